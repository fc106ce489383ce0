"""What a stretch of time came to, as the tables beside the charts show it (`apps.telemetry.periods`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apps.console import formats
from apps.console.present import LOST_CAUSES, latency_rows, share
from apps.telemetry.periods import BandSums, Period, Sums, percentile

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# Outcomes as people say them, the good one first.
OUTCOMES = ("completed", "failed", "dropped", "cancelled")


def present_period(period: Period, slo_ttft_s: float | None) -> dict[str, Any]:
    """Texts and tones of a period. `slo_ttft_s` is the policy's TTFT target, None without one."""
    sums = period.sums
    measured = {f"{name}_s": _quantiles(found) for name, found in sums.times.items()}
    return {
        "requests": period.requests,
        "start": period.start,
        "end": period.end,
        "latency": latency_rows(measured, slo_ttft_s),
        "error": formats.percent(percentile(sums.error, 0.5)),
        "error_n": formats.exact(sum(sums.error.values())),
        "rates": _rates(period),
        "outcomes": _outcomes(sums.outcomes),
        "bands": [_band(name, band, period.seconds) for name, band in sorted(sums.bands.items(), key=_most)],
        "reuse": _reuse(sums),
    }


def _quantiles(found: Mapping[str, int]) -> dict[str, Any]:
    return {name: percentile(found, part) for name, part in QUANTILES.items()} | {"n": sum(found.values())}


def _rates(period: Period) -> list[dict[str, str]]:
    tokens = period.sums.tokens
    named = (
        ("Requests", period.requests),
        ("Output tokens", tokens.get("output_tokens", 0)),
        ("Prompt tokens", tokens.get("prompt_tokens", 0)),
        ("of them computed", tokens.get("computed_tokens", 0)),
    )
    return [{"label": name, "per_s": formats.rate(n / period.seconds), "total": formats.count(n)} for name, n in named]


def _outcomes(outcomes: Mapping[str, int]) -> str:
    """As `12 completed · 1 dropped`, also those that have no name of their own here."""
    names = [*OUTCOMES, *sorted(set(outcomes) - set(OUTCOMES))]
    return " · ".join(f"{formats.count(outcomes[name])} {name}" for name in names if outcomes.get(name))


def _most(pair: tuple[str, BandSums]) -> tuple[int, str]:
    return -sum(pair[1].outcomes.values()), pair[0]


def _band(name: str, band: BandSums, seconds: float) -> dict[str, str]:
    n = sum(band.outcomes.values())
    dropped = band.outcomes.get("dropped", 0)
    return {
        "name": name or "none",
        "requests": formats.count(n),
        "per_s": formats.rate(n / seconds),
        "p50": formats.duration(percentile(band.queue, 0.5)),
        "p95": formats.duration(percentile(band.queue, 0.95)),
        "dropped": f"{formats.count(dropped)} ({formats.percent(dropped / n, 1)})" if dropped else "none",
        "tone": "warn" if dropped else "",
    }


def _reuse(sums: Sums) -> dict[str, Any]:
    """Reused, and what could have been: a prompt's cached tokens and those lost to some cause are its ideal."""
    prompt, actual = sums.tokens.get("prompt_tokens", 0), sums.tokens.get("cached_tokens", 0)
    gap = sum(sums.lost.values())
    return {
        "prompt": formats.count(prompt),
        "actual": formats.percent(actual / prompt if prompt else None, 1),
        "ideal": formats.percent((actual + gap) / prompt if prompt else None, 1),
        "gap": formats.count(gap),
        "actual_share": share(actual, prompt),
        "gap_share": share(gap, prompt),
        "causes": [
            {
                "label": LOST_CAUSES.get(cause, cause),
                "tokens": formats.count(n),
                "share": share(n, prompt),
                "percent": formats.percent(n / prompt if prompt else None, 1),
            }
            for cause, n in sorted(sums.lost.items(), key=lambda pair: (-pair[1], pair[0]))
        ],
    }
