"""Experiments: published tables and claims of our own, measured in the simulator by a worker. Reads what lies in the data
folder, asks for runs, cancels them.

A report is `experiments/NAME.json`, written by `manage.py experiment` or a worker; each experiment has one job.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane import env
from controlplane.actors import Actor
from controlplane.audit import MAX_REASON_CHARS
from controlplane.errors import Conflict, InvalidField, NotFound, Unavailable
from controlplane.jobs import OPEN, Job
from controlplane.permissions import require

logger = logging.getLogger(__name__)
TASK = "simulator.run_experiment"
CATALOGUE: Mapping[str, str] = {
    "stationary": "Stationary load",
    "switches": "Switches and lost reuse",
    "balance": "Prefill queueing and load balance, CC",
    "shifting": "Shifting composition, Kimi K2.6",
    "best-static": "Each system at its own best static split",
    "open-loop": "Agents arrive at random, CC",
    "tp8-adp8": "TP8 prefill, ADP8 decode (assumed coefficients)",
    "fixed-4P5D": "CC 126 at a fixed 4P5D",
    "components": "One step at a time, CC 126 at 4P5D",
    "initial-split": "From which split it starts, CC 126",
    "adaptation-cost": "What adapting costs where nothing is to be adapted",
    "motivation": "What others do at CC 90",
    "scale-256": "From 36 to 256 GPUs",
    "guards": "TTFT guard and rollback on random arrivals",
    "no-signals": "Branches inferred without a harness's signals",
    "prefetch": "Contexts brought ahead for requests in the central queue",
    "bands": "Tenants' bands under overload",
    "fairness": "Token-fair beside round-robin",
    "sensitivity": "Coefficients 15 % off",
    "scale-3072": "8 partitions of 96 nodes with swinging composition",
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """`report` is None where nothing was run, `problem` says why a report could not be read. `measured_at` in unix seconds."""

    name: str
    title: str
    report: dict[str, Any] | None
    measured_at: float | None
    job: dict[str, Any] | None
    problem: str = ""

    @property
    def is_open(self) -> bool:
        return self.job is not None and self.job.get("state") in OPEN


def folder() -> Path:
    return env.data_folder() / "experiments"


def job(name: str) -> Job:
    return Job(folder() / "jobs", name)


def experiments() -> list[Experiment]:
    """All there are, whether they were run or not."""
    return [_experiment(name) for name in CATALOGUE]


def experiment_named(name: str) -> Experiment:
    """Raises NotFound."""
    if name not in CATALOGUE:
        raise NotFound("experiment", name)
    return _experiment(name)


def start(name: str, actor: Actor, reason: str = "", *, quick: bool = True) -> Experiment:
    """Ask a worker for it. Operator. `quick` is one seed and half of the scored time. Runs that were made before are not made
    again. Raises NotFound, Conflict while one is under way, Unavailable when no worker can be told."""
    require(actor, "operator")
    _check_reason(reason)
    experiment_named(name)
    busy = next((each for each in experiments() if each.is_open), None)
    if busy is not None:
        raise Conflict(f"experiment {busy.name} is under way; wait for it or cancel it", "experiment-running")
    asked = job(name)
    asked.ask({"asked_by": str(actor), "reason": reason, "quick": quick})
    try:
        _send(name, quick)
    except Exception as error:  # the broker's client has no common base class for "away"
        asked.cancel()
        logger.warning("experiment %s is not sent: the broker is away (%s)", name, error)
        raise Unavailable("no worker can be told: Redis is away") from None
    return _experiment(name)


def cancel(name: str, actor: Actor) -> Experiment:
    """Stops after the run that is being made; those made so far are kept. Operator. Raises NotFound, or Conflict when it is
    not under way."""
    require(actor, "operator")
    if not experiment_named(name).is_open:
        raise Conflict(f"experiment {name} is not under way", "experiment-not-running")
    job(name).cancel()
    return _experiment(name)


def _check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidField("reason", f"at most {MAX_REASON_CHARS} characters")


def _send(name: str, quick: bool) -> None:
    from controlplane.celery import app

    app.send_task(TASK, args=[name, quick], ignore_result=True, retry=False)


def _experiment(name: str) -> Experiment:
    path = folder() / f"{name}.json"
    report, at, problem = None, None, ""
    try:
        at = path.stat().st_mtime
        report = _checked(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{path.name} cannot be read ({type(error).__name__}); run the experiment again"
    if report is not None and not any(line["seeds"] for line in report["found"]):
        report, at = None, None  # written without runs
    return Experiment(name, CATALOGUE[name], report, at, job(name).read(), problem)


_LINE = ("case", "figure", "unit", "value", "spread", "published", "ratio", "seeds")
_VERDICT = ("text", "value", "target", "aim", "met")


def _checked(raw: Any) -> dict[str, Any]:
    """The report with exactly the fields that are shown. Raises KeyError or TypeError for anything else."""
    return {
        "found": [{field: _plain(line[field]) for field in _LINE} for line in raw["found"]],
        "verdicts": [{field: _plain(verdict[field]) for field in _VERDICT} for verdict in raw["verdicts"]],
        "notes": [str(note) for note in raw["notes"]],
        "configuration": dict(raw["configuration"]),
    }


def _plain(value: Any) -> Any:
    """Numbers that JSON cannot say are none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
