"""Nodes: what operators may do to them, and what agents report."""

from datetime import UTC, datetime, timedelta

import pytest

from apps.topology import configuration, services
from apps.topology.models import Node, NodeEvent
from controlplane.actors import PLANNER, SYSTEM
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Forbidden
from tests.factories import actor_with, make_partition

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_drained_node_is_published_as_draining():
    partition = make_partition()
    services.drain_node(Node.objects.get(name="gb300-2"), actor_with("operator"), "new firmware")
    nodes = configuration.latest(partition).document["nodes"]
    assert [node["draining"] for node in nodes] == [False, True, False]


def test_the_last_node_of_a_phase_cannot_be_drained_or_disabled():
    make_partition()
    for leave in (services.drain_node, services.disable_node):
        with pytest.raises(Conflict, match="last node of gb300 that serves prefill"):
            leave(Node.objects.get(name="gb300-1"), SYSTEM)


def test_a_draining_node_does_not_count_as_serving():
    make_partition()
    services.drain_node(Node.objects.get(name="gb300-2"), SYSTEM)
    with pytest.raises(Conflict):
        services.drain_node(Node.objects.get(name="gb300-3"), SYSTEM)


def test_an_operator_cannot_move_a_node_to_another_address():
    make_partition()
    with pytest.raises(Forbidden, match="administrator"):
        services.update_node(Node.objects.get(name="gb300-1"), actor_with("operator"), url="http://elsewhere:1/nodes/x")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"url": "ftp://a"}, "url"),
        ({"decode_limit": 0}, "decode_limit"),
        ({"coefficients": {"c0": 1}}, "coefficients"),
        ({"generation": 9}, "generation"),
        ({"enabled": None}, "enabled"),
    ],
)
def test_a_bad_value_is_refused_by_name(changes, field):
    make_partition()
    with pytest.raises(InvalidField) as refusal:
        services.update_node(Node.objects.get(name="gb300-1"), SYSTEM, **changes)
    assert refusal.value.field == field


def test_a_new_phase_raises_the_generation_and_is_published_once():
    partition = make_partition()
    before = configuration.latest(partition).version
    changed = services.set_desired_phases(
        partition, {"gb300-2": "prefill", "gb300-1": "prefill"}, PLANNER, "more prefill"
    )
    assert [(node.name, node.generation) for node in changed] == [("gb300-2", 1)]
    latest = configuration.latest(partition)
    assert latest.version == before + 1
    assert (latest.document["nodes"][1]["phase"], latest.document["nodes"][1]["generation"]) == ("prefill", 1)


def test_a_phase_is_never_left_empty():
    partition = make_partition()
    with pytest.raises(Conflict, match="would serve prefill"):
        services.set_desired_phases(partition, {"gb300-1": "decode"}, PLANNER, "all decode")
    assert Node.objects.get(name="gb300-1").desired_phase == "prefill"


@pytest.mark.parametrize("phases", [{"nobody": "decode"}, {"gb300-1": "idle"}])
def test_unknown_nodes_and_phases_are_refused(phases):
    partition = make_partition()
    with pytest.raises(InvalidField):
        services.set_desired_phases(partition, phases, PLANNER, "odd")


def test_reports_are_stored_without_audit_and_never_backwards():
    make_partition()
    node = Node.objects.get(name="gb300-1")
    history = NodeEvent.objects.count()
    assert services.record_status(node, phase="decode", state="ready", generation=3, at=NOW)
    assert not services.record_status(node, phase="prefill", state="ready", generation=2, at=NOW - timedelta(seconds=1))
    node.refresh_from_db()
    assert (node.observed_phase, node.observed_generation, node.observed_at) == ("decode", 3, NOW)
    assert NodeEvent.objects.count() == history


def test_an_unreachable_node_keeps_its_last_phase():
    make_partition()
    node = Node.objects.get(name="gb300-1")
    services.record_status(node, phase="prefill", state="ready", generation=0, at=NOW)
    services.record_unreachable(node, NOW + timedelta(seconds=5))
    node.refresh_from_db()
    assert (node.observed_phase, node.observed_state) == ("prefill", "down")


def test_the_audit_trail_says_who_why_and_under_which_request():
    make_partition()
    actor = actor_with("operator").during("request-7")
    services.drain_node(Node.objects.get(name="gb300-2"), actor, "new firmware")
    event = NodeEvent.objects.filter(pgh_obj__name="gb300-2").latest("pgh_id")
    assert event.draining is True
    context = event.pgh_context.metadata
    assert (context["actor"], context["reason"], context["request_id"]) == ("robin", "new firmware", "request-7")


def test_a_bulk_update_is_audited_too():
    make_partition()
    history = NodeEvent.objects.count()
    Node.objects.filter(partition__name="gb300").update(decode_limit=7)
    assert NodeEvent.objects.count() == history + 3
