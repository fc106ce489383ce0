"""Which branch a request without signals belongs to, told from its prompt alone.

    the prompt goes on with a context, or its last prompt          continuation
    ... whose own request still runs                               fork
    it shares a long head with a context and then diverges         version, as long as the old tail stays silent
    ... whose own request still runs, or whose old tail goes on    fork: both live
    else                                                           new

A head is long when it is at least half of the other context. Only branches without signals of the same tenant are looked at:
what a harness said is never overruled.
"""

from __future__ import annotations

from collections.abc import Iterable

from apps.kvcache.domain.hashing import HashedPrompt
from apps.kvcache.domain.ledger import Branch, Ledger, Resolution
from apps.kvcache.domain.segments import Segment

_MAX_SEGMENTS_LOOKED_AT = 64


def resolve_inferred(ledger: Ledger, tenant: str, prompt: HashedPrompt, end: Segment) -> Resolution:
    """The branch for `prompt`, whose chain ends at `end` in the tree. Looks at a bounded part of the tree."""
    path = end.path()
    extended = _deepest_extended(ledger, tenant, path)
    extended_blocks = extended[0].end.end if extended else 0
    diverged = _diverged(ledger, tenant, path, extended_blocks)
    if diverged:
        return _resolve_diverged(ledger, prompt, end, diverged)
    if not extended:
        return Resolution(ledger.next_inferred_id(), None, 0, "new", "inferred-new")
    idle = _latest_idle(extended)
    if idle is None:
        return _fork(ledger, extended[0], "inferred-context-in-use")
    return Resolution(idle.branch_id, idle, idle.version, "continuation", "inferred-extends")


def _resolve_diverged(ledger: Ledger, prompt: HashedPrompt, end: Segment, candidates: list[Branch]) -> Resolution:
    for branch in candidates:
        if branch.had_before(prompt.chain):
            branch.former_last = b""
            return _fork(ledger, branch, "inferred-old-tail-goes-on")
    idle = _latest_idle(candidates)
    if idle is None:
        return _fork(ledger, candidates[0], "inferred-diverged-while-running")
    if idle.extended_by(end):
        return Resolution(idle.branch_id, idle, idle.version, "continuation", "inferred-extends-prompt")
    return Resolution(idle.branch_id, idle, idle.version + 1, "version", "inferred-diverged")


def _fork(ledger: Ledger, of: Branch, reason: str) -> Resolution:
    return Resolution(ledger.next_inferred_id(), None, 0, "fork", reason, parent=of.branch_id)


def _deepest_extended(ledger: Ledger, tenant: str, path: list[Segment]) -> list[Branch]:
    """Branches whose whole context is a prefix of the path, the longest."""
    for segment in reversed(path):
        found = _inferred(ledger, tenant, segment)
        if found:
            return found
    return []


def _diverged(ledger: Ledger, tenant: str, path: list[Segment], longer_than: int) -> list[Branch]:
    """Branches that share a long head with the path and leave it at the deepest place where a live one does."""
    shared = next((segment for segment in reversed(path) if segment.live), None)
    if shared is None or shared.end <= longer_than:
        return []
    found: list[Branch] = []
    pending = [child for child in shared.children.values() if child.live]
    for _ in range(_MAX_SEGMENTS_LOOKED_AT):
        if not pending:
            break
        segment = pending.pop()
        found.extend(branch for branch in _inferred(ledger, tenant, segment) if 2 * shared.end >= branch.end.end)
        pending.extend(child for child in segment.children.values() if child.live)
    return found


def _inferred(ledger: Ledger, tenant: str, segment: Segment) -> list[Branch]:
    branches = (ledger.branches[branch_id] for branch_id in sorted(segment.enders or ()))
    return [branch for branch in branches if branch.inferred and branch.tenant == tenant]


def _latest_idle(branches: Iterable[Branch]) -> Branch | None:
    idle = (branch for branch in branches if not branch.open)
    return max(idle, key=lambda branch: branch.heard_s, default=None)
