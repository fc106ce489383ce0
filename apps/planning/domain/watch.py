"""After a switch: did it make people wait? And before an approval: is the proposal still about today?"""

from __future__ import annotations

from collections.abc import Sequence

from apps.planning.domain.capacity import Workload
from apps.planning.domain.slices import LoadPiece, percentile

WATCH_S = 120.0
BREACH_S = 30.0
BUCKET_S = 10.0
BREACH_FACTOR = 2.0
MOVED_FACTOR = 2.0
SENTENCE = "the P95 prefill wait stays under twice its target after a switch"


def breach(now: float, switched_at: float, slo_ttft_s: float | None, pieces: Sequence[LoadPiece]) -> str | None:
    """Why the switch finished at `switched_at` must be undone, or None.

    Within two minutes of a switch, the P95 prefill wait must not exceed twice its target for 30 s (three times 10 s in a
    row). A wait that was that long before the switch is not blamed on it. Times in unix seconds.
    """
    if slo_ttft_s is None or not BREACH_S <= now - switched_at <= WATCH_S:
        return None
    limit_s = BREACH_FACTOR * slo_ttft_s
    before = _wait_p95_s(pieces, switched_at - BREACH_S, switched_at)
    if before is not None and before > limit_s:
        return None
    worst_s = 0.0
    for index in range(int(BREACH_S / BUCKET_S)):
        end = now - index * BUCKET_S
        wait_s = _wait_p95_s(pieces, end - BUCKET_S, end)
        if wait_s is None or wait_s <= limit_s:
            return None
        worst_s = max(worst_s, wait_s)
    return f"P95 prefill wait was {worst_s:.1f} s, over {limit_s:.1f} s for {BREACH_S:.0f} s after the switch"


def _wait_p95_s(pieces: Sequence[LoadPiece], start: float, end: float) -> float | None:
    return percentile([w for p in pieces if start < (p.t0 + p.t1) / 2 <= end for w in p.prefill_waits_s], 95)


def workload_moved(then: Workload, now: Workload) -> str | None:
    """What has changed by more than a factor of two since a proposal was made, or None."""
    for name in ("t_uc", "pairs", "t_out", "in_flight"):
        before, after = getattr(then, name), getattr(now, name)
        if after > MOVED_FACTOR * before or before > MOVED_FACTOR * after:
            return f"{name} went from {before:,.0f} to {after:,.0f}"
    return None
