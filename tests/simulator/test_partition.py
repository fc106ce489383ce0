"""A partition in virtual time: nobody is lost, the same seed gives the same journal, faults do what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulator.support import BLOCK, make_run, play, small, turns
from workers.simulator.partition import Signals
from workers.simulator.systems import FIXED
from workers.simulator.workloads.mixes import ClosedLoop, Population, generated
from workers.yard import commands


def journal(seed: int) -> list[str]:
    run = make_run(prefill=2, decode=2, seed=seed, check_every=0)
    lines: list[str] = []
    run.partition.trace = lambda now, event, answer: lines.extend(
        f"{now:.6f} {type(event).__name__} {command}" for command in answer if not isinstance(command, commands.Journal)
    )
    ClosedLoop(run.partition, {"CC": generated("CC", seed, BLOCK)}, [Population(0.0, {"CC": 6})], seed, stagger_s=5.0)
    run.partition.clock.run_until(90.0)
    return lines


def test_the_same_seed_gives_the_same_journal_and_another_seed_another() -> None:
    first = journal(3)
    assert len(first) > 150
    assert first == journal(3)
    assert first != journal(4)


def test_a_branch_finds_its_context_again_and_only_its_news_are_computed() -> None:
    run = make_run()
    over = play(run, turns("a", [(100, 10), (5, 10), (5, 10)], pause_s=2.0))
    run.partition.clock.run_until(60.0)
    assert over
    cached = run.partition.recorder.column("cached_tokens")
    assert list(cached) == [0, 110 * BLOCK, 125 * BLOCK]
    reuse = run.partition.yard.kv.reuse()
    assert reuse.ideal_tokens == reuse.actual_tokens


def test_nobody_is_lost_between_the_yard_and_its_nodes() -> None:
    """`check_every` 1 recomputes every count from the living branches after every event."""
    run = make_run(hardware=small(host_pool_tokens=400 * BLOCK))
    over = [play(run, turns(f"b{n}", [(60, 4)] * 6), at=n * 0.3) for n in range(6)]
    run.partition.clock.run_until(120.0)
    assert all(over)
    assert run.partition.arrived == run.partition.answered == 36
    assert any(node.counters.evicted_blocks for node in run.partition.nodes.values())


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_node_that_dies_loses_no_request(stage: str) -> None:
    run = make_run()
    over = [play(run, turns(f"c{n}", [(200, 40)] * 3), at=n * 0.1) for n in range(8)]
    run.partition.clock.run_until(1.5)
    victim = next(node for node in run.partition.nodes.values() if node.phase.phase == stage)
    assert victim.prefill.calls or victim.decode.outputs
    run.partition.crash(1.5, victim.name)
    run.partition.clock.run_until(20.0)
    run.partition.restart(20.0, victim.name)
    run.partition.clock.run_until(200.0)
    assert all(over), run.partition.living
    assert run.partition.yard.fleet.nodes.by_name[victim.name].health == "ok"


def test_lost_and_repeated_events_are_healed_by_a_snapshot() -> None:
    run = make_run(signals=Signals(lost_ratio=0.2, repeated_ratio=0.2), check_every=0)
    snapshots: list[commands.FetchSnapshot] = []
    run.partition.trace = lambda now, event, answer: snapshots.extend(
        command for command in answer if isinstance(command, commands.FetchSnapshot)
    )
    over = [play(run, turns(f"d{n}", [(50, 4)] * 8), at=n * 0.2) for n in range(4)]
    run.partition.clock.run_until(200.0)
    assert all(over)
    assert len(snapshots) > 4
    run.partition.signals = Signals()
    for node in run.partition.nodes.values():
        run.partition._fetch_snapshot(run.partition.clock.now, commands.FetchSnapshot(node.name))
    run.partition.clock.run_until(210.0)
    for node in run.partition.nodes.values():
        assert run.partition.yard.kv.node_usage(node.name)[0] == node.pool.used_blocks


def test_a_fetch_that_fails_is_computed_instead_and_counted() -> None:
    fine, broken = make_run(prefill=3, decode=1), make_run(prefill=3, decode=1, failed_fetch_ratio=1.0)
    for run in (fine, broken):
        for n in range(6):
            play(run, turns(f"e{n}", [(400, 4)] * 5, pause_s=0.2), at=0.01 * n)
        run.partition.clock.run_until(120.0)
        assert run.partition.answered == 30
    assert sum(node.counters.fetched_tokens for node in fine.partition.nodes.values()) > 0
    assert sum(node.counters.fetched_tokens for node in broken.partition.nodes.values()) == 0
    assert broken.partition.yard.kv.reuse().lost["fetch-failed"] > 0


def test_a_slow_node_is_slow_from_then_on() -> None:
    run = make_run(prefill=1, decode=1)
    over = play(run, turns("f", [(100, 40)] * 2, pause_s=1.0))
    run.partition.clock.run_until(30.0)
    usual_s = run.partition.recorder.column("e2e_s")[1]
    for node in run.partition.nodes.values():
        node.slow_down(30.0, replace(node.timing, speed=0.25))
    again = play(run, turns("g", [(100, 40)] * 2, pause_s=1.0), at=31.0)
    run.partition.clock.run_until(90.0)
    assert over and again
    assert run.partition.recorder.column("e2e_s")[3] > 3 * usual_s


def test_signals_are_as_old_as_they_are_set_to_be() -> None:
    late = make_run(signals=Signals(delay_s=1.5), check_every=0)
    play(late, turns("h", [(100, 2)]))
    late.partition.clock.run_until(2.4)
    node = next(node for node in late.partition.nodes.values() if node.pool.used_blocks)
    assert late.partition.yard.kv.node_usage(node.name)[0] == 0
    late.partition.clock.run_until(4.0)
    assert late.partition.yard.kv.node_usage(node.name)[0] == node.pool.used_blocks


def test_without_harness_signals_branches_are_still_recognised() -> None:
    run = make_run(FIXED, signals=Signals(harness=False))
    over = play(run, turns("i", [(100, 4)] * 4))
    run.partition.clock.run_until(60.0)
    assert over
    assert run.partition.yard.kv.branches_live == 1
    assert run.partition.yard.kv.reuse().actual_tokens > 0
