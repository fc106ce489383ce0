"""Experiments of the simulator: listed with what was found, asked for once, cancelled, made by the worker's task."""

import json

import pytest

from apps.planning import experiments
from controlplane.errors import Conflict, NotFound
from controlplane.permissions import Forbidden
from tests.factories import actor_with
from workers.simulator import tasks
from workers.simulator.experiments import making, registry, scale
from workers.simulator.experiments.shapes import QUICK, Experiment, Line

BOB = actor_with("operator", "bob")
LINE = {"case": "CC 90 ours", "figure": "throughput", "unit": "req/s", "value": 5.9, "spread": None, "published": 5.4,
        "ratio": 1.09, "seeds": 1}  # fmt: skip
REPORT = {
    "name": "bands",
    "title": "t",
    "found": [LINE],
    "verdicts": [],
    "notes": ["n"],
    "configuration": {"seeds": [1]},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    (tmp_path / "experiments").mkdir()
    return tmp_path / "experiments"


@pytest.fixture
def sent(monkeypatch):
    asked = []
    monkeypatch.setattr(experiments, "_send", lambda name, quick: asked.append((name, quick)))
    return asked


def test_the_catalogue_is_what_the_simulator_has():
    titles = {name: make(QUICK).title for name, make in registry.EXPERIMENTS.items()}
    assert {name: title for name, title in experiments.CATALOGUE.items() if name != scale.NAME} == titles
    assert tuple(experiments.CATALOGUE) == making.NAMES


def test_what_was_found_is_read_and_what_was_not_run_or_cannot_be_read_is_said(folder):
    (folder / "bands.json").write_text(json.dumps(REPORT))
    (folder / "fairness.json").write_text(json.dumps(REPORT | {"found": [LINE | {"seeds": 0, "value": None}]}))
    (folder / "guards.json").write_text("{")
    (folder / "balance.json").write_text('{"found": [{}]}')
    (folder / "shifting.json").write_text(json.dumps(REPORT).replace("5.9", "NaN"))
    found = {each.name: each for each in experiments.experiments()}
    assert found.keys() == experiments.CATALOGUE.keys()
    assert found["bands"].report["found"] == [LINE] and found["bands"].measured_at
    assert (found["fairness"].report, found["fairness"].problem) == (None, "")
    assert "guards.json cannot be read" in found["guards"].problem
    assert "balance.json cannot be read" in found["balance"].problem
    assert found["shifting"].report["found"][0]["value"] is None
    assert (found["motivation"].report, found["motivation"].measured_at) == (None, None)
    with pytest.raises(NotFound):
        experiments.experiment_named("../../etc/passwd")


def test_one_is_asked_for_at_a_time_by_an_operator(folder, sent):
    with pytest.raises(Forbidden):
        experiments.start("bands", actor_with("viewer"))
    assert experiments.start("bands", BOB, "for the meeting").job["state"] == "waiting"
    with pytest.raises(Conflict, match="bands is under way"):
        experiments.start("fairness", BOB)
    assert sent == [("bands", True)]
    assert experiments.cancel("bands", BOB).job["state"] == "cancelled"
    with pytest.raises(Conflict, match="not under way"):
        experiments.cancel("bands", BOB)
    experiments.start("fairness", BOB, quick=False)
    assert sent == [("bands", True), ("fairness", False)]


@pytest.fixture
def made(monkeypatch):
    """An experiment of two runs that take no time; the runs that were made."""

    def small(scope):
        lines = [
            Line(f"CC {agents}", "throughput", scope.spec("switchyard", "CC", agents), "throughput_rps", 4.0, "req/s")
            for agents in (10, 20)
        ]
        return Experiment("no-signals", "small", tuple(lines))

    def execute(spec):
        runs.append(spec)
        return {"throughput_rps": 5.0}

    runs = []
    monkeypatch.setitem(registry.EXPERIMENTS, "no-signals", small)
    monkeypatch.setattr("workers.simulator.experiments.runs.execute", execute)
    return runs


def test_the_worker_makes_the_runs_and_writes_the_report(folder, sent, made):
    experiments.start("no-signals", BOB)
    assert tasks.run_experiment("no-signals", True)["state"] == "done"
    assert len(made) == 2
    found = experiments.experiment_named("no-signals")
    assert [(line["value"], line["ratio"]) for line in found.report["found"]] == [(5.0, 1.25), (5.0, 1.25)]
    assert (found.job["state"], found.job["progress"], found.job["asked_by"]) == ("done", 1.0, "bob")


def test_a_cancelled_one_stops_after_the_run_that_is_being_made_and_goes_on_from_there(folder, sent, made, monkeypatch):
    def execute(spec):
        experiments.job("no-signals").cancel()
        return {"throughput_rps": 5.0}

    with monkeypatch.context() as patched:
        patched.setattr("workers.simulator.experiments.runs.execute", execute)
        experiments.start("no-signals", BOB)
        assert tasks.run_experiment("no-signals", True)["state"] == "cancelled"
    assert not (folder / "no-signals.json").exists()
    experiments.start("no-signals", BOB)
    assert tasks.run_experiment("no-signals", True)["state"] == "done"
    assert len(made) == 1, "one was made before"
