"""Which requests count as in flight decides whether a planner finds the best split or sticks: against independent figures."""

import json
from pathlib import Path

import pytest

from apps.planning.domain.capacity import Workload, closed_loop_rate, decode_rate, split_capacity
from apps.planning.domain.gate import FLOOR_RATIO
from tests.planning.domain.building import CAPACITY

CHECK = json.loads((Path(__file__).parents[2] / "data" / "formula_vectors.json").read_text())["q_definition_check"]
NODES = 9
THINK_S = 14.1


def workload(in_flight):
    return Workload(5268.0, 804078546.0, 150000.0, 848.0, 2.15, 8192.0, in_flight)


def theta(prefill, in_flight):
    return split_capacity([CAPACITY] * prefill, [CAPACITY] * (NODES - prefill), workload(in_flight)).theta


def best(in_flight):
    return max(range(1, NODES), key=lambda prefill: theta(prefill, in_flight))


def in_decode(rate, nodes):
    """Little's law: the batch at which a decode node keeps up with today's rate, times the nodes."""
    low, high = 0.0, 128.0
    for _ in range(60):
        middle = (low + high) / 2
        if decode_rate(CAPACITY, workload(1.0), middle) < rate / nodes:
            low = middle
        else:
            high = middle
    return high * nodes


CASES = [
    (name, agents, int(start))
    for name, agents in (("N=160,Z=14.1", 160), ("N=400,Z=14.1", 400))
    for start in range(1, 9)
]


@pytest.mark.parametrize(("name", "agents", "start"), CASES)
def test_counting_both_phases_picks_what_was_computed_independently(name, agents, start):
    rate = CHECK[name]["actual_X_by_P"][str(start)]
    picked = best(agents - rate * THINK_S)
    expected = int(CHECK[name]["planner_pick"]["q=in flight, both stages"][f"from {start}P{NODES - start}D"][0])
    assert abs(picked - expected) <= 1
    if expected == start:  # there it must stay: whatever else looks better is below the gate's floor
        q = agents - rate * THINK_S
        assert theta(picked, q) - theta(start, q) <= FLOOR_RATIO * theta(start, q)


@pytest.mark.parametrize("start", [2, 3, 4])
def test_counting_decode_alone_sticks_short_of_the_best_split(start):
    known = CHECK["N=400,Z=14.1"]
    rate = known["actual_X_by_P"][str(start)]
    assert best(in_decode(rate, NODES - start)) <= start + 1 < int(known["best"][0])


@pytest.mark.parametrize(("name", "agents"), [("N=160,Z=14.1", 160), ("N=400,Z=14.1", 400)])
def test_the_closed_loop_predicts_the_throughput_that_was_computed_independently(name, agents):
    for prefill in range(1, NODES - 1):  # a single decode node would run beyond its batch limit, which they ignored
        predicted = closed_loop_rate(
            [CAPACITY] * prefill, [CAPACITY] * (NODES - prefill), workload(1.0), agents, THINK_S
        )
        actual = CHECK[name]["actual_X_by_P"][str(prefill)]
        assert predicted == pytest.approx(actual, rel=0.08), f"{prefill}P"
    rates = {
        prefill: closed_loop_rate([CAPACITY] * prefill, [CAPACITY] * (9 - prefill), workload(1.0), agents, THINK_S)
        for prefill in range(1, NODES)
    }
    assert max(rates, key=rates.__getitem__) == int(CHECK[name]["best"][0])
