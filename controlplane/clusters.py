"""The description of a run's clusters (`controlplane/defaults/clusters.yaml`), validated, and what follows from it for processes.

`manage.py bootstrap` makes database rows of it, `manage.py up` processes and agent specifications. A cluster of existing
engines (`engine: vllm` or `sglang`) has no agents, and may leave out whatever only they need (docs/existing-engines.md).
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from django.core.exceptions import ValidationError
from msgspec import UNSET, UnsetType

from controlplane import yaml_text
from controlplane.validators import direct_settings, http_url

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
DIRECT_ENGINES = ("vllm", "sglang")
# A model of some billion parameters on one current accelerator, roughly. Routing begins with it; SGLang's own totals and
# what requests take replace it.
UNKNOWN_HARDWARE = "unknown"
_UNKNOWN = {
    "c0": 0.015, "c1": 6.0e-5, "c2": 1.0e-9, "c3": 0.0, "d0": 0.012, "d1": 0.0, "d2": 1.0e-4, "experts": 0,
    "experts_per_token": 0, "t_fwd": 1, "t_acc": 1.0, "kv_bytes_per_token": 131072, "host_pool_tokens": 0, "device_tokens": 0,
}  # fmt: skip
_UNKNOWN_NETWORK = {"peer_bandwidth_bytes_s": 10.0e9, "host_to_device_bytes_s": 20.0e9, "latency_s": 0.002}


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


Text = Annotated[str, msgspec.Meta(min_length=1)]


class Model(msgspec.Struct, forbid_unknown_fields=True):
    """`tokenizer: text`: none is known, four bytes of a prompt's text count as a token (existing engines only). The other
    defaults are an existing engine's: its blocks are of 16 tokens unless it was told otherwise."""

    name: Text
    context_tokens: Count
    served_names: list[Text] = []
    tokenizer: Literal["gguf", "symbolic", "text"] = "text"
    dtype: Text = "auto"
    block_tokens: Count = 16
    ids_per_block: Count | None = None
    tokens_per_id: Count = 1
    tokenizer_path: str | None = None

    def __post_init__(self) -> None:
        self.served_names = self.served_names or [self.name]
        self.ids_per_block = self.ids_per_block or self.block_tokens


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """The defaults are for existing engines: what they take at once they know themselves."""

    max_decode_batch: Count = 256
    prefill_limit_per_node: Count = 16
    decode_limit_per_node: Count = 256
    prefill_chunk_tokens: Count = 8192


class KvEvents(msgspec.Struct, forbid_unknown_fields=True):
    """`tcp://*:5557` is bound, `tcp://host:5557` connected to; `replay` is where lost events can be had again."""

    endpoint: Text
    replay: Text | None = None
    topic: str = ""


class Direct(msgspec.Struct, forbid_unknown_fields=True):
    """An existing engine. `token_env` names the environment variable with its API key; the key itself is stored nowhere."""

    url: Text
    bootstrap_port: Port | None = None
    token_env: Text | None = None
    kv_tokens: Count | None = None
    kv_events: KvEvents | None = None

    def settings(self) -> dict[str, Any]:
        """All but the address, as the node's row and the configuration document have it."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["url"]
        return fields


PhaseName = Literal["prefill", "decode", "mixed"]


class DirectNode(msgspec.Struct, forbid_unknown_fields=True):
    """One node of a cluster of existing engines."""

    direct: Direct
    phase: PhaseName = "mixed"


class Replay(msgspec.Struct, forbid_unknown_fields=True):
    agents: Count
    objective_shares: dict[str, NotNegative]
    pause_scale: NotNegative = 1.0


class Cluster(msgspec.Struct, forbid_unknown_fields=True):
    """`agent_port`, `processes` and `network` are needed where there are agents, and `hardware` that is described."""

    name: Name
    engine: Literal["reference", "simulated", "vllm", "sglang"]
    gateway_port: Port
    model: Model
    nodes: Annotated[dict[Name, PhaseName | DirectNode], msgspec.Meta(min_length=1)]
    title: str = ""
    hardware: str = UNKNOWN_HARDWARE
    agent_port: Port | None = None
    processes: Literal["per-node", "shared"] | None = None
    network: dict[str, NotNegative] | None = None
    limits: Limits = msgspec.field(default_factory=Limits)
    planner: Planner = msgspec.field(default_factory=lambda: Planner(mode="advisory"))
    bands: list[Band] = msgspec.field(default_factory=lambda: [Band("standard", 0)])
    objectives: list[Objective] = msgspec.field(default_factory=lambda: [Objective("standard", "standard")])
    agent_host: str = "127.0.0.1"
    speed: Positive = 1.0
    replay: Replay | None = None

    @property
    def is_direct(self) -> bool:
        """Its nodes are existing engines, without agents."""
        return self.engine in DIRECT_ENGINES

    def phases(self) -> dict[str, PhaseName]:
        """Each node's phase at the first start."""
        return {name: node if isinstance(node, str) else node.phase for name, node in self.nodes.items()}

    def directs(self) -> dict[str, Direct]:
        """The nodes that are existing engines."""
        return {name: node.direct for name, node in self.nodes.items() if isinstance(node, DirectNode)}


class Clusters(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[Tenant]
    keys: list[Key]
    clusters: Annotated[list[Cluster], msgspec.Meta(min_length=1)]
    bands: list[Band] = []
    objectives: list[Objective] = []
    hardware: dict[str, dict[str, NotNegative]] = {}

    def figures(self, cluster: Cluster) -> dict[str, float]:
        """All figures of the cluster's hardware class."""
        return self.hardware.get(cluster.hardware, _UNKNOWN)

    def coefficients(self, cluster: Cluster) -> dict[str, float]:
        """c0..d2 and the expert figures of the cluster's hardware class; seconds."""
        return {name: self.figures(cluster)[name] for name in COEFFICIENTS}

    def network(self, cluster: Cluster) -> dict[str, float]:
        known = _UNKNOWN_NETWORK if cluster.network is None else cluster.network
        return {**known, "kv_bytes_per_token": self.figures(cluster)["kv_bytes_per_token"]}


class Ports(msgspec.Struct):
    """The ports of one run. `agents` maps a node to the port of the process that runs it."""

    web: int
    gateways: dict[str, int]
    agents: dict[str, int]


def load(path: Path = DEFAULT_FILE) -> Clusters:
    """Read and check. Raises ClustersError naming the field."""
    try:
        document = _document(path.read_text())
        _check_finite(document, "$")
        described = msgspec.convert(document, Clusters)
        _check_names(described)
    except ValueError as error:
        raise ClustersError(f"{path.name}: {error}") from error
    return described


def _document(text: str) -> Any:
    found = yaml_text.load(text, aliases=True)
    if len(found) != 1:
        raise ValueError(f"Expected one YAML document, got {len(found)}")
    return found[0]


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
        _check_kind(at, cluster)
        if not cluster.is_direct or cluster.hardware != UNKNOWN_HARDWARE:
            _one_of(f"{at}.hardware", cluster.hardware, described.hardware)
        if cluster.network is not None:
            _expect(f"{at}.network", cluster.network, _NETWORK)
        for objective in cluster.objectives:
            band_names = [band.name for band in cluster.bands]
            _one_of(f"{at}.objectives.{objective.name}.band", objective.band, band_names)
        for name in cluster.replay.objective_shares if cluster.replay else ():
            _one_of(f"{at}.replay.objective_shares", name, [objective.name for objective in cluster.objectives])


def _check_kind(at: str, cluster: Cluster) -> None:
    """A cluster has agents, or existing engines, and what belongs to the one is an error with the other."""
    directs = cluster.directs()
    if cluster.is_direct:
        for name in cluster.nodes.keys() - directs.keys():
            raise ValueError(f"{at}.nodes.{name}: a node of an existing engine needs `direct: {{url: ...}}`")
        for field in ("agent_port", "processes"):
            if getattr(cluster, field) is not None:
                raise ValueError(f"{at}.{field}: existing engines ({cluster.engine}) have no agents; leave it out")
        if cluster.replay is not None:
            raise ValueError(f"{at}.replay: recorded sessions hold no text; only the simulated engine replays them")
        if cluster.model.tokenizer == "symbolic":
            raise ValueError(f"{at}.model.tokenizer: expected text or gguf with {cluster.engine}")
        for name, direct in directs.items():
            _check_direct(f"{at}.nodes.{name}.direct", cluster, direct)
        return
    for name in directs:
        raise ValueError(
            f"{at}.nodes.{name}: `direct` needs engine vllm or sglang, not {cluster.engine}; expected a phase"
        )
    for field in ("agent_port", "processes", "network"):
        if getattr(cluster, field) is None:
            raise ValueError(f"{at}.{field} is missing; expected for the nodes' agents")
    if cluster.model.tokenizer == "text":
        raise ValueError(f"{at}.model.tokenizer: expected gguf or symbolic; only existing engines can do without one")


def _check_direct(at: str, cluster: Cluster, direct: Direct) -> None:
    try:
        http_url(direct.url)
        direct_settings(direct.settings())
    except ValidationError as error:
        raise ValueError(f"{at}: {error.messages[0]}") from None
    if direct.kv_events is not None and cluster.model.tokenizer == "text":
        raise ValueError(
            f"{at}.kv_events: they speak of token ids; expected model.tokenizer gguf (the engine's own tokenizer) with them"
        )


def missing_tokens(described: Clusters, environment: Mapping[str, str]) -> list[str]:
    """A line for every engine whose key is in a variable that is not set."""
    return [
        f"clusters.{cluster.name}.nodes.{name}.direct.token_env: {direct.token_env} is not set; export it first"
        for cluster in described.clusters
        for name, direct in cluster.directs().items()
        if direct.token_env is not None and not environment.get(direct.token_env)
    ]


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
        if cluster.agent_port is None:
            continue
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
        if cluster.is_direct:
            continue
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
    """Specification files of the cluster's agent processes, by process name; none for existing engines."""
    if cluster.is_direct:
        return {}
    hardware = described.figures(cluster)
    pool_blocks = int(hardware["host_pool_tokens"]) // cluster.model.block_tokens
    limits = {
        "max_decode_batch": cluster.limits.max_decode_batch,
        "prefill_chunk_tokens": cluster.limits.prefill_chunk_tokens,
        "kv_tokens": int(hardware["device_tokens"]),
    }
    specs: dict[str, dict[str, Any]] = {}
    for node, phase in cluster.phases().items():
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
