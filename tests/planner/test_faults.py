"""Processes that die in the middle of a switch: the next ones finish it, or take it back; never in between for ever."""

import time

import pytest
from celery import current_app

from apps.planning import services
from apps.planning.models import Decision, ForcedSplit, PlannerPolicy, SwitchOrder
from apps.topology import services as topology
from apps.topology.models import Node
from controlplane.actors import SYSTEM
from tests.factories import actor_with, make_partition
from tests.planner.fault_support import AgentHost, Gatekeeper, Workers, kill
from workers.planner import tasks

pytestmark = [pytest.mark.processes, pytest.mark.django_db(transaction=True)]
ADA = actor_with("administrator", "ada")
PHASES = ("prefill", "prefill", "decode", "decode")


@pytest.fixture
def agents(tmp_path):
    host = AgentHost(tmp_path / "agents", PHASES)
    yield host
    host.kill()


@pytest.fixture
def gatekeeper(agents):
    keeper = Gatekeeper(agents)
    yield keeper
    keeper.close()


@pytest.fixture
def workers(tmp_path):
    workers = Workers(tmp_path)
    yield workers
    workers.close()


@pytest.fixture
def partition(db, gatekeeper, redis_client):
    """Four nodes behind the gatekeeper, two in each phase."""
    partition = make_partition("gb300", PHASES)
    for node in Node.objects.filter(partition=partition):
        topology.update_node(node, SYSTEM, "where the agents are", url=gatekeeper.url(node.name))
    PlannerPolicy.objects.create(partition=partition, mode="approve", cooldown_s=1, drain_deadline_s=5)
    return partition


def forced(node="gb300-3", phase="prefill"):
    services.force_node(Node.objects.get(name=node), phase, ADA, "for a test")
    return SwitchOrder.objects.order_by("-id").first()


def state_of(order):
    return SwitchOrder.objects.get(pk=order.pk).state


@pytest.mark.parametrize("hold", ["before", "after"])
def test_a_worker_killed_while_it_pushes_leaves_an_order_that_the_next_one_finishes(
    partition, agents, gatekeeper, workers, wait_for, hold
):
    """`before`: ordered, and the agent has heard nothing. `after`: the agent obeys, and nobody has recorded it."""
    first = workers.start()
    gatekeeper.hold = hold
    order = forced()
    assert gatekeeper.stuck.wait(30), "the push was never sent"
    kill(first)
    heard = agents.status("gb300-3")["generation"]
    assert heard == (0 if hold == "before" else 1)
    assert not order.steps.get().accepted
    gatekeeper.release()
    time.sleep(0.5)
    assert state_of(order) == "draining", "nobody drives"

    began = time.monotonic()
    workers.start()
    wait_for(lambda: state_of(order) in ("cooling", "done"), 30)
    took_s = time.monotonic() - began
    assert took_s < 20, "a start, and one round of the reconciler"
    assert agents.phase("gb300-3") == "prefill"
    node = Node.objects.get(name="gb300-3")
    assert (node.desired_phase, node.generation, node.draining) == ("prefill", 1, False)


@pytest.mark.parametrize("hold", ["before", "after"])
def test_a_switch_rolled_back_after_its_worker_was_killed_ends_where_it_began(
    partition, agents, gatekeeper, workers, wait_for, hold
):
    """The node is sent back under a newer generation, and what the dead worker said to it counts no more."""
    first = workers.start(beat=False)
    gatekeeper.hold = hold
    order = forced()
    assert gatekeeper.stuck.wait(30), "the push was never sent"
    kill(first)
    gatekeeper.release()
    services.roll_back(order, ADA, "not after all")
    workers.start(beat=False)
    wait_for(lambda: state_of(order) == "rolled-back", 30)
    wait_for(lambda: agents.status("gb300-3")["generation"] == 2, 10)
    node = Node.objects.get(name="gb300-3")
    assert (node.desired_phase, node.generation, node.draining) == ("decode", 2, False)
    assert not ForcedSplit.objects.filter(cleared_at=None).exists(), "or it would be ordered anew"
    late = agents.order("gb300-3", "prefill", 1)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "stale-generation")
    assert agents.phase("gb300-3") == "decode"


def test_the_task_of_a_killed_worker_returns_to_another_within_seconds(
    partition, agents, gatekeeper, workers, wait_for
):
    """No beat, so no reconciler: the broker alone brings the task back."""
    first = workers.start(beat=False)
    gatekeeper.hold = "before"
    order = forced()
    assert gatekeeper.stuck.wait(30)
    kill(first)
    gatekeeper.release()
    workers.start(beat=False)
    began = time.monotonic()
    wait_for(lambda: state_of(order) == "cooling", 25)
    assert time.monotonic() - began < 20
    assert agents.phase("gb300-3") == "prefill"
    assert current_app.conf.broker_transport_options["unacked_restore_throttle"] == 1


def test_an_agent_restarted_with_an_old_generation_is_told_again(partition, agents, wait_for):
    agents.remember()
    order = forced()
    assert tasks.drive_switch(order.pk) == "cooling"
    agents.kill()
    agents.restore()
    agents.start()
    assert (agents.phase("gb300-3"), agents.status("gb300-3")["generation"]) == ("decode", 0)
    assert "gb300-3 told again to prefill" in tasks.reconcile(partition.name)
    wait_for(lambda: agents.phase("gb300-3") == "prefill", 5)
    assert agents.status("gb300-3")["generation"] == 1
    # What was said before its death is still refused.
    assert Node.objects.get(name="gb300-3").generation == 1


def test_an_agent_that_dies_in_the_middle_of_its_switch_is_switched_after_its_restart(
    partition, agents, gatekeeper, wait_for
):
    agents.remember()
    order = forced()
    agents.kill()
    assert tasks.drive_switch(order.pk, budget_s=0.3) == "draining"
    agents.restore()
    agents.start()
    assert tasks.drive_switch(order.pk) == "cooling"
    assert agents.phase("gb300-3") == "prefill"


def test_two_workers_with_two_beats_make_each_decision_once_and_drive_a_switch_to_its_end(
    partition, agents, workers, wait_for
):
    PlannerPolicy.objects.update(slice_s=2, slices_per_window=5, mode="automatic")
    workers.start()
    workers.start()
    order = forced()
    wait_for(lambda: state_of(order) == "done", 45)
    assert agents.phase("gb300-3") == "prefill"
    wait_for(lambda: Decision.objects.exists(), 30)
    ends = list(Decision.objects.values_list("window_end", flat=True))
    assert len(ends) == len(set(ends))
    assert Decision.objects.first().rule in ("forced", "too_few_slices")
    starts = list(partition.slices.values_list("t0", flat=True))
    assert len(starts) == len(set(starts))
