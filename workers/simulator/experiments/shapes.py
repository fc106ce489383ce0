"""What an experiment is: its lines, its claims, how long and how often it runs, and the published figures.

A *line* is one figure of one case: ours as the mean over seeds with its spread, the published one, and their ratio. A
*claim* is a ratio between systems on the same work; it is met or it stays red.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from workers.simulator.experiments.runs import RunSpec, stationary

PUBLISHED = Path(__file__).parents[1] / "data" / "published_results.yaml"

Figures = Mapping[str, Any]
Read = Callable[[RunSpec], Sequence[Figures]]


@dataclass(frozen=True)
class Scope:
    """How long and how often: the publication's half hour of warm-up and scored hour with three seeds, or a quick look."""

    seeds: tuple[int, ...] = (1, 2, 3)
    warm_up_s: float = 1800.0
    scored_s: float = 3600.0

    def spec(self, name: str, workload: str, agents: int, **changes: Any) -> RunSpec:
        return stationary(name, workload, agents, warm_up_s=self.warm_up_s, scored_s=self.scored_s, **changes)


FULL = Scope()
QUICK = Scope((1,), 1800.0, 1800.0)


@dataclass(frozen=True)
class Line:
    """`figure`: a key of a run's figures, or a function of them."""

    case: str
    figure: str
    spec: RunSpec
    read: str | Callable[[Figures], float | None]
    published: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Claim:
    """`value(over, under)` of two lines' means, demanded to be at least or at most `target`."""

    text: str
    over: tuple[str, str]
    under: tuple[str, str]
    target: float
    aim: str = "at_least"
    as_lower_pct: bool = False


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    lines: tuple[Line, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    configuration: Mapping[str, Any] = field(default_factory=dict)


@cache
def published() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    return document


def rows(table: str) -> list[dict[str, Any]]:
    found = published()[table]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


COMMON_NOTE = (
    "Coefficients are inferred from the same publication's tables and are the same for every table; ratios between systems "
    "on the same work are what this shows, not absolute times."
)


def with_seeds(experiment: Experiment, seeds: Iterable[int]) -> list[RunSpec]:
    """Every run of an experiment, once for each seed."""
    return list(dict.fromkeys(replace(line.spec, seed=seed) for line in experiment.lines for seed in seeds))
