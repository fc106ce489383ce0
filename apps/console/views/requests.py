"""What became of requests: a list to narrow down, the life of one, and the end of one that still lives."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.views.decorators.http import require_http_methods

from apps.console import lives
from apps.console.access import Scope, partition_view
from apps.console.exports import exported
from apps.console.filters import Filters, choice, read, text
from apps.console.forms import WhyForm
from apps.console.views.actions import answer, posted
from apps.console.views.shell import RANGES, abilities, page
from apps.flowcontrol.selectors import bands_of
from apps.telemetry import gateways
from apps.telemetry.models import RequestRecord
from apps.telemetry.selectors import RequestFilter, own_detail, own_request, request_record, requests_of
from apps.tenancy.models import Tenant
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from controlplane.errors import InvalidField, NotFound, Unavailable

SHOWN = 50
EXPORTED = 5000
OUTCOMES = ("completed", "failed", "dropped", "cancelled")
RANGE_LABELS = [("1h", "1 hour"), ("6h", "6 hours"), ("24h", "24 hours"), ("7d", "7 days")]
_FIELDS = (
    "request_id", "at", "tenant", "band", "branch", "branch_kind", "prefill_node", "decode_node", "prompt_tokens",
    "cached_tokens", "computed_tokens", "fetched_tokens", "output_tokens", "queue_s", "ttft_s", "predicted_ttft_s",
    "e2e_s", "outcome", "drop_code", "reason",
)  # fmt: skip


def filters_of(request: HttpRequest, partition: Partition, scope: Scope) -> Filters:
    tenants = Tenant.objects.order_by("name").values_list("name", flat=True)
    bands = bands_of(partition).values_list("name", flat=True)
    fields = [
        choice("range", "Last", RANGE_LABELS, "24h"),
        choice("tenant", "Tenant", [t for t in tenants if scope is None or t in scope]),
        choice("band", "Band", bands),
        choice("outcome", "Outcome", OUTCOMES),
    ]
    if scope is None:
        fields.append(choice("node", "Node", nodes_of(partition).values_list("name", flat=True)))
    fields += [text("branch", "Branch", "whole id"), text("q", "Request", "id or its beginning")]
    return read(request, *fields)


def _records(partition: Partition, filters: Filters, scope: Scope) -> Any:
    value = filters.value
    rows = requests_of(
        partition,
        RequestFilter(
            tenant=value("tenant"),
            band=value("band"),
            branch=value("branch"),
            node=value("node"),
            outcome=value("outcome"),
            since=timezone.now() - timedelta(seconds=RANGES[value("range") or "24h"]),
            tenants=scope,
        ),
    )
    return rows.filter(request_id__startswith=value("q")) if value("q") else rows


@partition_view("viewer", tenants=True)
def requests(request: HttpRequest, partition: Partition) -> HttpResponse:
    scope: Scope = request.scope  # type: ignore[attr-defined]
    filters = filters_of(request, partition, scope)
    rows = _records(partition, filters, scope)
    kind = request.GET.get("format")
    if kind:
        table = rows.values(*_FIELDS)[:EXPORTED]
        told = [row if scope is None else own_request(row) for row in table]
        file = exported(kind, f"{partition.name}-requests", [row | {"at": row["at"].isoformat()} for row in told])
        if file is not None:
            return file
    before = parse_datetime(request.GET.get("before", "").replace(" ", "+"))
    if before is not None and timezone.is_aware(before):
        rows = rows.filter(at__lt=before)
    found = list(rows[: SHOWN + 1])
    shown = found[:SHOWN]
    living, note = ([], "") if before or filters.value("outcome") else _living(partition, filters, scope)
    context: dict[str, Any] = {
        "filters": filters,
        "living": living,
        "living_note": note,
        "rows": [lives.row(_told(record_entry(record), scope)) for record in shown],
        "older": shown[-1].at.isoformat() if len(found) > SHOWN else None,
        "before": before,
    }
    return page(request, partition, "requests", **context)


def _living(partition: Partition, filters: Filters, scope: Scope) -> tuple[list[dict[str, Any]], str]:
    """Requests that have not ended, as the gateway tells them, and what to say when it cannot be asked."""
    wanted = {name: filters.value(name) for name in ("tenant", "band", "node")}
    wanted["q"] = filters.value("q") or filters.value("branch")
    try:
        found = gateways.living_requests(partition, wanted, scope, limit=20)
    except (Unavailable, InvalidField, NotFound) as error:
        return [], error.message
    told = [_told(entry, scope) for entry in found["rows"]]
    rows = [lives.row(entry | {"t": entry["arrived_at"], "e2e_s": entry["age_s"]}) for entry in told]
    return rows, "" if found["total"] <= len(rows) else f"{found['total']} in all; the oldest are shown"


def _told(entry: dict[str, Any], scope: Scope) -> dict[str, Any]:
    return entry if scope is None else own_request(entry)


def record_entry(record: RequestRecord) -> dict[str, Any]:
    """A stored record in the form of a live entry."""
    names = [name for name in _FIELDS if name not in ("request_id", "at")]
    return {name: getattr(record, name) for name in names} | {"id": record.request_id, "t": record.at.timestamp()}


@partition_view("viewer", tenants=True)
def request_life(request: HttpRequest, partition: Partition, request_id: str) -> HttpResponse:
    scope: Scope = request.scope  # type: ignore[attr-defined]
    entry, alive = _entry(partition, request_id)
    if scope is not None and entry.get("tenant") not in scope:
        raise Http404("There is no such request.")
    if request.GET.get("format") == "json":
        file = exported("json", f"request-{request_id}", [entry if scope is None else own_detail(entry)])
        assert file is not None
        return file
    context: dict[str, Any] = {
        "entry": entry,
        "row": lives.row(entry),
        "alive": alive,
        "life": lives.life(entry, time.time()),
        "lost": lives.lost(entry),
        "candidates": lives.candidates(entry) if scope is None else None,
        "template": "console/request.html",
        "title": "Request",
    }
    return page(request, partition, "requests", **context)


def _entry(partition: Partition, request_id: str) -> tuple[dict[str, Any], bool]:
    """The request and whether it still lives. Raises Http404."""
    try:
        record = request_record(partition, request_id)
        return record.detail | record_entry(record), False
    except NotFound:
        pass
    try:
        found = gateways.living_request(partition, request_id)
    except (NotFound, Unavailable, InvalidField):
        raise Http404("There is no such request here, or it was too long ago.") from None
    return found | {"t": found["arrived_at"], "e2e_s": found["age_s"]}, True


@partition_view("operator")
@require_http_methods(["GET", "POST"])
def cancel(request: HttpRequest, partition: Partition, request_id: str) -> HttpResponse:
    form = WhyForm(posted(request), prefix="cancel")

    def write() -> str:
        gateways.cancel_request(partition, request_id, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"Request {request_id} is cancelled."

    return answer(
        request, form, write, slot="cancel-slot", title=f"Cancel request {request_id}", submit="Cancel this request",
        about="Its client gets an error that says so, and its nodes stop at once.", danger=True,
    )  # fmt: skip


@partition_view("viewer")
def waiting(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The part of the Queues page that lists who waits, oldest first."""
    context = waiting_context(request, partition)
    return render(request, "console/_waiting.html", {"partition": partition} | context | abilities(request))


def waiting_context(request: HttpRequest, partition: Partition) -> dict[str, Any]:
    """Living requests narrowed by the URL, as the gateway tells them now."""
    stages = [(stage, label) for stage, label in lives.STAGES.items()]
    filters = read(
        request,
        choice("stage", "Stage", [("all", "any"), *stages], "queued"),
        choice("band", "Band", bands_of(partition).values_list("name", flat=True)),
        choice("tenant", "Tenant", Tenant.objects.order_by("name").values_list("name", flat=True)),
        text("flow", "Flow", "whole id"),
        text("q", "Request or branch", "part of the id"),
    )
    stage = filters.value("stage")
    wanted = filters.values | {"stage": "" if stage == "all" else stage}
    try:
        found = gateways.living_requests(partition, wanted, request.scope, limit=SHOWN)  # type: ignore[attr-defined]
    except (Unavailable, InvalidField, NotFound) as error:
        return {"filters": filters, "waiting": [], "waiting_total": 0, "waiting_error": error.message}
    rows = [_waiting_row(entry) for entry in found["rows"]]
    return {"filters": filters, "waiting": rows, "waiting_total": found["total"], "waiting_shown": len(rows)}


def _waiting_row(entry: dict[str, Any]) -> dict[str, Any]:
    row = lives.row(entry | {"t": entry["arrived_at"], "e2e_s": entry["age_s"]})
    ttl, age = entry.get("ttl_s"), entry["age_s"]
    left = ttl - age if ttl and entry["stage"] == "queued" else None
    return row | {
        "stage": lives.STAGES.get(entry["stage"], entry["stage"]),
        "uncached": entry["uncached_tokens"],
        "prompt_tokens": entry["prompt_tokens"],
        "flow": entry["flow"],
        "left_s": left,
        "soon": left is not None and left < 0.2 * (ttl or 0.0),
    }
