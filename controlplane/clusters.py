"""The description of a run's clusters (`controlplane/defaults/clusters.yaml`), validated, and what follows from it for processes.

`manage.py bootstrap` makes database rows of it, `manage.py up` processes and agent specifications.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

DEFAULT_FILE = Path(__file__).parent / "defaults" / "clusters.yaml"


class ClustersError(ValueError):
    """The file is not a valid description; the message names the field and what was expected."""


class Model(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    served_names: list[str]
    tokenizer: Literal["gguf", "symbolic"]
    dtype: str
    block_tokens: int
    ids_per_block: int
    tokens_per_id: int
    context_tokens: int
    tokenizer_path: str | None = None


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    max_decode_batch: int
    prefill_limit_per_node: int
    decode_limit_per_node: int
    prefill_chunk_tokens: int


class Replay(msgspec.Struct, forbid_unknown_fields=True):
    agents: int
    objective_shares: dict[str, float]
    pause_scale: float = 1.0


class Cluster(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    title: str
    engine: Literal["reference", "simulated"]
    hardware: str
    gateway_port: int
    agent_port: int
    processes: Literal["per-node", "shared"]
    model: Model
    network: dict[str, float]
    nodes: dict[str, Literal["prefill", "decode", "mixed"]]
    limits: Limits
    planner: dict[str, Any]
    bands: list[dict[str, Any]]
    objectives: list[dict[str, Any]]
    agent_host: str = "127.0.0.1"
    speed: float = 1.0
    replay: Replay | None = None


class Clusters(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[dict[str, Any]]
    keys: list[dict[str, Any]]
    bands: list[dict[str, Any]]
    objectives: list[dict[str, Any]]
    hardware: dict[str, dict[str, float]]
    clusters: list[Cluster]

    def coefficients(self, cluster: Cluster) -> dict[str, float]:
        """c0..d2 and the expert figures of the cluster's hardware class; seconds."""
        names = ("c0", "c1", "c2", "c3", "d0", "d1", "d2", "experts", "experts_per_token", "t_fwd", "t_acc")
        return {name: self.hardware[cluster.hardware][name] for name in names}

    def network(self, cluster: Cluster) -> dict[str, float]:
        return {**cluster.network, "kv_bytes_per_token": self.hardware[cluster.hardware]["kv_bytes_per_token"]}


class Ports(msgspec.Struct):
    """The ports of one run. `agents` maps a node to the port of the process that runs it."""

    web: int
    gateways: dict[str, int]
    agents: dict[str, int]


def load(path: Path = DEFAULT_FILE) -> Clusters:
    """Read and check. Raises ClustersError naming the field."""
    try:
        described = msgspec.convert(yaml.safe_load(path.read_text()), Clusters)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise ClustersError(f"{path.name}: {error}") from error
    for cluster in described.clusters:
        if cluster.hardware not in described.hardware:
            raise ClustersError(
                f"{path.name}: clusters.{cluster.name}.hardware is {cluster.hardware!r}; "
                f"expected one of {', '.join(described.hardware)}"
            )
    return described


def default_ports(described: Clusters, web: int) -> Ports:
    agents = {}
    for cluster in described.clusters:
        for index, node in enumerate(cluster.nodes):
            agents[node] = cluster.agent_port + (index if cluster.processes == "per-node" else 0)
    return Ports(web, {cluster.name: cluster.gateway_port for cluster in described.clusters}, agents)


def free_ports(described: Clusters) -> Ports:
    """Ports that were free a moment ago."""
    held: list[socket.socket] = []

    def take() -> int:
        held.append(socket.create_server(("127.0.0.1", 0)))
        return int(held[-1].getsockname()[1])

    agents = {}
    for cluster in described.clusters:
        shared = take() if cluster.processes == "shared" else None
        for node in cluster.nodes:
            agents[node] = shared or take()
    ports = Ports(take(), {cluster.name: take() for cluster in described.clusters}, agents)
    for listener in held:
        listener.close()
    return ports


def agent_specs(
    described: Clusters, cluster: Cluster, ports: Ports, host: str, data_folder: Path
) -> dict[str, dict[str, Any]]:
    """Specification files of the cluster's agent processes, by process name."""
    hardware = described.hardware[cluster.hardware]
    pool_blocks = int(hardware["host_pool_tokens"]) // cluster.model.block_tokens
    limits = {
        "max_decode_batch": cluster.limits.max_decode_batch,
        "prefill_chunk_tokens": cluster.limits.prefill_chunk_tokens,
        "kv_tokens": int(hardware["device_tokens"]),
    }
    specs: dict[str, dict[str, Any]] = {}
    for node, phase in cluster.nodes.items():
        process = f"agents-{cluster.name}" if cluster.processes == "shared" else f"agent-{node}"
        spec = specs.setdefault(
            process,
            {
                "host": host,
                "port": ports.agents[node],
                "token_env": "SWITCHYARD_AGENT_TOKEN",
                "data_dir": str(data_folder / "agents" / cluster.name),
                "speed": cluster.speed,
                "nodes": [],
            },
        )
        spec["nodes"].append(
            {
                "name": node,
                "engine": cluster.engine,
                "model": msgspec.to_builtins(cluster.model),
                "phase": phase,
                "generation": 0,
                "pool_blocks": pool_blocks,
                "limits": limits,
                "coefficients": described.coefficients(cluster),
                "network": described.network(cluster),
            }
        )
    return specs
