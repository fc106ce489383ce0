"""Switches driven against real node agents (simulated engine): from order to observed phase, and after crashes."""

import threading
import time

import httpx
import pytest

from apps.planning import orders, services
from apps.planning.domain.phase_machine import Tick
from apps.planning.models import SwitchOrder
from apps.planning.selectors import order_document
from apps.topology import configuration
from apps.topology.models import Node
from controlplane import redis_client as redis_keys
from tests.factories import actor_with
from workers.planner import driving, health, tasks

ADA = actor_with("administrator", "ada")


def force(partition, node="gb300-3", phase="prefill"):
    services.force_node(Node.objects.get(name=node), phase, ADA, "for a test")
    return SwitchOrder.objects.filter(partition=partition).first()


def test_an_idle_node_switches_within_the_target_of_seven_tenths_of_a_second(partition, yard):
    order = force(partition)
    began = time.monotonic()
    assert tasks.drive_switch(order.pk) == "cooling"
    assert time.monotonic() - began < 0.7
    status = yard.status("gb300-3")
    assert (status["phase"], status["state"], status["generation"]) == ("prefill", "ready", 1)
    node = Node.objects.get(name="gb300-3")
    assert (node.desired_phase, node.generation, node.draining) == ("prefill", 1, False)
    assert (node.observed_phase, node.observed_generation) == ("prefill", 1)
    published = configuration.latest(partition).document["nodes"][2]
    assert (published["phase"], published["draining"]) == ("prefill", False)


def test_each_step_tells_when_it_was_pushed_accepted_and_over(partition, yard):
    order = force(partition)
    tasks.drive_switch(order.pk)
    (step,) = order_document(SwitchOrder.objects.get(pk=order.pk))["steps"]
    assert step["accepted"]
    assert step["began_at"] <= step["pushed_at"] <= step["finished_at"]
    assert 0 < step["drain_s"] <= step["switch_s"] < 5


def test_driving_a_finished_order_again_changes_nothing(partition, yard):
    order = force(partition)
    tasks.drive_switch(order.pk)
    version = configuration.latest(partition).version
    assert tasks.drive_switch(order.pk) == "cooling"
    assert configuration.latest(partition).version == version
    assert yard.status("gb300-3")["generation"] == 1


def prefill_body(request_id, tokens=400_000):
    from apps.kvcache.domain.hashing import extend_chain, root_hash

    ids = list(range(tokens // 64))
    from array import array
    from base64 import b64encode

    chain = extend_chain(root_hash("glm-5.2", "fp8", "tests"), array("I", ids), 1)
    return {
        "request_id": request_id,
        "token_ids": ids,
        "prompt_tokens": tokens,
        "chain_b64": b64encode(chain).decode(),
        "tail_hash_b64": None,
        "fetch": None,
        "sampling": {"max_tokens": 4},
        "generation": 0,
    }


def test_a_running_prefill_is_finished_before_its_node_leaves(partition, yard, wait_for):
    answers = []

    def ask():
        with yard.client() as client:
            answers.append(client.post(f"{yard.url('gb300-2')}/v1/prefill", json=prefill_body("r1")))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: yard.status("gb300-2")["running"]["prefill"] == 1)
    order = force(partition, "gb300-2", "decode")
    assert tasks.drive_switch(order.pk) == "cooling"
    asking.join(10)
    assert answers[0].status_code == 200, answers[0].text
    assert yard.status("gb300-2")["phase"] == "decode"


def test_an_agent_that_is_away_is_told_when_it_comes_back(partition, yard):
    order = force(partition)
    yard.stop()
    assert tasks.drive_switch(order.pk, budget_s=0.5) == "draining"
    assert order.steps.get().reason == "no connection"
    yard.start()
    assert tasks.drive_switch(order.pk) == "cooling"
    assert yard.status("gb300-3")["phase"] == "prefill"


@pytest.mark.parametrize("point", ["ordered", "taken", "pushed", "switched"])
def test_a_planner_that_died_at_any_point_leaves_an_order_that_the_next_one_finishes(
    partition, yard, point, monkeypatch, wait_for
):
    order = force(partition)
    if point != "ordered":
        # Stored, but whoever stored it died before anything went out.
        orders.advance(order.pk, order.ordered_at.timestamp(), Tick())
    if point in ("pushed", "switched"):
        assert yard.push("gb300-3", "prefill", 1) == 200
    if point == "switched":
        wait_for(lambda: yard.status("gb300-3")["phase"] == "prefill")
    started = []
    monkeypatch.setattr(orders, "start_driving", started.append)
    assert f"resumed order {order.pk}" in tasks.reconcile(partition.name)
    assert [row.pk for row in started] == [order.pk]
    assert tasks.drive_switch(order.pk) == "cooling"
    assert yard.status("gb300-3")["phase"] == "prefill"
    assert not Node.objects.get(name="gb300-3").draining


def test_a_crash_in_the_middle_of_an_event_stores_nothing_of_it(partition, monkeypatch):
    order = force(partition)

    def crash(*arguments, **more):
        raise RuntimeError("killed")

    monkeypatch.setattr(orders, "publish", crash)
    with pytest.raises(RuntimeError):
        orders.advance(order.pk, order.ordered_at.timestamp(), Tick())
    node = Node.objects.get(name="gb300-3")
    order.refresh_from_db()
    assert (order.state, node.desired_phase, node.generation, node.draining) == ("ordered", "decode", 0, False)


def test_rolling_back_under_way_returns_the_node(partition, yard):
    order = force(partition)
    orders.advance(order.pk, time.time(), Tick())
    yard.push("gb300-3", "prefill", 1)
    services.roll_back(order, ADA, "wrong node")
    assert tasks.drive_switch(order.pk) == "rolled-back"
    status = yard.status("gb300-3")
    assert (status["phase"], status["generation"]) == ("decode", 2)


def test_several_nodes_move_in_a_safe_order(partition, yard):
    services.force_split(partition, ["gb300-3"], ADA, "turn it round")
    order = SwitchOrder.objects.get()
    assert order.steps.count() == 3
    seen = []
    original = driving.orders.advance

    def watch(*arguments):
        result = original(*arguments)
        nodes = Node.objects.filter(partition=partition, draining=False)
        seen.append({node.desired_phase for node in nodes})
        return result

    driving.orders.advance = watch
    try:
        assert tasks.drive_switch(order.pk) == "cooling"
    finally:
        driving.orders.advance = original
    assert all({"prefill", "decode"} <= phases for phases in seen), seen
    assert [yard.status(f"gb300-{i}")["phase"] for i in range(1, 5)] == ["decode", "decode", "prefill", "decode"]


def test_a_second_driver_leaves_at_once(partition, yard, other_connection_holds):
    order = force(partition)
    with other_connection_holds("drive", partition.pk):
        assert tasks.drive_switch(order.pk) == "another worker drives"
        assert "resumed" not in tasks.reconcile(partition.name)
    assert tasks.drive_switch(order.pk) == "cooling"


# -- reconcile -------------------------------------------------------------------------------------------------------


def test_an_agent_that_lost_its_state_is_told_the_decided_phase_again(partition, yard, tmp_path):
    tasks.drive_switch(force(partition).pk)
    yard.push("gb300-1", "mixed", 0)
    yard.stop()
    for kept in (tmp_path / "agents").rglob("*phase*"):
        kept.unlink()
    yard.start()
    assert yard.status("gb300-3")["phase"] == "decode"
    assert "gb300-3 told again to prefill" in tasks.reconcile(partition.name)
    assert yard.status("gb300-3")["target_phase"] == "prefill"
    assert tasks.reconcile(partition.name) == "nothing to do"


def test_an_agent_under_a_generation_the_database_does_not_know_is_fenced_above_it(partition, yard):
    assert yard.push("gb300-1", "decode", 17) == 200
    assert "gb300-1 told again to prefill" in tasks.reconcile(partition.name)
    assert Node.objects.get(name="gb300-1").generation == 18
    assert yard.status("gb300-1")["generation"] == 18
    assert yard.push("gb300-1", "decode", 17) == 409


def test_an_agent_under_our_generation_but_another_phase_is_fenced_too(partition, yard):
    tasks.drive_switch(force(partition).pk)
    Node.objects.filter(name="gb300-3").update(desired_phase="decode")
    assert "gb300-3 told again to decode" in tasks.reconcile(partition.name)
    assert yard.status("gb300-3")["generation"] == 2


def test_a_node_that_does_not_answer_is_down_since_it_was_first_missed(partition, yard):
    tasks.reconcile(partition.name, now=1000.0)
    assert Node.objects.get(name="gb300-1").observed_state == "ready"
    yard.stop()
    tasks.reconcile(partition.name, now=1005.0)
    tasks.reconcile(partition.name, now=1010.0)
    node = Node.objects.get(name="gb300-1")
    assert (node.observed_state, node.observed_at.timestamp()) == ("down", 1005.0)


def test_a_cooled_down_order_is_done(partition):
    order = force(partition)
    tasks.drive_switch(order.pk)
    assert "is done" not in tasks.reconcile(partition.name)
    assert f"order {order.pk} is done" in tasks.reconcile(partition.name, now=time.time() + 31)
    order.refresh_from_db()
    assert (order.state, order.finished_at is not None) == ("done", True)


def test_a_force_that_had_to_wait_is_ordered_by_the_reconciler(partition):
    first = force(partition)
    force(partition, "gb300-4", "decode")
    services.clear_force(partition, ADA, "clear the first", node="gb300-3")
    services.force_node(Node.objects.get(name="gb300-3"), "decode", ADA, "other way")
    orders.advance(first.pk, first.ordered_at.timestamp(), Tick())
    tasks.drive_switch(first.pk)
    second = SwitchOrder.objects.exclude(pk=first.pk).get()
    assert second.to_prefill == ["gb300-1", "gb300-2"]


def test_an_emptied_redis_gets_the_configuration_again(partition, redis_client):
    redis_client.flushall()
    assert "sent the configuration again" in tasks.reconcile(partition.name)
    held = redis_keys.read_json(redis_keys.config_key(partition.name))
    assert held["version"] == configuration.latest(partition).version
    assert tasks.reconcile(partition.name) == "nothing to do"


def test_an_agent_with_another_token_refuses_and_the_order_fails_saying_so(partition, yard, settings):
    order = force(partition)
    settings.AGENT_TOKEN = "another"
    assert tasks.drive_switch(order.pk) == "failed"
    order.refresh_from_db()
    assert "the agent refused" in order.outcome
    assert Node.objects.get(name="gb300-3").desired_phase == "decode"


def test_unknown_partitions_and_orders_are_no_errors(db):
    assert tasks.tick("nowhere") == "unknown partition"
    assert tasks.reconcile("nowhere") == "unknown partition"
    assert tasks.drive_switch(10**9) == "unknown order"
    assert isinstance(httpx.__version__, str)


def test_a_force_that_cannot_be_ordered_after_a_switch_is_logged_and_tried_again(partition, yard, caplog):
    """The force waits for the switch; meanwhile the other node of the phase it leaves is disabled."""
    order = force(partition, "gb300-3", "prefill")
    services.force_node(Node.objects.get(name="gb300-2"), "decode", ADA, "needed there")
    Node.objects.filter(name__in=("gb300-1", "gb300-3")).update(enabled=False)
    assert tasks.drive_switch(order.pk) == "cooling"
    assert "the forced split cannot be ordered" in caplog.text
    assert SwitchOrder.objects.count() == 1
    Node.objects.update(enabled=True)
    assert "ordered what is forced" in tasks.reconcile(partition.name)


def test_a_node_that_is_gone_since_it_was_asked_stops_no_healing(partition, yard):
    Node.objects.filter(name="gb300-2").update(desired_phase="decode", generation=3)
    reports = health.observe(partition, time.time())
    Node.objects.get(name="gb300-1").delete()
    assert health.heal(partition, reports) == ["gb300-2 told again to decode"]
