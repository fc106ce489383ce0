"""What a simulated node is made of: its hardware, how KV moves and phases change there, its counters, and its host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from apps.kvcache.domain.eviction import EvictionPolicy
from workers.agent.engines.simulated_timing import Timing
from workers.agent.phase import PhaseName, StageName
from workers.yard.events import PrefillResult

if TYPE_CHECKING:
    from workers.simulator.node_core import NodeCore

HANDOFF_PIN_S = 30.0
FETCH_DEADLINE_S = 10.0

FetchBegins = Literal["queued", "at-start"]


@dataclass(frozen=True, slots=True)
class SwitchStyle:
    """How an engine changes phase once it is drained. `keeps_kv` False empties its pool; `seconds` (low, high) it serves
    nothing; `drain_deadline_s` it may take to end its old work."""

    keeps_kv: bool = True
    seconds: tuple[float, float] = (0.5, 0.5)
    drain_deadline_s: float = 60.0


@dataclass(frozen=True, slots=True)
class DataPlane:
    """How KV moves. `host_pool`: nodes keep their KV in host memory; without, a prefix is cached on the device alone, as
    far as it fits there. `moves_outputs`: what still runs on a node that leaves decode goes on on another one.
    `fetch_begins`: peers' blocks are pulled while a prompt waits, or only when it starts, so that its iteration stalls.
    `decode_stores`: decode nodes write their KV to the pool. `eviction`: what goes first. `answers_from`: who sends the
    first token: the prefill node as soon as it has it, or the decode node once the request has joined its batch there."""

    host_pool: bool = True
    moves_outputs: bool = True
    fetch_begins: FetchBegins = "queued"
    decode_stores: bool = True
    eviction: EvictionPolicy = "referenced"
    answers_from: StageName = "prefill"
    switch: SwitchStyle = SwitchStyle()


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node's hardware. Blocks are the partition's."""

    name: str
    order: int
    phase: PhaseName
    timing: Timing
    block_tokens: int
    pool_blocks: int
    device_tokens: int
    max_decode_batch: int
    prefill_chunk_tokens: int
    plane: DataPlane = DataPlane()


@dataclass(slots=True)
class Job:
    """A request as a node sees it. `output_chain`: the blocks that its output adds, once it is decoded."""

    request_id: str
    chain: bytes
    prompt_tokens: int
    output_tokens: int
    output_chain: bytes = b""
    sent_tokens: int = 0


class Host(Protocol):
    """Where a node's reports go, and its peers."""

    def peer(self, name: str) -> NodeCore | None: ...

    def prefilled(self, now: float, node: NodeCore, job: Job, result: PrefillResult) -> None: ...

    def fetched_ahead(self, now: float, node: NodeCore, request_id: str) -> None:
        """What was to come ahead of the request has come, or will not."""

    def joined(self, now: float, node: NodeCore, job: Job) -> None:
        """The request has a place in the decode batch."""

    def decoded(self, now: float, node: NodeCore, job: Job) -> None: ...

    def refused(self, now: float, node: NodeCore, job: Job, stage: StageName, code: str) -> None: ...

    def wake(self, node: NodeCore, at: float) -> None: ...

    def heard(self, now: float, node: NodeCore) -> None:
        """The node has something new in its outbox."""

    def fetch_fails(self) -> bool: ...

    def draw(self, low: float, high: float) -> float: ...


@dataclass(slots=True)
class Counters:
    fetched_tokens: int = 0
    failed_fetch_tokens: int = 0
    recomputed_tokens: int = 0
    evicted_blocks: int = 0
    prefill_busy_s: float = 0.0
    stalled_s: float = 0.0
    decode_busy_s: float = 0.0
    computed_tokens: int = 0


@dataclass(slots=True)
class WorkRow:
    """Sums over the iterations of one phase (and, where it is decode, of one batch size)."""

    t_uc: int = 0
    pairs: float = 0.0
    t_rst: int = 0
    busy_s: float = 0.0
    requests: int = 0
    iterations: int = 0
