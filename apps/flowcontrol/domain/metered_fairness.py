"""Fairness that counts work: `token-fair` between flows, `least-attained-service` between agents.

Work is tokens to compute and to produce: what was expected when a request is dispatched, corrected when it has ended.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from apps.flowcontrol.domain.events import FlowRequest
from apps.flowcontrol.domain.fairness import GlobalStrict, PolicyMaker, RoundRobin
from apps.flowcontrol.domain.ordering import Line
from apps.flowcontrol.domain.waiting import Waiting

LEAST_WEIGHT: Final = 0.001
HALF_LIFE_S: Final = 300.0
MAX_HANDICAP_S: Final = 60.0
NEGLIGIBLE_RATIO: Final = 0.01
KEPT_WHEN_IDLE: Final = 1024


class _RankedLines:
    """Lines by rank, least first; equal ranks by who was ranked earlier. A line is ranked again by adding it again."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Line]] = []
        self._entries: dict[str, tuple[float, int, Line]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def add(self, rank: float, line: Line) -> None:
        self._count += 1
        entry = self._entries[line.key] = (rank, self._count, line)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapify(self._heap)
        else:
            heappush(self._heap, entry)

    def remove(self, key: str) -> None:
        del self._entries[key]

    def line(self, key: str) -> Line:
        return self._entries[key][2]

    def first(self) -> tuple[float, Line]:
        heap, entries = self._heap, self._entries
        while True:
            rank, number, line = heap[0]
            entry = entries.get(line.key)
            if entry is not None and entry[1] == number:
                return rank, line
            heappop(heap)


class TokenFair:
    """Deficit round robin in tokens, weighted by tenant, with a quantum that goes to nought.

    Each flow has an account: the tokens it was served, divided by its weight. The flow whose account is lowest is next, so
    of two flows that both wait neither is ever ahead by more than one request of its own and one of the other's. A flow
    that has nothing waiting gathers no claim: when it waits again its account is at least that of the flow served last.
    What it was served beyond that stays on its account, until nobody waits any more: then all begin anew.
    """

    explanation = "its flow had the fewest tokens for its weight"

    def __init__(self) -> None:
        self._lines = _RankedLines()
        self._accounts: dict[str, float] = {}
        self._level = 0.0
        self._prune_at = KEPT_WHEN_IDLE

    def line_key(self, request: FlowRequest) -> str:
        return request.flow_id

    def filled(self, now: float, line: Line) -> None:
        account = self._accounts[line.key] = max(self._level, self._accounts.get(line.key, 0.0))
        self._lines.add(account, line)
        if len(self._accounts) > self._prune_at:
            self._forget_settled()

    def emptied(self, line: Line) -> None:
        self._lines.remove(line.key)
        if not len(self._lines):
            self._accounts.clear()
            self._level = 0.0
        elif self._accounts[line.key] <= self._level:
            del self._accounts[line.key]

    def next_line(self) -> Line:
        return self._lines.first()[1]

    def dispatched(self, now: float, line: Line, waiting: Waiting) -> None:
        account = self._accounts[line.key]
        self._level = max(self._level, account)
        self._enter(line, account + waiting.service_tokens / _weight(waiting))

    def returned(self, now: float, line: Line, waiting: Waiting) -> None:
        self._enter(line, self._accounts[line.key] - waiting.service_tokens / _weight(waiting))

    def shortened(self, now: float, line: Line) -> None:
        """Its account stays."""

    def settled(self, now: float, waiting: Waiting, tokens: int) -> None:
        """A flow that was charged too much gets it back while it waits, or while its account is above the level."""
        if not len(self._lines):
            return
        key = waiting.request.flow_id
        account = self._accounts.get(key, self._level) + tokens / _weight(waiting)
        if key in self._lines:
            self._enter(self._lines.line(key), max(self._level, account))
        elif account > self._level:
            self._accounts[key] = account
        else:
            self._accounts.pop(key, None)

    def _enter(self, line: Line, account: float) -> None:
        self._accounts[line.key] = account
        self._lines.add(account, line)

    def _forget_settled(self) -> None:
        self._accounts = {k: a for k, a in self._accounts.items() if a > self._level or k in self._lines}
        self._prune_at = 2 * len(self._accounts) + KEPT_WHEN_IDLE


class LeastAttainedService:
    """The agent that was served least lately is next; all branches of an agent stand in one line.

    A line ranks by how long its first request waits, with a handicap of up to `MAX_HANDICAP_S` in proportion to the
    service its agent attained (which halves every `HALF_LIFE_S`), so new and light agents pass heavy ones, yet nobody is
    passed by a request that came more than `MAX_HANDICAP_S` later.
    """

    explanation = "its agent attained the least service"

    def __init__(self) -> None:
        self._lines = _RankedLines()
        self._attained: dict[str, tuple[float, float]] = {}
        self._peak: tuple[float, float] = (0.0, 0.0)
        self._prune_at = KEPT_WHEN_IDLE

    def line_key(self, request: FlowRequest) -> str:
        return f"{request.tenant}/{request.program}" if request.program else request.flow_id

    def filled(self, now: float, line: Line) -> None:
        self._rank(now, line)

    def emptied(self, line: Line) -> None:
        self._lines.remove(line.key)

    def next_line(self) -> Line:
        return self._lines.first()[1]

    def dispatched(self, now: float, line: Line, waiting: Waiting) -> None:
        self._charge(now, line.key, waiting.service_tokens)
        if len(line):
            self._rank(now, line)

    def returned(self, now: float, line: Line, waiting: Waiting) -> None:
        self._charge(now, line.key, -waiting.service_tokens)
        self._rank(now, line)

    def shortened(self, now: float, line: Line) -> None:
        self._rank(now, line)

    def settled(self, now: float, waiting: Waiting, tokens: int) -> None:
        key = self.line_key(waiting.request)
        self._charge(now, key, tokens)
        if key in self._lines:
            self._rank(now, self._lines.line(key))

    def attained_tokens(self, now: float, key: str) -> float:
        """What an agent was served, the older the less."""
        return _decayed(now, self._attained.get(key))

    def _rank(self, now: float, line: Line) -> None:
        peak = _decayed(now, self._peak)
        handicap_s = MAX_HANDICAP_S * min(1.0, self.attained_tokens(now, line.key) / peak) if peak > 0 else 0.0
        self._lines.add(line.peek().enqueued_at + handicap_s, line)

    def _charge(self, now: float, key: str, tokens: int) -> None:
        attained = max(0.0, self.attained_tokens(now, key) + tokens)
        self._attained[key] = (attained, now)
        self._peak = (max(attained, _decayed(now, self._peak)), now)
        if len(self._attained) > self._prune_at:
            least = NEGLIGIBLE_RATIO * self._peak[0]
            self._attained = {k: v for k, v in self._attained.items() if _decayed(now, v) > least}
            self._prune_at = 2 * len(self._attained) + KEPT_WHEN_IDLE


def _weight(waiting: Waiting) -> float:
    return max(LEAST_WEIGHT, waiting.request.weight)


def _decayed(now: float, value: tuple[float, float] | None) -> float:
    if value is None:
        return 0.0
    amount, at = value
    return amount if now == at else float(amount * 0.5 ** ((now - at) / HALF_LIFE_S))


FAIRNESS: dict[str, PolicyMaker] = {
    "round-robin": RoundRobin,
    "global-strict": GlobalStrict,
    "token-fair": TokenFair,
    "least-attained-service": LeastAttainedService,
}
