"""Capacity questions: searched by simulation, told how far, stopped, kept; wrong ones are refused by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from workers.simulator import capacity
from workers.simulator.capacity import Job, Planner, Question, QuestionError
from workers.simulator.experiments.runs import Cancelled
from workers.simulator.tasks import plan_capacity

SMALL: dict[str, Any] = {"workload": "Putnam", "nodes": 3, "agents": 6, "warm_up_s": 20.0, "scored_s": 40.0}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kind": "best"}, "kind"),
        ({"nodes": 1}, "nodes"),
        ({"agents": "many"}, "agents"),
        ({"slo_ttft_s": 0}, "slo_ttft_s"),
        ({"workload": "chess"}, "workload"),
        ({"hardware": "abacus"}, "hardware"),
        ({"colour": "red"}, "colour"),
        ({"scored_s": True}, "scored_s"),
    ],
)
def test_a_wrong_question_is_refused_by_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(QuestionError, match=f"^{field}: expected") as refused:
        Question.parse({"kind": "best-split", **change})
    assert refused.value.field == field


def test_the_best_split_is_found_and_every_trial_is_told() -> None:
    told: list[tuple[float, str]] = []

    def progress(share: float, text: str) -> bool:
        told.append((share, text))
        return True

    answer = Planner(Question.parse({"kind": "best-split", **SMALL}), progress).run()
    assert answer.best is not None
    assert {trial.prefill_nodes for trial in answer.trials} == {1, 2}
    assert answer.best.throughput_rps == max(trial.throughput_rps for trial in answer.trials if trial.carried)
    assert told[0][1] == "1P2D with 6 agents" and told[-1] == (1.0, "done")
    assert [share for share, _ in told] == sorted(share for share, _ in told)


def carried_up_to(limit: int, per_node: float) -> Any:
    """Stands for the simulator: a load is carried while it is small enough for the nodes."""

    def execute(spec: Any) -> dict[str, Any]:
        agents = spec.populations[0][1][0][1]
        fine = agents <= limit and agents <= per_node * spec.nodes
        return {
            "ttft_p95_s": 1.0 if fine else 99.0,
            "failed": 0,
            "requests": 10,
            "throughput_rps": float(agents),
            "e2e_mean_s": 1.0,
        }

    return execute


def test_the_most_load_lies_within_five_percent_of_where_the_slo_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "execute", carried_up_to(137, 1e9))
    answer = Planner(Question.parse({"kind": "max-load", "nodes": 4})).run()
    assert answer.best is not None
    assert 128 <= answer.best.agents <= 137


def test_the_fewest_nodes_are_found_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "execute", carried_up_to(10_000, 9.5))
    answer = Planner(Question.parse({"kind": "nodes-needed", "agents": 100})).run()
    assert answer.best is not None and answer.best.nodes == 11


def test_a_load_that_nothing_carries_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "execute", carried_up_to(0, 0))
    answer = Planner(Question.parse({"kind": "max-load", "nodes": 4})).run()
    assert answer.best is None and "not even" in answer.reason


def test_a_job_tells_its_progress_can_be_cancelled_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "execute", carried_up_to(137, 1e9))
    job = Job(tmp_path, "one")
    seen: list[dict[str, Any]] = []
    write = Job._write

    def noting(self: Job, document: dict[str, Any]) -> None:
        seen.append(document)
        write(self, document)
        if len(seen) == 4:
            self.cancel()

    monkeypatch.setattr(Job, "_write", noting)
    job.run(Question.parse({"kind": "max-load", "nodes": 4}))
    assert seen[0]["state"] == "running"
    kept = job.read()
    assert kept is not None and kept["state"] == "cancelled" and kept["trials"]
    with pytest.raises(QuestionError, match="job_id"):
        Job(tmp_path, "../elsewhere")


def test_the_celery_task_and_the_command_answer_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    found = plan_capacity("two", {"kind": "best-split", **SMALL})
    assert found["state"] == "done"
    call_command(
        "capacity",
        "best-split",
        "--workload",
        "Putnam",
        "--nodes",
        "3",
        "--agents",
        "6",
        "--warm-up",
        "20",
        "--seconds",
        "40",
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["best"] == found["best"]
    with pytest.raises(CommandError, match="nodes: expected"):
        call_command("capacity", "best-split", "--nodes", "0")


def test_stopping_at_once_makes_no_run() -> None:
    planner = Planner(Question.parse({"kind": "best-split", **SMALL}), lambda share, text: False)
    with pytest.raises(Cancelled):
        planner.run()
    assert planner.answer.trials == []
