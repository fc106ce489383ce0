"""The description of a run's clusters (`controlplane/defaults/clusters.yaml`), validated, and what follows from it for processes.

`manage.py bootstrap` makes database rows of it, `manage.py up` processes and agent specifications.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import UNSET, UnsetType

DEFAULT_FILE = Path(__file__).parent / "defaults" / "clusters.yaml"


class ClustersError(ValueError):
    """The file is not a valid description; the message names the field and what was expected."""


Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,63}$")]
Count = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
COEFFICIENTS = ("c0", "c1", "c2", "c3", "d0", "d1", "d2", "experts", "experts_per_token", "t_fwd", "t_acc")
_HARDWARE = (*COEFFICIENTS, "kv_bytes_per_token", "host_pool_tokens", "device_tokens")
_NETWORK = ("peer_bandwidth_bytes_s", "host_to_device_bytes_s", "latency_s")


class Described(msgspec.Struct, forbid_unknown_fields=True):
    """What is left out keeps the default of the table it goes to."""

    def given(self) -> dict[str, Any]:
        """The fields that the file gives."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class Tenant(Described):
    name: Name
    title: str | UnsetType = UNSET
    sharing_domain: Name | UnsetType = UNSET
    weight: Positive | UnsetType = UNSET
    default_objective: Name | UnsetType = UNSET


class Key(Described):
    name: Name
    tenant: Name
    role: str | UnsetType = UNSET
    objectives: list[str] | UnsetType = UNSET
    trusted: bool | UnsetType = UNSET


class Band(Described):
    name: Name
    priority: int
    fairness: str | UnsetType = UNSET
    ordering: str | UnsetType = UNSET
    max_requests: Count | UnsetType = UNSET
    max_bytes: Count | UnsetType = UNSET
    ttl_s: Positive | UnsetType = UNSET
    ceiling: NotNegative | UnsetType = UNSET
    min_share: NotNegative | UnsetType = UNSET


class Objective(Described):
    name: Name
    band: Name
    slo_ttft_s: Positive | UnsetType | None = UNSET
    ttl_s: Positive | UnsetType | None = UNSET


class Planner(Described):
    mode: Literal["automatic", "approve", "advisory", "frozen"]
    slice_s: Positive | UnsetType = UNSET
    slices_per_window: Count | UnsetType = UNSET
    cooldown_s: NotNegative | UnsetType = UNSET
    drain_deadline_s: NotNegative | UnsetType = UNSET
    slo_ttft_s: Positive | UnsetType | None = UNSET
    max_stale_ratio: NotNegative | UnsetType = UNSET
    min_utilisation: NotNegative | UnsetType = UNSET
    approvals_required: Count | UnsetType = UNSET
    self_approval: bool | UnsetType = UNSET


class Model(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    served_names: list[str]
    tokenizer: Literal["gguf", "symbolic"]
    dtype: str
    block_tokens: Count
    ids_per_block: Count
    tokens_per_id: Count
    context_tokens: Count
    tokenizer_path: str | None = None


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    max_decode_batch: Count
    prefill_limit_per_node: Count
    decode_limit_per_node: Count
    prefill_chunk_tokens: Count


class Replay(msgspec.Struct, forbid_unknown_fields=True):
    agents: Count
    objective_shares: dict[str, NotNegative]
    pause_scale: NotNegative = 1.0


class Cluster(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    title: str
    engine: Literal["reference", "simulated"]
    hardware: str
    gateway_port: Port
    agent_port: Port
    processes: Literal["per-node", "shared"]
    model: Model
    network: dict[str, NotNegative]
    nodes: Annotated[dict[Name, Literal["prefill", "decode", "mixed"]], msgspec.Meta(min_length=1)]
    limits: Limits
    planner: Planner
    bands: list[Band]
    objectives: list[Objective]
    agent_host: str = "127.0.0.1"
    speed: Positive = 1.0
    replay: Replay | None = None


class Clusters(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[Tenant]
    keys: list[Key]
    bands: list[Band]
    objectives: list[Objective]
    hardware: dict[str, dict[str, NotNegative]]
    clusters: list[Cluster]

    def coefficients(self, cluster: Cluster) -> dict[str, float]:
        """c0..d2 and the expert figures of the cluster's hardware class; seconds."""
        return {name: self.hardware[cluster.hardware][name] for name in COEFFICIENTS}

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
        document = yaml.safe_load(path.read_text())
        _check_finite(document, "$")
        described = msgspec.convert(document, Clusters)
        _check_names(described)
    except (msgspec.ValidationError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ClustersError(f"{path.name}: {error or 'it contains itself'}") from error
    return described


def _check_finite(value: Any, place: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"Expected a finite number - at `{place}`")
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_finite(inner, f"{place}[{key}]" if isinstance(value, list) else f"{place}.{key}")


def _check_names(described: Clusters) -> None:
    """Every name that leads somewhere leads to something described, and no two things share one."""
    for name, figures in described.hardware.items():
        _expect(f"hardware.{name}", figures, _HARDWARE)
    _distinct("tenants", [tenant.name for tenant in described.tenants])
    _distinct("keys", [key.name for key in described.keys])
    _distinct("clusters", [cluster.name for cluster in described.clusters])
    _distinct("nodes", [node for cluster in described.clusters for node in cluster.nodes])
    for key in described.keys:
        _one_of(f"keys.{key.name}.tenant", key.tenant, [tenant.name for tenant in described.tenants])
    for cluster in described.clusters:
        at = f"clusters.{cluster.name}"
        _one_of(f"{at}.hardware", cluster.hardware, described.hardware)
        _expect(f"{at}.network", cluster.network, _NETWORK)
        for objective in cluster.objectives:
            band_names = [band.name for band in cluster.bands]
            _one_of(f"{at}.objectives.{objective.name}.band", objective.band, band_names)
        for name in cluster.replay.objective_shares if cluster.replay else ():
            _one_of(f"{at}.replay.objective_shares", name, [objective.name for objective in cluster.objectives])


def _one_of(place: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"{place} is {name!r}; expected one of {', '.join(known) or 'none'}")


def _expect(place: str, given: dict[str, float], names: tuple[str, ...]) -> None:
    for name in (*names, *given):
        if name not in given:
            raise ValueError(f"{place}.{name} is missing")
        _one_of(place, name, names)


def _distinct(place: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{place}: {name!r} is there twice")


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
