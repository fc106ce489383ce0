"""Experiments of the simulator on the What-if page: one opened, one asked for, one cancelled."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_http_methods

from apps.console import experiments as shown
from apps.console.access import partition_view
from apps.console.exports import json_response
from apps.console.forms import ReasonForm, RunForm
from apps.console.views.actions import answer, posted
from apps.console.views.shell import page
from apps.planning import experiments
from apps.topology.models import Partition
from controlplane.errors import NotFound

form_view = require_http_methods(["GET", "POST"])


def _named(name: str) -> experiments.Experiment:
    try:
        return experiments.experiment_named(name)
    except NotFound:
        raise Http404("There is no such experiment.") from None


@partition_view("viewer")
def experiment(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    """What was found beside what was published; `?format=json` is the report itself."""
    found = _named(name)
    if request.GET.get("format") == "json":
        return json_response(f"{name}.json", found.report)
    context: dict[str, Any] = {
        "experiment": shown.detail(found),
        "template": "console/experiment.html",
        "title": found.title,
    }
    return page(request, partition, "whatif", **context)


@partition_view("operator")
@form_view
def run_experiment(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    found = _named(name)
    form = RunForm(posted(request), prefix="run-experiment")

    def write() -> str:
        quick = form.cleaned_data["how"] == "quick"
        experiments.start(name, request.actor, form.reason_given, quick=quick)  # type: ignore[attr-defined]
        return f"A worker runs “{found.title}”; its progress and result appear here."

    return answer(
        request, form, write, slot="experiment-slot", title=found.title, submit="Run it in the simulator",
        about="Takes minutes to hours of one core. Runs that were made before are kept and not made again.",
    )  # fmt: skip


@partition_view("operator")
@form_view
def cancel_experiment(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    found = _named(name)
    form = ReasonForm(posted(request), prefix="cancel-experiment")

    def write() -> str:
        experiments.cancel(name, request.actor)  # type: ignore[attr-defined]
        return f"“{found.title}” stops after the run that is being made; those made so far are kept."

    return answer(
        request, form, write, slot="experiment-slot", title=f"Cancel “{found.title}”", submit="Cancel the experiment",
        danger=True,
    )  # fmt: skip
