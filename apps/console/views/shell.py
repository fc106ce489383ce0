"""What every page of a partition shares: navigation, roles, the last snapshot, the open alerts, the time range."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.urls import reverse

from apps.console import live
from apps.console.access import partition_view, scope_of, slo_ttft_s
from apps.console.exports import csv_response
from apps.console.past import present_period
from apps.console.present import present
from apps.console.scoping import scoped
from apps.planning.choices import Mode
from apps.planning.models import PlannerPolicy
from apps.planning.selectors import live_forces
from apps.telemetry import alerting, periods, samples
from apps.telemetry.choices import AlertState
from apps.telemetry.models import Alert
from apps.telemetry.selectors import live_snapshot
from apps.tenancy.selectors import tenants_visible_to
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from controlplane import permissions
from controlplane.errors import Unavailable

# (address name, label, key after "g", whether a tenant user has it) in the order of the rail, by group.
GROUPS: tuple[tuple[str, tuple[tuple[str, str, str, bool], ...]], ...] = (
    (
        "Watch",
        (
            ("overview", "Overview", "o", True),
            ("queues", "Queues", "q", False),
            ("nodes", "Nodes", "n", False),
            ("requests", "Requests", "r", True),
            ("branches", "Branches", "b", True),
            ("reuse", "KV reuse", "k", False),
        ),
    ),
    ("Decide", (("split", "Split", "s", False), ("model", "Model", "m", False), ("whatif", "What-if", "w", False))),
    (
        "Manage",
        (
            ("tenants", "Tenants", "t", True),
            ("alerts", "Alerts", "a", False),
            ("audit", "Audit", "u", False),
            ("settings", "Settings", "e", False),
        ),
    ),
)
TITLES = {name: label for _, pages in GROUPS for name, label, _, _ in pages}
RANGES = {"5m": 300, "1h": 3600, "6h": 21_600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000}
THEMES = ("auto", "light", "dark")


class Seen(NamedTuple):
    """The last snapshot ready to show (`view`, None when there is none) and as it came; else `why` there is none."""

    view: dict[str, Any] | None
    slo_ttft_s: float | None
    snapshot: dict[str, Any]
    why: Unavailable | None = None


# Parts of a snapshot that only these pages show; the others are spared presenting hundreds of nodes and flows.
_BULKY = ("nodes", "bands", "recent")
_SHOW_ALL = frozenset({"overview", "queues", "nodes", "reuse"})


def page(
    request: HttpRequest, partition: Partition, name: str, seen: Seen | None = None, **context: Any
) -> HttpResponse:
    """Renders `console/<name>.html` inside the shell, with the partition's last snapshot as `view` (None when silent).

    `seen` is for a page that has read the live state already.
    """
    view, slo, _, why = seen or live_view(request, partition, whole=name in _SHOW_ALL)
    scope = request.scope  # type: ignore[attr-defined]
    groups = [(title, [entry for entry in pages if scope is None or entry[3]]) for title, pages in GROUPS]
    shell = {
        "page": name,
        "groups": [(title, pages) for title, pages in groups if pages],
        "title": TITLES.get(name, ""),
        "partition": partition,
        "partitions": list(Partition.objects.order_by("name")),
        "view": view,
        "unseen": why,
        "slo_ttft_s": slo,
        "stale_after_s": live.STALE_AFTER_S,
        "scope": sorted(scope) if scope is not None else None,
        "alerts_open": open_alerts(partition) if scope is None else 0,
        "unwatched": alerting.unwatched_since(partition, time.time()) if scope is None else None,
        "holds": holds(partition) if scope is None and name != "split" else [],
    }
    template = context.pop("template", f"console/{name}.html")
    return render(request, template, shell | abilities(request) | theme(request) | context)


def holds(partition: Partition) -> list[dict[str, Any]]:
    """What keeps the planner from deciding, for a banner on every page: forces and a freeze, by whom, why, how long."""
    found = [
        {
            "text": f"{force.node} is forced to {force.phases.get(force.node)}"
            if force.node
            else "The split is forced",
            "by": force.forced_by,
            "reason": force.reason,
            "until": force.expires_at.timestamp() if force.expires_at else None,
        }
        for force in live_forces(partition)
    ]
    policy = PlannerPolicy.objects.filter(partition=partition, mode=Mode.FROZEN).first()
    if policy is not None:
        until = policy.frozen_until.timestamp() if policy.frozen_until else None
        by, reason = policy.frozen_by or "someone", policy.freeze_reason
        found.append({"text": "The split is frozen", "by": by, "reason": reason, "until": until})
    return found


def open_alerts(partition: Partition) -> int:
    """Alerts that fire and that nobody has taken on yet."""
    return Alert.objects.filter(partition=partition, state=AlertState.FIRING, acknowledged_at=None).count()


def live_view(request: HttpRequest, partition: Partition, whole: bool = True) -> Seen:
    """The last snapshot and the TTFT target in seconds.

    Unless it is wanted `whole`, nodes, bands and recent requests are left out of the view.
    """
    slo = slo_ttft_s(partition)
    try:
        snapshot = live_snapshot(partition)
    except Unavailable as error:
        return Seen(None, slo, {}, error)
    shown = snapshot if whole else {part: value for part, value in snapshot.items() if part not in _BULKY}
    scope = request.scope  # type: ignore[attr-defined]
    if scope is not None:
        shown = scoped(shown, scope)
    return Seen(present(shown, time.time(), slo), slo, snapshot)


def last_snapshot(partition: Partition) -> dict[str, Any]:
    """The last snapshot as it came, empty when there is none."""
    try:
        return live_snapshot(partition)
    except Unavailable:
        return {}


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


def chosen_range(request: HttpRequest, default: str = "5m") -> str:
    """The time range in the URL, as one of `RANGES`."""
    asked = request.GET.get("range", default)
    return asked if asked in RANGES else default


def past(request: HttpRequest, partition: Partition, slo: float | None) -> dict[str, Any]:
    """The chosen time range and what requests came to in it; `slo` is the TTFT target in seconds."""
    name, now = chosen_range(request), time.time()
    found = periods.between(partition, now - RANGES[name], now, now)
    return {"range": name, "ranges": RANGES, "period": present_period(found, slo)}


@login_required
def home(request: HttpRequest) -> HttpResponse:
    """Opens the first partition's overview; says what to do when there is none yet."""
    actor = permissions.actor_of(request)
    if not permissions.has_role(actor, "tenant"):
        permissions.require(actor, "viewer")
    first = Partition.objects.order_by("name").first()
    if first is None:
        return render(request, "console/no_partition.html", theme(request))
    return redirect("overview", partition=first.name)


@partition_view("viewer")
def history(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The charts' points of a time range: JSON, or `?format=csv`."""
    now = time.time()
    points = samples.between(partition, now - RANGES[chosen_range(request, "1h")], now)
    if request.GET.get("format") == "csv":
        return csv_response(f"{partition.name}-history.csv", [_flat(point) for point in points])
    return JsonResponse({"points": points})


def _flat(point: dict[str, Any]) -> dict[str, Any]:
    """Nested members as `waiting.premium`."""
    flat: dict[str, Any] = {}
    for name, value in point.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": number for inner, number in value.items()}
        else:
            flat[name] = value
    return flat


@partition_view("viewer", tenants=True)
def palette(request: HttpRequest, partition: Partition) -> HttpResponse:
    """What the keyboard palette can go to: pages, partitions, nodes, tenants."""
    scope = scope_of(permissions.actor_of(request))
    entries = [
        {"label": label, "kind": "page", "keys": f"g {key}", "url": reverse(name, args=[partition.name])}
        for _, pages in GROUPS
        for name, label, key, for_tenants in pages
        if scope is None or for_tenants
    ]
    entries += [
        {"label": name, "kind": "partition", "url": reverse("overview", args=[name])}
        for name in Partition.objects.order_by("name").values_list("name", flat=True)
    ]
    if scope is None:
        url = reverse("nodes", args=[partition.name])
        entries += [{"label": n.name, "kind": "node", "url": f"{url}?q={n.name}"} for n in nodes_of(partition)[:1000]]
    url = reverse("requests", args=[partition.name])
    visible = tenants_visible_to(permissions.actor_of(request)).values_list("name", flat=True)
    entries += [{"label": name, "kind": "tenant", "url": f"{url}?tenant={name}"} for name in visible]
    return JsonResponse({"entries": entries, "find": f"{url}?q="})
