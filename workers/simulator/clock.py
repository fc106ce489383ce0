"""Virtual time: a heap of what happens next. Times are whole microseconds, so that equal moments are equal."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil
from typing import Any

# At one moment: work that ends, then what is heard of it, then requests, then deadlines.
COMPLETION, SIGNAL, ARRIVAL, TIMEOUT = range(4)
US = 1_000_000

Handler = Callable[[float, Any], None]


class Clock:
    """Runs handlers in the order of (time, priority, sequence). A handler gets the time in seconds and its object."""

    def __init__(self) -> None:
        self.now_us = 0
        self.events = 0
        self._heap: list[tuple[int, int, int, Handler, Any]] = []
        self._sequence = 0

    @property
    def now(self) -> float:
        return self.now_us / US

    def at(self, seconds: float, priority: int, handler: Handler, thing: Any = None) -> None:
        """Have `handler(now, thing)` called at `seconds`, never before; what is already past is due now."""
        due_us = ceil(seconds * US)
        if due_us / US < seconds:
            due_us += 1
        if due_us < self.now_us:
            due_us = self.now_us
        self._sequence += 1
        heappush(self._heap, (due_us, priority, self._sequence, handler, thing))

    def run_until(self, seconds: float) -> None:
        """Let everything up to and with `seconds` happen; the clock stands at `seconds` after it."""
        end_us = round(seconds * US)
        heap = self._heap
        while heap and heap[0][0] <= end_us:
            self.now_us, _, _, handler, thing = heappop(heap)
            self.events += 1
            handler(self.now_us / US, thing)
        self.now_us = end_us

    def __len__(self) -> int:
        return len(self._heap)
