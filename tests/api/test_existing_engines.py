"""Existing engines over REST: nodes that join a partition, and what is said to those that cannot."""

import pytest

from apps.topology import configuration
from apps.topology import services as topology
from controlplane.actors import SYSTEM
from tests.factories import COEFFICIENTS, MODEL, NETWORK
from workers.yard.config import DirectConfig

pytestmark = pytest.mark.django_db
NODES = "/partitions/engines/nodes"
NEW = {"name": "e2", "url": "http://10.0.0.6:8000", "engine": "vllm", "phase": "mixed", "direct": {}}


@pytest.fixture
def engines(partition):
    cluster = topology.create_cluster("engines", SYSTEM)
    model = MODEL | {"tokenizer": "text", "ids_per_block": 64, "tokens_per_id": 1}
    made = topology.create_partition(
        cluster, "engines", SYSTEM, model=model, network=NETWORK, gateway_url="http://127.0.0.1:8102"
    )
    topology.create_node(
        made, "e1", SYSTEM, order=0, engine="vllm", phase="mixed", url="http://10.0.0.5:8000", direct={},
        hardware_class="h100", coefficients=COEFFICIENTS, decode_limit=64,
    )  # fmt: skip
    configuration.publish(made, SYSTEM, "made for a test")
    return made


def published(partition, name):
    nodes = configuration.latest(partition).document["nodes"]
    return next(node for node in nodes if node["name"] == name)


def test_an_engine_that_joins_is_published_with_what_it_has_in_common_with_the_first(rest, engines):
    direct = {"token_env": "VLLM_API_KEY", "kv_tokens": 1000}
    status, node = rest("post", NODES, NEW | {"direct": direct, "reason": "more room"})
    assert (status, node["engine"], node["desired_phase"], node["order"]) == (201, "vllm", "mixed", 1)
    assert (node["hardware_class"], node["decode_limit"]) == ("h100", 64)
    told = published(engines, "e2")
    assert (told["url"], told["coefficients"]) == ("http://10.0.0.6:8000", COEFFICIENTS)
    assert DirectConfig(**told["direct"]) == DirectConfig(token_env="VLLM_API_KEY", kv_tokens=1000)


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"name": "e1"}, 409, "already exists"),
        ({"name": "two words"}, 422, "name"),
        ({"url": "10.0.0.6:8000"}, 422, "expected an http:// or https:// address"),
        ({"engine": "llama.cpp"}, 422, "engine"),
        ({"engine": "sglang"}, 422, "expected as the other nodes of engines, which are existing vllm engines"),
        ({"engine": "simulated", "direct": None}, 422, "has no tokenizer"),
        ({"direct": None}, 422, "vllm is an existing engine"),
        ({"direct": {"token_env": "SWITCHYARD_SECRET_KEY"}}, 422, "secret of Switchyard's own"),
        ({"direct": {"token_env": "a b"}}, 422, "name of an environment variable"),
        ({"direct": {"bootstrap_port": 0}}, 422, "bootstrap_port: expected a whole number from 1 to 65535"),
        ({"direct": {"surprise": 1}}, 422, "surprise"),
        ({"direct": {"kv_events": {"endpoint": "tcp://h"}}}, 422, "kv_events.endpoint: expected an address"),
        ({"direct": {"kv_events": {"endpoint": "tcp://h:1"}}}, 422, "they speak of token ids"),
        ({"hardware_class": "b200"}, 422, "known: h100"),
        ({"phase": "asleep"}, 422, "phase"),
    ],
)
def test_what_cannot_join_is_told_why(rest, engines, change, status, says):
    answer = rest("post", NODES, NEW | change)
    assert answer[0] == status, answer
    assert says in str(answer[1])
    assert engines.nodes.count() == 1


def test_an_existing_engine_does_not_join_nodes_with_agents(rest, engines):
    status, told = rest("post", "/partitions/gb300/nodes", NEW | {"hardware_class": "gb300"})
    assert (status, "which are agents" in str(told)) == (422, True)


def test_an_engine_moves_and_is_told_more(rest, engines):
    status, node = rest("patch", "/nodes/e1", {"url": "http://10.0.0.9:8000", "direct": {"kv_tokens": 5}})
    assert (status, node["direct"]["kv_tokens"]) == (200, 5)
    assert published(engines, "e1")["url"] == "http://10.0.0.9:8000"
    for wrong in ({"direct": None}, {"direct": {"kv_tokens": -1}}, {"url": "x"}):
        assert rest("patch", "/nodes/e1", wrong)[0] == 422


def test_a_node_with_an_agent_does_not_become_an_existing_engine(rest, engines):
    status, told = rest("patch", "/nodes/gb300-1", {"direct": {}})
    assert (status, "has an agent" in str(told)) == (422, True)
