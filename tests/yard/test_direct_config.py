"""Existing engines in the configuration document."""

from typing import Any

import pytest

from tests.gateway.world import SYMBOLIC, document, node
from workers.yard.config import ConfigError, KvEventsConfig, PartitionConfig

TEXT_MODEL = SYMBOLIC | {"tokenizer": "text", "ids_per_block": 64, "tokens_per_id": 1}


def direct(name: str = "v1", phase: str = "mixed", engine: str = "vllm", **fields: Any) -> dict[str, Any]:
    return node(name, int(name[1:]), phase, "http://h") | {"engine": engine, "direct": fields}


def parsed(*nodes: dict[str, Any], model: dict[str, Any] = TEXT_MODEL) -> PartitionConfig:
    return PartitionConfig.parse(document(list(nodes), model=model))


def test_an_existing_engine_needs_no_more_than_its_url() -> None:
    config = parsed(direct())
    assert config.nodes["v1"].serves_whole
    assert config.nodes["v1"].direct is not None
    assert config.nodes["v1"].direct.kv_events is None
    assert config.model.by_text


def test_everything_an_existing_engine_can_be_told() -> None:
    events = {"endpoint": "tcp://*:5557", "replay": "tcp://h:5558", "topic": "kv"}
    config = parsed(direct(phase="prefill", bootstrap_port=8998, token_env="KEY", kv_tokens=1000, kv_events=events))
    told = config.nodes["v1"].direct
    assert told is not None
    assert (told.bootstrap_port, told.token_env, told.kv_tokens) == (8998, "KEY", 1000)
    assert told.kv_events == KvEventsConfig("tcp://*:5557", "tcp://h:5558", "kv")
    assert not config.nodes["v1"].serves_whole


@pytest.mark.parametrize(
    ("nodes", "field"),
    [
        ([direct(engine="reference")], "nodes[0].direct"),
        ([direct(bootstrap_port=0)], "nodes[0].direct.bootstrap_port"),
        ([direct(kv_events={})], "nodes[0].direct.kv_events.endpoint"),
        ([direct("v1"), direct("v2", engine="sglang")], "nodes"),
        ([direct("v1"), node("n2", 2, "mixed", "http://h")], "nodes"),
        ([node("n2", 2, "mixed", "http://h")], "model.tokenizer"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(nodes: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(*nodes)
    assert error.value.field == field
