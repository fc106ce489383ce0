"""What a page shows of flow control; field names as in the live snapshot of docs/interfaces.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apps.flowcontrol.domain.bands import Band
from apps.flowcontrol.domain.events import Stage

MAX_FLOWS_SHOWN = 100


@dataclass(frozen=True, slots=True)
class FlowLine:
    """One flow of a band: `oldest_s` is how long its oldest request has waited, None when none waits."""

    id: str
    waiting: int
    oldest_s: float | None
    dispatched_total: int


@dataclass(frozen=True, slots=True)
class BandSnapshot:
    """`expected_wait_s`: what a request arriving now would wait at the present rate; None while nothing is dispatched.

    `ceiling` is the one in force; `waits_for` says in words what its next request waits for, None while it has none.
    """

    name: str
    priority: int
    ceiling: float
    waits_for: str | None
    waiting: int
    waiting_bytes: int
    oldest_s: float | None
    expected_wait_s: float | None
    dispatched_per_s: float
    dispatched_total: int
    dropped: dict[str, int]
    flows: tuple[FlowLine, ...]


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """`limit` None: this stage does not count requests. `announced` are on their way to it and take up room.

    `tokens` are what its requests are expected to take up, against `token_limit` where the stage counts tokens.
    """

    saturation: float
    in_flight: int
    announced: int
    limit: int | None
    tokens: int
    token_limit: int | None


@dataclass(frozen=True, slots=True)
class FlowTotals:
    """Since start: arrived = dispatched + rejected + expired + displaced + cancelled + waiting, always."""

    arrived: int
    dispatched: int
    rejected: int
    expired: int
    displaced: int
    cancelled: int
    waiting: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class FlowSnapshot:
    """`gating_stage`: the stage without room, while something waits for it."""

    bands: tuple[BandSnapshot, ...]
    stages: dict[Stage, StageSnapshot]
    totals: FlowTotals
    gating_stage: Stage | None


def band_snapshot(now: float, band: Band, expected_wait_s: float | None, waits_for: str | None) -> BandSnapshot:
    """One band with its flows: those that wait first, longest first, then those served before; at most 100."""
    oldest_at: dict[str, float] = {}
    waiting: dict[str, int] = {}
    for entry in band.waiting():
        flow_id = entry.request.flow_id
        waiting[flow_id] = waiting.get(flow_id, 0) + 1
        oldest_at[flow_id] = min(oldest_at.get(flow_id, entry.enqueued_at), entry.enqueued_at)
    dropped: dict[str, int] = {}
    for outcome, count in band.outcomes.items():
        dropped[outcome.reason_code] = dropped.get(outcome.reason_code, 0) + count
    return BandSnapshot(
        name=band.name,
        priority=band.config.priority,
        ceiling=band.ceiling,
        waits_for=waits_for,
        waiting=band.waiting_requests,
        waiting_bytes=band.waiting_bytes,
        oldest_s=now - min(oldest_at.values()) if oldest_at else None,
        expected_wait_s=expected_wait_s,
        dispatched_per_s=band.meter.per_second(now),
        dispatched_total=band.dispatched_total,
        dropped=dropped,
        flows=tuple(
            FlowLine(
                id=flow_id,
                waiting=waiting.get(flow_id, 0),
                oldest_s=now - oldest_at[flow_id] if flow_id in oldest_at else None,
                dispatched_total=band.dispatched_by_flow.get(flow_id, 0),
            )
            for flow_id in _shown_flows(oldest_at, band.dispatched_by_flow)
        ),
    )


def _shown_flows(oldest_at: dict[str, float], dispatched: dict[str, int]) -> Sequence[str]:
    shown = sorted(oldest_at, key=lambda flow_id: oldest_at[flow_id])[:MAX_FLOWS_SHOWN]
    if len(shown) < MAX_FLOWS_SHOWN:
        served = (flow_id for flow_id in dispatched if flow_id not in oldest_at)
        most_first = sorted(served, key=lambda flow_id: -dispatched[flow_id])
        shown += most_first[: MAX_FLOWS_SHOWN - len(shown)]
    return shown
