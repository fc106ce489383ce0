"""What every page of a partition shares: navigation, roles, the last snapshot."""

from __future__ import annotations

import time
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from apps.console import live
from apps.console.access import slo_ttft_s
from apps.console.present import present
from apps.topology.models import Partition
from controlplane import permissions

PAGES = (("overview", "Overview"), ("queues", "Queues"), ("split", "Split"), ("nodes", "Nodes"))
Live = tuple[dict[str, Any] | None, float | None]
THEMES = ("auto", "light", "dark")


def page(
    request: HttpRequest, partition: Partition, name: str, seen: Live | None = None, **context: Any
) -> HttpResponse:
    """Renders `console/<name>.html` inside the shell, with the partition's last snapshot as `view` (None when silent).

    `seen` is for a page that has read the live state already.
    """
    view, slo = seen or live_view(partition)
    shell = {
        "page": name,
        "pages": PAGES,
        "title": dict(PAGES)[name],
        "partition": partition,
        "partitions": list(Partition.objects.order_by("name")),
        "view": view,
        "slo_ttft_s": slo,
        "stale_after_s": live.STALE_AFTER_S,
    }
    return render(request, f"console/{name}.html", shell | abilities(request) | theme(request) | context)


def live_view(partition: Partition) -> Live:
    """The last snapshot, ready to show (None when the gateway is silent), and the TTFT target in seconds."""
    snapshot, slo = live.last_snapshot(partition), slo_ttft_s(partition)
    return present(snapshot, time.time(), slo) if snapshot else None, slo


def abilities(request: HttpRequest) -> dict[str, bool]:
    """What the person behind the request may do; templates hide what is not allowed, views refuse it."""
    actor = permissions.actor_of(request)
    return {
        f"can_{verb}": permissions.has_role(actor, role)
        for verb, role in (("operate", "operator"), ("administer", "administrator"))
    }


def theme(request: HttpRequest) -> dict[str, str]:
    chosen = request.COOKIES.get("theme", "auto")
    return {"theme": chosen if chosen in THEMES else "auto"}


@login_required
def home(request: HttpRequest) -> HttpResponse:
    """Opens the first partition's overview; says what to do when there is none yet."""
    permissions.require(request, "viewer")
    first = Partition.objects.order_by("name").first()
    if first is None:
        return render(request, "console/no_partition.html", theme(request))
    return redirect("overview", partition=first.name)
