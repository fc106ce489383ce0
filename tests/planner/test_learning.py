"""What is learned reaches the planner and the router, says what it was learned from, and is replaced when it is outgrown."""

import pytest

from apps.planning import deciding, learning, windows
from apps.planning.domain.planner import evaluate
from apps.planning.domain.replay import slice_from, state_from
from apps.planning.models import Decision, FittedModel, PlannerPolicy
from apps.topology import configuration
from apps.topology.models import Node
from tests.factories import COEFFICIENTS
from tests.planner.telemetry import END, START, WINDOW_S, load, make_watched_partition, measure, run

pytestmark = pytest.mark.django_db


@pytest.fixture
def partition(redis_client):
    return make_watched_partition()


def published(partition):
    return {node["name"]: node for node in configuration.latest(partition).document["nodes"]}


def test_the_router_is_told_the_learned_coefficients_and_their_new_level_after_drift(partition):
    measure(partition, START, END, slower=1.3)
    load(partition)
    run(partition)
    node = published(partition)["gb300-1"]["coefficients"]
    assert node["c1"] == pytest.approx(1.3 * COEFFICIENTS["c1"], rel=0.1)
    assert (node["t_acc"], node["experts"]) == (COEFFICIENTS["t_acc"], COEFFICIENTS["experts"])
    assert Node.objects.get(name="gb300-1").coefficients["c1"] == COEFFICIENTS["c1"], "what people configured stays"
    measure(partition, END, END + 120, slower=3.0)
    assert learning.watch_drift(partition, END + 120)
    assert published(partition)["gb300-1"]["coefficients"]["c1"] == pytest.approx(3 * COEFFICIENTS["c1"], rel=0.1)


def test_a_fit_is_stored_with_what_it_was_learned_from(partition):
    measure(partition, START, END)
    (fit,) = learning.refit(partition, END)
    assert (fit.summary["from"], fit.summary["until"]) == (START + 60, END - 5)
    assert fit.summary["nodes"] == [f"gb300-{i}" for i in range(1, 10)]
    assert fit.summary["prefill"]["rows"] == fit.prefill_rows == 48
    assert fit.summary["prefill"]["columns"]["c1"]["low"] < fit.summary["prefill"]["columns"]["c1"]["high"]
    node, t0, measured_s, predicted_s, held_out = fit.residuals["decode"][0]
    assert node == "gb300-5" and t0 == START + 60
    assert predicted_s == pytest.approx(measured_s, rel=0.15)
    assert isinstance(held_out, bool)


def test_a_drifted_fit_goes_on_with_its_level_corrected_until_it_is_learned_anew(partition):
    measure(partition, START, END)
    (first,) = learning.refit(partition, END)
    measure(partition, END, END + 120, slower=1.6)
    assert learning.watch_drift(partition, END + 120) == [first]
    corrected = FittedModel.objects.get(state="accepted")
    assert corrected.prefill["c1"] == pytest.approx(1.6 * first.prefill["c1"], rel=0.05)
    assert corrected.decode["d1"] == pytest.approx(1.6 * first.decode["d1"], rel=0.05)
    assert corrected.prefill_error_ratio < 0.05
    assert "corrected in its level" in corrected.warnings[0]
    assert learning.problems(partition) == {}
    (anew,) = learning.refit(partition, END + 120)
    assert "provisional" not in anew.summary
    corrected.refresh_from_db()
    assert (corrected.state, corrected.retired_reason) == ("retired", "it was only corrected in its level")


def test_when_more_than_the_level_has_changed_nothing_is_planned_until_the_next_fit(partition):
    PlannerPolicy.objects.update(mode="advisory")
    measure(partition, START, END)
    load(partition)
    run(partition)
    measure(partition, END, END + 60, slower=2.0, noise=0.4)
    assert learning.watch_drift(partition, END + 60)
    state = windows.planner_state(partition, END + 60)
    assert {node.fit_problem for node in state.nodes} == {"has drifted and is learned anew"}
    assert evaluate(state, []).rule == "unfitted"


def test_batches_far_beyond_the_fit_ask_for_a_wider_one(partition):
    measure(partition, START, END, batches=(2, 8))
    (narrow,) = learning.refit(partition, END)
    assert narrow.batch_high < 9
    measure(partition, END, END + 60, batches=(20, 60))
    (wide,) = learning.refit(partition, END + 60)
    narrow.refresh_from_db()
    assert narrow.state == "retired" and "had seen" in narrow.retired_reason
    assert wide.batch_high > 40 and wide.batch_low < 9
    assert learning.problems(partition) == {}


def test_prompts_of_another_size_are_no_drift_but_ask_for_a_wider_fit(partition):
    """The first fit cannot tell an iteration from its tokens: all chunks had one size."""
    measure(partition, START, END, chunk=4096)
    (narrow,) = learning.refit(partition, END)
    assert narrow.summary["prefill"]["merged"] == [["c0", "c1"]]
    measure(partition, END, END + 60, chunk=64)
    assert learning.watch_drift(partition, END + 60) == []
    (wide,) = learning.refit(partition, END + 60)
    narrow.refresh_from_db()
    assert "64 tokens in a prefill iteration" in narrow.retired_reason
    assert wide.summary["prefill"]["merged"] == []
    assert wide.prefill["c0"] == pytest.approx(COEFFICIENTS["c0"], rel=0.2)


def test_a_node_that_is_slower_than_its_class_is_planned_with_at_its_own_speed(partition):
    measure(partition, START, END + WINDOW_S, slow_node=("gb300-7", 1.5))
    (fit,) = learning.refit(partition, END + WINDOW_S)
    assert list(fit.summary["decode"]["odd_nodes"]) == ["gb300-7"]
    _, slow = learning.learned(Node.objects.get(name="gb300-7"), fit)
    _, usual = learning.learned(Node.objects.get(name="gb300-6"), fit)
    assert slow.d1 > 1.2 * usual.d1


def test_a_decision_is_stored_with_all_its_inputs_and_made_again_is_the_same(partition):
    measure(partition, START, END)
    load(partition)
    run(partition)
    decision = Decision.objects.get(window_end=END)
    again = evaluate(state_from(decision.detail["state"]), [slice_from(piece) for piece in decision.detail["window"]])
    assert (again.verdict, again.rule, again.reason) == (decision.verdict, decision.rule, decision.reason)
    assert list(again.chosen.prefill) == decision.chosen_prefill
    assert again.chosen.gate.gain == decision.gain
    assert decision.detail["fits"] == [FittedModel.objects.get().pk]
    assert decision.rule != deciding.WATCH
