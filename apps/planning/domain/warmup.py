"""Warm-up: how the concurrency of collocated nodes ramps, and when enough has been seen.

While a partition warms up every node serves both phases, and each node's decode limit climbs a ladder 1, 2, 4, ... up to
its own limit, a rung every `rung_s`. Nodes start on different rungs, so that the partition as a whole keeps serving while
each batch size is seen on some node. After each full ladder the model is fitted; the warm-up ends when every hardware
class has a usable fit, or after `limit_s` with whatever there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# A node's first minute teaches nothing, so the first ladder ends no earlier than that plus one rung.
FIRST_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class WarmUpPlan:
    """Seconds of the driver's clock. `limits` are the nodes' own decode limits, in node order."""

    started_at: float
    rung_s: float
    limit_s: float
    limits: tuple[tuple[str, int], ...]

    @property
    def ladder(self) -> tuple[int, ...]:
        return ladder(max((limit for _, limit in self.limits), default=1))

    @property
    def ladder_s(self) -> float:
        """How long one full ladder takes."""
        return len(self.ladder) * self.rung_s

    @property
    def first_fit_s(self) -> float:
        """When the first full ladder has been climbed with samples that count."""
        return max(self.ladder_s, FIRST_MINUTE_S + self.rung_s)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`go-on` on `rung`, `fit` and look again, or end `done` / `given-up`; the reason is for people."""

    what: Literal["go-on", "done", "given-up"]
    rung: int
    reason: str


def ladder(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... and the limit itself."""
    rungs = [1]
    while rungs[-1] * 2 < limit:
        rungs.append(rungs[-1] * 2)
    return (*rungs, limit) if limit > 1 else (1,)


def rung_at(plan: WarmUpPlan, now: float) -> int:
    """Rungs since the start, counted on through all ladders."""
    return max(0, int((now - plan.started_at) / plan.rung_s))


def decode_limits(plan: WarmUpPlan, rung: int) -> dict[str, int]:
    """Each node's decode limit on this rung; never more than its own."""
    rungs = plan.ladder
    return {name: min(own, rungs[(rung + index) % len(rungs)]) for index, (name, own) in enumerate(plan.limits)}


def ladder_ended(plan: WarmUpPlan, now: float) -> bool:
    """Whether at least one full ladder has been climbed with samples that count: time to fit."""
    return now - plan.started_at >= plan.first_fit_s


def judge(plan: WarmUpPlan, now: float, unlearned: Mapping[str, str]) -> Verdict:
    """Go on or end. `unlearned` says of each hardware class without a usable fit why it has none."""
    rung = rung_at(plan, now)
    if ladder_ended(plan, now) and not unlearned:
        return Verdict("done", rung, f"every hardware class is learned after {now - plan.started_at:.0f} s")
    missing = "; ".join(f"{name}: {why}" for name, why in sorted(unlearned.items()))
    if now - plan.started_at >= plan.limit_s:
        return Verdict("given-up", rung, f"not learned within {plan.limit_s:.0f} s: {missing}"[:500])
    return Verdict("go-on", rung, missing)
