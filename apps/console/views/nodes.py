"""Every node: what it does, how full and how healthy it is, which phases it had; drain, force, remove."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_http_methods

from apps.console import exports, fleet
from apps.console.access import partition_view
from apps.console.filters import Filters, choice, read, text
from apps.console.forms import ConfirmForm, ForceNodeForm, ReasonForm
from apps.console.present import NODES_SHOWN, present_nodes
from apps.console.timeline import SPANS, Move, Window, lanes, ticks, trace, window
from apps.console.views.actions import answer, posted
from apps.console.views.shell import abilities, last_snapshot, live_view, page
from apps.planning import services
from apps.planning.models import SwitchStep
from apps.planning.selectors import forced_phases
from apps.telemetry.samples import KINDS, node_kind
from apps.topology import services as topology
from apps.topology.models import ConfigurationVersion, Node, Partition
from apps.topology.selectors import nodes_of

form_view = require_http_methods(["GET", "POST"])
LANES_SHOWN = 40
MOVES_SHOWN = 200
# What takes less of the time shown than this is thinner than a line on a screen.
LEAST_SHARE = 0.0004
# What a page shows of nodes is in none of these, and they are most of a row.
_BULKY = ("coefficients", "direct", "url")


class Known(NamedTuple):
    """What the timeline needs to know of a node."""

    name: str
    phase: str
    order: int
    enabled: bool


@partition_view("viewer")
def nodes(request: HttpRequest, partition: Partition) -> HttpResponse:
    known = _known(partition)
    filters = _filters(request)
    still = _still(filters, len(known))
    seen = live_view(request, partition, whole=not still)
    context: dict[str, Any] = {"filters": filters, "still": still}
    if still:
        context |= _narrowed(request, filters, seen.snapshot)
    stored = _stored(partition, context["chosen"] if still and seen.view else None)
    context |= _timeline(request, partition, known)
    return page(request, partition, "nodes", seen, stored=stored, forced=forced_phases(partition), **context)


@partition_view("viewer")
def node_list(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The cards again, of a list too long to be kept up to date by the live feed."""
    context = _narrowed(request, _filters(request), last_snapshot(partition)) | abilities(request)
    stored = _stored(partition, context["chosen"])
    context |= {"partition": partition, "stored": stored, "forced": forced_phases(partition)}
    return render(request, "console/_node_list.html", context)


def _known(partition: Partition) -> list[Known]:
    return [Known(*row) for row in nodes_of(partition).values_list("name", "desired_phase", "order", "enabled")]


def _stored(partition: Partition, shown: Iterable[dict[str, Any]] | None) -> dict[str, Node]:
    """By name: those that are shown as cards, and those that are out of service; all of them when `shown` is None."""
    rows = nodes_of(partition).defer(*_BULKY)
    if shown is not None:
        rows = rows.filter(Q(name__in=[row["name"] for row in shown]) | Q(enabled=False))
    return {node.name: node for node in rows}


def _filters(request: HttpRequest) -> Filters:
    orders = [(name, label) for name, (label, _) in fleet.ORDERS.items()]
    return read(
        request,
        choice("kind", "Doing", KINDS),
        choice("sort", "Order", orders, fleet.ATTENTION),
        text("q", "Node", "part of the name"),
    )


def _still(filters: Filters, total: int) -> bool:
    """Whether the cards are chosen ones, as they are now, and not all of them, kept up to date by the live feed."""
    chosen = filters.value("kind") or filters.value("q") or filters.value("sort") != fleet.ATTENTION
    return bool(chosen) or total > NODES_SHOWN


def _narrowed(request: HttpRequest, filters: Filters, snapshot: dict[str, Any]) -> dict[str, Any]:
    """Cards that stand still: a page of those that fit, and how many there are of each kind."""
    named = fleet.named(snapshot.get("nodes") or [], filters.value("q"))
    found = [node for node in named if filters.value("kind") in ("", node_kind(node))]
    asked = request.GET.get("page", "")
    number = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 1
    shown = fleet.page(found, filters.value("sort"), number)
    kinds = [{"kind": kind, "n": n, "query": filters.query(kind=kind)} for kind, n in fleet.counts(named)]
    return {
        "filters": filters,
        "still": True,
        "list": shown,
        "chosen": present_nodes(shown.rows),
        "kinds": kinds,
        "kinds_query": filters.query(kind=None),
        "kinds_total": len(named),
        "list_query": filters.query(page=shown.number),
        "previous_query": filters.query(page=shown.previous) if shown.previous else "",
        "next_query": filters.query(page=shown.next) if shown.next else "",
    }


@partition_view("viewer")
def timeline(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The lanes again, as time goes on; `?format=trace` (Perfetto), `csv` or `json` for all of them as a file."""
    kind = request.GET.get("format")
    found = _timeline(request, partition, _known(partition), whole=bool(kind))
    if kind == "trace":
        return exports.json_response(
            f"{partition.name}-phases.trace.json", trace(found["lanes"], found["window"].start)
        )
    rows = [
        {"node": lane["name"], "phase": part["kind"], "from": part["began"], "to": part["ended"], "what": part["text"]}
        for lane in found["lanes"]
        for part in lane["parts"]
    ]
    file = exports.exported(kind, f"{partition.name}-phases", rows)
    return file or render(request, "console/_timeline.html", {"partition": partition} | found)


def _timeline(request: HttpRequest, partition: Partition, known: list[Known], whole: bool = False) -> dict[str, Any]:
    """The lanes of as many nodes as fit, those first that switched lately."""
    now = time.time()
    shown = window(request.GET, now)
    steps = _steps(partition, shown)
    first = ConfigurationVersion.objects.filter(partition=partition).order_by("version").only("created_at").first()
    known_since = first.created_at.timestamp() if first else now
    wanted = request.GET.get("q", "").lower()
    chosen = [node for node in known if node.enabled and wanted in node.name.lower()]
    newest = _moves(steps.order_by("-began_at")) if whole else _moves(steps.order_by("-began_at")[:MOVES_SHOWN])
    ran, left_out = newest, 0
    if not whole:
        moved, left_out = {move.node for move in newest}, max(0, len(chosen) - LANES_SHOWN)
        if left_out:
            chosen.sort(key=lambda node: (node.name not in moved, node.order))
            del chosen[LANES_SHOWN:]
        if len(newest) == MOVES_SHOWN:
            ran = _moves(steps.filter(node__in=[node.name for node in chosen]))
    phases = {node.name: node.phase for node in chosen}
    moves = ran + _next_moves(partition, shown, phases)
    least_s = 0.0 if whole else shown.span_s * LEAST_SHARE
    return {
        "window": shown,
        "lanes": lanes(phases, moves, shown.start, shown.end, known_since, least_s),
        "lanes_left_out": left_out,
        "moves": newest,
        "ticks": ticks(shown.start, shown.end),
        "long_ticks": shown.span_s > 86_400,
        "spans": SPANS,
        "q": request.GET.get("q", ""),
    }


def _steps(partition: Partition, shown: Window) -> QuerySet[SwitchStep]:
    """Steps that ran within the window."""
    start, end = (datetime.fromtimestamp(at, UTC) for at in (shown.start, shown.end))
    running = Q(finished_at=None) | Q(finished_at__gt=start)
    return SwitchStep.objects.filter(running, order__partition=partition, began_at__lt=end)


def _next_moves(partition: Partition, shown: Window, names: Iterable[str]) -> list[Move]:
    """Of each node the first step after a window that lies in the past: it tells the phase at the window's end."""
    if shown.follows:
        return []
    end = datetime.fromtimestamp(shown.end, UTC)
    later = SwitchStep.objects.filter(order__partition=partition, began_at__gte=end, node__in=list(names))
    return _moves(later.order_by("node", "began_at").distinct("node"))


def _moves(steps: QuerySet[SwitchStep]) -> list[Move]:
    rows = steps.values_list("node", "from_phase", "to_phase", "state", "began_at", "finished_at", "order_id", "reason")
    return [
        Move(node, was, to, state, began.timestamp(), ended.timestamp() if ended else None, order, reason)
        for node, was, to, state, began, ended, order, reason in rows
        if began is not None
    ]


# -- force -----------------------------------------------------------------------------------------------------------


@partition_view("administrator")
@form_view
def force(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    node = get_object_or_404(nodes_of(partition), name=name)
    form = ForceNodeForm(node, posted(request))

    def write() -> str:
        phase = form.cleaned_data["phase"]
        services.force_node(node, phase, request.actor, form.reason_given, form.until)  # type: ignore[attr-defined]
        return f"{node.name} is forced to {phase}."

    return answer(
        request, form, write, slot=f"node-{name}-slot", title=f"Force a phase on {name}", submit=f"Force {name}",
        about="It drains first; running requests finish. The planner holds while a force is on.", danger=True,
    )  # fmt: skip


@partition_view("administrator")
@form_view
def clear(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    node = get_object_or_404(nodes_of(partition), name=name)
    form = ReasonForm(posted(request), prefix=f"clear-{name}")

    def write() -> str:
        ended = services.clear_force(partition, request.actor, form.reason_given, node.name)  # type: ignore[attr-defined]
        return (
            f"{name} is no longer forced."
            if ended
            else f"{name} was not forced by itself; the Split page ends a forced split."
        )

    return answer(
        request, form, write, slot=f"node-{name}-slot", title=f"End the force on {name}", submit="End the force",
        about="It keeps its phase until the planner or a person changes it.",
    )  # fmt: skip


# -- service ---------------------------------------------------------------------------------------------------------


@partition_view("operator")
@form_view
def drain(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    return _serve(
        request, partition, name, topology.drain_node, "drain", "Drain", "takes no new work",
        "Running requests finish; new ones go elsewhere. Its pool can still be fetched from.",
    )  # fmt: skip


@partition_view("operator")
@form_view
def undrain(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    return _serve(
        request, partition, name, topology.undrain_node, "undrain", "Bring back", "is back in service",
        "It takes new work of its phase again, at once.",
    )  # fmt: skip


@partition_view("operator")
@form_view
def remove(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    node = get_object_or_404(nodes_of(partition), name=name)
    form = ConfirmForm(name, posted(request), prefix=f"remove-{name}")

    def write() -> str:
        topology.disable_node(node, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"{name} is out of service; the gateway has forgotten it."

    return answer(
        request, form, write, slot=f"node-{name}-slot", title=f"Take {name} out of service", submit=f"Disable {name}",
        about="The gateway moves its requests elsewhere and forgets it and its pool. Drain it first to let them finish. "
        "It stays in the records and can be added again.", danger=True,
    )  # fmt: skip


@partition_view("administrator")
@form_view
def forget(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    node = get_object_or_404(nodes_of(partition), name=name)
    form = ConfirmForm(name, posted(request), prefix=f"forget-{name}")

    def write() -> str:
        services.forget_node(node, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"{name} is forgotten."

    return answer(
        request, form, write, slot=f"node-{name}-slot", title=f"Forget {name}", submit=f"Forget {name}",
        about="For hardware that is gone: it is taken out of the records for good. What it did keeps its name.",
        danger=True,
    )  # fmt: skip


@partition_view("operator")
@form_view
def add(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    return _serve(
        request, partition, name, topology.enable_node, "add", "Add", "is in service again",
        "The gateway connects to its agent and asks what its pool holds.",
    )  # fmt: skip


def _serve(
    request: HttpRequest, partition: Partition, name: str, write_to: Callable[..., Node], prefix: str, verb: str,
    done: str, about: str,
) -> HttpResponse:  # fmt: skip
    node = get_object_or_404(nodes_of(partition), name=name)
    form = ReasonForm(posted(request), prefix=f"{prefix}-{name}")

    def write() -> str:
        write_to(node, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"{name} {done}."

    return answer(
        request, form, write, slot=f"node-{name}-slot", title=f"{verb} {name}", submit=f"{verb} {name}", about=about
    )
