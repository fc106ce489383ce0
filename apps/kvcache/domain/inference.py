"""Which branch a request belongs to where its harness does not say, told from its prompt.

Looked at are the branches of the request's *scope*: of its session where a session id came (many branches may share one), else all
branches of the tenant that came without any id. What a harness said is never overruled.

    the prompt goes on with a context, or with all of its last prompt but the tail    continuation
    ... whose own request still runs                                            fork
    ... that was let go when its lease ran out                                  continuation: it is taken up again
    it shares a telling head with a silent context and then leaves it           version
    ... whose own request still runs, or whose old tail goes on later           fork: both live
    else                                                                        new; in a known session: subagent

A head is telling when it is at least half of the other context, when a rewrite was announced, or when it goes beyond every head
that is known to be common. A head (tools, system prompt) is known to be common once two branches that both live part there.
"""

from __future__ import annotations

from collections.abc import Iterable

from apps.kvcache.domain.events import BranchSignal, ResolvedKind
from apps.kvcache.domain.hashing import HashedPrompt
from apps.kvcache.domain.ledger import Branch, Ledger, Resolution, shared_blocks, slack_blocks
from apps.kvcache.domain.segments import Segment

_MAX_SEGMENTS_LOOKED_AT = 64


def resolve_inferred(ledger: Ledger, signal: BranchSignal, prompt: HashedPrompt, end: Segment) -> Resolution:
    """The branch for `prompt`, whose chain ends at `end` in the tree. Looks at a bounded part of the tree."""
    return _Inference(ledger, signal, prompt, end).resolve()


class _Inference:
    def __init__(self, ledger: Ledger, signal: BranchSignal, prompt: HashedPrompt, end: Segment) -> None:
        self._ledger, self._signal, self._prompt, self._end = ledger, signal, prompt, end
        self._scope = signal.session or ""
        self._path = end.path()

    def resolve(self) -> Resolution:
        extended = self._deepest_extended()
        extended_blocks = extended[0].end.end if extended else 0
        diverged, shared = self._diverged(extended_blocks)
        for branch in diverged:
            if branch.had_before(self._prompt.chain):
                branch.former_last = b""
                self._ledger.common_head(self._signal.tenant, self._scope, self._prompt.chain, shared)
                return self._child(branch, "fork", "inferred-old-tail-goes-on")
        goes_on = _latest_idle(branch for branch in diverged if branch.extended_by(self._end))
        if goes_on is not None:
            return Resolution(goes_on.branch_id, goes_on, goes_on.version, "continuation", "inferred-extends-prompt")
        known_blocks = max(shared, extended_blocks)
        dormant = self._ledger.dormant_for(self._signal.tenant, self._scope, self._prompt.chain, known_blocks)
        if dormant is not None:
            return Resolution(dormant.branch_id, None, dormant.version, "continuation", "inferred-resumed")
        if diverged and (left := self._left(diverged, shared)) is not None:
            return left
        if extended:
            idle = _latest_idle(extended)
            if idle is None:
                return self._child(extended[0], "fork", "inferred-context-in-use")
            return Resolution(idle.branch_id, idle, idle.version, "continuation", "inferred-extends")
        self._ledger.common_head(self._signal.tenant, self._scope, self._prompt.chain, shared)
        return self._new()

    def _left(self, diverged: list[Branch], shared: int) -> Resolution | None:
        """The prompt leaves these contexts after `shared` blocks: of one it is a new version, or a fork, or of none."""
        common_blocks = self._ledger.common_blocks(self._signal.tenant, self._scope, self._prompt.chain)
        beyond = shared - slack_blocks(self._prompt.block_tokens, shared) > common_blocks
        idle = _latest_idle(b for b in diverged if beyond or b.rewriting or shared >= b.first_blocks)
        if idle is not None:
            reason = "signal-rewritten" if idle.rewriting else "inferred-diverged"
            return Resolution(idle.branch_id, idle, idle.version + 1, "version", reason)
        running = [b for b in diverged if b.open and shared >= b.first_blocks]
        return self._child(running[0], "fork", "inferred-diverged-while-running") if running else None

    def _new(self) -> Resolution:
        session = self._signal.session
        if session is None:
            return Resolution(self._ledger.next_inferred_id(), None, 0, "new", "inferred-new")
        main = self._ledger.branches.get(session)
        if main is not None and main.rewriting and not main.open:
            return Resolution(session, main, main.version + 1, "version", "signal-rewritten")
        if main is not None:
            return self._child(main, "subagent", "session-other-context")
        version = self._ledger.closed_version(session)
        if version is not None:
            return Resolution(session, None, version + 1, "version", "session-resumed")
        return Resolution(session, None, 0, "new", "session-new")

    def _child(self, of: Branch, kind: ResolvedKind, reason: str) -> Resolution:
        branch_id = self._ledger.next_inferred_id(self._signal.session)
        return Resolution(branch_id, None, 0, kind, reason, parent=of.branch_id)

    def _deepest_extended(self) -> list[Branch]:
        """Branches whose whole context is a prefix of the path, the longest."""
        for segment in reversed(self._path):
            found = self._in_scope(segment)
            if found:
                return found
        return []

    def _diverged(self, longer_than: int) -> tuple[list[Branch], int]:
        """Branches that leave the path at the deepest place where one does, and how many blocks they share with it: more
        than `longer_than`, else none."""
        if self._scope:
            return self._diverged_in_session(longer_than)
        left_to_look_at, below = _MAX_SEGMENTS_LOOKED_AT, None
        for shared in reversed(self._path):
            if shared.end <= longer_than or left_to_look_at <= 0:
                break
            found: list[Branch] = []
            pending = [child for child in shared.children.values() if child.live and child is not below]
            below = shared
            while pending and left_to_look_at > 0:
                left_to_look_at -= 1
                segment = pending.pop()
                found.extend(self._in_scope(segment))
                pending.extend(child for child in segment.children.values() if child.live)
            if found:
                return found, shared.end
        return [], 0

    def _diverged_in_session(self, longer_than: int) -> tuple[list[Branch], int]:
        found: list[Branch] = []
        most = longer_than
        for branch in self._ledger.of_session(self._scope):
            shared = shared_blocks(branch.end, self._end)
            if shared > most:
                found, most = [branch], shared
            elif shared == most > longer_than:
                found.append(branch)
        return (found, most) if found else ([], 0)

    def _in_scope(self, segment: Segment) -> list[Branch]:
        branches = (self._ledger.branches[branch_id] for branch_id in sorted(segment.enders or ()))
        return [b for b in branches if b.scope == self._scope and b.tenant == self._signal.tenant]


def _latest_idle(branches: Iterable[Branch]) -> Branch | None:
    idle = (branch for branch in branches if not branch.open)
    return max(idle, key=lambda branch: branch.heard_s, default=None)
