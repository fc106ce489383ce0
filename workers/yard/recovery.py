"""When a node counts as faulty, when a request is tried again and where it goes on, and what nodes hold without need.

Policy alone: `failures.py` acts by it. A fault is the node's own (it broke, it answered nonsense); a refusal by phase, a full
queue or a bad request says nothing against the node, however often it comes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from apps.planning.domain.cost_model import NetworkProfile, PrefillCoefficients, fetch_s, prefill_iteration_s

MAX_FAILURES = 3
MAX_FAILURES_IN_ALL = 12
PROGRESS_TOKENS = 16
PAUSE_S = 0.5
FAULTS_UNTIL_OPEN = 3
OPEN_S = 5.0
OPEN_LONGEST_S = 60.0
FRESH_HANDOFF_S = 25.0
MAX_REDONE_TOKENS = 256
NOBODY_THERE = "connection-refused"
MOMENTARY = frozenset(("wrong-phase", "draining", "stale-generation", "queue-full", "duplicate-request"))
REFUSALS = MOMENTARY | {NOBODY_THERE, "unreachable", "node-lost"}
NO_FAULTS = (REFUSALS - {"unreachable"}) | {"aborted", "shutting-down"}


def is_node_fault(reason: str, retryable: bool) -> bool:
    """Whether a failed call speaks against the node. What no other node can do better was the request's fault."""
    return retryable and reason not in NO_FAULTS


@dataclass(slots=True)
class Breaker:
    """Keeps work away from a node that answers its status and breaks its requests.

    Opens after `FAULTS_UNTIL_OPEN` faults in a row, for `OPEN_S` and twice as long each time; then the next request is a
    trial: one more fault opens it again, a success closes it.
    """

    faults: int = 0
    open_until: float | None = None
    opened: int = 0

    @property
    def is_open(self) -> bool:
        return self.open_until is not None

    def failed(self, now: float) -> bool:
        """One more fault; True when it opened by it."""
        self.faults += 1
        if self.is_open or self.faults < FAULTS_UNTIL_OPEN:
            return False
        self.open_until = now + min(OPEN_LONGEST_S, OPEN_S * 2**self.opened)
        self.opened += 1
        return True

    def succeeded(self) -> None:
        self.faults = self.opened = 0
        self.open_until = None

    def look(self, now: float) -> None:
        """Lets a trial through once its time is over."""
        if self.open_until is not None and now >= self.open_until:
            self.open_until = None
            self.faults = FAULTS_UNTIL_OPEN - 1


@dataclass(slots=True)
class Attempts:
    """A request's broken attempts: few in a row, and not for ever even where each made some progress."""

    in_a_row: int = 0
    in_all: int = 0
    _tokens: int = 0

    def failed(self, sent_tokens: int, reason: str) -> bool:
        """Counts one; True when there were too many. Where no process was there, none was made; a refusal broke nothing."""
        if reason == NOBODY_THERE:
            return False
        if reason in REFUSALS:
            self.in_all += 1
            return self.in_all > MAX_FAILURES_IN_ALL
        if sent_tokens - self._tokens >= PROGRESS_TOKENS:
            self.in_a_row = 0
        self.in_a_row += 1
        self.in_all += 1
        self._tokens = sent_tokens
        return self.in_a_row > MAX_FAILURES or self.in_all > MAX_FAILURES_IN_ALL


@dataclass(slots=True)
class HandedOver:
    """The newest computed context of a request: on `node` since `at`, `tokens` long. `kept`: the node still pins it."""

    node: str
    at: float
    tokens: int
    kept: bool = True

    def serves(self, now: float, context_tokens: int) -> bool:
        """Whether another decode node can start from it and redo but little."""
        return now - self.at < FRESH_HANDOFF_S and context_tokens - self.tokens <= MAX_REDONE_TOKENS


def move_decode_s(
    context_tokens: int, block_tokens: int, prefill: PrefillCoefficients, network: NetworkProfile
) -> float:
    """Seconds until an output goes on on another decode node: its full blocks are fetched, at most one is computed again."""
    again = (block_tokens, max(0, context_tokens - block_tokens), context_tokens)
    return fetch_s(context_tokens, context_tokens, 0, network) + prefill_iteration_s(prefill, [again])


@dataclass(slots=True)
class OrphanWatch:
    """Requests of ours that a node lists and that have no business there: orphans, once two reports in a row say so."""

    suspects: frozenset[str] = frozenset()
    confirmed: frozenset[str] = field(default=frozenset())

    def report(self, listed: Collection[str], wanted: Collection[str]) -> frozenset[str]:
        """Takes one report; answers the orphans. `wanted` are the requests that belong there now."""
        now_suspect = frozenset(listed) - frozenset(wanted)
        self.confirmed = now_suspect & self.suspects
        self.suspects = now_suspect
        return self.confirmed
