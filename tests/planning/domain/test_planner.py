"""Planner decisions: which split, when to hold, and that every answer explains itself."""

from dataclasses import replace

import pytest

from apps.planning.domain.capacity import NodeCapacity, decode_rate
from apps.planning.domain.cost_model import PrefillCoefficients
from apps.planning.domain.plan_types import LastSwitch, PlannerPolicy
from apps.planning.domain.planner import evaluate
from tests.planning.domain.building import (
    CAPACITY,
    DECODE,
    HEAVY_PREFILL,
    LONG_ANSWERS,
    NOW,
    cluster,
    node,
    state,
    window,
)


def test_a_workload_that_prefill_limits_moves_a_node_to_prefill():
    decision = evaluate(state(4, 5), window())
    assert (decision.verdict, decision.rule) == ("switch", "switch")
    assert len(decision.chosen.prefill) == 5
    assert [(m.from_phase, m.to_phase) for m in decision.chosen.moves] == [("decode", "prefill")]
    assert decision.theta == pytest.approx(6.4033, abs=1e-3)
    assert decision.chosen.theta == pytest.approx(7.0539, abs=1e-3)
    assert decision.chosen.gate.gain == pytest.approx(7.0539 - 6.4033, abs=1e-3)


def test_the_best_split_is_held_and_says_why():
    decision = evaluate(state(5, 4), window())
    assert (decision.verdict, decision.chosen) == ("hold", None)
    assert decision.rule == "no_gain"
    assert "not better" in decision.reason
    assert len(decision.candidates) == 7


def test_long_answers_move_nodes_to_decode():
    decision = evaluate(state(6, 3), window(LONG_ANSWERS, decode_utilisation=1.0))
    assert decision.verdict == "switch"
    assert decision.chosen.prefill_delta < 0


def test_one_burst_is_within_the_noise():
    slices = window(replace(HEAVY_PREFILL, in_flight=5), slices=10)
    slices[4] = replace(slices[4], workload=HEAVY_PREFILL)
    decision = evaluate(state(4, 5), slices)
    assert decision.verdict == "hold"
    five = next(c for c in decision.candidates if len(c.prefill) == 5)
    assert five.rule in {"within_noise", "no_gain"}


def test_fewer_than_five_measured_slices_hold():
    slices = [replace(piece, workload=None) if index > 3 else piece for index, piece in enumerate(window())]
    decision = evaluate(state(), slices)
    assert (decision.verdict, decision.rule, decision.slices_used) == ("hold", "too_few_slices", 4)


def test_configured_coefficients_are_named_as_the_source_until_all_nodes_have_learned_ones():
    assert evaluate(state(), window()).source == "configured"
    nodes = tuple(replace(n, source="learned") for n in cluster(4, 5))
    assert evaluate(state(nodes=nodes), window()).source == "learned"


HOLDS = {
    "frozen": {"policy": PlannerPolicy(mode="frozen", freeze_reason="release day")},
    "forced": {"forced_reason": "maintenance by ada"},
    "switch_running": {"switch_running": True},
    "cooldown": {"last_switch": LastSwitch(NOW - 30, 1)},
    "draining": {"nodes": (node(1, "prefill"), *[node(i, "decode", draining=i == 2) for i in range(2, 10)])},
    "unfitted": {"nodes": (node(1, "prefill", fit_ok=False), *[node(i, "decode") for i in range(2, 10)])},
    "warming_up": {"warming_up": True},
    "too_few_nodes": {"nodes": (node(1, "prefill"), node(2, "decode", available=False))},
}


@pytest.mark.parametrize("rule", sorted(HOLDS))
def test_a_rule_that_objects_holds_the_split_and_is_named(rule):
    decision = evaluate(state(**HOLDS[rule]), window())
    assert (decision.verdict, decision.rule, decision.chosen) == ("hold", rule, None)
    assert decision.reason
    assert rule in {code for _, code, _ in decision.rules}


def test_holding_still_shows_what_each_candidate_would_gain():
    decision = evaluate(state(policy=PlannerPolicy(mode="frozen")), window())
    assert max(c.gate.gain for c in decision.candidates) == pytest.approx(0.65, abs=0.01)


def test_stale_reports_hold():
    assert evaluate(state(), window(stale_ratio=0.21)).rule == "stale_reports"
    assert evaluate(state(), window(stale_ratio=0.19)).verdict == "switch"


def test_low_demand_holds_unless_some_slice_was_busy():
    calm = window(prefill_utilisation=0.5, decode_utilisation=0.69)
    assert evaluate(state(), calm).rule == "low_demand"
    calm[3] = replace(calm[3], decode_utilisation=0.7)
    assert evaluate(state(), calm).verdict == "switch"


def test_a_candidate_that_would_break_the_ttft_slo_is_not_taken():
    # Answers got long: theta asks for fewer prefill nodes, but prefill could then no longer keep up in time.
    load = replace(LONG_ANSWERS, t_uc=8000.0, pairs=4e8, t_out=2500.0)
    pieces = window(load, decode_utilisation=1.0, rate=6.5)
    free = evaluate(state(6, 3), pieces)
    assert free.verdict == "switch"
    guarded = evaluate(state(6, 3, policy=PlannerPolicy(slo_ttft_s=0.05)), pieces)
    stopped = next(c for c in guarded.candidates if c.prefill == free.chosen.prefill)
    assert stopped.rule == "ttft_guard"
    assert "SLO" in stopped.reason


def test_undoing_a_recent_switch_needs_twice_the_gate():
    # Every fourth slice is calm: the gain of 5P4D is between two and four standard errors.
    slices = [
        replace(piece, workload=replace(HEAVY_PREFILL, in_flight=75 if index % 4 else 52))
        for index, piece in enumerate(window())
    ]
    assert evaluate(state(4, 5), slices).verdict == "switch"
    decision = evaluate(state(4, 5, last_switch=LastSwitch(NOW - 200, prefill_delta=-1)), slices)
    assert decision.verdict == "hold"
    assert next(c for c in decision.candidates if len(c.prefill) == 5).rule == "hysteresis"
    assert evaluate(state(4, 5, last_switch=LastSwitch(NOW - 200, prefill_delta=1)), slices).verdict == "switch"
    assert evaluate(state(4, 5, last_switch=LastSwitch(NOW - 1300, prefill_delta=-1)), slices).verdict == "switch"


def test_an_engine_that_must_restart_is_switched_only_if_the_gain_pays_for_it():
    nodes = tuple(replace(n, switch_s=20_000.0) for n in cluster(4, 5))
    decision = evaluate(state(nodes=nodes), window())
    assert decision.verdict == "hold"
    assert decision.rule == "switch_cost"


def test_the_least_busy_node_moves():
    nodes = tuple(replace(n, running=0 if n.name == "n7" else 10) for n in cluster(4, 5))
    decision = evaluate(state(nodes=nodes), window())
    assert [move.node for move in decision.chosen.moves] == ["n7"]


def test_of_unequal_nodes_the_one_that_suits_prefill_moves():
    fast = NodeCapacity(PrefillCoefficients(0.0075, 2.5e-5, 2e-10, 1e-7), DECODE, 128)
    nodes = tuple(replace(n, capacity=fast) if n.name == "n8" else n for n in cluster(4, 5))
    decision = evaluate(state(nodes=nodes), window())
    assert "n8" in decision.chosen.prefill


def test_an_empty_phase_is_filled_at_once_in_spite_of_gate_and_cooldown():
    nodes = tuple(replace(n, available=n.phase == "decode", down_s=10.0) for n in cluster(1, 8))
    decision = evaluate(state(nodes=nodes, last_switch=LastSwitch(NOW - 1, 1)), [])
    assert (decision.verdict, decision.rule) == ("switch", "empty_phase")
    assert len(decision.chosen.moves) == 1


def test_a_node_that_only_restarts_does_not_turn_the_split_round():
    nodes = tuple(replace(n, available=n.phase == "decode", down_s=3.0) for n in cluster(1, 8))
    assert evaluate(state(nodes=nodes), []).verdict == "hold"


def test_mixed_nodes_count_half_in_each_phase_and_get_one_by_a_plan():
    nodes = tuple(replace(n, phase="mixed") for n in cluster(4, 5))
    decision = evaluate(state(nodes=nodes), window())
    assert decision.theta == pytest.approx(9 / 2 * decode_rate(CAPACITY, HEAVY_PREFILL, 70 / 9))
    assert all(len(c.prefill) + len(c.decode) == 9 for c in decision.candidates)


def test_a_decision_is_plain_values_for_storage():
    document = evaluate(state(), window()).as_dict()
    assert document["chosen"]["gate"]["code"] == "switch"
    assert document["candidates"][0]["gate"]["reason"]
