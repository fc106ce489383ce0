"""The cost model as it was learned, and what-if: splits tried in the simulator from the live state."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_http_methods

from apps.console.access import partition_view
from apps.console.experiments import row as experiment_row
from apps.console.exports import exported
from apps.console.forms import ReasonForm, TryForm
from apps.console.plan import dry_run
from apps.console.views.actions import answer, posted
from apps.console.views.shell import page
from apps.planning import dryruns, experiments, warmups
from apps.planning.models import DryRun, FittedModel
from apps.planning.selectors import dry_run_document, fit_with_residuals, running_warm_up
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of

form_view = require_http_methods(["GET", "POST"])
FITS_SHOWN = 12
RUNS_SHOWN = 30


@partition_view("viewer")
def model(request: HttpRequest, partition: Partition) -> HttpResponse:
    fits = [fit_with_residuals(fit) for fit in FittedModel.objects.filter(partition=partition)[:FITS_SHOWN]]
    file = exported(request.GET.get("format"), f"{partition.name}-fits", fits) if request.GET.get("format") else None
    if file is not None:
        return file
    in_use = [_fit(fit) for fit in fits if fit["state"] == "accepted"]
    context: dict[str, Any] = {
        "in_use": in_use,
        "others": [_fit(fit) for fit in fits if fit["state"] != "accepted"],
        "residuals": json.dumps({str(fit["id"]): fit["residuals"] for fit in in_use}),
        "warm_up": running_warm_up(partition),
    }
    return page(request, partition, "model", **context)


def _fit(fit: dict[str, Any]) -> dict[str, Any]:
    summary = fit["summary"] or {}
    parts = []
    for phase in ("prefill", "decode"):
        said = summary.get(phase) or {}
        columns = said.get("columns") or {}
        unsure = set(said.get("unidentified") or [])
        parts.append(
            {
                "phase": phase,
                "error": fit[f"{phase}_error_ratio"],
                "rows": fit[f"{phase}_rows"],
                "condition": said.get("condition"),
                "merged": [", ".join(group) for group in said.get("merged") or []],
                "odd": said.get("odd_nodes") or {},
                "coefficients": [
                    {"name": name, "value": f"{value:.4g}", "sure": name not in unsure, "spread": columns.get(name)}
                    for name, value in fit[phase].items()
                ],
            }
        )
    return fit | {"parts": parts, "nodes": summary.get("nodes") or [], "windows": summary.get("windows")}


@partition_view("administrator")
@form_view
def warm_up(request: HttpRequest, partition: Partition) -> HttpResponse:
    running = running_warm_up(partition)
    form = ReasonForm(posted(request), prefix="warm-up")

    def write() -> str:
        change = warmups.stop if running else warmups.start
        change(partition, request.actor, form.reason_given or "asked for in the console")  # type: ignore[attr-defined]
        return "The warm-up is stopped." if running else "The warm-up begins; the model is learned anew at its end."

    return answer(
        request, form, write, slot="model-slot", title="Stop the warm-up" if running else "Measure anew",
        submit="Stop it" if running else "Begin the warm-up",
        about="Nodes become mixed and their concurrency climbs rung by rung, so that every batch size is seen. Latency is "
        "higher meanwhile.", danger=not running,
    )  # fmt: skip


@partition_view("viewer")
def whatif(request: HttpRequest, partition: Partition) -> HttpResponse:
    runs = [dry_run_document(run) for run in DryRun.objects.filter(partition=partition).order_by("-id")[:RUNS_SHOWN]]
    file = exported(request.GET.get("format"), f"{partition.name}-what-if", runs)
    if file is not None:
        return file
    found = experiments.experiments()
    context: dict[str, Any] = {
        "runs": [dry_run(run) for run in runs],
        "experiments": [experiment_row(each) for each in found],
        "experiments_open": any(each.is_open for each in found),
    }
    return page(request, partition, "whatif", **context)


@partition_view("operator")
@form_view
def try_split(request: HttpRequest, partition: Partition) -> HttpResponse:
    nodes = list(nodes_of(partition).filter(enabled=True))
    form = TryForm(nodes, posted(request), prefix="try")

    def write() -> str:
        dryruns.ask(partition, form.cleaned_data["prefill_nodes"], request.actor, form.reason_given)  # type: ignore[attr-defined]
        return "The simulator tries it; the result appears here."

    return answer(
        request, form, write, slot="try-slot", title="Try a split", submit="Try it in the simulator",
        about="Replays the newest window's workload on this split and on the present one. No node changes anything.",
    )  # fmt: skip
