"""The planning loop: slices on the grid, windows decided once, a switch that hurts undone; all from (now, memory, state)."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from apps.planning.domain import loop
from apps.planning.domain.loop import Decided, Measured, Memory, SliceClosed, UndoSwitch
from apps.planning.domain.plan_types import LastSwitch, PlannerPolicy
from apps.planning.domain.planner import evaluate
from apps.planning.domain.replay import slice_from, state_document, state_from
from apps.planning.domain.slices import LoadPiece
from tests.planning.domain.building import HEAVY_PREFILL, cluster, window
from tests.planning.domain.building import state as state_of

POLICY = PlannerPolicy(slice_s=12.0, window_s=120.0, slo_ttft_s=5.0)
START = 1200.0


def piece(t0, requests=12, wait_s=1.0, **changes):
    load = HEAVY_PREFILL
    values = {
        "prefilled": requests,
        "t_uc": int(requests * load.t_uc),
        "pairs": int(requests * load.pairs),
        "t_rst": int(requests * load.t_rst),
        "prefill_iterations": requests,
        "finished": requests,
        "t_out": int(requests * load.t_out),
        "decode_iterations_of_finished": requests * load.t_out / load.t_acc,
        "in_flight_s": 2 * load.in_flight,
        "prefill_utilisation": 0.95,
        "decode_utilisation": 0.6,
        "prefill_waits_s": (wait_s,) * requests,
    }
    return LoadPiece(t0, t0 + 2.0, **{**values, **changes})


def state(now, prefill=4, decode=5, **changes):
    return replace(state_of(prefill, decode, policy=POLICY, **changes), now=now)


def run(until, memory=Memory(), pieces=(), every_s=2.0, start=START, **changes):
    """Ticks from the start to `until`; returns the memory and what came of it as (now, outcome)."""
    found, now = [], start
    while now <= until:
        seen = [p for p in pieces if p.t1 <= now]
        memory, outcomes = loop.tick(now, memory, state(now, **changes), Measured(seen))
        found += [(now, outcome) for outcome in outcomes]
        now += every_s
    return memory, found


def load(start=START, end=START + 240, **changes):
    pieces, t0 = [], start
    while t0 < end:
        pieces.append(piece(t0, **changes))
        t0 += 2.0
    return pieces


def test_slices_are_closed_once_on_the_grid_when_their_load_has_arrived():
    _, found = run(START + 40, pieces=load(), start=START + 13)
    closed = [(now, o.slice.t0, o.slice.t1) for now, o in found if isinstance(o, SliceClosed)]
    assert closed[0] == (START + 13, START - 12, START)
    assert closed[1] == (START + 17, START, START + 12)
    assert [t0 for _, t0, _ in closed] == [START - 12, START, START + 12]


def test_a_window_is_decided_once_when_its_last_slice_is_closed():
    _, found = run(START + 130, pieces=load())
    (decided,) = [(now, o) for now, o in found if isinstance(o, Decided) and o.end == START + 120]
    assert decided[0] == START + 124
    assert decided[1].decision.verdict == "switch"
    assert len(decided[1].window) == 10


def test_a_planner_that_was_away_closes_at_most_one_window_and_decides_it():
    memory, _ = run(START + 20, pieces=load())
    now = START + 242
    _, outcomes = loop.tick(now, memory, state(now), Measured(load()))
    closed = [o.slice.t0 for o in outcomes if isinstance(o, SliceClosed)]
    assert (closed[0], closed[-1]) == (START + 108, START + 216)
    assert [o.end for o in outcomes if isinstance(o, Decided)] == [START + 120]


def test_a_shorter_slice_begins_on_its_own_grid():
    memory, _ = run(START + 20, pieces=load())
    policy = replace(POLICY, slice_s=8.0, window_s=40.0)
    now = START + 60
    _, outcomes = loop.tick(now, memory, replace(state(now), policy=policy), Measured(load()))
    assert all(o.slice.t0 % 8 == 0 for o in outcomes if isinstance(o, SliceClosed))


def test_pauses_give_the_number_of_agents_and_the_closed_loop_estimate():
    now = START + 124
    thinks = [(START + t, 14.0) for t in range(120)]
    memory, found = Memory(), []
    for moment in range(int(START) + 4, int(now) + 1, 2):
        memory, outcomes = loop.tick(float(moment), memory, state(float(moment)), Measured(load(), thinks))
        found += outcomes
    closed = [o.slice for o in found if isinstance(o, SliceClosed)][-1]
    assert closed.think_s == 14.0
    assert closed.agents == pytest.approx(HEAVY_PREFILL.in_flight + 6.0 * 14.0)
    decision = [o for o in found if isinstance(o, Decided)][-1].decision
    assert decision.closed_loop is not None and decision.closed_loop < decision.theta * 1.05
    assert all(candidate.closed_loop is not None for candidate in decision.candidates)


# -- undoing a switch that hurts -------------------------------------------------------------------------------------

SWITCHED = LastSwitch(START + 100, prefill_delta=-1, watched=True)


def hurting():
    return [*load(end=START + 100), *load(START + 100, START + 240, wait_s=11.0)]


def test_a_watched_switch_that_breaks_twice_the_target_for_half_a_minute_is_undone():
    _, found = run(START + 200, pieces=hurting(), start=START + 100, last_switch=SWITCHED)
    undone = [(now, o) for now, o in found if isinstance(o, UndoSwitch)]
    assert START + 130 <= undone[0][0] <= START + 140
    assert "11.0 s" in undone[0][1].reason


def test_a_switch_that_goes_on_hurting_is_asked_to_be_undone_each_half_minute_and_the_window_is_decided_in_time():
    hurts = [*load(end=START + 20), *load(START + 20, START + 240, wait_s=11.0)]
    _, found = run(START + 170, pieces=hurts, start=START, last_switch=replace(SWITCHED, finished_at=START + 20))
    asked = [now for now, o in found if isinstance(o, UndoSwitch)]
    assert len(asked) > 1 and all(later - earlier == 30 for earlier, later in pairwise(asked))
    (decided_at,) = [now for now, o in found if isinstance(o, Decided) and o.end == START + 120]
    assert decided_at - (START + 120) <= 6


@pytest.mark.parametrize(
    "changes",
    [
        {"last_switch": replace(SWITCHED, watched=False)},
        {"last_switch": SWITCHED, "switch_running": True},
        {"last_switch": SWITCHED, "forced_reason": "maintenance"},
        {"last_switch": replace(SWITCHED, finished_at=START - 200)},
    ],
)
def test_what_a_person_wants_or_what_is_long_past_is_left_alone(changes):
    _, found = run(START + 200, pieces=hurting(), start=START + 100, **changes)
    assert not [o for _, o in found if isinstance(o, UndoSwitch)]


def test_a_wait_that_was_there_before_the_switch_is_not_blamed_on_it():
    always = load(wait_s=11.0)
    _, found = run(START + 200, pieces=always, start=START + 100, last_switch=SWITCHED)
    assert not [o for _, o in found if isinstance(o, UndoSwitch)]


def test_measurements_are_asked_for_back_to_before_a_watched_switch():
    memory = Memory(slices=tuple(replace(piece, t0=START + 108, t1=START + 120) for piece in window(slices=1)))
    now = START + 130
    assert loop.measured_since(now, memory, state(now)) == START + 120
    assert loop.measured_since(now, memory, state(now, last_switch=SWITCHED)) == START + 70


# -- a phase that lost its last node ---------------------------------------------------------------------------------


def test_a_lost_phase_is_restored_between_windows_and_not_again_within_a_slice():
    nodes = tuple(replace(n, available=n.phase == "decode", down_s=30.0) for n in cluster(1, 8))
    memory = Memory(decided_until=START)
    memory, found = run(START + 20, memory, nodes=nodes)
    restored = [(now, o.decision) for now, o in found if isinstance(o, Decided)]
    assert [now for now, _ in restored] == [START, START + 12]
    assert restored[0][1].rule == "empty_phase"
    assert memory.restored_at == START + 12


# -- a decision can be made again ------------------------------------------------------------------------------------


def test_a_stored_decision_made_again_from_its_inputs_is_the_same():
    now = START + 124
    _, found = run(now, pieces=load(), last_switch=SWITCHED)
    decided = [o for _, o in found if isinstance(o, Decided)][-1]
    stored = json.loads(json.dumps(state_document(state(now, last_switch=SWITCHED))))
    slices = [
        slice_from(json.loads(json.dumps({**{n: getattr(s, n) for n in type(s).__slots__}, "workload": plain(s)})))
        for s in decided.window
    ]
    again = evaluate(state_from(stored), slices)
    assert again == decided.decision


def plain(piece):
    load = piece.workload
    return {name: getattr(load, name) for name in type(load).__slots__} if load else None


# -- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_s", [2.1, 3.3333, 7.3, 59.9, 60.0])
def test_slices_of_any_length_are_closed_without_gap_or_overlap_and_each_window_is_decided(slice_s):
    policy = PlannerPolicy(slice_s=slice_s, window_s=7 * slice_s)
    memory, slices, windows, now = Memory(), [], [], 1.79e9 + 0.7
    while now < 1.79e9 + 25 * policy.window_s:
        memory, outcomes = loop.tick(now, memory, replace(state(now), policy=policy), Measured())
        slices += [(o.slice.t0, o.slice.t1) for o in outcomes if isinstance(o, SliceClosed)]
        windows += [(o.start, o.end, len(o.window)) for o in outcomes if isinstance(o, Decided)]
        now += 2.0 if len(windows) != 5 else 0.9 * policy.window_s  # once it was away
    assert 24 * 7 <= len(slices) <= 25 * 7 + 1
    assert max(abs(after[0] - before[1]) for before, after in pairwise(slices)) < 1e-5
    assert {count for *_, count in windows[1:]} == {7}
    assert max(abs(after[0] - before[1]) for before, after in pairwise(windows)) < 1e-5


def test_a_clock_that_is_set_back_stops_neither_slices_nor_windows():
    ahead = START + 86_400
    memory, _ = run(ahead + 130, pieces=load(ahead, ahead + 130), start=ahead)
    assert memory.decided_until > ahead and memory.closed_until > ahead
    memory, found = run(START + 130, memory, pieces=load())
    closed = [o.slice.t0 for _, o in found if isinstance(o, SliceClosed)]
    assert closed[-10:] == [START + 12 * i for i in range(10)]
    assert [o.end for _, o in found if isinstance(o, Decided)][-1] == START + 120


def test_a_switch_in_the_future_does_not_hold_the_split_until_then():
    now = START + 124
    decision = evaluate(state(now, last_switch=LastSwitch(now + 86_400, -1)), window())
    assert decision.rule != "cooldown"
    assert evaluate(state(now, last_switch=LastSwitch(now + 1, 1)), window()).rule == "cooldown"


def test_a_lost_phase_that_outlasts_a_windows_end_is_decided_once_a_slice_and_the_window_afterwards():
    lost = tuple(replace(n, available=n.phase == "decode", down_s=30.0) for n in cluster(1, 8))
    memory, found = run(START + 150, Memory(decided_until=START - 120), pieces=load(), start=START + 118, nodes=lost)
    restored = [now for now, o in found if isinstance(o, Decided)]
    assert all(after - before >= 12 for before, after in pairwise(restored))
    assert memory.decided_until == START - 120
    _, found = run(START + 152, memory, pieces=load(), start=START + 152)
    assert [o.end for _, o in found if isinstance(o, Decided)] == [START + 120]
