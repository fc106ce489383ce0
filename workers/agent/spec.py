"""The agent's start file: typed, with errors that name the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from workers.agent.custody import LEASE_S

Positive = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
TransportName = Literal["shared-memory", "http", "mooncake"]
PhaseName = Annotated[str, msgspec.Meta(pattern=r"^(prefill|decode|mixed)$")]


class SpecError(Exception):
    """A start file that cannot be used: `field` and what was `expected`."""

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: {expected}")
        self.field = field
        self.expected = expected


class ModelSpec(msgspec.Struct, frozen=True):
    """The model of a node. `weights`: a GGUF file, a folder of safetensors, or `random` (tiny, from `seed`); null = where
    the tokenizer is, else the packaged default."""

    name: str
    block_tokens: Positive = 16
    ids_per_block: Positive = 16
    tokens_per_id: Positive = 1
    context_tokens: Positive = 4096
    dtype: str = "f32"
    tokenizer: str = "gguf"
    tokenizer_path: str | None = None
    served_names: list[str] = []
    weights: str | None = None
    seed: int = 0


class LimitsSpec(msgspec.Struct, frozen=True):
    """Limits of a node. `fetch_bytes` is the most that may be in flight from one peer. `kv_tokens` is device KV; `max_queue` is how many accepted requests may wait in the engine;
    a gateway that is silent for `lease_s` loses what it asked for."""

    max_decode_batch: Positive = 8
    prefill_chunk_tokens: Positive = 128
    kv_tokens: Positive = 32768
    max_queue: Positive = 256
    fetch_deadline_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    fetch_bytes: Positive = 64 * 1024 * 1024
    lease_s: Annotated[float, msgspec.Meta(gt=0)] = LEASE_S


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node: `phase` and `generation` hold at first start; later the kept state wins unless this generation is newer.
    `transports` are the ways to read peers' pools, the preferred one first (`mooncake` needs its library)."""

    name: Name
    engine: str
    model: ModelSpec
    phase: PhaseName = "mixed"
    generation: Annotated[int, msgspec.Meta(ge=0)] = 0
    pool_blocks: Positive = 1024
    pool_policy: str = "referenced"
    limits: LimitsSpec = LimitsSpec()
    coefficients: dict[str, float] = {}
    network: dict[str, float] = {}
    transports: Annotated[tuple[TransportName, ...], msgspec.Meta(min_length=1)] = ("shared-memory", "http")


class AgentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One agent process. `token_env` names the environment variable that holds the bearer token."""

    data_dir: str
    nodes: Annotated[list[NodeSpec], msgspec.Meta(min_length=1)]
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    token_env: str = "SWITCHYARD_AGENT_TOKEN"  # noqa: S105 (the variable's name, not a token)
    speed: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    models_dir: str | None = None


def parse_spec(document: Any) -> AgentSpec:
    """An AgentSpec from decoded JSON. Raises SpecError naming the field."""
    try:
        spec = msgspec.convert(document, AgentSpec)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None
    names = [node.name for node in spec.nodes]
    for name in names:
        if names.count(name) > 1:
            raise SpecError("nodes", f"expected unique names, got {name!r} twice")
    return spec


def load_spec(path: Path) -> AgentSpec:
    """Read and check a start file. Raises SpecError."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise SpecError(str(path), f"expected a readable file ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise SpecError(str(path), f"expected JSON ({error})") from None
    return parse_spec(document)


def _field_error(message: str) -> SpecError:
    """Split msgspec's `Expected .. - at `$.nodes[0].name`` into field and expectation."""
    match = re.match(r"(?P<expected>.*) - at `\$\.?(?P<field>.*)`$", message)
    if match is None:
        return SpecError("document", message)
    return SpecError(match["field"] or "document", match["expected"])
