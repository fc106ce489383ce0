"""The audit trail: who changed what, from what to what, why, and what else the same action changed."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from apps.console.access import partition_view
from apps.console.exports import exported
from apps.console.filters import choice, read, text
from apps.console.views.shell import page
from apps.topology.models import Partition
from controlplane.audit_trail import Entry, Narrow, tables, title, trail

EXPORTED = 1000


@partition_view("viewer")
def audit(request: HttpRequest, partition: Partition) -> HttpResponse:
    filters = read(
        request,
        choice("table", "What", [(name, title(name)) for name in tables()]),
        text("actor", "Who", "person, key or planner"),
        text("cause", "Cause", "id of one action"),
        text("request_id", "HTTP request", "its X-Request-ID"),
        text("q", "Name or reason", "part of it"),
    )
    before = parse_datetime(request.GET.get("before", "").replace(" ", "+"))
    narrow = Narrow(
        table=filters.value("table"),
        actor=filters.value("actor"),
        cause=filters.value("cause"),
        request_id=filters.value("request_id"),
        text=filters.value("q"),
        before=before if before is not None and timezone.is_aware(before) else None,
        skip=_skip(request.GET.get("skip", "")),
    )
    kind = request.GET.get("format")
    if kind:
        entries, _ = trail(partition, narrow, EXPORTED)
        file = exported(kind, f"{partition.name}-audit", [_flat(entry) for entry in entries])
        if file is not None:
            return file
    entries, more = trail(partition, narrow)
    context: dict[str, Any] = {
        "filters": filters,
        "rows": entries,
        "before": narrow.before,
        "older": _older(entries, narrow) if more else None,
    }
    return page(request, partition, "audit", **context)


def _skip(asked: str) -> int:
    return int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 7 else 0


def _older(entries: list[Entry], narrow: Narrow) -> dict[str, Any]:
    """Where the next page begins: at the last one's time, after those of that time that were shown."""
    at = entries[-1].at
    shown = sum(1 for entry in entries if entry.at == at)
    return {"at": at.isoformat(), "skip": shown + (narrow.skip if narrow.before == at else 0)}


def _flat(entry: Entry) -> dict[str, Any]:
    return {
        "at": entry.at.isoformat(),
        "what": entry.kind,
        "name": entry.subject,
        "done": entry.done,
        "who": entry.actor,
        "reason": entry.reason,
        "cause": entry.cause,
        "request_id": entry.request_id,
        "changes": "; ".join(f"{c.field}: {c.before} -> {c.after}" for c in entry.changes),
    }
