"""What-if, experiments: the list, one opened, its chart, and what is said when nothing was run or a file is broken."""

import json

import pytest

from apps.planning import experiments
from tests.planning.test_experiments import LINE, REPORT

WHATIF = "/p/gb300/what-if/"
ONE = f"{WHATIF}experiments/bands/"
VERDICT = {"text": "throughput over dynamo", "value": 1.3, "target": 2.0, "aim": "at_least", "met": False}


@pytest.fixture
def folder(tmp_path, monkeypatch, partition, live):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    monkeypatch.setattr(experiments, "_send", lambda name, quick: None)
    (tmp_path / "experiments").mkdir()
    return tmp_path / "experiments"


def text(answer):
    return answer.content.decode()


def test_every_experiment_is_listed_with_what_was_found(as_role, folder):
    (folder / "bands.json").write_text(json.dumps(REPORT | {"verdicts": [VERDICT, VERDICT | {"met": True}]}))
    (folder / "guards.json").write_text("{")
    page = text(as_role("operator").get(WHATIF))
    assert all(name in page for name in ("Stationary load", "Coefficients 15 % off"))
    assert "1 of 2 demands met" in page and "not run yet" in page and "guards.json cannot be read" in page
    assert "Run<span" not in text(as_role("viewer").get(WHATIF))


def test_one_is_opened_with_its_demands_chart_figures_and_configuration(as_role, folder):
    (folder / "bands.json").write_text(json.dumps(REPORT | {"verdicts": [VERDICT]}))
    client = as_role("viewer")
    page = text(client.get(ONE))
    assert "missed" in page and "≥ 2" in page and "1.09x" in page and "&quot;published&quot;: [5.4]" in page
    assert client.get(f"{ONE}?format=json").json()["found"] == [LINE]
    assert "Nothing of this was run here yet" in text(client.get(f"{WHATIF}experiments/fairness/"))
    assert client.get(f"{WHATIF}experiments/nope/").status_code == 404


def test_one_is_asked_for_followed_and_cancelled(as_role, folder):
    client = as_role("operator")
    done = client.post(f"{ONE}run/", {"run-experiment-how": "full", "run-experiment-reason": "for the meeting"})
    assert "A worker runs" in text(done)
    page = text(client.get(ONE))
    assert "waiting" in page and "for the meeting" in page and "every 3s" in page
    refused = client.post(f"{WHATIF}experiments/fairness/run/", {"run-experiment-how": "quick"})
    assert refused.status_code == 422 and "bands is under way" in text(refused)
    assert "stops after" in text(client.post(f"{ONE}cancel/", {}))
    assert "cancelled" in text(client.get(ONE)) and "every 3s" not in text(client.get(ONE))


def test_one_that_was_cancelled_says_that_it_is_stopping_until_its_worker_lets_go(as_role, folder):
    client, seen = as_role("operator"), []

    def work(progress):
        progress(0.3, "1/3 runs")
        client.post(f"{ONE}cancel/", {})
        seen.extend(text(client.get(address)) for address in (WHATIF, ONE))
        progress(0.6, "2/3 runs")
        return {}

    experiments.job("bands").ask({"asked_by": "robin", "quick": True})
    experiments.job("bands").carry_out({}, work)
    assert len(seen) == 2
    for page in seen:
        assert "stopping" in page and "it ends after the run that is being made" in page
        assert "cancel/" not in page, "nothing is left to cancel"
        assert "every 3s" in page
    assert "stopping" not in text(client.get(ONE))
