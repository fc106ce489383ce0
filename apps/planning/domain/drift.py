"""Has reality left the learned model? Page's CUSUM on log(measured/predicted) of every new window.

While a fit is right the logs scatter around zero and neither sum grows. A lasting change makes one of them climb; it is
reported once it stands clearly above what the fit's own scatter can do. Changes smaller than `TOLERATED_RATIO` are left
alone: they do not move a split, and a refit costs the planner its model for some windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

TOLERATED_RATIO = 0.05
SLACK_DEVIATIONS = 0.5
ALARM_DEVIATIONS = 10.0
# A single wild window (a paused machine) must not count for more than this.
CLIP = 0.7
MIN_ALARM = 1.0


@dataclass(frozen=True, slots=True)
class Drift:
    """The two sums and since when each has been above zero (unix seconds; None: it is at zero).

    `slow` grows while nodes are slower than predicted, `fast` while they are faster. `rows` counts what was seen, and
    `seen_until` is the begin of the newest window counted.
    """

    slow: float = 0.0
    fast: float = 0.0
    slow_since: float | None = None
    fast_since: float | None = None
    slow_rows: int = 0
    fast_rows: int = 0
    rows: int = 0
    seen_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Alarm:
    """Reality has left the fit since `since` (unix seconds) by about `ratio` (1.2: a fifth slower)."""

    since: float
    ratio: float
    rows: int

    @property
    def reason(self) -> str:
        word = "slower" if self.ratio > 1 else "faster"
        return f"nodes run about {abs(self.ratio - 1):.0%} {word} than the model says, over {self.rows} windows"


@dataclass(frozen=True, slots=True)
class Level:
    """How a phase now runs against its fit: all coefficients times `ratio` leave a mean error of `error_ratio`."""

    ratio: float
    error_ratio: float
    rows: int


def level(slowness: Sequence[float]) -> Level:
    """The level of these windows' measured/predicted: their median, and what scatter remains about it. Needs one at least."""
    ratio = median(slowness)
    return Level(ratio, sum(abs(ratio / value - 1) for value in slowness) / len(slowness), len(slowness))


def watch(drift: Drift, windows: Iterable[tuple[float, float]], deviation: float) -> tuple[Drift, Alarm | None]:
    """Count new windows `(t0, measured/predicted)`, oldest first; the first alarm ends the counting.

    `deviation` is the standard deviation of the fit's own log residuals.
    """
    slack = max(TOLERATED_RATIO, SLACK_DEVIATIONS * deviation)
    limit = max(MIN_ALARM, ALARM_DEVIATIONS * deviation)
    for t0, slowness in windows:
        drift = _count(drift, t0, max(-CLIP, min(CLIP, log(max(slowness, 1e-6)))), slack)
        if drift.slow > limit and drift.slow_since is not None:
            return drift, Alarm(drift.slow_since, exp(drift.slow / drift.slow_rows + slack), drift.slow_rows)
        if drift.fast > limit and drift.fast_since is not None:
            return drift, Alarm(drift.fast_since, exp(-drift.fast / drift.fast_rows - slack), drift.fast_rows)
    return drift, None


def _count(drift: Drift, t0: float, value: float, slack: float) -> Drift:
    slow = max(0.0, drift.slow + value - slack)
    fast = max(0.0, drift.fast - value - slack)
    return replace(
        drift,
        slow=slow,
        fast=fast,
        slow_since=None if slow == 0 else t0 if drift.slow_since is None else drift.slow_since,
        fast_since=None if fast == 0 else t0 if drift.fast_since is None else drift.fast_since,
        slow_rows=0 if slow == 0 else drift.slow_rows + 1,
        fast_rows=0 if fast == 0 else drift.fast_rows + 1,
        rows=drift.rows + 1,
        seen_until=max(drift.seen_until, t0),
    )
