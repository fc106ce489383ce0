"""Who is first in one line: `fcfs`, `edf`, `slo-deadline` or `continue-first`.

The last two put some requests before others that came earlier, but never by more than a fixed time, so that nobody in the
line starves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from apps.flowcontrol.domain.waiting import Waiting

UNSTATED_SLO_S: Final = 60.0
CONTINUE_LEAD_S: Final = 60.0


class Line(Protocol):
    """Requests that wait for one turn. A withdrawn request (`waiting.withdrawn`) goes before all others.

    `push` and `discard` are told of every request once; `pop` and `peek` are only called while the line holds one.
    """

    key: str

    def __len__(self) -> int: ...

    def push(self, waiting: Waiting) -> None: ...

    def peek(self) -> Waiting: ...

    def pop(self) -> Waiting: ...

    def discard(self, waiting: Waiting) -> None: ...


class FcfsLine:
    """First come, first served."""

    __slots__ = ("_waiting", "key")

    def __init__(self, key: str) -> None:
        self.key = key
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, waiting: Waiting) -> None:
        self._waiting[waiting.order] = waiting
        if waiting.withdrawn:
            self._waiting.move_to_end(waiting.order, last=False)

    def peek(self) -> Waiting:
        return next(iter(self._waiting.values()))

    def pop(self) -> Waiting:
        return self._waiting.popitem(last=False)[1]

    def discard(self, waiting: Waiting) -> None:
        del self._waiting[waiting.order]


class TimedLine:
    """Whose time comes first goes first; equal times by arrival. `time_of` must not change while a request waits."""

    __slots__ = ("_heap", "_members", "_time_of", "key")

    def __init__(self, key: str, time_of: Callable[[Waiting], float]) -> None:
        self.key = key
        self._time_of = time_of
        self._heap: list[tuple[bool, float, int, Waiting]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, waiting: Waiting) -> None:
        heappush(self._heap, (not waiting.withdrawn, self._time_of(waiting), waiting.order, waiting))
        self._members.add(waiting.order)

    def peek(self) -> Waiting:
        while self._heap[0][2] not in self._members:
            heappop(self._heap)
        return self._heap[0][3]

    def pop(self) -> Waiting:
        waiting = self.peek()
        heappop(self._heap)
        self._members.remove(waiting.order)
        return waiting

    def discard(self, waiting: Waiting) -> None:
        self._members.remove(waiting.order)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapify(self._heap)


def deadline_at(waiting: Waiting) -> float:
    """`edf`: the end of waiting, which is the time of arrival and the TTL."""
    return waiting.deadline_at


def slo_deadline_at(waiting: Waiting) -> float:
    """`slo-deadline`: received + the wished TTFT. Without a wish it counts as one of `UNSTATED_SLO_S`, so that wishes go
    first but not for ever."""
    slo_s = waiting.request.slo_ttft_s
    return waiting.request.received_at + (UNSTATED_SLO_S if slo_s is None else slo_s)


def continuation_at(waiting: Waiting) -> float:
    """`continue-first`: a turn of a branch that is under way goes before new branches, which count as if they had come
    `CONTINUE_LEAD_S` later."""
    return waiting.enqueued_at + (CONTINUE_LEAD_S if waiting.request.starts_branch else 0.0)


LINES: dict[str, Callable[[str], Line]] = {
    "fcfs": FcfsLine,
    "edf": lambda key: TimedLine(key, deadline_at),
    "slo-deadline": lambda key: TimedLine(key, slo_deadline_at),
    "continue-first": lambda key: TimedLine(key, continuation_at),
}
