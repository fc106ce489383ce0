"""The gate: is a candidate's gain more than noise?

A candidate passes when its mean gain over the window's slices is more than two standard errors and at least one
percent of what the current split does. Slices in which nothing was measured drop out. Neighbouring slices resemble each
other, so the standard error is widened for their lag-1 autocorrelation. Gains are in requests per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

MIN_SLICES = 5
STANDARD_ERRORS = 2.0
FLOOR_RATIO = 0.01
MAX_AUTOCORRELATION = 0.8

SWITCH = "switch"
NO_GAIN = "no_gain"
BELOW_FLOOR = "below_floor"
WITHIN_NOISE = "within_noise"
TOO_FEW_SLICES = "too_few_slices"


@dataclass(frozen=True, slots=True)
class GateResult:
    """What the gate found. `gain` and `standard_error` are None when too few slices were measured."""

    passed: bool
    gain: float | None
    standard_error: float | None
    slices: int
    code: str
    threshold: float | None
    autocorrelation: float = 0.0

    @property
    def reason(self) -> str:
        """The code as a sentence with its numbers."""
        if self.gain is None or self.standard_error is None or self.threshold is None:
            return f"only {self.slices} slices were measured, {MIN_SLICES} are needed"
        numbers = f"gain {self.gain:+.3f} req/s (SE {self.standard_error:.3f}, must exceed {self.threshold:.3f})"
        return {
            SWITCH: f"{numbers}: passes",
            NO_GAIN: f"{numbers}: the candidate is not better than the current split",
            BELOW_FLOOR: f"{numbers}: too small to be worth a switch",
            WITHIN_NOISE: f"{numbers}: within the noise of the window",
        }[self.code]


def widened_standard_error(gains: Sequence[float]) -> tuple[float, float]:
    """Standard error of the mean, times sqrt((1+r1)/(1-r1)); and r1, the lag-1 autocorrelation clipped to [0, 0.8].

    Needs at least two values.
    """
    values = np.asarray(gains, dtype=float)
    spread = values - values.mean()
    total = float(spread @ spread)
    # Equal values differ by rounding only; without this the autocorrelation of that rounding would be measured.
    if total <= 1e-18 * max(1.0, float(values @ values)):
        return 0.0, 0.0
    r1 = float(np.clip(float(spread[:-1] @ spread[1:]) / total, 0.0, MAX_AUTOCORRELATION))
    standard_error = float(values.std(ddof=1)) / len(values) ** 0.5
    return standard_error * ((1 + r1) / (1 - r1)) ** 0.5, r1


def judge(gains: Sequence[float | None], base: float, strictness: float = 1.0) -> GateResult:
    """Judge one candidate by its gain in each slice (None = empty slice).

    `base` is what the current split does (requests per second); `strictness` multiplies both thresholds (2 for a switch
    that undoes a recent one).
    """
    # What is no number, as where a model says that work takes no time, is no evidence either.
    kept = [float(gain) for gain in gains if gain is not None and isfinite(gain)]
    if len(kept) < MIN_SLICES:
        return GateResult(False, None, None, len(kept), TOO_FEW_SLICES, None)
    gain = float(np.mean(kept))
    standard_error, r1 = widened_standard_error(kept)
    noise, floor = strictness * STANDARD_ERRORS * standard_error, strictness * FLOOR_RATIO * base
    if gain <= 0:
        code = NO_GAIN
    elif gain <= noise:
        code = WITHIN_NOISE
    elif gain < floor:
        code = BELOW_FLOOR
    else:
        code = SWITCH
    return GateResult(code == SWITCH, gain, standard_error, len(kept), code, max(noise, floor), r1)
