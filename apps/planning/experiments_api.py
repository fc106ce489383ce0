"""REST of experiments: published tables and claims of our own, measured in the simulator."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema, Status

from apps.planning import experiments
from controlplane.permissions import require
from controlplane.rest.schemas import Reason

router = Router(tags=["experiments"])


class LineOut(Schema):
    """Ours is the mean over `seeds` runs, `spread` their standard deviation, `ratio` ours over the published one."""

    case: str
    figure: str
    unit: str
    value: float | None
    spread: float | None
    published: float | None
    ratio: float | None
    seeds: int


class VerdictOut(Schema):
    """`aim` is at_least or at_most; `met` is null where it was not run."""

    text: str
    value: float | None
    target: float
    aim: str
    met: bool | None


class ReportOut(Schema):
    found: list[LineOut]
    verdicts: list[VerdictOut]
    notes: list[str]
    configuration: dict[str, Any]


class ExperimentJobOut(Schema):
    """`state` is waiting, running, done, failed, cancelled or interrupted (its worker died); `progress` 0 to 1. `stopping`: it was
    cancelled, and ends after the run that is being made."""

    state: str
    progress: float = 0.0
    step: str = ""
    stopping: bool = False
    problem: str = ""
    asked_by: str = ""
    reason: str = ""
    quick: bool = True


class ExperimentOut(Schema):
    name: str
    title: str
    measured_at: datetime | None
    problem: str
    job: ExperimentJobOut | None


class ExperimentDetail(ExperimentOut):
    """`report` is null where nothing was run yet."""

    report: ReportOut | None


class StartIn(Reason):
    """`quick`: one seed and half of the scored time."""

    quick: bool = True


def _shown(found: experiments.Experiment, detail: bool = False) -> dict[str, Any]:
    at = None if found.measured_at is None else datetime.fromtimestamp(found.measured_at, UTC)
    shown = {"name": found.name, "title": found.title, "measured_at": at, "problem": found.problem, "job": found.job}
    return shown | {"report": found.report} if detail else shown


@router.get("/experiments", response=list[ExperimentOut])
def list_experiments(request: HttpRequest) -> Any:
    require(request, "viewer")
    return [_shown(found) for found in experiments.experiments()]


@router.get("/experiments/{name}", response=ExperimentDetail)
def get_experiment(request: HttpRequest, name: str) -> Any:
    require(request, "viewer")
    return _shown(experiments.experiment_named(name), detail=True)


@router.post("/experiments/{name}/start", response={202: ExperimentOut})
def start_experiment(request: HttpRequest, name: str, payload: StartIn) -> Any:
    """A worker makes the runs that are missing; 409 `experiment-running` while one is under way."""
    actor = require(request, "operator")
    return Status(202, _shown(experiments.start(name, actor, payload.reason, quick=payload.quick)))


@router.post("/experiments/{name}/cancel", response=ExperimentOut)
def cancel_experiment(request: HttpRequest, name: str, payload: Reason) -> Any:
    """It stops after the run that is being made; 409 `experiment-not-running` when it is not under way."""
    actor = require(request, "operator")
    return _shown(experiments.cancel(name, actor))
