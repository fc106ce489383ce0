"""Ledger: the live branches, the requests open in each, and when a silent one loses its references.

A harness says which branch a request belongs to, or nothing; then the prompt tells (`inference`). What it says is ordered by
(version, sequence): anything not newer than what was seen changes nothing. A branch ends when told so or when its lease
runs out: a multiple of its own pauses, longer while one of its requests is open or one of its sub-agents lives.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from apps.kvcache.domain.directory import PrefixFacts
from apps.kvcache.domain.events import BranchSignal, BranchView, Relation, ResolvedKind
from apps.kvcache.domain.hashing import HASH_BYTES, HashedPrompt
from apps.kvcache.domain.segments import Segment

_MAX_CLOSED = 4096
_MAX_COMMON_HEADS = 1024
TAIL_TOKENS = 192
"""A harness may move its reminders: so many tokens at a prompt's end (and at most an eighth of it) may come back different."""


def slack_blocks(block_tokens: int, context_blocks: int) -> int:
    """Blocks at the end of a prompt that may differ in the next one without making it another version."""
    return min(TAIL_TOKENS // block_tokens, context_blocks // 8)


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """A silent branch lives `multiple` times its longest recent pause, within [floor_s, ceiling_s]; before its first
    pause, `multiple` times the floor. While a request is open: the ceiling since it was last heard of."""

    multiple: float = 4.0
    floor_s: float = 600.0
    ceiling_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.multiple <= 0:
            raise ValueError(f"lease.multiple: expected a positive number, got {self.multiple}")
        if not 0 < self.floor_s <= self.ceiling_s:
            raise ValueError(
                f"lease.floor_s: expected more than 0 and at most ceiling_s ({self.ceiling_s}), got {self.floor_s}"
            )

    def length_s(self, pause_s: float | None) -> float:
        return min(self.ceiling_s, max(self.floor_s, self.multiple * (self.floor_s if pause_s is None else pause_s)))


@dataclass(slots=True)
class OpenRequest:
    """A request between RequestSeen and its end. `facts`: what the directory knew when it came, or was last placed."""

    request_id: str
    branch_id: str
    prompt: HashedPrompt
    facts: PrefixFacts
    served: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """What is remembered of a branch that lived. `named`: a harness called it so, it was not inferred."""

    version: int
    sequence: int | None
    named: bool


@dataclass(slots=True, eq=False)
class Branch:
    """A live context. `end`: the segment where it ends; `latest`: the request that set it last. `former_*`: the context
    before an inferred new version, which a fork would go on with. `held_until_s`: its sub-agents keep it alive until then.
    `scope`: its session, "" without any id, None where the harness names branches: nothing is inferred for those.
    `first_blocks`: its first prompt. `rewriting`: the harness announced that the context will be rewritten."""

    branch_id: str
    version: int
    sequence: int | None
    kind: ResolvedKind
    parent: str | None
    program: str | None
    tenant: str
    inferred: bool
    end: Segment
    latest: str
    prompt_blocks: int
    slack_blocks: int
    heard_s: float
    first_blocks: int = 0
    scope: str | None = None
    rewriting: bool = False
    homes: dict[str, str] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    pause_s: float | None = None
    ending: bool = False
    held_until_s: float = 0.0
    former_last: bytes = b""
    former_blocks: int = 0

    @property
    def nodes(self) -> list[str]:
        """Nodes whose copy this branch counts on: its homes, each once."""
        return sorted(set(self.homes.values()))

    def extended_by(self, end: Segment) -> bool:
        """Whether a context goes on with this one: with its last prompt, at least. The output after it may come back
        in other tokens (a chat template rewrites it), which is no new version."""
        return shared_blocks(self.end, end) >= self.prompt_blocks - self.slack_blocks

    def had_before(self, chain: bytes) -> bool:
        """Whether `chain` goes on with the context that an inferred new version replaced."""
        at = self.former_blocks * HASH_BYTES
        return bool(self.former_last) and chain[at - HASH_BYTES : at] == self.former_last


@dataclass(frozen=True, slots=True)
class Resolution:
    """Which branch a request belongs to. `branch` None: a new one is to be opened, unless `stale`; stale requests change
    no context."""

    branch_id: str
    branch: Branch | None
    version: int
    kind: ResolvedKind
    reason: str
    parent: str | None = None
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Dormant:
    """An inferred branch whose lease ran out; a prompt that goes on with it takes it up again."""

    branch_id: str
    version: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a harness said of a branch ahead of its first request."""

    parent: str | None = None
    relation: Relation | None = None
    program: str | None = None


class Ledger:
    def __init__(self, lease: LeasePolicy) -> None:
        self.lease = lease
        self.branches: dict[str, Branch] = {}
        self.requests: dict[str, OpenRequest] = {}
        # A lease is looked at when its entry comes up: it may have grown since, but is never shorter than its entry.
        self._leases: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}
        self._subagents: dict[str, set[str]] = {}
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self._announced: OrderedDict[str, Announcement] = OrderedDict()
        self._sessions: dict[str, set[str]] = {}
        # Tenants of one sharing domain have the same blocks: what is remembered by block is kept apart by tenant and scope.
        # (tenant, scope, last block that a resumed prompt must have)
        self._dormant: OrderedDict[tuple[str, str, bytes], Dormant] = OrderedDict()
        # (tenant, scope, last block) of a head -> its length in blocks
        self._common_heads: OrderedDict[tuple[str, str, bytes], int] = OrderedDict()
        self._inferred = 0

    # ---- who is it -----------------------------------------------------------------------------------------------

    def resolve_signal(self, branch_id: str, signal: BranchSignal, end: Segment) -> Resolution:
        """The branch that a signalled request, whose prompt ends at `end`, belongs to."""
        branch = self.branches.get(branch_id)
        if branch is None:
            return self._resolve_unknown(branch_id, signal, end)
        if not _newer(signal, branch.version, branch.sequence):
            return Resolution(branch_id, branch, branch.version, "continuation", "signal-stale", stale=True)
        if signal.version is not None and signal.version > branch.version:
            return Resolution(branch_id, branch, signal.version, "version", "signal-version")
        if signal.version is None and not branch.extended_by(end):
            reason = "signal-rewritten" if branch.rewriting else "signal-diverged"
            return Resolution(branch_id, branch, branch.version + 1, "version", reason)
        return Resolution(branch_id, branch, branch.version, "continuation", "signal")

    def _resolve_unknown(self, branch_id: str, signal: BranchSignal, end: Segment) -> Resolution:
        version = signal.version or 0
        closed = self._closed.get(branch_id)
        if closed is not None and (signal.version is not None or signal.sequence is not None):
            if not _newer(signal, closed.version, closed.sequence):
                return Resolution(branch_id, None, closed.version, "continuation", "signal-stale", stale=True)
            return Resolution(branch_id, None, version, "continuation", "signal-resumed")
        if signal.relation is not None:
            return Resolution(branch_id, None, version, signal.relation, "signal-relation")
        if signal.parent is None:
            return Resolution(branch_id, None, version, "new", "signal")
        parent = self.branches.get(signal.parent)
        shared = parent is not None and 2 * shared_blocks(parent.end, end) >= parent.end.end > 0
        return Resolution(branch_id, None, version, "fork" if shared else "subagent", "signal-parent")

    def next_inferred_id(self, session: str | None = None) -> str:
        self._inferred += 1
        return f"inferred-{self._inferred}" if session is None else f"{session}~{self._inferred}"

    def announce(self, branch_id: str, announcement: Announcement) -> None:
        """Kept for the first request of a branch that is not known yet."""
        self._announced[branch_id] = announcement
        self._announced.move_to_end(branch_id)
        if len(self._announced) > _MAX_CLOSED:
            self._announced.popitem(last=False)

    def completed(self, signal: BranchSignal) -> BranchSignal:
        """The signal, with what was announced of its branch and it does not say itself."""
        said = self._announced.pop(signal.branch_id, None) if signal.branch_id is not None else None
        if said is None:
            return signal
        return replace(
            signal,
            parent=signal.parent or said.parent,
            relation=signal.relation or said.relation,
            program=signal.program or said.program,
        )

    def closed_version(self, branch_id: str) -> int | None:
        """The last version of a branch that lived before; None when it is not remembered."""
        closed = self._closed.get(branch_id)
        return None if closed is None else closed.version

    def of_session(self, session: str) -> list[Branch]:
        """Live branches that were inferred in a session, the session's own name among them."""
        return [self.branches[branch_id] for branch_id in sorted(self._sessions.get(session, ()))]

    def ending(self, name: str) -> list[Branch]:
        """What ends when this name does: the branch that a harness calls so, or nothing when that has ended already; else
        the session of this name as a whole, or the one inferred branch."""
        branch, closed = self.branches.get(name), self._closed.get(name)
        if branch is None:
            return [] if closed is not None and closed.named else self.whole_session(name)
        if branch.scope is None:
            return [branch]
        return self.whole_session(name) or [branch]

    def whole_session(self, session: str) -> list[Branch]:
        """Every live branch of a session: those inferred in it, and the sub-agents that name one of them as parent."""
        found = {branch.branch_id: branch for branch in self.of_session(session)}
        pending = [session, *found]
        while pending:
            for branch_id in sorted(self._subagents.get(pending.pop(), ())):
                if branch_id not in found:
                    found[branch_id] = self.branches[branch_id]
                    pending.append(branch_id)
        return list(found.values())

    # ---- what inference remembers ----------------------------------------------------------------------------------

    def common_head(self, tenant: str, scope: str, chain: bytes, blocks: int) -> None:
        """Two branches that both live part after `blocks` of `chain`: sharing that much tells nothing."""
        if blocks:
            head = tenant, scope, chain[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES]
            self._common_heads[head] = blocks
            self._common_heads.move_to_end(head)
            if len(self._common_heads) > _MAX_COMMON_HEADS:
                self._common_heads.popitem(last=False)

    def common_blocks(self, tenant: str, scope: str, chain: bytes) -> int:
        """The longest head of `chain` that is known to be common among the branches of a tenant's scope."""
        return max(
            (
                blocks
                for (*of, last), blocks in self._common_heads.items()
                if of == [tenant, scope] and chain[(blocks - 1) * HASH_BYTES : blocks * HASH_BYTES] == last
            ),
            default=0,
        )

    def dormant_for(self, tenant: str, scope: str, chain: bytes, longer_than: int) -> Dormant | None:
        """The branch let go that `chain` goes on with, the longest one with more than `longer_than` blocks. It is
        forgotten here: it lives again."""
        if not self._dormant:
            return None
        for at in range(len(chain) - HASH_BYTES, (longer_than - 1) * HASH_BYTES, -HASH_BYTES):
            key = tenant, scope, chain[at : at + HASH_BYTES]
            found = self._dormant.get(key)
            if found is not None:
                del self._dormant[key]
                return None if found.branch_id in self.branches else found
        return None

    def keep_dormant(self, branch: Branch) -> None:
        """Remember a silent branch that is about to be closed, if a request could be told to be its own."""
        must_have = branch.prompt_blocks - branch.slack_blocks
        if branch.scope is None or must_have < 1:
            return
        key = branch.tenant, branch.scope, block_of_context(branch.end, must_have - 1)
        self._dormant[key] = Dormant(branch.branch_id, branch.version)
        self._dormant.move_to_end(key)
        if len(self._dormant) > _MAX_CLOSED:
            self._dormant.popitem(last=False)

    # ---- life of a branch ----------------------------------------------------------------------------------------

    def open_branch(
        self,
        now: float,
        resolution: Resolution,
        signal: BranchSignal,
        end: Segment,
        request_id: str,
        block_tokens: int,
    ) -> Branch:
        branch = Branch(
            branch_id=resolution.branch_id,
            version=resolution.version,
            sequence=signal.sequence,
            kind=resolution.kind,
            parent=signal.parent or resolution.parent,
            program=signal.program,
            tenant=signal.tenant,
            inferred=signal.branch_id is None,
            end=end,
            latest=request_id,
            prompt_blocks=end.end,
            slack_blocks=slack_blocks(block_tokens, end.end),
            heard_s=now,
            first_blocks=end.end,
            scope=None if signal.branch_id is not None else signal.session or "",
        )
        self.branches[branch.branch_id] = branch
        if branch.scope:
            self._sessions.setdefault(branch.scope, set()).add(branch.branch_id)
        self._closed.pop(branch.branch_id, None)
        if branch.kind == "subagent" and branch.parent is not None:
            self._subagents.setdefault(branch.parent, set()).add(branch.branch_id)
        self._queue_lease(branch)
        return branch

    def hear(self, now: float, branch: Branch, request: OpenRequest) -> None:
        """A request of the branch came; if none was open, the time since it was last heard of was a pause."""
        if not branch.open and now > branch.heard_s:
            pause_s = now - branch.heard_s
            branch.pause_s = pause_s if branch.pause_s is None else max(pause_s, (branch.pause_s + pause_s) / 2)
        branch.heard_s = max(branch.heard_s, now)
        branch.open.add(request.request_id)

    def finish(self, now: float, request: OpenRequest) -> Branch | None:
        """The request is over; answers its branch if that lives."""
        del self.requests[request.request_id]
        branch = self.branches.get(request.branch_id)
        if branch is None or request.request_id not in branch.open:
            return None
        branch.open.discard(request.request_id)
        branch.heard_s = max(branch.heard_s, now)
        self._queue_lease(branch)
        return branch

    def close(self, now: float, branch: Branch) -> None:
        """Forget the branch; what was last heard of it is kept a while, so that a late duplicate does not revive it.
        The parent of a sub-agent has a fresh lease from here on: it is about to go on."""
        del self.branches[branch.branch_id]
        self._queued.pop(branch.branch_id, None)
        self._closed[branch.branch_id] = Closed(branch.version, branch.sequence, branch.scope is None)
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)
        if branch.scope:
            inferred = self._sessions[branch.scope]
            inferred.discard(branch.branch_id)
            if not inferred:
                del self._sessions[branch.scope]
        siblings = self._subagents.get(branch.parent) if branch.parent is not None else None
        if siblings is not None and branch.parent is not None:
            siblings.discard(branch.branch_id)
            if not siblings:
                del self._subagents[branch.parent]
            parent = self.branches.get(branch.parent)
            if parent is not None:
                parent.held_until_s = now + self.lease.length_s(parent.pause_s)
                self._queue_lease(parent)

    def drop_requests(self, branch: Branch) -> None:
        """Forget the branch's open requests, which nobody will finish."""
        for request_id in branch.open:
            self.requests.pop(request_id, None)

    # ---- leases --------------------------------------------------------------------------------------------------

    def lease_until_s(self, branch: Branch) -> float:
        length_s = self.lease.ceiling_s if branch.open else self.lease.length_s(branch.pause_s)
        return max(branch.heard_s + length_s, branch.held_until_s)

    def next_lease_s(self) -> float | None:
        """When a lease has to be looked at next."""
        return self._leases[0][0] if self._leases else None

    def expired(self, now: float) -> list[Branch]:
        """Branches whose lease ran out; one with a living sub-agent is held for as long as that has a lease."""
        found = []
        while self._leases and self._leases[0][0] <= now:
            until_s, branch_id = heappop(self._leases)
            if self._queued.get(branch_id) != until_s:
                continue
            branch = self.branches[branch_id]
            del self._queued[branch_id]
            for subagent in self._subagents.get(branch_id, ()):
                branch.held_until_s = max(branch.held_until_s, self.lease_until_s(self.branches[subagent]))
            if self.lease_until_s(branch) > now:
                self._queue_lease(branch)
            else:
                found.append(branch)
        return found

    def _queue_lease(self, branch: Branch) -> None:
        until_s = self.lease_until_s(branch)
        if until_s < self._queued.get(branch.branch_id, float("inf")):
            self._queued[branch.branch_id] = until_s
            heappush(self._leases, (until_s, branch.branch_id))

    def view(self, branch: Branch) -> BranchView:
        return BranchView(
            branch_id=branch.branch_id,
            version=branch.version,
            sequence=branch.sequence,
            kind=branch.kind,
            parent=branch.parent,
            program=branch.program,
            tenant=branch.tenant,
            inferred=branch.inferred,
            context_blocks=branch.end.end,
            homes=dict(branch.homes),
            open_requests=len(branch.open),
            lease_until_s=self.lease_until_s(branch),
        )


def _newer(signal: BranchSignal, version: int, sequence: int | None) -> bool:
    if signal.version is not None and signal.version != version:
        return signal.version > version
    return signal.sequence is None or sequence is None or signal.sequence > sequence


def block_of_context(end: Segment, index: int) -> bytes:
    """Block `index` of the context that ends at `end`."""
    segment = end
    while segment.start > index:
        assert segment.parent is not None
        segment = segment.parent
    return segment.block(index - segment.start)


def shared_blocks(left: Segment, right: Segment) -> int:
    """Blocks that the contexts ending at two segments have in common."""
    while left is not right:
        if left.end >= right.end and left.parent is not None:
            left = left.parent
        else:
            assert right.parent is not None
            right = right.parent
    return left.end
