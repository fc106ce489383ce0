"""The configuration document of one partition (docs/interfaces.md, section 8), parsed and checked.

`PartitionConfig.parse` accepts the JSON document that the control plane publishes and raises `ConfigError` with the
field's path and what was expected there. Everything later reads typed, frozen values; nothing reads the raw document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from apps.flowcontrol.domain.config import FlowConfig, FlowConfigError
from apps.planning.domain.cost_model import DecodeCoefficients, NetworkProfile, PrefillCoefficients
from apps.routing.domain.views import POLICIES, Phase, RoutingPolicy

PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed")
TOKENIZERS = ("gguf", "symbolic", "text")
DIRECT_ENGINES = ("vllm", "sglang")
Item = TypeVar("Item")


class ConfigError(ValueError):
    """A configuration document that cannot be used: `field` is a path such as `bands[1].priority`."""

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: expected {expected}")
        self.field = field
        self.expected = expected


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    served_names: tuple[str, ...]
    tokenizer: str
    tokenizer_path: str | None
    dtype: str
    block_tokens: int
    ids_per_block: int
    tokens_per_id: int
    context_tokens: int

    @property
    def symbolic(self) -> bool:
        """One id stands for a whole block, as in replayed traces; there is no text."""
        return self.tokenizer == "symbolic"

    @property
    def by_text(self) -> bool:
        """No tokenizer is known: four bytes of a prompt's text count as one token (existing engines only)."""
        return self.tokenizer == "text"


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Where an engine's KV events come from: `tcp://*:5557` is bound, `tcp://host:5557` is connected to. `replay`: where
    lost ones can be had again (None: nowhere, so a gap makes everything unknown)."""

    endpoint: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """An existing engine, driven by its URL without an agent. `bootstrap_port`: of an SGLang prefill server's hand-over
    service. `token_env`: the environment variable with the engine's API key. `kv_tokens`: how many tokens its device holds,
    for engines that do not tell."""

    bootstrap_port: int | None = None
    token_env: str | None = None
    kv_tokens: int | None = None
    kv_events: KvEventsConfig | None = None


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node as the control plane wants it: `phase` is the desired one, `draining` keeps new work away."""

    name: str
    order: int
    url: str
    engine: str
    phase: Phase
    generation: int
    draining: bool
    enabled: bool
    hardware_class: str
    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    t_acc: float
    decode_limit: int
    direct: DirectConfig | None = None

    @property
    def serves_whole(self) -> bool:
        """The node takes a request's prefill and decode in one call: there is no hand-over."""
        return self.direct is not None and self.phase == "mixed"


@dataclass(frozen=True, slots=True)
class TenantConfig:
    name: str
    sharing_domain: str
    weight: float
    paused: bool
    default_objective: str


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """An API key by its digest. `objectives` holds names or `*`."""

    id: str
    sha256: str
    tenant: str
    trusted: bool
    objectives: tuple[str, ...]
    expires_at: float | None

    def allows(self, objective: str) -> bool:
        return "*" in self.objectives or objective in self.objectives


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    name: str
    band: str
    slo_ttft_s: float | None
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """How long a silent branch keeps its references: `multiple` of its own pauses, between floor and ceiling."""

    multiple: float
    ceiling_s: float
    floor_s: float


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    """All of it. `whole_only`: every node serves requests whole, so nothing is ever handed over. `moves_outputs`: an output
    can go on on another decode node, which takes somebody who has its ids (of symbolic models only the simulator has)."""

    version: int
    partition: str
    published_at: float
    model: ModelConfig
    network: NetworkProfile
    nodes: Mapping[str, NodeConfig]
    tenants: Mapping[str, TenantConfig]
    keys: tuple[KeyConfig, ...]
    objectives: Mapping[str, ObjectiveConfig]
    flow: FlowConfig
    routing: RoutingPolicy
    lease: LeaseConfig
    slo_ttft_s: float | None = None
    keys_by_sha256: Mapping[str, KeyConfig] = field(default_factory=dict)
    whole_only: bool = False
    moves_outputs: bool = False

    @classmethod
    def parse(cls, document: object) -> PartitionConfig:
        """Reads one document. Raises `ConfigError` naming the first field that is wrong and what it should hold."""
        root = _Reader("", document)
        keys = tuple(_key(item) for item in root.items("keys"))
        network = _network(root.section("network"))
        nodes = _unique(root, "nodes", _node, lambda node: node.name)
        model = _model(root.section("model"))
        config = cls(
            version=root.integer("version", low=0),
            partition=root.text("partition"),
            published_at=root.number("published_at", default=0.0),
            model=model,
            network=network,
            nodes=nodes,
            tenants=_unique(root, "tenants", _tenant, lambda tenant: tenant.name),
            keys=keys,
            objectives=_unique(root, "objectives", _objective, lambda objective: objective.name),
            flow=_flow(root.document),
            routing=_routing(root.section("routing", optional=True), network, nodes),
            lease=_lease(root.section("lease", optional=True)),
            slo_ttft_s=root.section("slo", optional=True).optional_number("ttft_s", low=0),
            keys_by_sha256=MappingProxyType({key.sha256: key for key in keys}),
            whole_only=bool(nodes) and all(node.serves_whole for node in nodes.values()),
            moves_outputs=not model.symbolic,
        )
        _check_references(config)
        return config


class _Reader:
    """Reads fields of one JSON object and knows where in the document it stands."""

    def __init__(self, path: str, value: object) -> None:
        self.path = path
        if not isinstance(value, dict):
            raise ConfigError(path or "document", "an object")
        self.document: dict[str, Any] = value

    def _at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(self._at(name), expected)

    def section(self, name: str, optional: bool = False) -> _Reader:
        value = self.document.get(name)
        return _Reader(self._at(name), {} if value is None and optional else value)

    def items(self, name: str) -> Iterator[_Reader]:
        value = self.document.get(name)
        if not isinstance(value, list):
            raise self.error(name, "a list")
        for index, item in enumerate(value):
            yield _Reader(f"{self._at(name)}[{index}]", item)

    def text(self, name: str, default: str | None = None, among: tuple[str, ...] = ()) -> str:
        value = self.document.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or not value:
            raise self.error(name, "a non-empty text")
        if among and value not in among:
            raise self.error(name, f"one of {', '.join(among)}")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self.document.get(name) is None else self.text(name)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.document.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.error(name, "a list of texts")
        return tuple(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.document.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def integer(self, name: str, default: int | None = None, low: int | None = None) -> int:
        value = self.document.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "a whole number")
        if low is not None and value < low:
            raise self.error(name, f"a whole number of at least {low}")
        return value

    def has(self, name: str) -> bool:
        """The field is there and is not null."""
        return self.document.get(name) is not None

    def optional_integer(self, name: str, low: int | None = None) -> int | None:
        return self.integer(name, low=low) if self.has(name) else None

    def number(self, name: str, default: float | None = None, low: float | None = None) -> float:
        value = self.document.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.error(name, "a number")
        if low is not None and value < low:
            raise self.error(name, f"a number of at least {low:g}")
        return float(value)

    def optional_number(self, name: str, low: float | None = None) -> float | None:
        return None if self.document.get(name) is None else self.number(name, low=low)


def _unique(
    root: _Reader, name: str, read: Callable[[_Reader], Item], key: Callable[[Item], str]
) -> Mapping[str, Item]:
    found: dict[str, Item] = {}
    for reader in root.items(name):
        item = read(reader)
        if key(item) in found:
            raise reader.error("name", f"a unique name ({key(item)!r} appears twice)")
        found[key(item)] = item
    return MappingProxyType(found)


def _model(reader: _Reader) -> ModelConfig:
    return ModelConfig(
        name=reader.text("name"),
        served_names=reader.texts("served_names"),
        tokenizer=reader.text("tokenizer", among=TOKENIZERS),
        tokenizer_path=reader.optional_text("tokenizer_path"),
        dtype=reader.text("dtype"),
        block_tokens=reader.integer("block_tokens", low=1),
        ids_per_block=reader.integer("ids_per_block", low=1),
        tokens_per_id=reader.integer("tokens_per_id", low=1),
        context_tokens=reader.integer("context_tokens", low=1),
    )


def _network(reader: _Reader) -> NetworkProfile:
    return NetworkProfile(
        kv_bytes_per_token=reader.number("kv_bytes_per_token", low=0),
        peer_bandwidth_bytes_s=reader.number("peer_bandwidth_bytes_s", low=1),
        host_to_device_bytes_s=reader.number("host_to_device_bytes_s", low=1),
        latency_s=reader.number("latency_s", low=0),
    )


def _node(reader: _Reader) -> NodeConfig:
    coefficients = reader.section("coefficients")
    return NodeConfig(
        name=reader.text("name"),
        order=reader.integer("order", low=0),
        url=reader.text("url").rstrip("/"),
        engine=reader.text("engine"),
        phase=_phase(reader),
        generation=reader.integer("generation", default=0, low=0),
        draining=reader.flag("draining", default=False),
        enabled=reader.flag("enabled", default=True),
        hardware_class=reader.text("hardware_class", default="unknown"),
        prefill=PrefillCoefficients(**{name: coefficients.number(name, low=0) for name in ("c0", "c1", "c2", "c3")}),
        decode=DecodeCoefficients(
            d0=coefficients.number("d0", low=0),
            d1=coefficients.number("d1", low=0),
            d2=coefficients.number("d2", low=0),
            experts=coefficients.integer("experts", default=0, low=0),
            experts_per_token=coefficients.integer("experts_per_token", default=0, low=0),
            t_fwd=coefficients.number("t_fwd", default=1, low=1),
        ),
        t_acc=coefficients.number("t_acc", default=1.0, low=1),
        decode_limit=reader.integer("decode_limit", low=1),
        direct=_direct(reader),
    )


def _direct(reader: _Reader) -> DirectConfig | None:
    if not reader.has("direct"):
        return None
    if reader.text("engine") not in DIRECT_ENGINES:
        raise reader.error("direct", f"nothing unless the engine is one of {', '.join(DIRECT_ENGINES)}")
    section = reader.section("direct")
    events = None
    if section.has("kv_events"):
        told = section.section("kv_events")
        topic = told.text("topic") if told.document.get("topic") else ""
        events = KvEventsConfig(told.text("endpoint"), told.optional_text("replay"), topic)
    return DirectConfig(
        bootstrap_port=section.optional_integer("bootstrap_port", low=1),
        token_env=section.optional_text("token_env"),
        kv_tokens=section.optional_integer("kv_tokens", low=1),
        kv_events=events,
    )


def _phase(reader: _Reader) -> Phase:
    name = reader.text("phase", among=PHASES)
    return next(phase for phase in PHASES if phase == name)


def _tenant(reader: _Reader) -> TenantConfig:
    return TenantConfig(
        name=reader.text("name"),
        sharing_domain=reader.text("sharing_domain"),
        weight=reader.number("weight", default=1.0, low=0),
        paused=reader.flag("paused", default=False),
        default_objective=reader.text("default_objective"),
    )


def _key(reader: _Reader) -> KeyConfig:
    digest = reader.text("sha256")
    if len(digest) != 64 or any(letter not in "0123456789abcdef" for letter in digest):
        raise reader.error("sha256", "64 lower-case hexadecimal digits")
    return KeyConfig(
        id=reader.text("id"),
        sha256=digest,
        tenant=reader.text("tenant"),
        trusted=reader.flag("trusted", default=False),
        objectives=reader.texts("objectives"),
        expires_at=reader.optional_number("expires_at"),
    )


def _objective(reader: _Reader) -> ObjectiveConfig:
    return ObjectiveConfig(
        name=reader.text("name"),
        band=reader.text("band"),
        slo_ttft_s=reader.optional_number("slo_ttft_s", low=0),
        ttl_s=reader.optional_number("ttl_s", low=0),
    )


def _flow(document: Mapping[str, Any]) -> FlowConfig:
    try:
        return FlowConfig.parse(document)
    except FlowConfigError as error:
        raise ConfigError(error.field, error.expected) from None


def _routing(reader: _Reader, network: NetworkProfile, nodes: Mapping[str, NodeConfig]) -> RoutingPolicy:
    """Nobody can fetch from an existing engine's memory, so among those the router does not plan to."""
    direct = any(node.direct is not None for node in nodes.values())
    name = reader.text("policy", default="ttft", among=POLICIES)
    return RoutingPolicy(name=name, network=network, fetch=False if direct else None)


def _lease(reader: _Reader) -> LeaseConfig:
    return LeaseConfig(
        multiple=reader.number("multiple", default=4.0, low=1),
        ceiling_s=reader.number("ceiling_s", default=3600.0, low=0),
        floor_s=reader.number("floor_s", default=600.0, low=0),
    )


def _check_references(config: PartitionConfig) -> None:
    """Names that one section takes from another must exist there, and nodes that work together must be of one kind."""
    _check_kinds(config)
    bands = {band.name for band in config.flow.bands}
    for name, tenant in config.tenants.items():
        if tenant.default_objective not in config.objectives:
            raise ConfigError(
                f"tenants[{name}].default_objective", f"a known objective, not {tenant.default_objective!r}"
            )
    for key in config.keys:
        if key.tenant not in config.tenants:
            raise ConfigError(f"keys[{key.id}].tenant", f"a known tenant, not {key.tenant!r}")
    for name, objective in config.objectives.items():
        if objective.band not in bands:
            raise ConfigError(f"objectives[{name}].band", f"a known band, not {objective.band!r}")


def _check_kinds(config: PartitionConfig) -> None:
    """KV goes from node to node, so a partition has agents' nodes or one kind of existing engine, not both."""
    kinds = {node.engine if node.direct is not None else "agent" for node in config.nodes.values()}
    if len(kinds) > 1:
        raise ConfigError("nodes", f"nodes of one kind, not {' and '.join(sorted(kinds))} together")
    if config.model.by_text and kinds == {"agent"}:
        raise ConfigError("model.tokenizer", "'gguf' or 'symbolic': only existing engines can do without one")
