"""KvMachine: branches, directory and reuse of one partition, driven by events, answering with commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.directory import Directory
from apps.kvcache.domain.hashing import HASH_BYTES, HashedPrompt
from apps.kvcache.domain.inference import resolve_inferred
from apps.kvcache.domain.ledger import (
    Announcement,
    Branch,
    LeasePolicy,
    Ledger,
    OpenRequest,
    Resolution,
    block_of_context,
    slack_blocks,
)
from apps.kvcache.domain.reuse import Dimension, ReuseAccounts, judge
from apps.kvcache.domain.segments import Segment
from apps.kvcache.domain.streams import KnownPhase, NodeStream

StreamEvent: TypeAlias = ev.BlocksStored | ev.BlocksRemoved | ev.NodeCleared | ev.NodePhaseChanged | ev.NodeSequence

_STAGES = ("prefill", "decode")
_PHASES = (*_STAGES, "mixed")


@dataclass(frozen=True, slots=True)
class KvConfig:
    """`max_blocks`: blocks remembered at most, those that no node holds any more included (some 25 bytes each).
    `snapshot_retry_s`: how long to wait for a snapshot before asking again. `silent_after_s`: without a heartbeat for so
    long, a node's events are not to be trusted (it sends one a second). `recount_after_s`: a node that let go of counted
    blocks is told its counts anew so much later: a change on its way meanwhile may have met such a block come back, which
    then is counted twice."""

    lease: LeasePolicy = field(default_factory=LeasePolicy)
    max_blocks: int = 8_000_000
    snapshot_retry_s: float = 5.0
    silent_after_s: float = 5.0
    recount_after_s: float = 10.0


class KvMachine:
    """See docs/interfaces.md, section 3. Raises ValueError, naming the field, for an event that is malformed; events about
    requests or branches it does not know are without effect."""

    def __init__(self, config: KvConfig | None = None) -> None:
        self.config = config or KvConfig()
        self._directory = Directory(self.config.max_blocks)
        self._ledger = Ledger(self.config.lease)
        self._reuse = ReuseAccounts()
        self._streams: dict[str, NodeStream[StreamEvent]] = {}
        self._unsettled: set[str] = set()  # nodes of which a snapshot is awaited
        self._phases: dict[str, KnownPhase] = {}
        self.refused_outputs = 0
        self._recounts: dict[str, float] = {}  # when each node is to be told its counts anew
        self._handlers: dict[type, Callable[[float, Any, list[Any]], None]] = {
            ev.RequestSeen: self._request_seen,
            ev.BranchEnded: self._branch_ended,
            ev.BranchAnnounced: self._branch_announced,
            ev.Homed: self._homed,
            ev.RequestServed: self._request_served,
            ev.OutputStored: self._output_stored,
            ev.RequestAborted: self._request_aborted,
            ev.BlocksStored: self._from_stream,
            ev.BlocksRemoved: self._from_stream,
            ev.NodeSequence: self._from_stream,
            ev.NodeCleared: self._from_stream,
            ev.NodePhaseChanged: self._from_stream,
            ev.NodeSnapshot: self._node_snapshot,
            ev.NodeLost: self._node_lost,
            ev.Tick: self._tick,
        }

    def handle(self, now: float, event: ev.Event) -> list[ev.Command]:
        out: list[ev.Command] = []
        self._handlers[type(event)](now, event, out)
        for branch in self._ledger.expired(now):
            self._ledger.keep_dormant(branch)
            self._ledger.drop_requests(branch)
            self._close(now, branch, "lease", out)
        if self._unsettled:
            for node in sorted(self._unsettled):
                self._ask_for_snapshot(now, node, out)
        if self._directory.unsure or self._recounts:
            self._recount(now, out)
        return out

    def next_deadline(self) -> float | None:
        """When to send a Tick: a lease to look at, or a snapshot to ask for again."""
        if not self._unsettled and not self._recounts:
            return self._ledger.next_lease_s()
        retries = [
            asked_at_s + self.config.snapshot_retry_s
            for node in self._unsettled
            if (asked_at_s := self._streams[node].asked_at_s) is not None
        ]
        lease_s = self._ledger.next_lease_s()
        retries.extend(self._recounts.values())
        return min(retries if lease_s is None else [*retries, lease_s], default=None)

    def reconfigure(self, config: KvConfig) -> None:
        """Takes effect for leases from each branch's next request on."""
        self.config = config
        self._ledger.lease = config.lease
        self._directory.tree.max_blocks = config.max_blocks

    # ---- queries -------------------------------------------------------------------------------------------------

    def match(self, prompt: HashedPrompt) -> list[ev.NodeMatch]:
        """The longest leading run of the prompt's blocks on each node that holds any."""
        return self._directory.match(prompt.chain)

    def held(self, prompt: HashedPrompt) -> dict[str, int]:
        """The same as {node: blocks}, as the router takes it."""
        return self._directory.held(prompt.chain)

    def unseen(self, now: float, nodes: Iterable[str]) -> dict[str, str]:
        """Those of `nodes` of which it is not known what they hold, each with the code of why."""
        found = {}
        for node in nodes:
            stream = self._streams.get(node)
            why = "no-events" if stream is None else stream.unseen_reason(now, self.config.silent_after_s)
            if why is not None:
                found[node] = why
        return found

    def names_live_branch(self, name: str) -> bool:
        """Whether BranchEnded of this name would end anything: a branch, or a session's branches."""
        return bool(self._ledger.ending(name))

    def home(self, branch_id: str, phase: str) -> str | None:
        """The node whose copy the branch counts on for `phase` (`prefill` or `decode`)."""
        branch = self._ledger.branches.get(branch_id)
        return None if branch is None else branch.homes.get(phase)

    def branch(self, branch_id: str) -> ev.BranchView | None:
        branch = self._ledger.branches.get(branch_id)
        return None if branch is None else self._ledger.view(branch)

    def branches(self) -> list[ev.BranchView]:
        """Every live branch, the one heard of last first."""
        newest = sorted(self._ledger.branches.values(), key=lambda branch: -branch.heard_s)
        return [self._ledger.view(branch) for branch in newest]

    def context(self, branch_id: str) -> ev.BranchContext | None:
        """Where a branch's blocks are, what was lost of them, and what keeps it alive; None when it does not live."""
        branch = self._ledger.branches.get(branch_id)
        if branch is None:
            return None
        path = branch.end.path()
        facts = self._directory.survey(b"".join(segment.hashes for segment in path))
        held = max(facts.held.values(), default=0)
        gone: dict[str, int] = {}
        at = held
        for upto, cause in facts.fates:
            upto = min(upto, facts.produced)
            if upto > at:
                gone[cause] = gone.get(cause, 0) + upto - at
                at = upto
        return ev.BranchContext(
            view=self._ledger.view(branch),
            held=facts.held,
            shared_blocks=sum(segment.blocks for segment in path if segment.live > 1),
            produced_blocks=facts.produced,
            gone=gone,
            heard_s=branch.heard_s,
            pause_s=branch.pause_s,
            open_requests=tuple(sorted(branch.open)),
            held_by_subagents_until_s=branch.held_until_s,
        )

    @property
    def branches_live(self) -> int:
        return len(self._ledger.branches)

    def reuse(self) -> ev.ReuseTotals:
        return self._reuse.totals()

    def reuse_by(self, dimension: Dimension) -> dict[str, ev.ReuseTotals]:
        return self._reuse.by(dimension)

    def node_usage(self, node: str) -> tuple[int, int]:
        """(blocks known to be in the node's host memory, those of them that a live branch counts on)."""
        return self._directory.usage(node)

    def check_integrity(self) -> None:
        """Recompute every count from the live branches and compare. Raises AssertionError naming what differs."""
        ledger = self._ledger
        self._directory.check_integrity(
            (branch.branch_id, branch.end, branch.nodes) for branch in ledger.branches.values()
        )
        self._reuse.check_integrity()
        for branch in ledger.branches.values():
            assert all(request_id in ledger.requests for request_id in branch.open), (
                f"{branch.branch_id}: open requests"
            )

    # ---- requests and branches -----------------------------------------------------------------------------------

    def _request_seen(self, now: float, event: ev.RequestSeen, out: list[Any]) -> None:
        known = self._ledger.requests.get(event.request_id)
        if known is not None:
            self._resolved_again(known, out)
            return
        prompt, signal = event.prompt, self._ledger.completed(event.branch)
        _check_hashes("prompt.chain", prompt.chain)
        self._directory.add_root(prompt.root)
        end = self._directory.tree.insert(prompt.chain)
        resolution = (
            resolve_inferred(self._ledger, signal, prompt, end)
            if signal.branch_id is None
            else self._ledger.resolve_signal(signal.branch_id, signal, end)
        )
        facts = self._directory.survey(prompt.chain)
        request = OpenRequest(event.request_id, resolution.branch_id, prompt, facts)
        self._ledger.requests[event.request_id] = request
        branch = resolution.branch
        if resolution.stale:
            self._directory.tree.settle(end)
        elif branch is None:
            branch = self._ledger.open_branch(now, resolution, signal, end, event.request_id, prompt.block_tokens)
            self._directory.move_branch(branch.branch_id, None, end, (), out)
        else:
            self._rewrite(branch, resolution, signal, end, event, out)
        if branch is not None:
            self._ledger.hear(now, branch, request)
            if not resolution.stale:
                branch.ending = signal.end
        out.append(
            ev.BranchResolved(
                event.request_id, resolution.branch_id, resolution.version, resolution.kind, resolution.reason
            )
        )

    def _rewrite(
        self,
        branch: Branch,
        resolution: Resolution,
        signal: ev.BranchSignal,
        end: Segment,
        event: ev.RequestSeen,
        out: list[Any],
    ) -> None:
        """The branch's context now ends at `end`."""
        old = branch.end
        if branch.scope is not None and resolution.kind == "version" and resolution.reason == "inferred-diverged":
            branch.former_blocks = branch.prompt_blocks - branch.slack_blocks
            branch.former_last = block_of_context(old, branch.former_blocks - 1) if branch.former_blocks else b""
        branch.rewriting = branch.rewriting and resolution.kind == "continuation"
        branch.version = resolution.version
        branch.sequence = signal.sequence if signal.sequence is not None else branch.sequence
        branch.program = signal.program or branch.program
        branch.end, branch.latest, branch.prompt_blocks = end, event.request_id, end.end
        branch.slack_blocks = slack_blocks(event.prompt.block_tokens, end.end)
        self._directory.move_branch(branch.branch_id, old, end, branch.nodes, out)

    def _resolved_again(self, request: OpenRequest, out: list[Any]) -> None:
        branch = self._ledger.branches.get(request.branch_id)
        version = 0 if branch is None else branch.version
        out.append(
            ev.BranchResolved(request.request_id, request.branch_id, version, "continuation", "duplicate-request")
        )

    def _branch_ended(self, now: float, event: ev.BranchEnded, out: list[Any]) -> None:
        for branch in self._ledger.ending(event.branch_id):
            self._close(now, branch, event.cause, out)

    def _branch_announced(self, now: float, event: ev.BranchAnnounced, out: list[Any]) -> None:
        branch = self._ledger.branches.get(event.branch_id)
        if branch is None:
            self._ledger.announce(event.branch_id, Announcement(event.parent, event.relation, event.program))
        else:
            branch.rewriting = branch.rewriting or event.rewritten
            branch.program = event.program or branch.program

    def _close(self, now: float, branch: Branch, cause: str, out: list[Any]) -> None:
        self._directory.move_branch(branch.branch_id, branch.end, None, branch.nodes, out)
        self._ledger.close(now, branch)
        out.append(ev.BranchClosed(branch.branch_id, cause, branch.end.end))

    def _homed(self, now: float, event: ev.Homed, out: list[Any]) -> None:
        if event.phase not in _STAGES:
            raise ValueError(f"phase: expected prefill or decode, got {event.phase!r}")
        branch = self._ledger.branches.get(event.branch_id)
        if branch is None:
            return
        if event.phase == "prefill":
            for request in (self._ledger.requests[request_id] for request_id in branch.open):
                if not request.served:
                    request.facts = self._directory.survey(request.prompt.chain)
        before = set(branch.nodes)
        branch.homes[event.phase] = event.node
        after = set(branch.nodes)
        for node in before - after:
            self._directory.count_context(branch.end, node, -1, out)
        for node in after - before:
            self._directory.count_context(branch.end, node, 1, out)

    def _request_served(self, now: float, event: ev.RequestServed, out: list[Any]) -> None:
        request = self._ledger.requests.get(event.request_id)
        if request is None or request.served:
            return
        request.served = True
        judgement = judge(request.prompt, request.facts, event)
        self._reuse.add(judgement, event)
        self._produced(request.prompt.chain)
        out.append(
            ev.ReuseCounted(
                event.request_id,
                judgement.prompt_tokens,
                judgement.ideal_tokens,
                judgement.actual_tokens,
                judgement.lost,
            )
        )

    def _output_stored(self, now: float, event: ev.OutputStored, out: list[Any]) -> None:
        request = self._ledger.requests.get(event.request_id)
        if request is None:
            return
        _check_hashes("chain", event.chain)
        head = request.prompt.chain
        chain = event.chain if head and event.chain.startswith(head) else head + event.chain
        stray = self._directory.tree.stray(chain)
        if stray is not None:
            self.refused_outputs += 1
            self._finish(now, request, out)
            return
        end = self._directory.tree.insert(chain)
        branch = self._ledger.branches.get(request.branch_id)
        if branch is not None and branch.latest == request.request_id and branch.end is not end:
            old, branch.end = branch.end, end
            self._directory.move_branch(branch.branch_id, old, end, branch.nodes, out)
        self._produced(chain)
        self._finish(now, request, out)

    def _request_aborted(self, now: float, event: ev.RequestAborted, out: list[Any]) -> None:
        request = self._ledger.requests.get(event.request_id)
        if request is not None:
            self._finish(now, request, out)

    def _finish(self, now: float, request: OpenRequest, out: list[Any]) -> None:
        branch = self._ledger.finish(now, request)
        if branch is not None and branch.ending and not branch.open:
            self._close(now, branch, "ended", out)

    def _produced(self, chain: bytes) -> None:
        end = self._directory.tree.insert(chain)
        self._directory.tree.mark_produced(end)
        self._directory.tree.settle(end)

    def _tick(self, now: float, event: ev.Tick, out: list[Any]) -> None:
        """What is due is done after every event."""

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def _from_stream(self, now: float, event: StreamEvent, out: list[Any]) -> None:
        if isinstance(event, ev.BlocksStored):
            _check_hashes("chain", event.chain)
        elif isinstance(event, ev.BlocksRemoved):
            _check_hashes("hashes", event.hashes)
        elif isinstance(event, ev.NodePhaseChanged) and event.phase not in _PHASES:
            raise ValueError(f"phase: expected prefill, decode or mixed, got {event.phase!r}")
        if event.seq is None:
            self._apply(event, out)
            return
        stream = self._stream(event.node)
        if isinstance(event, ev.NodeSequence):
            stream.beat_s = now
        stream.push(event.seq, event)
        self._drain(event.node, out)

    def _stream(self, node: str) -> NodeStream[StreamEvent]:
        return self._streams.setdefault(node, NodeStream())

    def _drain(self, node: str, out: list[Any]) -> None:
        stream = self._stream(node)
        while (event := stream.pop()) is not None:
            problem = self._apply(event, out)
            if problem is not None:
                stream.distrust(problem)
        if stream.snapshot_reason is None:
            self._unsettled.discard(node)
        else:
            self._unsettled.add(node)

    def _apply(self, event: StreamEvent, out: list[Any]) -> str | None:
        """Apply one event in its turn; answers why it cannot be true, if so."""
        if isinstance(event, ev.BlocksStored):
            if not self._directory.stored(event.node, event.tier, event.parent, event.chain, out):
                return "unknown-parent"
        elif isinstance(event, ev.BlocksRemoved):
            if not self._directory.removed(event.node, event.tier, event.hashes):
                return "unknown-blocks"
        elif isinstance(event, ev.NodeCleared):
            self._directory.cleared(event.node, "switched")
        elif isinstance(event, ev.NodePhaseChanged):
            self._phase_changed(event, out)
        return None

    def _phase_changed(self, event: ev.NodePhaseChanged, out: list[Any]) -> None:
        """From decode to prefill a node frees its memory first, so nothing counts on it; the other way counts stay."""
        known = self._phases.get(event.node, KnownPhase())
        phase = known.next(event)
        if phase is None:
            return
        self._phases[event.node] = phase
        if known.phase == "decode" and phase.phase == "prefill":
            self._leave_home(event.node)
            out.append(ev.RefsReset(event.node, "switched-to-prefill"))

    def _leave_home(self, node: str) -> None:
        for branch in self._ledger.branches.values():
            if node in branch.homes.values():
                self._directory.count_context(branch.end, node, -1, [])
                branch.homes = {phase: home for phase, home in branch.homes.items() if home != node}

    def _node_snapshot(self, now: float, event: ev.NodeSnapshot, out: list[Any]) -> None:
        for parent, chain in event.segments:
            _check_hashes("segments", chain)
            _check_hashes("segments", parent or b"")
        if not self._stream(event.node).snapshot(event.seq):
            return
        self._directory.replaced(event.node, event.segments)
        self._tell_counts(event.node, "snapshot", out)
        self._drain(event.node, out)

    def _tell_counts(self, node: str, reason: str, out: list[Any]) -> None:
        self._recounts.pop(node, None)
        self._directory.unsure.discard(node)
        out.append(ev.RefsReset(node, reason))
        out.extend(self._directory.counted_runs(node))

    def _recount(self, now: float, out: list[Any]) -> None:
        """Tell those nodes their counts anew whose time has come; the snapshot that some wait for does it for them."""
        for node in self._directory.unsure:
            self._recounts.setdefault(node, now + self.config.recount_after_s)
        self._directory.unsure.clear()
        for node in [node for node, due_s in self._recounts.items() if due_s <= now]:
            if node in self._unsettled:
                del self._recounts[node]
            else:
                self._tell_counts(node, "recount", out)

    def _node_lost(self, now: float, event: ev.NodeLost, out: list[Any]) -> None:
        self._streams.pop(event.node, None)
        self._unsettled.discard(event.node)
        self._phases.pop(event.node, None)
        self._directory.cleared(event.node, "evicted")
        self._recounts.pop(event.node, None)
        self._directory.unsure.discard(event.node)
        self._leave_home(event.node)

    def _ask_for_snapshot(self, now: float, node: str, out: list[Any]) -> None:
        stream = self._streams[node]
        reason = stream.snapshot_reason
        due = stream.asked_at_s is None or now >= stream.asked_at_s + self.config.snapshot_retry_s
        if reason is not None and due:
            stream.asked_at_s = now
            out.append(ev.SnapshotNeeded(node, reason))


def _check_hashes(name: str, hashes: bytes) -> None:
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"{name}: expected a multiple of {HASH_BYTES} bytes, got {len(hashes)}")
