"""What the router is shown (nodes, a request) and what it answers (a choice, with the whole table behind it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from apps.planning.domain.cost_model import DecodeCoefficients, NetworkProfile, PrefillCoefficients

Phase = Literal["prefill", "decode", "mixed"]
NodeState = Literal["ready", "draining", "switching", "avoided", "down"]
Mode = Literal["local", "fetch", "recompute"]

POLICIES = ("ttft", "round-robin", "least-loaded", "cache-aware", "sticky", "dynamo-kv")


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """Prefill work of one request on one node, in tokens: to compute, cached, and of those restored from host memory."""

    t_uc: int
    t_c: int = 0
    t_rst: int = 0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known of a node apart from its load.

    `kv_capacity_tokens` is the device memory for running requests (None = not known, never full).
    `prefill_chunk_tokens` 0 means a prompt is computed in one iteration. `pool_spare_tokens` (free or worthless host
    memory) and `pool_referenced_tokens` (still needed) price the copies a fetch makes; None spare = not known, no price.
    """

    name: str
    order: int
    phase: Phase
    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    state: NodeState = "ready"
    healthy: bool = True
    decode_limit: int = 1
    kv_capacity_tokens: int | None = None
    prefill_chunk_tokens: int = 0
    pool_spare_tokens: int | None = None
    pool_referenced_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node and its load at one moment. `announced_decode` are requests on their way to decode there;
    `kv_used_tokens` is what running and announced requests may grow to; `fetch_queue_bytes` still have to arrive.
    `queued_s` prices `queued` where that was counted already (None: count it)."""

    facts: NodeFacts
    queued: tuple[QueuedWork, ...] = ()
    running_prefill: int = 0
    running_remaining_s: float = 0.0
    running_decode: int = 0
    announced_decode: int = 0
    kv_used_tokens: int = 0
    fetch_queue_bytes: float = 0.0
    queued_s: float | None = None

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def prefill_requests(self) -> int:
        """Requests placed for prefill and not finished."""
        return self.running_prefill + len(self.queued)

    @property
    def decode_requests(self) -> int:
        """Requests that decode here or are announced to."""
        return self.running_decode + self.announced_decode

    @property
    def kv_free_tokens(self) -> int | None:
        """Device memory left for one more request; None where the capacity is not known."""
        capacity = self.facts.kv_capacity_tokens
        return None if capacity is None else capacity - self.kv_used_tokens


@dataclass(frozen=True, slots=True)
class PrefillQuery:
    """`matches`: leading blocks of the prompt that each node's pool holds. `home`: the node that last prefilled this
    branch. `waited_s`: time already spent in the queue. `unseen`: nodes whose pool's content is not known, and why."""

    request_id: str
    prompt_tokens: int
    matches: Mapping[str, int]
    block_tokens: int
    waited_s: float = 0.0
    home: str | None = None
    unseen: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.block_tokens < 1:
            raise ValueError(
                f"prompt_tokens, block_tokens: expected at least 1, got {self.prompt_tokens}, {self.block_tokens}"
            )


@dataclass(frozen=True, slots=True)
class DecodeQuery:
    """`context_tokens` the prompt and tokens so far; `output_tokens` what may still come (room is kept for both)."""

    request_id: str
    context_tokens: int
    output_tokens: int
    home: str | None = None


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Copy blocks `[from_block, to_block)` of the prompt from `source_node`'s pool."""

    source_node: str
    from_block: int
    to_block: int


@dataclass(frozen=True, slots=True)
class CandidateTerms:
    """One node's row: the seconds its predicted TTFT is made of (queueing before the decision not included), and
    `duplicate_s`, which others will pay for the copies made. `total_s` is both: what nodes are compared by.

    `cached_tokens` count local and fetched ones; `mode` is `recompute` when a peer holds more but computing is cheaper.
    `why_not` is None for an eligible node, else a code like `phase-decode`; its seconds are then zero.
    """

    node: str
    remaining_s: float = 0.0
    queue_s: float = 0.0
    service_s: float = 0.0
    fetch_s: float = 0.0
    fetch_overflow_s: float = 0.0
    duplicate_s: float = 0.0
    total_s: float = 0.0
    cached_tokens: int = 0
    fetch_tokens: int = 0
    mode: Mode = "local"
    fetch: FetchPlan | None = None
    why_not: str | None = None

    @property
    def ttft_s(self) -> float:
        """What this request itself will wait for its first token, from the decision on."""
        return self.total_s - self.duplicate_s


@dataclass(frozen=True, slots=True)
class Blindness:
    """Something that the router's view lacks: a code a program matches, and what it means in words."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """`node` None: no node can take it (`reason_code` `no-node`). `predicted_ttft_s` counts the time already waited.
    `terms` has a row for every node, `chosen` is the chosen one's. `blind` says what the choice was made without."""

    node: str | None
    predicted_ttft_s: float | None
    terms: Sequence[CandidateTerms]
    fetch: FetchPlan | None
    reason_code: str
    reason: str
    chosen: CandidateTerms | None = None
    blind: tuple[Blindness, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeTerms:
    """One node's row: `iteration_s` predicted once `batch` requests, this one included, decode there."""

    node: str
    iteration_s: float = 0.0
    batch: int = 0
    kv_free_tokens: int | None = None
    home: bool = False
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """`node` None: no node has room now (`reason_code` `no-node` or `no-room`)."""

    node: str | None
    terms: Sequence[DecodeTerms]
    reason_code: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """How to route. `name` is one of `POLICIES`; raises `ValueError` naming the choices.

    `home_margin_ratio`: a decode home is kept while it is at most this much slower than the best. `tie_margin_ratio`:
    predicted TTFTs this close count as equal, and the node with less placed on it wins. `fetch` None leaves it to the
    policy (only `ttft` fetches from peers). `decode` names another policy for decode nodes (None: the same).
    `holds_back` False sends requests on to decode nodes without room, to wait in the engine, as routers without a queue do.
    `prefetch_bytes`: how much may be on its way to one node for requests that still wait in the central queue (0: nothing).
    """

    name: str
    network: NetworkProfile
    home_margin_ratio: float = 0.1
    tie_margin_ratio: float = 0.01
    fetch: bool | None = None
    cache_threshold_ratio: float = 0.5
    balance_abs_requests: int = 32
    balance_rel_ratio: float = 1.0001
    overlap_weight: float = 1.0
    decode: str | None = None
    holds_back: bool = True
    prefetch_bytes: float = 0.0

    def __post_init__(self) -> None:
        for path, name in (("routing.policy", self.name), ("routing.decode", self.decode or self.name)):
            if name not in POLICIES:
                raise ValueError(f"{path}: expected one of {', '.join(POLICIES)}, got {name!r}")


def why_not_eligible(facts: NodeFacts, stage: Phase) -> str | None:
    """A code for why a node gets nothing new of this stage, or None when it may: `phase-...`, `unhealthy`, a state."""
    if facts.state == "down" or not facts.healthy:
        return "down" if facts.state == "down" else "unhealthy"
    if facts.state != "ready":
        return facts.state
    if facts.phase not in (stage, "mixed"):
        return f"phase-{facts.phase}"
    return None
