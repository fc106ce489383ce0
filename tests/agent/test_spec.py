"""Start files: what is refused, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.agent.engines import build_engine
from workers.agent.engines.base import EngineContext
from workers.agent.spec import SpecError, load_spec, parse_spec


def document(**node: Any) -> dict[str, Any]:
    return {
        "data_dir": "d",
        "nodes": [{"name": "n1", "engine": "reference", "model": {"name": "m"}, **node}],
    }


def test_defaults_complete_a_short_document() -> None:
    spec = parse_spec(document())
    assert (spec.host, spec.nodes[0].phase, spec.nodes[0].limits.max_decode_batch) == ("127.0.0.1", "mixed", 8)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"phase": "sideways"}, "nodes[0].phase"),
        ({"name": "../x"}, "nodes[0].name"),
        ({"pool_blocks": 0}, "nodes[0].pool_blocks"),
        ({"limits": {"max_decode_batch": "8"}}, "nodes[0].limits.max_decode_batch"),
        ({"model": {}}, "nodes[0].model"),
        ({"speling": 1}, "nodes[0]"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(document(**change))
    assert error.value.field == field


def test_two_nodes_of_one_name_are_refused() -> None:
    twice = document()
    twice["nodes"] *= 2
    with pytest.raises(SpecError, match="unique"):
        parse_spec(twice)


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    with pytest.raises(SpecError, match="readable"):
        load_spec(path)
    path.write_text("{")
    with pytest.raises(SpecError, match="JSON"):
        load_spec(path)
    path.write_text(json.dumps(document()))
    assert load_spec(path).nodes[0].name == "n1"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"engine": "steam"}, "nodes.engine"),
        ({"model": {"name": "m", "dtype": "fp8"}}, "nodes.model.dtype"),
        ({"model": {"name": "m", "block_tokens": 64, "ids_per_block": 1, "tokens_per_id": 64}}, "nodes.model"),
    ],
)
def test_an_engine_says_what_it_cannot_serve(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    spec = parse_spec(document(**change))
    with pytest.raises(SpecError) as error:
        build_engine(spec.nodes[0], EngineContext(tmp_path, tmp_path, "http://127.0.0.1:9", "t", 1.0, {}))
    assert error.value.field == field
