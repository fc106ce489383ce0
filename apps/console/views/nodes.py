"""Every node: what it does, how full and how healthy it is, and which phases it had."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_http_methods

from apps.console.access import partition_view
from apps.console.forms import ForceNodeForm, ReasonForm
from apps.console.timeline import SPANS_MIN, Move, lanes, ticks
from apps.console.views.actions import answer, posted
from apps.console.views.shell import page
from apps.planning import services
from apps.planning.models import SwitchStep
from apps.planning.selectors import forced_phases
from apps.topology.models import ConfigurationVersion, Node, Partition
from apps.topology.selectors import nodes_of

form_view = require_http_methods(["GET", "POST"])


@partition_view("viewer")
def nodes(request: HttpRequest, partition: Partition) -> HttpResponse:
    rows = {node.name: node for node in nodes_of(partition)}
    lanes_shown = _timeline(request, partition, list(rows.values()))
    return page(request, partition, "nodes", stored=rows, forced=forced_phases(partition), **lanes_shown)


@partition_view("viewer")
def timeline(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The lanes again, as time goes on."""
    context = {"partition": partition} | _timeline(request, partition, list(nodes_of(partition)))
    return render(request, "console/_timeline.html", context)


def _timeline(request: HttpRequest, partition: Partition, rows: list[Node]) -> dict[str, Any]:
    asked = request.GET.get("minutes", "")
    minutes = int(asked) if asked in {str(span) for span in SPANS_MIN} else SPANS_MIN[0]
    now = time.time()
    start = now - minutes * 60
    steps = SwitchStep.objects.filter(order__partition=partition, began_at__isnull=False).filter(
        Q(finished_at=None) | Q(finished_at__gt=datetime.fromtimestamp(start, UTC))
    )
    moves = [
        Move(
            node=step.node,
            from_phase=step.from_phase,
            to_phase=step.to_phase,
            state=step.state,
            began=step.began_at.timestamp(),
            finished=step.finished_at.timestamp() if step.finished_at else None,
            order=step.order_id,
            reason=step.reason,
        )
        for step in steps.order_by("began_at")
        if step.began_at
    ]
    phases = {node.name: node.desired_phase for node in rows if node.enabled}
    first = ConfigurationVersion.objects.filter(partition=partition).order_by("version").only("created_at").first()
    known_since = first.created_at.timestamp() if first else now
    return {
        "lanes": lanes(phases, moves, start, now, known_since),
        "moves": sorted(moves, key=lambda move: -move.began),
        "ticks": ticks(start, now),
        "minutes": minutes,
        "spans": SPANS_MIN,
    }


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
