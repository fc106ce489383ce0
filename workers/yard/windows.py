"""Sliding windows over what happened lately: percentiles and rates for the live snapshot."""

from __future__ import annotations

import math
from collections import deque

MAX_SAMPLES = 4_000


class SampleWindow:
    """Values of the last `window_s` seconds (at most `MAX_SAMPLES`), and their percentiles."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._times: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._values: deque[float] = deque(maxlen=MAX_SAMPLES)

    def add(self, now: float, value: float) -> None:
        self._times.append(now)
        self._values.append(value)

    def values(self, now: float) -> list[float]:
        """Values younger than the window, oldest first."""
        while self._times and self._times[0] <= now - self.window_s:
            self._times.popleft()
            self._values.popleft()
        return list(self._values)

    def percentiles(self, now: float, which: tuple[int, ...] = (50, 95, 99)) -> dict[str, float | int | None]:
        """`{"p50": .., "n": ..}` by nearest rank; None where there are no samples."""
        ordered = sorted(self.values(now))
        found: dict[str, float | int | None] = {f"p{percent}": nearest_rank(ordered, percent) for percent in which}
        found["n"] = len(ordered)
        return found


def nearest_rank(ordered: list[float], percent: int) -> float | None:
    if not ordered:
        return None
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


class RateWindow:
    """Amounts a second over the last `window_s` seconds, in buckets of one second."""

    def __init__(self, window_s: int, started_at: float) -> None:
        self._window_s = window_s
        self._started_at = started_at
        self._buckets: deque[list[float]] = deque()

    def add(self, now: float, amount: float = 1.0) -> None:
        second = math.floor(now)
        if self._buckets and self._buckets[-1][0] >= second:
            self._buckets[-1][1] += amount
        else:
            self._buckets.append([second, amount])

    def per_s(self, now: float) -> float:
        """The mean rate; a yard younger than the window divides by its age (at least one second)."""
        while self._buckets and self._buckets[0][0] < now - self._window_s:
            self._buckets.popleft()
        age_s = min(float(self._window_s), max(1.0, now - self._started_at))
        return sum(amount for _, amount in self._buckets) / age_s
