"""REST of sums: what requests came to over a period, as the overview and the bills of tenants need it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.http import HttpRequest
from ninja import Query, Router, Schema
from pydantic import AwareDatetime

from apps.telemetry import periods
from apps.topology.selectors import partition_named
from controlplane.errors import InvalidField
from controlplane.permissions import actor_of, has_role, require, require_tenant_view
from controlplane.rest.schemas import Storable

router = Router(tags=["telemetry"])
KEPT_S, USUAL_S = max(periods.SLOTS.values()), 3600.0


class SumsQuery(Storable):
    """`since` is an hour ago and `until` is now unless given. Sums are kept by band and by tenant, not by both at once."""

    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    band: str = ""
    tenant: str = ""


class SpreadOut(Schema):
    """Of `n` requests; percentiles are within 2.5 %, null where there was none."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None


class WholeSumsOut(Schema):
    """Seconds in `times_s` by ttft, e2e, tpot and queue; `lost_tokens` by cause; `prediction_error_ratio` is of TTFT."""

    requests: int
    outcomes: dict[str, int]
    tokens: dict[str, int]
    lost_tokens: dict[str, int]
    times_s: dict[str, SpreadOut]
    prediction_error_ratio: SpreadOut


class BandSumsOut(Schema):
    band: str
    requests: int
    outcomes: dict[str, int]
    queue_s: SpreadOut


class TenantSumsOut(Schema):
    tenant: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    mean_ttft_s: float | None


class RequestSumsOut(Schema):
    """`since` and `until` are what the sums cover: whole slots around what was asked for, not later than now. `whole` is null
    when it was narrowed; `bands` and `tenants` then hold what was asked for alone."""

    since: datetime
    until: datetime
    whole: WholeSumsOut | None
    bands: list[BandSumsOut]
    tenants: list[TenantSumsOut]


@router.get("/partitions/{partition}/request-sums", response=RequestSumsOut)
def get_request_sums(request: HttpRequest, partition: str, query: Query[SumsQuery]) -> Any:
    """Requests that ended in a period of the last 32 days, however many, in all and by band and tenant. Tenant users see
    their own tenants alone."""
    scope = _own_only(request, query)
    place, now = partition_named(partition), time.time()
    start, end = _span(query, now)
    found = periods.between(place, start, end, now)
    by_tenant = periods.tenants_between(place, start, end, now)
    narrowed = scope is not None or query.tenant or query.band
    return {
        "since": datetime.fromtimestamp(found.start, UTC),
        "until": datetime.fromtimestamp(found.end, UTC),
        "whole": None if narrowed else _whole(found),
        "bands": [] if query.tenant or scope is not None else _bands(found.sums, query.band),
        "tenants": [] if query.band else _tenants(by_tenant, query.tenant, scope),
    }


def _own_only(request: HttpRequest, query: SumsQuery) -> frozenset[str] | None:
    """The tenants that the answer is narrowed to; None for those who may see all. Raises Forbidden, InvalidField."""
    actor = actor_of(request)
    if has_role(actor, "viewer"):
        if query.band and query.tenant:
            raise InvalidField("band", "sums are kept by band or by tenant; ask for one of them")
        return None
    if query.band or not actor.tenants:
        require(actor, "viewer")
    if query.tenant:
        require_tenant_view(actor, query.tenant)
    return actor.tenants


def _span(query: SumsQuery, now: float) -> tuple[float, float]:
    end = min(query.until.timestamp(), now) if query.until else now
    start = query.since.timestamp() if query.since else end - USUAL_S
    if start >= end:
        raise InvalidField("since", "expected a time before `until`, and not later than now")
    if start < now - KEPT_S:
        raise InvalidField("since", f"sums are kept for {KEPT_S / 86_400:.0f} days; expected a later time")
    return start, end


def _spread(found: Mapping[str, int] | None) -> dict[str, Any]:
    found = found or {}
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {"n": sum(found.values())} | {name: periods.percentile(found, share) for name, share in shares.items()}


def _whole(found: periods.Period) -> dict[str, Any]:
    sums = found.sums
    return {
        "requests": found.requests,
        "outcomes": sums.outcomes,
        "tokens": {name: sums.tokens.get(name, 0) for name in periods.TOKENS},
        "lost_tokens": sums.lost,
        "times_s": {name: _spread(sums.times.get(name)) for name in periods.TIMES},
        "prediction_error_ratio": _spread(sums.error),
    }


def _bands(sums: periods.Sums, wanted: str) -> list[dict[str, Any]]:
    return [
        {
            "band": name,
            "requests": sum(band.outcomes.values()),
            "outcomes": band.outcomes,
            "queue_s": _spread(band.queue),
        }
        for name, band in sorted(sums.bands.items())
        if wanted in ("", name)
    ]


def _tenants(found: periods.Tenants, wanted: str, scope: frozenset[str] | None) -> list[dict[str, Any]]:
    return [
        {
            "tenant": name,
            "requests": each.requests,
            "prompt_tokens": each.prompt_tokens,
            "cached_tokens": each.cached_tokens,
            "output_tokens": each.output_tokens,
            "mean_ttft_s": each.ttft_s,
        }
        for name, each in sorted(found.items())
        if wanted in ("", name) and (scope is None or name in scope)
    ]
