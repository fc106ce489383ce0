"""Numbers that reach a node are bounded: what it reports of them must fit a database column and a live frame."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from workers.agent import messages
from workers.agent.engines.base import EngineError
from workers.agent.messages import PhaseBody, PrefillBody, parse_body

BODIES = [messages.PrefillBody, messages.DecodeBody, messages.AbortBody, messages.PhaseBody, messages.RefsBody]


def whole_numbers(kind: msgspec.inspect.Type, path: str) -> Iterator[tuple[str, msgspec.inspect.IntType]]:
    if isinstance(kind, msgspec.inspect.IntType):
        yield path, kind
    elif isinstance(kind, msgspec.inspect.UnionType):
        for part in kind.types:
            yield from whole_numbers(part, path)
    elif isinstance(kind, msgspec.inspect.ListType):
        yield from whole_numbers(kind.item_type, path + "[]")
    elif isinstance(kind, msgspec.inspect.StructType):
        for field in kind.fields:
            yield from whole_numbers(field.type, f"{path}.{field.name}")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_whole_number_has_a_lowest_and_a_highest_value(body: type) -> None:
    found = list(whole_numbers(msgspec.inspect.type_info(body), body.__name__))
    open_ended = [path for path, kind in found if kind.ge is None or kind.le is None]
    assert not open_ended


def test_a_generation_that_the_control_plane_could_not_store_is_refused() -> None:
    with pytest.raises(EngineError) as refused:
        parse_body(b'{"phase": "decode", "generation": 9223372036854775808}', PhaseBody)
    assert (refused.value.status, refused.value.field) == (400, "generation")


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"fetch":'])
def test_a_body_nested_without_end_is_refused(opening: bytes) -> None:
    with pytest.raises(EngineError) as refused:
        parse_body(opening * 100_000, PrefillBody)
    assert refused.value.status == 400
