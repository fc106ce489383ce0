"""Clusters of existing engines: what their description needs, what it starts, and what becomes of it."""

import copy
import json

import pytest
import yaml
from django.core.management import CommandError, call_command

from apps.topology import configuration
from apps.topology.models import Node, Partition
from controlplane import bootstrap, clusters, env
from controlplane.yardmaster import Yardmaster
from workers.yard.config import PartitionConfig

EXAMPLE = env.ROOT / "docs" / "examples" / "existing-engines.yaml"
FULL = {
    "url": "http://10.0.0.5:8001",
    "bootstrap_port": 8998,
    "token_env": "VLLM_API_KEY",
    "kv_tokens": 400_000,
    "kv_events": {"endpoint": "tcp://*:5557", "replay": "tcp://10.0.0.5:5558", "topic": "kv"},
}


def example(**cluster):
    document = yaml.safe_load(EXAMPLE.read_text())
    document["clusters"][0] |= cluster
    return document


@pytest.fixture
def load(tmp_path):
    def load(document):
        file = tmp_path / "clusters.yaml"
        file.write_text(yaml.safe_dump(document))
        return clusters.load(file)

    return load


def test_the_example_names_the_model_and_two_addresses_and_no_more_is_needed(load):
    (cluster,) = clusters.load(EXAMPLE).clusters
    assert cluster.phases() == {"engine-1": "mixed", "engine-2": "mixed"}
    assert cluster.model.served_names == ["Qwen/Qwen3-8B"]
    assert (cluster.model.tokenizer, cluster.model.ids_per_block) == ("text", 16)


def test_no_agent_is_started_for_an_existing_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    described = clusters.load(EXAMPLE)
    for ports in (clusters.default_ports(described, 8000), clusters.free_ports(described)):
        assert (ports.agents, list(ports.gateways)) == ({}, ["engines"])
        master = Yardmaster(described, ports, EXAMPLE)
        assert master._agents() == []
        assert [child.name for child in master._gateways()] == ["gateway-engines"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"agent_port": 8200}, "clusters.engines.agent_port: existing engines (vllm) have no agents"),
        ({"processes": "shared"}, "clusters.engines.processes"),
        (
            {"nodes": {"engine-1": "mixed"}},
            "clusters.engines.nodes.engine-1: a node of an existing engine needs `direct",
        ),
        ({"nodes": {"e": {"phase": "mixed"}}}, "missing required field `direct`"),
        (
            {"nodes": {"e": {"direct": {"url": "10.0.0.5:8001"}}}},
            "clusters.engines.nodes.e.direct: expected an http:// or https:// address",
        ),
        ({"nodes": {"e": {"direct": FULL | {"port": 1}}}}, "unknown field `port`"),
        (
            {"nodes": {"e": {"direct": FULL | {"token_env": "my key"}}}},
            "token_env: expected the name of an environment",
        ),
        ({"nodes": {"e": {"direct": FULL | {"token_env": "SWITCHYARD_AGENT_TOKEN"}}}}, "secret of Switchyard's own"),
        ({"nodes": {"e": {"direct": FULL | {"bootstrap_port": 99999}}}}, "bootstrap_port"),
        ({"nodes": {"e": {"direct": FULL}}}, "direct.kv_events: they speak of token ids"),
        ({"engine": "simulated"}, "clusters.engines.nodes.engine-1: `direct` needs engine vllm or sglang"),
        ({"replay": {"agents": 1, "objective_shares": {}}}, "clusters.engines.replay"),
        ({"hardware": "h100"}, "clusters.engines.hardware is 'h100'; expected one of none"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(load, change, says):
    with pytest.raises(clusters.ClustersError) as refusal:
        load(example(**change))
    assert says in str(refusal.value)


def test_agents_still_need_what_only_they_need(load):
    default = yaml.safe_load(clusters.DEFAULT_FILE.read_text())
    for field in ("agent_port", "processes", "network"):
        document = copy.deepcopy(default)
        del document["clusters"][0][field]
        with pytest.raises(clusters.ClustersError, match=f"clusters.laptop.{field} is missing"):
            load(document)
    default["clusters"][0]["model"]["tokenizer"] = "text"
    with pytest.raises(clusters.ClustersError, match=r"laptop\.model\.tokenizer: expected gguf or symbolic"):
        load(default)


@pytest.mark.parametrize("endpoint", ["5557", "tcp://*", "tcp://*:99999", "http://h:1", "tcp://h:5557/x", ""])
def test_an_address_of_events_is_checked(load, endpoint):
    model = {"name": "m", "context_tokens": 10, "tokenizer": "gguf"}
    direct = FULL | {"kv_events": {"endpoint": endpoint}}
    with pytest.raises(clusters.ClustersError, match="endpoint"):
        load(example(model=model, nodes={"e": {"direct": direct}}))


def test_a_key_that_is_not_in_the_environment_is_missed_before_anything_starts(load):
    described = load(example(nodes={"e": {"direct": {"url": "http://h:1", "token_env": "VLLM_API_KEY"}}}))
    assert clusters.missing_tokens(described, {"VLLM_API_KEY": "x"}) == []
    (line,) = clusters.missing_tokens(described, {})
    assert line == "clusters.engines.nodes.e.direct.token_env: VLLM_API_KEY is not set; export it first"


@pytest.mark.django_db
def test_a_described_engine_is_published_as_the_gateway_reads_it(load, tmp_path, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    model = {"name": "m", "context_tokens": 1000, "tokenizer": "gguf"}
    nodes = {"e1": {"phase": "prefill", "direct": FULL}, "e2": {"phase": "decode", "direct": {"url": "http://h:2"}}}
    described = load(example(model=model, nodes=nodes))
    ports = clusters.default_ports(described, 8000)
    bootstrap.run(described, ports, lambda line: None)
    document = configuration.latest(Partition.objects.get(name="engines")).document
    config = PartitionConfig.parse(json.loads(json.dumps(document)))
    told = config.nodes["e1"]
    assert (told.url, told.engine, told.phase) == ("http://10.0.0.5:8001", "vllm", "prefill")
    assert told.direct.token_env == "VLLM_API_KEY"
    assert told.direct.kv_events.replay == "tcp://10.0.0.5:5558"
    assert config.nodes["e2"].direct.kv_events is None

    # The next run follows its file, and keeps what people decided.
    moved = load(example(model=model, nodes={**nodes, "e2": {"phase": "prefill", "direct": {"url": "http://h:3"}}}))
    bootstrap.run(moved, ports, lambda line: None)
    node = Node.objects.get(name="e2")
    assert (node.url, node.desired_phase) == ("http://h:3", "decode")


def test_up_refuses_to_start_without_an_engines_key(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    file = tmp_path / "clusters.yaml"
    file.write_text(
        yaml.safe_dump(example(nodes={"e": {"direct": {"url": "http://h:1", "token_env": "VLLM_API_KEY"}}}))
    )
    with pytest.raises(CommandError, match="VLLM_API_KEY is not set; export it first"):
        call_command("up", clusters=file)
