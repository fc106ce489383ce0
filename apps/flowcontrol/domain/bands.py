"""One priority band: its lines, its fairness and ordering policies, its limits and its counts."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp
from typing import Final

from apps.flowcontrol.domain.commands import Outcome
from apps.flowcontrol.domain.config import BandConfig
from apps.flowcontrol.domain.fairness import FairnessPolicy
from apps.flowcontrol.domain.metered_fairness import FAIRNESS
from apps.flowcontrol.domain.ordering import LINES, Line
from apps.flowcontrol.domain.waiting import Place, Waiting

MAX_COUNTED_FLOWS: Final = 1000
OTHER_FLOWS: Final = "other"


class RateMeter:
    """Events per second, weighted over about the last `window_s` seconds."""

    __slots__ = ("_at", "_rate", "_window_s")

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._rate = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        self._rate = self.per_second(now) + 1.0 / self._window_s
        self._at = now

    def per_second(self, now: float) -> float:
        if self._rate == 0.0 or now == self._at:
            return self._rate
        return self._rate * exp((self._at - now) / self._window_s)


class Band:
    """All flows of one name. Its priority, policies and limits follow the configuration; its requests stay."""

    def __init__(self, config: BandConfig, configured: bool) -> None:
        self.config = config
        self.configured = configured
        self.ceiling = config.ceiling
        self.waiting_bytes = 0
        self.in_flight = 0
        self.credit = 0.0
        self.meter = RateMeter()
        self.dispatched_total = 0
        self.outcomes: dict[Outcome, int] = {}
        self.dispatched_by_flow: dict[str, int] = {}
        self._members: dict[int, Waiting] = {}
        self._starters: dict[int, Waiting] = {}
        self._lines: dict[str, Line] = {}
        self._fairness: FairnessPolicy = FAIRNESS[config.fairness]()

    @property
    def waiting_requests(self) -> int:
        return len(self._members)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def explanation(self) -> str:
        """Why the first request of this band is the first, by its fairness policy."""
        return self._fairness.explanation

    def waiting(self) -> Iterator[Waiting]:
        """Everything that waits here, by arrival (withdrawn requests last)."""
        return iter(self._members.values())

    def reconfigure(self, now: float, config: BandConfig, configured: bool) -> None:
        """Take a new configuration; the waiting requests are lined up again where a policy changed."""
        before = self.config
        self.config = config
        self.configured = configured
        if (before.fairness, before.ordering) != (config.fairness, config.ordering):
            self._fairness = FAIRNESS[config.fairness]()
            self._lines = {}
            arrivals = sorted(self._members.values(), key=lambda w: w.order)
            for waiting in (w for w in arrivals if not w.withdrawn):
                self._line_up(now, waiting)
            for waiting in (w for w in reversed(arrivals) if w.withdrawn):
                self._line_up(now, waiting)

    def add(self, now: float, waiting: Waiting) -> None:
        """A request joins its line."""
        self._members[waiting.order] = waiting
        self.waiting_bytes += waiting.request.bytes
        if waiting.request.starts_branch:
            self._starters[waiting.order] = waiting
        self._line_up(now, waiting)

    def peek(self) -> Waiting:
        """The next request by fairness and ordering; only while something waits."""
        return self._fairness.next_line().peek()

    def take_next(self, now: float) -> Waiting:
        """Remove and answer the next request by fairness and ordering; only while something waits."""
        line = self._fairness.next_line()
        waiting = line.pop()
        self._fairness.dispatched(now, line, waiting)
        self._leave(waiting, line)
        return waiting

    def give_back(self, now: float, waiting: Waiting) -> None:
        """A dispatched request returns to the head of its line."""
        waiting.withdrawn = True
        self.add(now, waiting)
        line = self._lines[self._fairness.line_key(waiting.request)]
        self._fairness.returned(now, line, waiting)

    def settle(self, now: float, waiting: Waiting, tokens: int) -> None:
        """A dispatched request cost `tokens` more (below 0: fewer) than was expected."""
        self._fairness.settled(now, waiting, tokens)

    def remove(self, now: float, waiting: Waiting) -> None:
        """A request stops waiting without being dispatched."""
        line = self._lines[self._fairness.line_key(waiting.request)]
        line.discard(waiting)
        self._leave(waiting, line)
        if len(line):
            self._fairness.shortened(now, line)

    def shed_order(self) -> Iterator[Waiting]:
        """Who gives way first: requests that start a branch, newest first, then the others, newest first. Withdrawn ones
        come last of each: they were on their way already."""
        others = [waiting for waiting in reversed(self._members.values()) if not waiting.request.starts_branch]
        for group in (list(reversed(self._starters.values())), others):
            yield from (waiting for waiting in group if not waiting.withdrawn)
            yield from (waiting for waiting in group if waiting.withdrawn)

    def count_dispatch(self, now: float, flow_id: str) -> None:
        self.meter.count(now)
        self.dispatched_total += 1
        counts = self.dispatched_by_flow
        if flow_id not in counts and len(counts) >= MAX_COUNTED_FLOWS:
            flow_id = OTHER_FLOWS
        counts[flow_id] = counts.get(flow_id, 0) + 1

    def uncount_dispatch(self, flow_id: str) -> None:
        """A dispatch came to nothing."""
        self.dispatched_total -= 1
        counted = flow_id if self.dispatched_by_flow.get(flow_id) else OTHER_FLOWS
        self.dispatched_by_flow[counted] -= 1

    def count_drop(self, outcome: Outcome) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def check_integrity(self) -> None:
        """Raises `AssertionError` when lines, members and sums disagree."""
        name = self.name
        assert sum(len(line) for line in self._lines.values()) == len(self._members), (
            f"{name}: lines and members differ"
        )
        assert all(len(line) for line in self._lines.values()), f"{name}: an empty line is kept"
        assert self.waiting_bytes == sum(w.request.bytes for w in self._members.values()), f"{name}: bytes differ"
        assert all(w.place is Place.WAITING for w in self._members.values()), f"{name}: a member does not wait"
        starters = {order for order, w in self._members.items() if w.request.starts_branch}
        assert starters == set(self._starters), f"{name}: branch starters differ"
        assert sum(self.dispatched_by_flow.values()) == self.dispatched_total, f"{name}: flow counts differ"

    def _line_up(self, now: float, waiting: Waiting) -> None:
        key = self._fairness.line_key(waiting.request)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = LINES[self.config.ordering](key)
            line.push(waiting)
            self._fairness.filled(now, line)
        else:
            line.push(waiting)

    def _leave(self, waiting: Waiting, line: Line) -> None:
        del self._members[waiting.order]
        self.waiting_bytes -= waiting.request.bytes
        if waiting.request.starts_branch:
            del self._starters[waiting.order]
        if not len(line):
            del self._lines[line.key]
            self._fairness.emptied(line)
        if not self._members:
            self.credit = 0.0
