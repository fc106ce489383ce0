"""The split: what it is, what is proposed and forced, why, and every way to change it."""

from __future__ import annotations

import time
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_http_methods

from apps.console.access import partition_view
from apps.console.formats import plural
from apps.console.forms import ForceSplitForm, FreezeForm, ModeForm, ReasonForm
from apps.console.plan import present_plan, shown_detail
from apps.console.views.actions import answer, posted
from apps.console.views.shell import abilities, last_snapshot, live_view, page
from apps.planning import selectors, services
from apps.planning.choices import Mode
from apps.planning.models import Decision
from apps.telemetry.samples import node_kind
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from controlplane.errors import NotFound

form_view = require_http_methods(["GET", "POST"])
# What the page's own controls open in.
CONTROLS = "act-slot"


@partition_view("viewer")
def split(request: HttpRequest, partition: Partition) -> HttpResponse:
    seen = live_view(request, partition, whole=False)
    return page(request, partition, "split", seen, plan=_plan(partition, seen.snapshot))


@partition_view("viewer")
def state(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The part of the page that events make old."""
    context = {"partition": partition, "plan": _plan(partition, last_snapshot(partition))}
    return render(request, "console/_split_state.html", context | abilities(request))


def _plan(partition: Partition, snapshot: dict[str, Any]) -> dict[str, Any]:
    observed = {node.get("name"): node_kind(node) for node in snapshot.get("nodes") or []}
    return present_plan(selectors.split_view(partition, _decided), time.time(), observed)


def _decided(decision: Decision) -> dict[str, Any]:
    detail = _shown_detail(decision.pk, decision.at)
    decision.detail = detail
    return selectors.decision_document(decision) | {"candidates_total": detail["candidates_total"]}


@lru_cache(maxsize=8)
def _shown_detail(number: int, at: datetime) -> dict[str, Any]:
    """A decision is never changed, and its page is opened much more often than one is made."""
    return shown_detail(Decision.objects.values_list("detail", flat=True).get(pk=number, at=at))


# -- proposals and orders --------------------------------------------------------------------------------------------


def _proposal(partition: Partition, number: int) -> Any:
    try:
        return selectors.proposal_numbered(number, partition)
    except NotFound as error:
        raise Http404(error.message) from None


@partition_view("operator")
@form_view
def approve(request: HttpRequest, partition: Partition, number: int) -> HttpResponse:
    proposal = _proposal(partition, number)
    form = ReasonForm(posted(request), prefix="approve")

    def write() -> str:
        voted = services.approve(proposal, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return (
            f"Proposal {number} is approved; the switch is ordered."
            if voted.state == "approved"
            else "Your approval counts; more are needed."
        )

    moves = f"{len(proposal.prefill)}P{len(proposal.decode)}D"
    return answer(
        request, form, write, slot="proposal-slot", title=f"Approve proposal {number}", submit=f"Approve and switch to {moves}",
        about="Nodes that change their phase drain first; running requests finish.",
    )  # fmt: skip


@partition_view("operator")
@form_view
def reject(request: HttpRequest, partition: Partition, number: int) -> HttpResponse:
    proposal = _proposal(partition, number)
    form = ReasonForm(posted(request), prefix="reject")

    def write() -> str:
        services.reject(proposal, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"Proposal {number} is rejected."

    return answer(
        request, form, write, slot="proposal-slot", title=f"Reject proposal {number}", submit="Reject it",
        about="The split stays as it is. The planner may propose again at the end of its next window.", danger=True,
    )  # fmt: skip


@partition_view("operator")
@form_view
def roll_back(request: HttpRequest, partition: Partition, number: int) -> HttpResponse:
    try:
        order = selectors.order_numbered(number, partition)
    except NotFound as error:
        raise Http404(error.message) from None
    form = ReasonForm(posted(request), prefix=f"roll-back-{number}")

    def write() -> str:
        undo = services.roll_back(order, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"Order {number} turns back." if undo.pk == order.pk else f"Order {undo.pk} undoes order {number}."

    back = f"{len(order.from_prefill)}P{len(order.from_decode)}D"
    return answer(
        request, form, write, slot=f"order-{number}-slot", title=f"Roll back order {number}", submit=f"Roll back to {back}",
        about="Its nodes get their earlier phases again; each drains first.", danger=True,
    )  # fmt: skip


# -- force, freeze, mode ---------------------------------------------------------------------------------------------


@partition_view("administrator")
@form_view
def force(request: HttpRequest, partition: Partition) -> HttpResponse:
    nodes = list(nodes_of(partition).filter(enabled=True))
    form = ForceSplitForm(partition.name, nodes, posted(request))

    def write() -> str:
        chosen = form.cleaned_data["prefill_nodes"]
        services.force_split(partition, chosen, request.actor, form.reason_given, form.until)  # type: ignore[attr-defined]
        return f"The split is forced to {len(chosen)}P{len(nodes) - len(chosen)}D."

    return answer(
        request, form, write, slot=CONTROLS, title="Force a split", submit="Force this split",
        about="Goes over the planner's head, and replaces every earlier force. The planner holds meanwhile.", danger=True,
    )  # fmt: skip


@partition_view("administrator")
@form_view
def clear(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = ReasonForm(posted(request), prefix="clear")

    def write() -> str:
        ended = services.clear_force(partition, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return (
            f"{plural(ended, 'force')} ended; the planner decides again." if ended else "Nothing was forced any more."
        )

    return answer(
        request, form, write, slot=CONTROLS, title="End the force", submit="End every force",
        about="The split stays as it is until the planner or a person changes it.",
    )  # fmt: skip


@partition_view("administrator")
@form_view
def freeze(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = FreezeForm(posted(request), prefix="freeze")

    def write() -> str:
        services.freeze(partition, request.actor, form.reason_given, form.until)  # type: ignore[attr-defined]
        return "The split is frozen: the planner changes nothing."

    return answer(
        request, form, write, slot=CONTROLS, title="Freeze the split", submit="Freeze",
        about="The planner goes on measuring but changes and proposes nothing. A switch under way finishes.",
    )  # fmt: skip


@partition_view("administrator")
@form_view
def unfreeze(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = ReasonForm(posted(request), prefix="unfreeze")

    def write() -> str:
        policy = services.unfreeze(partition, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"The freeze is over; mode {Mode(policy.mode).label.lower()}."

    return answer(request, form, write, slot=CONTROLS, title="End the freeze", submit="Unfreeze")


@partition_view("administrator")
@form_view
def mode(request: HttpRequest, partition: Partition) -> HttpResponse:
    policy = selectors.policy_of(partition)
    now = policy.thaw_mode if policy.mode == Mode.FROZEN else policy.mode
    form = ModeForm(posted(request), initial={"mode": now}, prefix="mode")

    def write() -> str:
        chosen = form.cleaned_data["mode"]
        services.set_mode(partition, chosen, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"Mode {Mode(chosen).label.lower()} from now on."

    about = "Automatic: the planner switches by itself. Approve: it proposes and waits for a person. Advisory: it only says."
    if policy.mode == Mode.FROZEN:
        about += " Choosing a mode ends the freeze."
    return answer(request, form, write, slot=CONTROLS, title="Who decides", submit="Set the mode", about=about)
