"""Dry runs: a split tried in the simulator from the live state, with real agents' limits; and what keeps one from running."""

from datetime import timedelta

import pytest
from django.utils import timezone

from apps.planning import dryruns, services
from apps.planning.models import DryRun, Slice
from apps.planning.selectors import split_view
from apps.telemetry.models import LoadWindow
from apps.topology import configuration
from controlplane.actors import SYSTEM
from controlplane.errors import Conflict
from controlplane.permissions import Forbidden
from tests.factories import actor_with
from workers.planner import simulating, tasks
from workers.planner.live_state import NothingToSimulate, live_state
from workers.planner.simulating import LiveState, NodeLimits, compare

BOB, EVE = actor_with("operator", "bob"), actor_with("viewer", "eve")
# Short prompts and long answers: decode limits, so 1P3D carries more than 2P2D.
LOAD = {"t_uc": 640.0, "pairs": 640 * 2000.0, "t_rst": 0.0, "t_out": 900.0, "t_acc": 2.2, "u_tokens": 2048.0}


@pytest.fixture
def measured(partition, tenant):
    """A window of such load, of 60 requests in flight that pause 5 s."""
    for index in range(10):
        t0 = 12.0 * index
        Slice.objects.create(
            partition=partition, t0=t0, t1=t0 + 12, workload={**LOAD, "in_flight": 60.0}, rate=6.0, think_s=5.0
        )
        LoadWindow.objects.create(partition=partition, t0=t0, t1=t0 + 2, prefilled=12, t_c=12 * 1280)
    configuration.publish(partition, SYSTEM, "for a dry run")
    return partition


def test_the_candidate_is_compared_with_the_present_split_under_the_measured_load(measured):
    run = dryruns.ask(measured, ["gb300-1"], BOB)
    assert (run.state, run.decode) == ("waiting", ["gb300-2", "gb300-3", "gb300-4"])
    assert tasks.dry_run(run.pk) == "done"
    run.refresh_from_db()
    assert run.state == "done"
    result = run.result
    assert result["agents"] == 90 and result["think_measured"]
    assert result["candidate"]["throughput_rps"] > 1.15 * result["current"]["throughput_rps"]
    assert result["gain_rps"] == pytest.approx(
        result["candidate"]["throughput_rps"] - result["current"]["throughput_rps"]
    )
    assert result["current"]["ttft_p95_s"] > 0 and result["cpu_s"] < 60


def test_a_proposal_carries_the_result_of_its_dry_run(measured):
    proposal = services.propose(measured, ["gb300-1"], BOB, "longer answers", _soon())
    run = DryRun.objects.get(proposal=proposal)
    assert split_view(measured)["open_proposal"]["dry_run"]["state"] == "waiting"
    tasks.dry_run(run.pk)
    shown = split_view(measured)["open_proposal"]["dry_run"]
    assert (shown["state"], shown["result"]["gain_rps"] > 0) == ("done", True)


def _soon():
    return timezone.now() + timedelta(minutes=5)


def test_a_dry_run_needs_an_operator_a_sensible_split_and_a_measured_load(partition):
    with pytest.raises(Forbidden):
        dryruns.ask(partition, 1, EVE)
    with pytest.raises(Conflict, match="measured"):
        dryruns.ask(partition, 1, BOB)


def test_one_at_a_time_and_one_whose_worker_died_does_not_stand_in_the_way_for_ever(measured):
    run = dryruns.ask(measured, 1, BOB)
    with pytest.raises(Conflict, match="under way"):
        dryruns.ask(measured, 3, BOB)
    assert dryruns.begin(run) and not dryruns.begin(run)
    DryRun.objects.update(asked_at="2020-01-01T00:00:00Z")
    assert dryruns.ask(measured, 3, BOB).state == "waiting"
    run.refresh_from_db()
    assert (run.state, "no result" in run.problem) == ("failed", True)


def test_without_agents_it_fails_saying_so(measured, yard):
    run = dryruns.ask(measured, 1, BOB)
    yard.stop()
    assert tasks.dry_run(run.pk).startswith("failed: 0 nodes answer")
    run.refresh_from_db()
    assert run.state == "failed" and "0 nodes answer" in run.problem


def test_the_same_state_gives_the_same_result(measured, monkeypatch):
    state = live_state(measured)
    assert state.t_c == 1280
    assert isinstance(state, LiveState) and state.limits["gb300-1"] == NodeLimits(1000, 1_000_000, 8192)
    assert state.workload.t_uc == LOAD["t_uc"] and state.workload.in_flight == 60.0
    for name in ("WARM_UP_REQUESTS", "SCORED_REQUESTS", "SHORTEST_S"):
        monkeypatch.setattr(simulating, name, 20)
    one = compare(state, ["gb300-1", "gb300-2"], ["gb300-1"], seed=3)
    two = compare(state, ["gb300-1", "gb300-2"], ["gb300-1"], seed=3)
    assert {**one, "cpu_s": 0} == {**two, "cpu_s": 0}
    with pytest.raises(NothingToSimulate):
        Slice.objects.all().delete()
        live_state(measured)
