"""Who is first in one line: arrival order (`fcfs`) or the earliest deadline (`edf`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from apps.flowcontrol.domain.waiting import Waiting


class Line(Protocol):
    """Requests that wait for one turn. A withdrawn request (`waiting.withdrawn`) goes before all others.

    `push` and `discard` are told of every request once; `pop` is only called while the line holds one.
    """

    key: str

    def __len__(self) -> int: ...

    def push(self, waiting: Waiting) -> None: ...

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

    def pop(self) -> Waiting:
        return self._waiting.popitem(last=False)[1]

    def discard(self, waiting: Waiting) -> None:
        del self._waiting[waiting.order]


class EdfLine:
    """Earliest deadline first; equal deadlines by arrival."""

    __slots__ = ("_heap", "_members", "key")

    def __init__(self, key: str) -> None:
        self.key = key
        self._heap: list[tuple[bool, float, int, Waiting]] = []
        self._members: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def push(self, waiting: Waiting) -> None:
        heappush(self._heap, (not waiting.withdrawn, waiting.deadline_at, waiting.order, waiting))
        self._members.add(waiting.order)

    def pop(self) -> Waiting:
        while True:
            waiting = heappop(self._heap)[3]
            if waiting.order in self._members:
                self._members.remove(waiting.order)
                return waiting

    def discard(self, waiting: Waiting) -> None:
        self._members.remove(waiting.order)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapify(self._heap)


LINES: dict[str, Callable[[str], Line]] = {"fcfs": FcfsLine, "edf": EdfLine}
