"""When waiting ends, for all that wait."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import inf

from apps.flowcontrol.domain.waiting import Place, Waiting


class DeadlineQueue:
    """Waiting requests by the time they must leave. Requests that no longer wait are skipped and cleared away."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Waiting]] = []

    def watch(self, at: float, waiting: Waiting, waiting_count: int) -> None:
        """`waiting_count` is how many wait in all; far more entries than that means most are stale."""
        if at == inf:
            return
        if len(self._heap) > 2 * waiting_count + 1024:
            self._heap = [entry for entry in self._heap if entry[2].place is Place.WAITING]
            heapify(self._heap)
        heappush(self._heap, (at, waiting.order, waiting))

    def replace(self, deadlines: Iterable[tuple[float, Waiting]]) -> None:
        """Start again with exactly these."""
        self._heap = [(at, waiting.order, waiting) for at, waiting in deadlines if at < inf]
        heapify(self._heap)

    def earliest(self) -> float:
        """Infinite when nothing is watched."""
        heap = self._heap
        while heap and heap[0][2].place is not Place.WAITING:
            heappop(heap)
        return heap[0][0] if heap else inf

    def pop_due(self, now: float, at_now_too: bool) -> Waiting | None:
        """The next waiting request whose time was before `now` (or is `now`), no longer watched; None when none is due."""
        if not self._heap:
            return None
        at = self.earliest()
        return heappop(self._heap)[2] if at < now or (at_now_too and at == now) else None
