"""The first page: is it fine, and if not, where. A tenant user gets the same about the own tenants."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from apps.console.access import partition_view, slo_ttft_s
from apps.console.views.shell import live_view, page, past
from apps.telemetry.choices import AlertState, Severity
from apps.telemetry.models import Alert
from apps.telemetry.rules import BY_NAME
from apps.topology.models import Partition

ALERTS_SHOWN = 3


@partition_view("viewer", tenants=True)
def overview(request: HttpRequest, partition: Partition) -> HttpResponse:
    if request.scope is not None:  # type: ignore[attr-defined]
        return page(request, partition, "overview", template="console/mine.html")
    seen = live_view(request, partition)
    return page(
        request, partition, "overview", seen, firing=_firing(partition), **past(request, partition, seen.slo_ttft_s)
    )


@partition_view("viewer")
def period(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The tables of the charts' time range again; `?part=reuse` is what the KV reuse page shows of them."""
    template = "console/_period_reuse.html" if request.GET.get("part") == "reuse" else "console/_period.html"
    return render(request, template, {"partition": partition} | past(request, partition, slo_ttft_s(partition)))


def _firing(partition: Partition) -> list[dict[str, str]]:
    """The gravest alerts, each with the page to look at."""
    order = [severity.value for severity in Severity]
    rows = sorted(
        Alert.objects.filter(partition=partition, state=AlertState.FIRING),
        key=lambda alert: (alert.acknowledged_at is not None, order.index(alert.severity)),
    )
    return [
        {
            "title": BY_NAME[alert.rule].title if alert.rule in BY_NAME else alert.rule,
            "summary": alert.summary,
            "tone": Severity(alert.severity).tone,
            "page": BY_NAME[alert.rule].page if alert.rule in BY_NAME else "alerts",
            "since": f"{alert.since.timestamp():.0f}",
        }
        for alert in rows[:ALERTS_SHOWN]
    ]
