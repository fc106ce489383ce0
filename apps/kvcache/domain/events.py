"""Events that KvMachine takes and commands it gives.

Chains are `bytes`, 16 bytes a block. A `parent` of None (or the root hash of a known sharing domain) means that the chain
starts a context. Each node numbers everything it reports; the machine ignores what is not newer than what it has seen and
asks for a snapshot when a number is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from apps.kvcache.domain.hashing import HashedPrompt

Tier: TypeAlias = Literal["host", "device"]
Relation: TypeAlias = Literal["fork", "subagent"]
ResolvedKind: TypeAlias = Literal["new", "continuation", "version", "fork", "subagent"]
LostCause: TypeAlias = Literal["evicted", "routed", "switched", "fetch-failed", "never-stored"]
LOST_CAUSES: tuple[LostCause, ...] = ("evicted", "routed", "switched", "fetch-failed", "never-stored")


@dataclass(frozen=True, slots=True)
class BranchSignal:
    """What a harness said about a request; every part may be missing. `end`: this is the branch's last request.
    `session`: an id that several branches may share; counts only where no `branch_id` came."""

    branch_id: str | None = None
    version: int | None = None
    parent: str | None = None
    relation: Relation | None = None
    end: bool = False
    program: str | None = None
    sequence: int | None = None
    tenant: str = ""
    session: str | None = None


# ---- events of requests and branches -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """A request arrived. It stays open until OutputStored or RequestAborted; an open request keeps its branch alive."""

    request_id: str
    branch: BranchSignal
    prompt: HashedPrompt


@dataclass(frozen=True, slots=True)
class BranchEnded:
    """The branch, or every branch inferred in a session of that name, sends no more requests (signal without a request,
    or an operator)."""

    branch_id: str
    cause: str = "ended"


@dataclass(frozen=True, slots=True)
class BranchAnnounced:
    """What a harness says of a branch without a request. `parent`, `relation`, `program` count for the first request of a
    branch that is not known yet; `rewritten`: the known branch's next context that does not go on is a new version."""

    branch_id: str
    parent: str | None = None
    relation: Relation | None = None
    program: str | None = None
    rewritten: bool = False


@dataclass(frozen=True, slots=True)
class Homed:
    """A request of the branch was placed on a node. `phase` is the stage it was placed for: `prefill` or `decode`."""

    branch_id: str
    phase: str
    node: str


@dataclass(frozen=True, slots=True)
class RequestServed:
    """The prompt is computed. cached = found on the node, fetched = read from a peer, computed = the rest, which
    includes `failed_fetch_tokens`: those a fetch was started for and that had to be computed after all."""

    request_id: str
    node: str
    cached_tokens: int
    computed_tokens: int
    fetched_tokens: int
    failed_fetch_tokens: int = 0
    tenant: str = ""
    workload: str = ""


@dataclass(frozen=True, slots=True)
class OutputStored:
    """The request is finished. `chain`: the full blocks that its output added after the prompt's chain (may be empty;
    the whole chain, prompt included, is understood too). One that cannot follow the prompt is not taken: `refused_outputs`."""

    request_id: str
    chain: bytes


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The request ended without output (dropped, cancelled, failed)."""

    request_id: str


# ---- events of nodes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlocksStored:
    node: str
    seq: int
    parent: bytes | None
    chain: bytes
    tier: Tier = "host"


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """`hashes`: concatenated, in any order; a node never keeps a block whose parent it removed."""

    node: str
    seq: int
    hashes: bytes
    tier: Tier = "host"


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """All host blocks the node holds after its event `seq`, as (parent, chain) runs in any order."""

    node: str
    seq: int
    segments: list[tuple[bytes | None, bytes]]


@dataclass(frozen=True, slots=True)
class NodeCleared:
    """The node dropped all its blocks (a switch or restart that loses KV). `seq` None: not from its event stream."""

    node: str
    seq: int | None = None


@dataclass(frozen=True, slots=True)
class NodePhaseChanged:
    """The node's phase, from its event stream or (`seq` None) from a status, which may be repeated or late: with a
    `generation` (a switch raises it), what is older than what is known has no effect."""

    node: str
    phase: str
    seq: int | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class NodeSequence:
    """A number of the node's event stream that concerns no blocks (iterations, heartbeat), so that none seems lost."""

    node: str
    seq: int


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node is gone with its memory, or came back as a new process: its numbering starts anew."""

    node: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; send it when `next_deadline()` is reached."""


Event: TypeAlias = (
    RequestSeen
    | BranchEnded
    | BranchAnnounced
    | Homed
    | RequestServed
    | OutputStored
    | RequestAborted
    | BlocksStored
    | BlocksRemoved
    | NodeSnapshot
    | NodeCleared
    | NodePhaseChanged
    | NodeSequence
    | NodeLost
    | Tick
)


# ---- commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RefsChanged:
    """Add `delta` to the reference count of `last` and of the `blocks - 1` blocks above it, on `node`."""

    node: str
    last: bytes
    blocks: int
    delta: int


@dataclass(frozen=True, slots=True)
class RefsReset:
    """All reference counts of `node` become 0; the RefsChanged that follow build them up again."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotNeeded:
    node: str
    reason: str = "gap"


@dataclass(frozen=True, slots=True)
class BranchResolved:
    """Which branch a request belongs to. `reason` says how it is known: `signal...` or `inferred...`."""

    request_id: str
    branch_id: str
    version: int
    kind: ResolvedKind
    reason: str = "signal"


@dataclass(frozen=True, slots=True)
class BranchClosed:
    """The branch counts on no block any more. cause: `ended`, `lease`, or what BranchEnded said."""

    branch_id: str
    cause: str
    context_blocks: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ReuseCounted:
    """One request's reuse: the sum of `lost` is `ideal_tokens - actual_tokens`."""

    request_id: str
    prompt_tokens: int
    ideal_tokens: int
    actual_tokens: int
    lost: dict[LostCause, int] = field(default_factory=dict)


Command: TypeAlias = RefsChanged | RefsReset | SnapshotNeeded | BranchResolved | BranchClosed | ReuseCounted


# ---- answers to queries --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeMatch:
    """`blocks`: how many leading blocks of the prompt the node holds."""

    node: str
    blocks: int
    tier: Tier = "host"


@dataclass(frozen=True, slots=True)
class BranchView:
    """A live branch as others may see it."""

    branch_id: str
    version: int
    sequence: int | None
    kind: ResolvedKind
    parent: str | None
    program: str | None
    tenant: str
    inferred: bool
    context_blocks: int
    homes: dict[str, str]
    open_requests: int
    lease_until_s: float


@dataclass(frozen=True, slots=True)
class BranchContext:
    """Where a live branch's context is and why it is kept. All block counts are of this context.

    `held`: leading blocks each node has; `shared_blocks`: blocks that another live branch counts on too; `produced_blocks`:
    leading blocks that were ever computed; `gone`: of those, blocks that no node holds any more, by cause.
    """

    view: BranchView
    held: dict[str, int]
    shared_blocks: int
    produced_blocks: int
    gone: dict[str, int]
    heard_s: float
    pause_s: float | None
    open_requests: tuple[str, ...]
    held_by_subagents_until_s: float


@dataclass(frozen=True, slots=True)
class ReuseTotals:
    prompt_tokens: int
    ideal_tokens: int
    actual_tokens: int
    lost: dict[LostCause, int]
