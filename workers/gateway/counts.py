"""Counters and histograms of the request path: plain numbers by their labels, put into Prometheus' text only when scraped.

A library's counter takes a lock and checks its labels at every step, which came to a tenth of a small request's cost; here
one thread counts, and the library writes the text (`metrics_text.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Name, help and label names, as Prometheus shows them."""

    name: str
    help: str
    labels: Labels


class Counts:
    """A family of counters."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount


class Spread:
    """How often a value lay at or below each bound but above the one before; the last place is for what lies above all."""

    __slots__ = ("counts", "sum")

    def __init__(self, places: int) -> None:
        self.counts = [0] * places
        self.sum = 0.0


class Histograms:
    """A family of histograms with the same `bounds`, rising."""

    def __init__(self, family: Family, bounds: tuple[float, ...]) -> None:
        self.family = family
        self.bounds = bounds
        self.spreads: dict[Labels, Spread] = {}

    def observe(self, labels: Labels, value: float) -> None:
        spread = self.spreads.get(labels)
        if spread is None:
            spread = self.spreads[labels] = Spread(len(self.bounds) + 1)
        spread.counts[bisect_left(self.bounds, value)] += 1
        spread.sum += value
