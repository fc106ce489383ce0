"""What happens to a yard: every fact that a driver (gateway or simulator) reports to it. Times are the driver's `now`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.kvcache.domain.events import BranchSignal, Relation
from apps.kvcache.domain.hashing import HashedPrompt
from apps.kvcache.domain.machine import StreamEvent
from workers.yard.config import PartitionConfig


@dataclass(frozen=True, slots=True)
class YardRequest:
    """One request as the front door understood it.

    `band` is a band's name, `flow_id` the line it stands in inside the band (tenant or a trusted fairness id), `bytes`
    the size of its body, `output_tokens` how many it may produce at most.
    """

    request_id: str
    tenant: str
    band: str
    flow_id: str
    bytes: int
    prompt: HashedPrompt
    output_tokens: int
    received_at: float
    branch: BranchSignal
    ttl_s: float | None = None
    slo_ttft_s: float | None = None
    objective: str = ""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefill node answered (docs/interfaces.md, section 7), without the ids.

    `first_finish` is the reason when the first token already ended the answer, and there is no decode: `stop` (that token
    is not sent), `length` or `stop-string`.
    """

    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    failed_fetch_tokens: int = 0
    first_finish: str | None = None
    queued_s: float = 0.0
    fetch_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeState:
    """The part of a node's status that decisions need (`GET /v1/status`).

    `own_requests` are those of this gateway that the node holds in any stage; `orphans` is the node's own count.
    """

    phase: str
    target_phase: str
    state: str
    generation: int
    boot_id: str
    running_prefill: int
    queued_prefill: int
    running_decode: int
    queued_decode: int
    queued_tokens: int
    pool_used_blocks: int
    pool_capacity_blocks: int
    pool_referenced_blocks: int
    kv_free_tokens: int
    max_decode_batch: int
    event_seq: int = 0
    kv_tokens: int = 0
    prefill_chunk_tokens: int = 0
    pool_name: str = ""
    last_switch: Mapping[str, Any] | None = None
    own_requests: frozenset[str] = frozenset()
    orphans: int = 0
    stalled_s: float = 0.0

    @property
    def pool_spare_blocks(self) -> int:
        """Free blocks and those that no branch needs any more."""
        return max(0, self.pool_capacity_blocks - self.pool_referenced_blocks)


@dataclass(frozen=True, slots=True)
class Arrived:
    request: YardRequest


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads the answer any more: the client closed its connection, or what `why` says."""

    request_id: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The front door ended the answer itself, at a stop string, after `output_tokens`. The node still decodes."""

    request_id: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefetchEnded:
    """Blocks that were to come ahead of a request's prefill have come to the node, or will not."""

    request_id: str
    node: str


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The first token is there. `result` None: the engine tells what it had cached at the answer's end, if at all."""

    request_id: str
    result: PrefillResult | None


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """`retryable`: another node may do better. `reason` is a code, `message` is for people."""

    request_id: str
    retryable: bool
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first output token is on its way to the client."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DecodeProgress:
    """`tokens` more output tokens came from the decode node."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """`output_tokens` counts the whole answer; `stored_chain` are the decoded blocks that the pool now holds. `result`: what
    became of the prompt, where `PrefillFinished` could not tell; None there and here means as predicted."""

    request_id: str
    reason: str
    output_tokens: int
    stored_chain: bytes = b""
    result: PrefillResult | None = None


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    request_id: str
    retryable: bool
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class EngineRefused:
    """The engine answered with an error that is the client's (a bad field, a prompt too long): the client got it as it is,
    and no other node would do better. It says nothing against the node."""

    request_id: str
    http_status: int
    message: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    node: str
    status: NodeState


@dataclass(frozen=True, slots=True)
class NodeStatuses:
    """Several nodes' statuses, taken together: the nodes are judged once, after the last. `worked`: iterations of nodes that
    do not come with their event streams, `(node, rows)`."""

    reports: Sequence[NodeStatus]
    worked: Sequence[tuple[str, Sequence[Sequence[Any]]]] = ()


@dataclass(frozen=True, slots=True)
class NodeEvents:
    """A batch of the node's event stream in order of `seq`: in its own JSON form, or already in the KV machine's words."""

    node: str
    events: Sequence[Mapping[str, Any] | StreamEvent]


@dataclass(frozen=True, slots=True)
class NodeSnapshotTaken:
    """The node's whole content as of `seq`: the answer to `FetchSnapshot`."""

    node: str
    seq: int
    segments: Sequence[tuple[bytes | None, bytes]]


@dataclass(frozen=True, slots=True)
class NodeUnreachable:
    """A status poll found nobody: `refused` when the connection was refused outright."""

    node: str
    refused: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BranchEnd:
    branch_id: str


@dataclass(frozen=True, slots=True)
class BranchAnnounced:
    """What a harness says of a branch without a request (as the KV machine's event of that name)."""

    branch_id: str
    parent: str | None = None
    relation: Relation | None = None
    program: str | None = None
    rewritten: bool = False


@dataclass(frozen=True, slots=True)
class Configured:
    config: PartitionConfig


@dataclass(frozen=True, slots=True)
class ShutDown:
    """No new requests; what waits is refused, what runs may finish."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline came. Nothing else happened."""


Event = (
    Arrived
    | ClientGone
    | AnswerEnded
    | PrefetchEnded
    | PrefillFinished
    | PrefillFailed
    | FirstToken
    | DecodeProgress
    | DecodeFinished
    | DecodeFailed
    | EngineRefused
    | NodeStatus
    | NodeStatuses
    | NodeEvents
    | NodeSnapshotTaken
    | NodeUnreachable
    | BranchEnd
    | BranchAnnounced
    | Configured
    | ShutDown
    | Tick
)
