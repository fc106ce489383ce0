"""The one form in which benchmarks print what they measured."""

from __future__ import annotations

import json
import sys
from typing import Literal

Aim = Literal["at_least", "at_most"]


def report(
    name: str,
    value: float | None,
    unit: str,
    *,
    target: float | None = None,
    aim: Aim = "at_least",
    baseline: float | None = None,
    ratio: float | None = None,
) -> bool | None:
    """Print one measurement as a JSON line and answer whether its target was met (None without a target).

    `baseline` is the peer's value in the same unit, measured in the same run (None: no peer was there); `ratio` is
    `value / baseline` unless told otherwise. A `value` of None says that it could not be measured: its target is missed.
    """
    met: bool | None = None
    if target is not None:
        met = value is not None and (value >= target if aim == "at_least" else value <= target)
    if ratio is None and value is not None and baseline:
        ratio = value / baseline
    line = {
        "name": name,
        "value": value,
        "unit": unit,
        "target": target,
        "met": met,
        "baseline": baseline,
        "ratio": ratio,
    }
    sys.stdout.write(json.dumps({key: _rounded(entry) for key, entry in line.items()}) + "\n")
    sys.stdout.flush()
    return met


def _rounded(entry: object) -> object:
    return float(f"{entry:.5g}") if isinstance(entry, float) else entry
