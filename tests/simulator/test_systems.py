"""Each compared system shows what it is: what its policies do that the others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apps.planning.domain.baselines import Demand, InputLengthDemand, LoadThresholds, NodeReport
from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients
from tests.simulator.support import BLOCK, make_run, play, small, turns
from workers.simulator import systems
from workers.simulator.planners import BaselineDriver
from workers.simulator.scenario import Run
from workers.simulator.systems import System, system
from workers.yard import commands, events


def cached(run: Run) -> list[int]:
    return [int(tokens) for tokens in run.partition.recorder.column("cached_tokens")]


def test_a_systems_name_may_carry_a_split() -> None:
    assert system("static:4P5D").split == (4, 5)
    assert system("kv-router+pool").fetch is True
    for wrong in ("nobody", "static:0P9D"):
        with pytest.raises(ValueError, match="system: expected"):
            system(wrong)


def test_the_same_request_waits_for_flow_control_in_ours_and_in_the_engine_elsewhere() -> None:
    for which, waits_in_engine in ((systems.FIXED, False), (systems.CACHE_AWARE, True)):
        run = make_run(which, prefill=1, decode=1)
        for n in range(12):
            play(run, turns(f"q{n}", [(200, 2)]), at=0.0)
        run.partition.clock.run_until(0.5)
        node = run.partition.nodes["n0"]
        assert (len(node.prefill.calls) > 4) is waits_in_engine
        run.partition.clock.run_until(60.0)


def lru_and_referenced(which: System) -> int:
    """A branch that pauses long, while others come and go; how much of it is found again."""
    run = make_run(which, prefill=1, decode=1, hardware=small(host_pool_tokens=600 * BLOCK, device_tokens=600 * BLOCK))
    play(run, turns("waiting", [(200, 2), (2, 2)], pause_s=40.0))
    for n in range(10):
        play(run, turns(f"passing{n}", [(100, 2)]), at=2.0 + 3.0 * n)
    run.partition.clock.run_until(100.0)
    return cached(run)[-1]


def test_least_recently_used_drops_a_branch_that_waits_and_reference_counts_keep_it() -> None:
    assert lru_and_referenced(systems.DATA_PLANE) < 50 * BLOCK
    assert lru_and_referenced(systems.EVICTION) >= 200 * BLOCK


def restarts(which: System) -> tuple[Run, str]:
    run = make_run(which, prefill=2, decode=2, check_every=0)
    play(run, turns("a", [(200, 4)] * 3, pause_s=5.0))
    run.partition.clock.run_until(30.0)
    name = next(
        name for name, node in run.partition.nodes.items() if node.pool.used_blocks and node.phase.phase == "prefill"
    )
    run.orders.order(30.0, [(name, "decode")])
    run.partition.clock.run_until(1000.0)
    return run, name


def test_dynamos_switch_restarts_the_engine_for_minutes_and_drops_its_cache() -> None:
    run, name = restarts(systems.DYNAMO)
    _, seconds, delta = run.orders.finished[0]
    assert delta == -1
    assert 666 <= seconds <= 840
    assert run.partition.nodes[name].pool.used_blocks == 0
    assert run.partition.yard.kv.node_usage(name)[0] == 0


def test_our_switch_takes_seconds_and_keeps_every_block() -> None:
    run, name = restarts(replace(systems.FIXED))
    _, seconds, _ = run.orders.finished[0]
    assert seconds < 2.0
    assert run.partition.nodes[name].pool.used_blocks > 200


def test_arrows_switch_is_quick_and_loses_the_nodes_kv() -> None:
    run, name = restarts(systems.ARROW)
    _, seconds, _ = run.orders.finished[0]
    assert seconds < 10.0
    assert run.partition.nodes[name].pool.used_blocks == 0


def reports(split: tuple[int, int], queued: int = 0, usage: float = 0.0) -> list[NodeReport]:
    prefill, decode = split
    return [
        *(NodeReport(f"p{n}", n, "prefill", queued, 0.0, 1) for n in range(prefill)),
        *(NodeReport(f"d{n}", prefill + n, "decode", 0, usage, 3) for n in range(decode)),
    ]


ARROW_PLANNER = InputLengthDemand(
    PrefillCoefficients(0.05, 44e-6, 2e-10, 6e-7), DecodeCoefficients(2.5e-3, 18e-3, 4e-4, 256, 8, 4), 2.2
)


def test_arrow_counts_input_that_is_cached_and_follows_a_burst() -> None:
    calm = Demand(60.0, 60, 60 * 2_000, 60, 60 * 2000)
    burst = Demand(60.0, 60, 60 * 150_000, 60, 60 * 1000)
    few = ARROW_PLANNER.prefill_nodes(9, calm)
    many = ARROW_PLANNER.prefill_nodes(9, burst)
    assert few <= 3 < 7 <= many
    flip = ARROW_PLANNER.decide(0.0, reports((4, 5)), burst)
    assert flip is not None and flip.phase == "prefill"
    back = ARROW_PLANNER.decide(60.0, reports((5, 4)), calm)
    assert back is not None and back.phase == "decode"


def test_dynamos_planner_moves_a_node_only_where_one_phase_wants_it_and_the_other_spares_it() -> None:
    planner, quiet = LoadThresholds(context_tokens=1000), Demand(5.0, 0, 0, 0, 0)

    def flip(split: tuple[int, int], queued: int, usage: float) -> tuple[str, str] | None:
        found = planner.decide(0.0, reports(split, queued=queued, usage=usage), quiet)
        return None if found is None else (found.node, found.phase)

    assert flip((4, 5), queued=500, usage=0.3) is None
    assert flip((4, 5), queued=1000, usage=0.3) == ("d0", "prefill")
    assert flip((4, 5), queued=1000, usage=0.8) is None, "decode does not spare a node"
    assert flip((4, 5), queued=1000, usage=1.1) is None, "both want one"
    assert flip((4, 5), queued=50, usage=1.1) == ("p0", "decode")
    assert flip((4, 5), queued=500, usage=1.1) is None, "prefill does not spare a node"
    assert flip((4, 5), queued=50, usage=0.8) is None, "nobody wants one"
    assert flip((1, 8), queued=50, usage=1.1) is None, "a phase keeps its last node"
    assert flip((8, 1), queued=1000, usage=0.3) is None
    assert flip((7, 2), queued=1000, usage=0.55) is None, "the one left would be over the upper threshold"


def test_a_baseline_sends_requests_on_to_decode_nodes_without_room_and_its_planner_sees_them_wait() -> None:
    run = make_run(systems.DYNAMO, prefill=2, decode=1, check_every=0, hardware=small(device_tokens=1500 * BLOCK))
    for n in range(6):
        play(run, turns(f"branch{n}", [(900, 40)]))
    run.partition.clock.run_until(9.0)
    decode = next(node for node in run.partition.nodes.values() if node.phase.phase == "decode")
    assert decode.decode.waiting
    assert decode.decode.tokens_needed() > decode.spec.device_tokens
    assert isinstance(run.planner, BaselineDriver)
    assert max(report.kv_usage for report in run.planner.reports()) > 1.0
    run.partition.clock.run_until(200.0)
    assert run.partition.answered == 6


@pytest.mark.parametrize(("which", "sooner"), [(systems.FIXED, True), (systems.STATIC, False)])
def test_without_our_data_plane_the_first_token_comes_from_the_decode_node(which: System, sooner: bool) -> None:
    run = make_run(which, prefill=1, decode=1, check_every=0, hardware=small(device_tokens=2000 * BLOCK))
    tokens: list[float] = []
    prefilled: list[float] = []

    def trace(now: float, event: object, _answer: object) -> None:
        if isinstance(event, events.FirstToken):
            tokens.append(now)
        if isinstance(event, events.PrefillFinished):
            prefilled.append(now)

    run.partition.trace = trace
    play(run, turns("a", [(900, 3)]))
    run.partition.clock.run_until(30.0)
    assert (tokens == prefilled) is sooner
    assert len(tokens) == 1 and tokens[0] >= prefilled[0]


def two_nodes_one_prefix(which: System) -> Run:
    """One context, many branches that share it, all at once: a second node is needed that has none of it."""
    run = make_run(which, prefill=2, decode=1, check_every=0)
    head = next(turns("head", [(1500, 2)])).chain
    play(run, turns("head", [(1500, 2)]))
    for n in range(10):
        play(run, turns(f"branch{n}", [(600, 2)], head=head), at=20.0)
    run.partition.clock.run_until(120.0)
    assert run.partition.answered == 11
    return run


def test_the_kv_router_computes_again_what_another_node_holds_and_the_pool_fetches_it() -> None:
    alone, pooled = two_nodes_one_prefix(systems.KV_ROUTER), two_nodes_one_prefix(systems.KV_ROUTER_POOL)
    assert sum(node.counters.fetched_tokens for node in alone.partition.nodes.values()) == 0
    assert alone.partition.yard.kv.reuse().lost["routed"] >= 1500 * BLOCK
    assert sum(node.counters.fetched_tokens for node in pooled.partition.nodes.values()) > 0
    assert pooled.partition.yard.kv.reuse().lost["routed"] == 0


def test_a_fetch_at_prefill_start_is_added_to_prefill_and_one_while_queued_is_not() -> None:
    late, early = two_nodes_one_prefix(systems.KV_ROUTER_POOL), two_nodes_one_prefix(systems.FIXED)
    stalled = [sum(node.counters.stalled_s for node in run.partition.nodes.values()) for run in (late, early)]
    assert stalled[0] > 0.05
    assert stalled[1] == pytest.approx(0.0, abs=1e-9)


def test_without_a_pool_decoded_tokens_are_computed_again() -> None:
    for which, cause in ((systems.STATIC, "never-stored"), (systems.FIXED, None)):
        run = make_run(which, prefill=1, decode=1)
        play(run, turns("a", [(100, 20), (5, 2)]))
        run.partition.clock.run_until(30.0)
        lost = run.partition.yard.kv.reuse().lost
        assert (lost["never-stored"] == 20 * BLOCK) is (cause is not None)


def test_sticky_stays_where_it_was_and_round_robin_decode_takes_turns() -> None:
    run = make_run(systems.STICKY, prefill=3, decode=3)
    used: list[str] = []
    run.partition.trace = lambda now, event, answer: used.extend(
        command.node for command in answer if isinstance(command, commands.StartPrefill)
    )
    play(run, turns("a", [(50, 2)] * 5))
    run.partition.clock.run_until(60.0)
    assert len(used) == 5 and len(set(used)) == 1
    run = make_run(systems.STATIC, prefill=1, decode=3)
    decoded: list[str] = []
    run.partition.trace = lambda now, event, answer: decoded.extend(
        command.node for command in answer if isinstance(command, commands.StartDecode)
    )
    play(run, turns("a", [(50, 2)] * 6))
    run.partition.clock.run_until(60.0)
    assert decoded == ["n1", "n2", "n3"] * 2


def test_agents_are_paused_while_all_their_contexts_would_not_fit() -> None:
    tight = small(device_tokens=500 * BLOCK)
    paused, free = (
        make_run(which, prefill=1, decode=2, hardware=tight, check_every=0)
        for which in (systems.THUNDERAGENT, systems.CACHE_AWARE)
    )
    most = {}
    for run in (paused, free):
        seen: list[int] = []
        run.partition.trace = lambda now, event, answer, run=run, seen=seen: seen.append(len(run.partition.living))  # type: ignore[misc]
        over = [play(run, turns(f"a{n}", [(200, 20), (10, 20)]), at=0.1 * n) for n in range(8)]
        run.partition.clock.run_until(300.0)
        assert all(over)
        most[run.system.name] = max(seen)
    assert most["thunderagent"] <= 2 < most["cache-aware"]


def test_published_rules_switch_where_the_guard_would_not() -> None:
    assert systems.PUBLISHED.guards is False
    run = make_run(systems.PUBLISHED)
    guarded = make_run(systems.SWITCHYARD)
    assert run.planner is not None and guarded.planner is not None
    assert run.planner.policy.slo_ttft_s is None  # type: ignore[union-attr]
    assert guarded.planner.policy.slo_ttft_s == 15.0  # type: ignore[union-attr]
