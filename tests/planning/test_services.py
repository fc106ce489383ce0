"""What people do about the split: votes, force, freeze, modes, roll back; each with its refusals and its audit row."""

from datetime import timedelta

import pytest
from django.utils import timezone

from apps.planning import orders, selectors, services
from apps.planning.domain.phase_machine import PushPhase, StatusReported, Tick
from apps.planning.models import ForcedSplit, PlannerPolicyEvent, Proposal, SwitchOrder
from apps.topology import configuration
from apps.topology import services as topology
from apps.topology.models import Node, NodeEvent
from controlplane.actors import PLANNER, SYSTEM
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Forbidden
from tests.factories import actor_with

pytestmark = pytest.mark.django_db
ADA = actor_with("administrator", "ada")
BOB = actor_with("operator", "bob")
EVE = actor_with("viewer", "eve")


def in_minutes(minutes):
    return timezone.now() + timedelta(minutes=minutes)


def phases(partition):
    return dict(Node.objects.filter(partition=partition).values_list("name", "desired_phase"))


def finish(order):
    """Let the order's agents do as they are told."""
    now = timezone.now().timestamp()
    for _ in range(10):
        state, _ = orders.advance(order.pk, now, Tick())
        for step in order.steps.all():
            report = StatusReported(step.node, step.to_phase, step.to_phase, "ready", step.generation)
            state, _ = orders.advance(order.pk, now, report)
        if state not in ("ordered", "draining", "switching"):
            break
    order.refresh_from_db()
    return order


def proposed(partition, actor=PLANNER, prefill=("gb300-1", "gb300-2", "gb300-3")):
    return services.propose(partition, list(prefill), actor, "more prompts", in_minutes(5))


# -- proposals -------------------------------------------------------------------------------------------------------


def test_an_approved_proposal_orders_the_switch_and_takes_the_node_when_it_starts(partition):
    proposal = services.approve(proposed(partition), BOB, "looks right")
    assert proposal.state == "approved"
    order = SwitchOrder.objects.get()
    assert (order.cause, order.ordered_by, order.state) == ("proposal", "bob", "ordered")
    assert [(s.node, s.from_phase, s.to_phase) for s in order.steps.all()] == [("gb300-3", "decode", "prefill")]
    state, commands = orders.advance(order.pk, order.ordered_at.timestamp(), Tick())
    assert state == "draining"
    assert commands == [PushPhase("gb300-3", "prefill", 1, 60.0)]
    node = Node.objects.get(name="gb300-3")
    assert (node.desired_phase, node.generation, node.draining) == ("prefill", 1, True)
    published = next(n for n in configuration.latest(partition).document["nodes"] if n["name"] == "gb300-3")
    assert (published["phase"], published["generation"], published["draining"]) == ("prefill", 1, True)


def test_after_the_switch_the_node_takes_work_again_and_the_order_cools_down(partition):
    services.approve(proposed(partition), BOB)
    order = finish(SwitchOrder.objects.get())
    assert order.state == "cooling"
    assert order.cooling_until - order.switched_at == timedelta(seconds=30)
    assert not Node.objects.get(name="gb300-3").draining
    assert not configuration.latest(partition).document["nodes"][2]["draining"]


def test_nobody_approves_their_own_proposal(partition):
    proposal = proposed(partition, BOB)
    with pytest.raises(Forbidden, match="another person"):
        services.approve(proposal, BOB)
    assert services.approve(proposal, ADA).state == "approved"


def test_self_approval_can_be_allowed_by_policy(partition):
    services.update_policy(partition, ADA, "small team", self_approval=True)
    assert services.approve(proposed(partition, BOB), BOB).state == "approved"


def test_each_person_has_one_vote_and_two_may_be_needed(partition):
    services.update_policy(partition, ADA, "four eyes", approvals_required=2)
    proposal = services.approve(proposed(partition), BOB)
    assert (proposal.state, SwitchOrder.objects.count()) == ("open", 0)
    with pytest.raises(Conflict, match="voted"):
        services.approve(proposal, BOB)
    assert services.approve(proposal, ADA).state == "approved"


def test_a_rejection_needs_a_reason_and_closes_the_proposal(partition):
    proposal = proposed(partition)
    with pytest.raises(InvalidField, match="reason"):
        services.reject(proposal, BOB, " ")
    assert services.reject(proposal, BOB, "not today").state == "rejected"
    with pytest.raises(Conflict, match="rejected"):
        services.approve(proposal, ADA)


def test_a_proposal_about_another_split_is_stale_and_stays_so(partition):
    proposal = proposed(partition)
    Node.objects.filter(name="gb300-4").update(desired_phase="prefill")
    with pytest.raises(Conflict, match="stale"):
        services.approve(proposal, BOB)
    proposal.refresh_from_db()
    assert (proposal.state, SwitchOrder.objects.count()) == ("stale", 0)


def test_a_proposal_expires_by_itself(partition):
    proposal = proposed(partition)
    Proposal.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    with pytest.raises(Conflict, match="expired"):
        services.approve(proposal, BOB)
    services.expire(partition)
    proposal.refresh_from_db()
    assert proposal.state == "expired"


def test_only_operators_vote_and_only_administrators_force_freeze_and_set_modes(partition):
    proposal = proposed(partition)
    with pytest.raises(Forbidden):
        services.approve(proposal, EVE)
    for forbidden in (
        lambda: services.force_split(partition, 1, BOB, "x"),
        lambda: services.freeze(partition, BOB, "x", None),
        lambda: services.set_mode(partition, "automatic", BOB, "x"),
        lambda: services.update_policy(partition, BOB, "x", cooldown_s=1),
    ):
        with pytest.raises(Forbidden):
            forbidden()


# -- force -----------------------------------------------------------------------------------------------------------


def test_a_forced_split_is_ordered_at_once_and_shown_until_cleared(partition):
    services.force_split(partition, 1, ADA, "long answers tonight", in_minutes(60))
    order = SwitchOrder.objects.get()
    assert (order.cause, order.to_prefill) == ("force", ["gb300-1"])
    view = selectors.split_view(partition)
    assert view["forced"]["prefill"] == ["gb300-1"]
    assert view["forced"]["forces"][0]["reason"] == "long answers tonight"
    services.clear_force(partition, ADA, "done")
    assert selectors.split_view(partition)["forced"] is None


def test_a_forced_node_leaves_the_others_alone(partition):
    services.force_node(Node.objects.get(name="gb300-2"), "decode", ADA, "maintenance")
    finish(SwitchOrder.objects.get())
    assert phases(partition) == {"gb300-1": "prefill", "gb300-2": "decode", "gb300-3": "decode", "gb300-4": "decode"}


def test_the_last_node_of_a_phase_cannot_be_forced_away(partition):
    services.force_node(Node.objects.get(name="gb300-2"), "decode", ADA, "maintenance")
    finish(SwitchOrder.objects.get())
    with pytest.raises(Conflict, match="keeps at least one"):
        services.force_node(Node.objects.get(name="gb300-1"), "decode", ADA, "too much")
    assert ForcedSplit.objects.filter(cleared_at=None).count() == 1


@pytest.mark.parametrize("prefill_nodes", [0, 4, 9, ["gb300-1", "elsewhere"]])
def test_an_impossible_split_is_refused_by_name(partition, prefill_nodes):
    with pytest.raises(InvalidField, match="prefill_nodes"):
        services.force_split(partition, prefill_nodes, ADA, "x")


def test_a_force_needs_a_reason_and_an_end_in_the_future(partition):
    with pytest.raises(InvalidField, match="reason"):
        services.force_split(partition, 1, ADA, "")
    with pytest.raises(InvalidField, match="expires_at"):
        services.force_split(partition, 1, ADA, "x", in_minutes(-1))


def test_a_force_during_a_switch_waits_for_its_end(partition):
    services.approve(proposed(partition), BOB)
    first = SwitchOrder.objects.get()
    services.force_split(partition, ["gb300-1"], ADA, "no, the other way")
    assert SwitchOrder.objects.count() == 1
    finish(first)
    second = services.apply_forces(partition)
    assert second.to_prefill == ["gb300-1"]
    assert second.reason == "forced by ada: no, the other way"
    finish(second)
    assert services.apply_forces(partition) is None, "what is forced is so already"


def test_a_newer_force_of_the_split_replaces_every_earlier_one(partition):
    services.force_node(Node.objects.get(name="gb300-1"), "prefill", ADA, "keep")
    services.force_split(partition, ["gb300-1", "gb300-2"], ADA, "as it is")
    live = ForcedSplit.objects.get(cleared_at=None)
    assert live.node == ""


def test_an_expired_force_ends_and_the_split_stays(partition):
    services.force_node(Node.objects.get(name="gb300-2"), "prefill", ADA, "keep", in_minutes(1))
    services.expire(partition, in_minutes(2))
    assert not selectors.live_forces(partition).exists()
    assert ForcedSplit.objects.get().clear_reason == "expired"


def test_a_force_that_could_not_follow_the_switch_under_way_is_refused(partition):
    services.force_node(Node.objects.get(name="gb300-2"), "decode", ADA, "maintenance")
    order = SwitchOrder.objects.get()
    assert phases(partition)["gb300-2"] == "prefill", "ordered, and nothing taken yet"
    with pytest.raises(Conflict, match="keeps at least one"):
        services.force_node(Node.objects.get(name="gb300-1"), "decode", ADA, "too much")
    assert ForcedSplit.objects.get(cleared_at=None).node == "gb300-2"
    finish(order)
    assert services.apply_forces(partition) is None


def test_a_force_of_an_engine_that_cannot_switch_is_refused_also_during_a_switch(partition):
    Node.objects.filter(name="gb300-4").update(engine="sglang")
    services.approve(proposed(partition), BOB)
    with pytest.raises(Conflict, match="SGLang"):
        services.force_node(Node.objects.get(name="gb300-4"), "mixed", ADA, "both")
    assert not ForcedSplit.objects.exists()


def test_a_proposal_against_a_force_is_not_ordered_until_the_force_is_cleared(partition):
    proposal = proposed(partition)
    services.force_node(Node.objects.get(name="gb300-3"), "decode", ADA, "stays")
    with pytest.raises(Conflict, match="gb300-3 is forced") as refused:
        services.approve(proposal, BOB)
    assert refused.value.code == "forced"
    assert (proposal.votes.count(), SwitchOrder.objects.count()) == (0, 0)
    services.clear_force(partition, ADA, "done")
    assert services.approve(proposal, BOB).state == "approved"


# -- modes -----------------------------------------------------------------------------------------------------------


def test_a_freeze_returns_to_the_mode_before_it_when_it_ends(partition):
    services.set_mode(partition, "automatic", ADA, "trust")
    policy = services.freeze(partition, ADA, "release day", in_minutes(10))
    assert (policy.mode, policy.freeze_reason, policy.frozen_by) == ("frozen", "release day", "ada")
    services.expire(partition, in_minutes(11))
    policy.refresh_from_db()
    assert (policy.mode, policy.freeze_reason, policy.frozen_until) == ("automatic", "", None)


def test_unfreezing_what_is_not_frozen_is_a_conflict(partition):
    with pytest.raises(Conflict, match="not frozen"):
        services.unfreeze(partition, ADA, "x")
    services.freeze(partition, ADA, "x", None)
    assert services.unfreeze(partition, ADA, "x").mode == "approve"


def test_bad_policies_are_refused_by_name(partition):
    with pytest.raises(InvalidField, match="slices_per_window"):
        services.update_policy(partition, ADA, slices_per_window=2)
    with pytest.raises(InvalidField, match="mode"):
        services.set_mode(partition, "wild", ADA, "x")


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"warm_up_rung_s": 3600.0}, "warm_up_rung_s", "shorter rungs: 8 rungs of 3600 s"),
        ({"warm_up_rung_s": 300.0}, "warm_up_rung_s", "take 2400 s, and warm_up_limit_s is 1800 s"),
        ({"warm_up_limit_s": 30.0}, "warm_up_limit_s", "a longer time: 8 rungs of 15 s.* take 120 s"),
        ({"warm_up_rung_s": 60.0, "warm_up_limit_s": 59.0}, "warm_up_limit_s", "take 480 s"),
    ],
)
def test_a_warm_up_that_could_never_learn_is_refused_by_the_field_that_was_edited(partition, changes, field, message):
    with pytest.raises(InvalidField, match=message) as refusal:
        services.update_policy(partition, ADA, **changes)
    assert refusal.value.field == field
    assert services.update_policy(partition, ADA, warm_up_rung_s=300.0, warm_up_limit_s=2400.0).warm_up_rung_s == 300.0


def test_every_change_of_a_policy_says_who_and_why(partition):
    services.set_mode(partition, "automatic", ADA, "trust")
    event = PlannerPolicyEvent.objects.order_by("-pgh_id").first()
    assert (event.mode, event.pgh_context.metadata["actor"]) == ("automatic", "ada")
    assert event.pgh_context.metadata["reason"] == "trust"


# -- roll back -------------------------------------------------------------------------------------------------------


def test_a_finished_switch_is_undone_by_an_order_of_the_reverse_moves(partition):
    services.approve(proposed(partition), BOB)
    first = finish(SwitchOrder.objects.get())
    second = services.roll_back(first, BOB, "worse than before")
    assert (second.cause, second.rolls_back_id) == ("rollback", first.pk)
    finish(second)
    first.refresh_from_db()
    assert first.state == "rolled-back"
    assert phases(partition)["gb300-3"] == "decode"
    with pytest.raises(Conflict, match="nothing to undo"):
        services.roll_back(first, BOB, "again")


def test_a_switch_under_way_is_turned_round_under_a_newer_generation(partition):
    services.approve(proposed(partition), BOB)
    order = SwitchOrder.objects.get()
    orders.advance(order.pk, order.ordered_at.timestamp(), Tick())
    services.roll_back(order, BOB, "wrong node")
    node = Node.objects.get(name="gb300-3")
    assert (node.desired_phase, node.generation) == ("decode", 2)
    assert finish(order).state == "rolled-back"


def test_rolling_back_a_forced_switch_ends_the_force(partition):
    services.force_node(Node.objects.get(name="gb300-2"), "decode", ADA, "maintenance")
    order = finish(SwitchOrder.objects.get())
    services.roll_back(order, BOB, "back again")
    assert not selectors.live_forces(partition).exists()


def test_a_switch_that_the_split_has_moved_on_from_cannot_be_undone(partition):
    services.approve(proposed(partition), BOB)
    order = finish(SwitchOrder.objects.get())
    topology.set_desired_phases(partition, {"gb300-3": "decode"}, SYSTEM, "by hand")
    with pytest.raises(Conflict, match="gb300-3 has changed phase"):
        services.roll_back(order, BOB, "late")


def test_two_switches_of_one_partition_never_run_at_once(partition):
    services.approve(proposed(partition), BOB)
    with pytest.raises(Conflict, match="under way"):
        orders.place(partition, {"gb300-4": "prefill"}, "planner", PLANNER, "x")


def test_the_split_view_has_everything_a_page_shows(partition):
    proposed(partition)
    view = selectors.split_view(partition)
    assert view["current"]["prefill"] == ["gb300-1", "gb300-2"]
    assert view["proposed"]["prefill"] == ["gb300-1", "gb300-2", "gb300-3"]
    assert view["open_proposal"]["state"] == "open"
    assert view["policy"]["mode"] == "approve"
    services.approve(Proposal.objects.get(), BOB)
    view = selectors.split_view(partition)
    assert view["proposed"] is None
    assert view["active_orders"][0]["steps"][0]["node"] == "gb300-3"
    finish(SwitchOrder.objects.get())
    SwitchOrder.objects.update(state="done")
    assert selectors.split_view(partition)["history"][0]["state"] == "done"


def test_the_gateway_is_told_the_latency_it_is_judged_by(partition):
    services.update_policy(partition, ADA, "tighter", slo_ttft_s=2.5)
    assert partition.configurations.latest("version").document["slo"] == {"ttft_s": 2.5}


def test_a_node_out_of_service_is_forgotten_and_its_past_stays(partition):
    """Not one that serves, moves, is forced, or is all there is."""
    node = Node.objects.get(name="gb300-4")
    with pytest.raises(Conflict, match="in service"):
        services.forget_node(node, ADA)
    topology.disable_node(node, ADA)
    with pytest.raises(Forbidden):
        services.forget_node(node, BOB)
    services.force_node(node, "prefill", ADA, "to see")
    with pytest.raises(Conflict, match=r"forced|under way"):
        services.forget_node(node, ADA)
    services.clear_force(partition, ADA, "", node.name)
    for order in SwitchOrder.objects.all():
        finish(order)
    services.forget_node(node, ADA, "sold")
    assert not Node.objects.filter(name="gb300-4").exists()
    document = configuration.latest(partition).document
    assert "gb300-4" not in [entry["name"] for entry in document["nodes"]]
    assert NodeEvent.objects.filter(name="gb300-4").exists()
