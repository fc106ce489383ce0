"""A warm-up in the database: every node mixed, limits that climb, a fit at the ladder's end, and a split after it."""

import pytest

from apps.planning import learning, orders, services, warmups
from apps.planning.domain.phase_machine import StatusReported, Tick
from apps.planning.models import FittedModel, PlannerPolicy, SwitchOrder, WarmUp
from apps.topology import configuration
from apps.topology.models import Node
from controlplane.errors import Conflict
from controlplane.permissions import Forbidden
from tests.factories import actor_with
from tests.planner.telemetry import START, load, make_watched_partition, measure
from workers.planner import tasks

pytestmark = pytest.mark.django_db
ADA = actor_with("administrator", "ada")
BOB = actor_with("operator", "bob")


@pytest.fixture
def partition(redis_client):
    partition = make_watched_partition(warm_up_rung_s=12.0, warm_up_limit_s=300.0)
    Node.objects.update(decode_limit=16)
    return partition


def finish(order, at):
    """Every node of the order does as it is told."""
    for _ in range(12):
        state, _ = orders.advance(order.pk, at, Tick())
        for step in order.steps.all():
            report = StatusReported(step.node, step.to_phase, step.to_phase, "ready", step.generation)
            state, _ = orders.advance(order.pk, at, report)
        if state not in ("ordered", "draining", "switching"):
            return
    raise AssertionError(f"the order is {state}")


def newest():
    return SwitchOrder.objects.order_by("-id").first()


def phases():
    return [node.desired_phase for node in Node.objects.order_by("order")]


def limits(partition):
    return [node["decode_limit"] for node in configuration.latest(partition).document["nodes"]]


def begin(partition):
    warm_up = warmups.start(partition, ADA, "new hardware")
    finish(newest(), START)
    assert tasks.tick(partition.name, now=START).startswith("warm-up climbs")
    return warm_up


def climb(partition, start, end):
    said = []
    moment = start
    while moment <= end:
        said.append(tasks.tick(partition.name, now=moment))
        moment += 12.0
    return said


def test_every_node_serves_both_phases_and_their_limits_climb_the_ladder(partition):
    begin(partition)
    assert set(phases()) == {"mixed"}
    order = newest()
    assert (order.cause, order.ordered_by) == ("warm-up", "ada")
    assert limits(partition) == [1, 2, 4, 8, 16, 1, 2, 4, 8]
    (said,) = climb(partition, START + 12, START + 12)
    assert said.startswith("warm-up on rung 1")
    assert limits(partition) == [2, 4, 8, 16, 1, 2, 4, 8, 16]
    assert {node.decode_limit for node in Node.objects.all()} == {16}, "the rows keep the nodes' own"


def test_it_ends_with_a_fit_and_the_split_that_carries_most(partition):
    Node.objects.update(decode_limit=64)
    warm_up = begin(partition)
    measure(partition, START, START + 120)
    load(partition, START, START + 120)
    said = climb(partition, START + 12, START + 120)
    assert any(text.startswith("warm-up model learned") for text in said)
    warm_up.refresh_from_db()
    assert warm_up.state == "done"
    assert "learned" in warm_up.outcome
    assert FittedModel.objects.get().state == "accepted"
    order = newest()
    assert order.cause == "warm-up"
    assert len(order.to_prefill) + len(order.to_decode) == 9 and len(order.to_prefill) > 4
    assert limits(partition) == [64] * 9


def test_while_it_runs_the_planner_holds(partition):
    begin(partition)
    load(partition, START, START + 120)
    said = climb(partition, START + 12, START + 130)
    assert not any("switch (switch)" in text for text in said)


def test_without_anything_to_learn_from_it_gives_up_in_time_and_returns_the_nodes(partition):
    warm_up = begin(partition)
    said = climb(partition, START + 12, START + 312)
    assert any(text.startswith("warm-up given up") for text in said)
    warm_up.refresh_from_db()
    assert "0 usable windows" in warm_up.outcome
    finish(newest(), START + 320)
    assert phases() == ["prefill"] * 4 + ["decode"] * 5


def test_an_administrator_stops_it_and_the_nodes_return(partition):
    begin(partition)
    with pytest.raises(Forbidden):
        warmups.stop(partition, BOB, "no")
    warmups.stop(partition, ADA, "release day")
    finish(newest(), START + 5)
    assert phases() == ["prefill"] * 4 + ["decode"] * 5
    assert limits(partition) == [16] * 9
    with pytest.raises(Conflict, match="not warming up"):
        warmups.stop(partition, ADA, "again")


def test_a_stop_before_every_node_is_mixed_turns_the_order_round(partition):
    warmups.start(partition, ADA, "new hardware")
    order = newest()
    orders.advance(order.pk, START, Tick())
    warmups.stop(partition, ADA, "wrong cluster")
    order.refresh_from_db()
    assert order.undoing
    for _ in range(6):
        for step in order.steps.all():
            orders.advance(
                order.pk, START, StatusReported(step.node, step.to_phase, step.to_phase, "ready", step.generation)
            )
        orders.advance(order.pk, START, Tick())
    assert phases() == ["prefill"] * 4 + ["decode"] * 5


def test_a_forced_split_ends_it(partition):
    warm_up = begin(partition)
    services.force_split(partition, 3, ADA, "maintenance")
    assert tasks.tick(partition.name, now=START + 4).startswith("warm-up stopped")
    warm_up.refresh_from_db()
    assert (warm_up.state, "maintenance" in warm_up.outcome) == ("stopped", True)
    finish(newest(), START + 5)
    assert phases().count("prefill") == 3


def test_it_is_refused_while_another_runs_or_the_split_is_forced_or_frozen(partition):
    services.freeze(partition, ADA, "release day", None)
    with pytest.raises(Conflict, match="frozen"):
        warmups.start(partition, ADA, "now")
    services.unfreeze(partition, ADA, "over")
    begin(partition)
    with pytest.raises(Conflict, match="already"):
        warmups.start(partition, ADA, "now")


def test_a_policy_begins_it_by_itself_once_while_nothing_was_ever_learned(partition):
    assert tasks.tick(partition.name, now=START) == "nothing to decide"
    PlannerPolicy.objects.update(auto_warm_up=True)
    assert tasks.tick(partition.name, now=START + 2) == "warm-up begins"
    warmups.stop(partition, ADA, "later")
    assert WarmUp.objects.count() == 1
    tasks.tick(partition.name, now=START + 4)
    assert WarmUp.objects.count() == 1


def test_learning_anew_replaces_an_older_fit(partition):
    measure(partition, START - 600, START - 400)
    (old,) = learning.refit(partition, START - 400)
    begin(partition)
    measure(partition, START, START + 120)
    climb(partition, START + 12, START + 120)
    old.refresh_from_db()
    assert (old.state, old.retired_reason) == ("retired", "a warm-up has measured it anew")
    assert FittedModel.objects.filter(state="accepted").count() == 1


def test_a_warm_up_whose_phases_cannot_be_given_back_ends_and_says_so(partition):
    begin(partition)
    Node.objects.exclude(order=0).update(enabled=False)  # only one that prefilled is left
    ended = warmups.stop(partition, ADA, "enough")
    assert (ended.state, newest().cause, phases()[0]) == ("stopped", "warm-up", "mixed")
    assert "the nodes serve both phases still: no enabled node would decode" in ended.outcome
    assert tasks.tick(partition.name, now=START + 12)


def test_one_that_cannot_begin_leaves_nothing_and_begins_later(partition):
    """A switch is under way when the policy would begin it."""
    services.force_node(Node.objects.get(order=0), "decode", ADA, "for a while")
    services.clear_force(partition, ADA, "the planner may have it")
    PlannerPolicy.objects.update(auto_warm_up=True)
    assert tasks.tick(partition.name, now=START) == "nothing to decide"
    assert not WarmUp.objects.exists()
    finish(newest(), START + 1)
    assert tasks.tick(partition.name, now=START + 2) == "warm-up begins"


def test_one_that_nodes_have_made_too_long_for_its_limit_is_refused(partition):
    services.update_policy(partition, ADA, warm_up_rung_s=12.0, warm_up_limit_s=72.0)
    Node.objects.filter(order=1).update(decode_limit=128)
    with pytest.raises(Conflict, match=r"8 rungs of 12 s.* take 96 s, and warm_up_limit_s is 72 s"):
        warmups.start(partition, ADA, "new hardware")
    assert not WarmUp.objects.exists()
