"""The planner's tick over stored telemetry: slices, windows, decisions, and what each mode does with them."""

from datetime import UTC, datetime

import pytest

from apps.planning import learning, orders, services
from apps.planning.domain.phase_machine import StatusReported, Tick
from apps.planning.models import Decision, FittedModel, PlannerPolicy, Proposal, Slice, SwitchOrder
from apps.telemetry.models import CostWindow
from apps.topology.models import Node
from tests.factories import COEFFICIENTS, actor_with
from tests.planner.telemetry import (
    END,
    START,
    WINDOW_S,
    load,
    make_watched_partition,
    measure,
    run,
)
from workers.planner import tasks

pytestmark = pytest.mark.django_db
ADA = actor_with("administrator", "ada")


@pytest.fixture
def partition(redis_client):
    return make_watched_partition()


def finish(order, at):
    orders.advance(order.pk, at, Tick())
    for step in order.steps.all():
        orders.advance(order.pk, at, StatusReported(step.node, step.to_phase, step.to_phase, "ready", step.generation))


def test_slices_are_closed_once_each_when_their_load_has_arrived(partition):
    load(partition, end=START + 36)
    tasks.tick(partition.name, now=START + 15.0)
    assert Slice.objects.filter(t0__gte=START).count() == 0, "the last load window of the slice may still come"
    tasks.tick(partition.name, now=START + 16.5)
    tasks.tick(partition.name, now=START + 16.5)
    row = Slice.objects.get(t0__gte=START)
    assert (row.t0, row.t1) == (START, START + 12)
    assert row.workload["t_uc"] == 5268
    assert row.workload["in_flight"] == 120
    assert row.prefill_wait_p95_s == 2.0


def test_slices_missed_while_the_planner_was_away_are_closed_later_up_to_one_window_back(partition):
    load(partition)
    tasks.tick(partition.name, now=START + 17)
    tasks.tick(partition.name, now=END + 5)
    assert Slice.objects.filter(t0__gte=START).count() == 10


def test_a_window_that_prefill_limits_orders_a_switch_in_automatic_mode(partition):
    load(partition)
    assert run(partition) == "switch (switch): ordered"
    decision = Decision.objects.get(window_end=END)
    assert (decision.verdict, decision.source, decision.slices_used) == ("switch", "configured", 10)
    assert decision.gain > decision.threshold > 0
    order = SwitchOrder.objects.get()
    assert (order.cause, order.decision) == ("planner", decision)
    assert len(order.to_prefill) > 4
    assert order.reason == decision.reason


def test_a_window_is_decided_once(partition):
    load(partition)
    run(partition)
    assert tasks.tick(partition.name, now=END + 7) == "nothing to decide"
    assert Decision.objects.filter(window_end=END).count() == 1


def test_in_approve_mode_the_decision_becomes_a_proposal_that_a_person_can_approve(partition):
    PlannerPolicy.objects.update(mode="approve")
    load(partition)
    assert run(partition) == "switch (switch): proposed"
    proposal = Proposal.objects.get()
    assert (proposal.state, proposal.proposed_by) == ("open", "planner:planner")
    assert proposal.evidence["workload"]["t_uc"] == 5268
    assert proposal.expires_at == datetime.fromtimestamp(END + WINDOW_S + 4, UTC)
    Proposal.objects.update(expires_at=datetime(2100, 1, 1, tzinfo=UTC))
    services.approve(proposal, actor_with("operator", "bob"))
    assert SwitchOrder.objects.get().cause == "proposal"


def test_in_advisory_mode_nothing_is_changed(partition):
    PlannerPolicy.objects.update(mode="advisory")
    load(partition)
    assert run(partition) == "switch (switch): advised"
    assert not Proposal.objects.exists() and not SwitchOrder.objects.exists()


def test_a_frozen_split_is_held_and_the_decision_still_shows_what_was_missed(partition):
    services.freeze(partition, ADA, "release day", None)
    load(partition)
    assert run(partition) == "hold (frozen): none"
    decision = Decision.objects.get(window_end=END)
    assert "release day" in decision.reason
    assert decision.gain > decision.threshold


def test_a_forced_split_is_held(partition):
    services.force_node(Node.objects.get(name="gb300-1"), "prefill", ADA, "keep it")
    load(partition)
    assert run(partition) == "hold (forced): none"


def test_a_window_with_nothing_in_it_holds_and_says_so(partition):
    assert run(partition) == "hold (too_few_slices): none"


def test_low_demand_holds(partition):
    load(partition, prefill_utilisation=0.4, decode_utilisation=0.5)
    assert run(partition) == "hold (low_demand): none"


def test_stale_reports_hold(partition):
    load(partition, stale_reports_ratio=0.5)
    assert run(partition) == "hold (stale_reports): none"


def test_a_proposal_goes_stale_when_the_workload_moves(partition):
    PlannerPolicy.objects.update(mode="approve")
    load(partition)
    run(partition)
    # Tests run in the past; the proposal must look as if it was made then.
    Proposal.objects.update(created_at=datetime.fromtimestamp(END, UTC))
    load(partition, END, END + 36, t_out=12 * 5000, decode_iterations_of_finished=12 * 5000 / 2.15)
    tasks.tick(partition.name, now=END + 35)
    proposal = Proposal.objects.get()
    assert proposal.state == "stale"
    assert "t_out went from" in proposal.closed_reason


def test_a_switch_after_which_people_wait_is_undone_in_spite_of_the_cooldown(partition):
    PlannerPolicy.objects.update(mode="automatic")
    load(partition, prefill_waits_s=[1.0])
    run(partition)
    order = SwitchOrder.objects.get()
    finish(order, END + 6)
    order.refresh_from_db()
    assert order.state == "cooling"
    load(partition, END, END + 6, prefill_waits_s=[1.0])
    load(partition, END + 6, END + 50, prefill_waits_s=[30.0])
    assert tasks.tick(partition.name, now=END + 52) == f"order {order.pk + 1} undoes a switch"
    undo = SwitchOrder.objects.get(cause="watch")
    assert (undo.rolls_back, undo.to_prefill) == (order, order.from_prefill)
    assert "over 10.0 s" in undo.reason
    decision = Decision.objects.get(rule="watch")
    assert undo.decision == decision
    assert (decision.verdict, decision.action, decision.chosen_prefill) == ("switch", "ordered", order.from_prefill)
    assert decision.reason.startswith(f"order {order.pk} is undone: P95 prefill wait was 30.0 s")
    ((rule, code, why),) = decision.detail["rules"]
    assert (code, why) == ("watch", decision.reason.split(": ", 1)[1]) and rule
    assert [piece["t0"] for piece in decision.detail["window"]] == list(
        Slice.objects.filter(t1__gt=decision.window_start).values_list("t0", flat=True)
    )
    assert decision.detail["window"] and decision.detail["fits"] == []
    assert decision.detail["undoes"] == order.pk and decision.detail["state"]["nodes"]
    assert tasks.tick(partition.name, now=END + 54) == "nothing to decide"


def test_a_switch_that_hurts_and_cannot_be_undone_is_stored_with_its_reason_and_holds_nothing_up(partition):
    PlannerPolicy.objects.update(mode="automatic")
    load(partition, prefill_waits_s=[1.0])
    run(partition)
    order = SwitchOrder.objects.get()
    finish(order, END + 6)
    (moved,) = order.steps.values_list("node", flat=True)
    Node.objects.filter(name=moved).update(desired_phase="mixed")  # somebody has given it another phase since
    load(partition, END, END + 6, prefill_waits_s=[1.0])
    load(partition, END + 6, END + 126, prefill_waits_s=[30.0])
    assert tasks.tick(partition.name, now=END + 52) == f"order {order.pk} hurts and cannot be undone"
    decision = Decision.objects.get(rule="watch")
    assert (decision.verdict, decision.action, decision.chosen_prefill) == ("hold", "none", None)
    assert f"order {order.pk} cannot be undone ({moved} has changed phase since order" in decision.reason
    assert "P95 prefill wait was 30.0 s" in decision.reason and decision.detail["undoes"] == order.pk
    assert tasks.tick(partition.name, now=END + 54) == "nothing to decide", "not with every tick"
    due = END + WINDOW_S + 4
    assert tasks.tick(partition.name, now=END + 110) == f"order {order.pk} hurts and cannot be undone", "asked again"
    tasks.tick(partition.name, now=due)
    assert Decision.objects.get(window_end=END + WINDOW_S).rule != "watch", "the window is decided in its time"


def test_a_choice_that_cannot_be_ordered_is_stored_with_its_reason_and_the_tick_goes_on(partition):
    Node.objects.filter(desired_phase="decode").update(desired_phase="mixed", engine="sglang")
    load(partition)
    assert run(partition) == "switch (switch): none"
    decision = Decision.objects.get(window_end=END)
    assert "not ordered: " in decision.reason and "SGLang" in decision.reason
    assert Slice.objects.filter(t0__gte=START).count() == 10
    assert not SwitchOrder.objects.exists()


@pytest.mark.parametrize(
    ("prepare", "rule"),
    [
        (lambda: PlannerPolicy.objects.update(mode="frozen", freeze_reason="release"), "frozen"),
        (lambda: services.force_node(Node.objects.get(name="gb300-1"), "prefill", ADA, "stays"), "forced"),
    ],
)
def test_a_hold_stores_what_would_have_been_chosen_and_every_rule_s_answer(partition, prepare, rule):
    prepare()
    load(partition)
    assert run(partition) == f"hold ({rule}): none"
    decision = Decision.objects.get(window_end=END)
    assert (decision.verdict, decision.rule, decision.chosen_prefill) == ("hold", rule, None)
    assert None not in (decision.gain, decision.standard_error, decision.threshold, decision.theta) and decision.reason
    assert rule in [code for _, code, _ in decision.detail["rules"]]
    assert len(decision.detail["window"]) == 10 and decision.detail["state"]["nodes"]
    for candidate in decision.detail["candidates"]:
        assert candidate["rule"] and candidate["reason"] and len(candidate["gains"]) == 10


def test_a_forced_switch_is_never_undone_by_the_planner(partition):
    load(partition, prefill_waits_s=[1.0])
    run(partition, now=END - 5)
    services.force_node(Node.objects.get(name="gb300-1"), "decode", ADA, "I know")
    finish(SwitchOrder.objects.get(), END - 4)
    load(partition, END, END + 50, prefill_waits_s=[30.0])
    tasks.tick(partition.name, now=END + 52)
    assert SwitchOrder.objects.count() == 1


def test_a_phase_that_lost_its_last_node_is_filled_without_waiting_for_the_window(partition):
    gone = datetime.fromtimestamp(START, UTC)
    Node.objects.filter(desired_phase="prefill").update(observed_state="down", observed_at=gone)
    assert tasks.tick(partition.name, now=START + 5) == "hold (too_few_nodes): none" or not SwitchOrder.objects.exists()
    assert tasks.tick(partition.name, now=START + 11) == "switch (empty_phase): ordered"
    order = SwitchOrder.objects.get()
    assert order.steps.count() == 1
    assert order.steps.get().to_phase == "prefill"


def test_a_second_planner_leaves_at_once(partition, other_connection_holds):
    with other_connection_holds("plan", partition.pk):
        assert tasks.tick(partition.name, now=END) == "another worker plans"


# -- fits ------------------------------------------------------------------------------------------------------------


def test_a_window_with_enough_measurements_learns_the_model_and_plans_with_it(partition):
    measure(partition, START, END, slower=1.3)
    load(partition)
    run(partition)
    fit = FittedModel.objects.get()
    assert (fit.state, fit.hardware_class) == ("accepted", "gb300")
    assert fit.prefill["c1"] == pytest.approx(1.3 * COEFFICIENTS["c1"], rel=0.1)
    assert fit.prefill_error_ratio < 0.05
    assert 2 <= fit.batch_low < 10 and 50 < fit.batch_high < 60
    assert Decision.objects.get(window_end=END).source == "learned"


def test_a_nodes_first_minute_and_its_switches_teach_nothing(partition):
    measure(partition, START + 65, END)
    assert learning.fit_windows(partition, [Node.objects.get(name="gb300-1")], START) == []
    measure(partition, END, END + 60)
    assert len(learning.fit_windows(partition, [Node.objects.get(name="gb300-1")], START)) == 11
    CostWindow.objects.all().delete()
    measure(partition, START, END, switching=True)
    assert learning.fit_windows(partition, [Node.objects.get(name="gb300-1")], START) == []


def test_a_fit_that_is_too_wrong_is_kept_with_its_error_and_holds_the_split(partition):
    measure(partition, START, END, noise=0.6)
    load(partition)
    assert run(partition) == "hold (unfitted): none"
    fit = FittedModel.objects.get()
    assert fit.state == "refused"
    assert any("not used for planning" in warning for warning in fit.warnings)


def test_a_fit_that_reality_has_left_is_retired_and_learned_anew_from_newer_measurements(partition):
    measure(partition, START, END)
    load(partition)
    run(partition)
    first = FittedModel.objects.get()
    measure(partition, END, END + WINDOW_S, slower=2.0)
    load(partition, END, END + WINDOW_S)
    assert learning.watch_drift(partition, END + 60) == [first]
    first.refresh_from_db()
    assert first.state == "retired"
    assert "slower than the model says" in first.retired_reason
    (second,) = learning.refit(partition, END + WINDOW_S)
    assert second.state == "accepted"
    assert second.prefill["c1"] == pytest.approx(2 * COEFFICIENTS["c1"], rel=0.1)
    assert learning.refit(partition, END + WINDOW_S) == []


# -- a clock that was wrong ------------------------------------------------------------------------------------------


def test_a_clock_that_was_ahead_for_a_while_does_not_stop_the_planner_until_then(partition):
    tasks.tick(partition.name, now=END + 86_405)
    assert Decision.objects.filter(window_end__gt=END + 80_000).exists()
    load(partition)
    assert run(partition) == "switch (switch): ordered"
    assert Slice.objects.filter(t0__gte=START, t1__lte=END).count() == 10
    # When that time comes the window is decided already.
    assert tasks.tick(partition.name, now=END + 86_404.5).startswith(("nothing", "hold")) is True
    assert Decision.objects.filter(window_end__gt=END + 80_000).count() == 1


def test_in_approve_mode_a_lost_phase_is_decided_once_a_slice_and_not_with_every_tick(partition):
    PlannerPolicy.objects.update(mode="approve")
    load(partition)
    run(partition, now=END - 1)
    gone = datetime.fromtimestamp(END - 60, UTC)
    Node.objects.filter(desired_phase="prefill").update(observed_state="down", observed_at=gone)
    before = Decision.objects.count()
    for second in range(0, 24, 2):
        tasks.tick(partition.name, now=END + second)
    assert Decision.objects.filter(rule="empty_phase").count() <= 3
    assert Decision.objects.count() - before <= 3
