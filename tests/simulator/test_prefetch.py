"""Blocks that come to a simulated node ahead of their request."""

from __future__ import annotations

import pytest

from tests.simulator.support import BLOCK, make_run
from workers.simulator import systems
from workers.simulator.scenario import Run
from workers.simulator.workloads.blocks import content
from workers.simulator.workloads.mixes import ClosedLoop, Population, generated
from workers.yard.commands import Fetch

BLOCKS = 4000


def two_nodes() -> tuple[Run, bytes, float]:
    """The second holds a context that the first has not; how long it takes to bring it over."""
    run = make_run(systems.FIXED, prefill=2, decode=1, check_every=0)
    chain = content("a", BLOCKS)
    run.partition.nodes["n1"].store(0.0, chain)
    return run, chain, run.partition.nodes["n0"].timing.transfer_s(BLOCKS * BLOCK)


def test_blocks_arrive_when_the_link_has_carried_them() -> None:
    run, chain, takes_s = two_nodes()
    node = run.partition.nodes["n0"]
    node.prefetch(0.0, "r", chain, Fetch("n1", 0, BLOCKS))
    run.partition.clock.run_until(takes_s * 0.9)
    assert node.pool.lookup(chain) == 0
    run.partition.clock.run_until(takes_s * 1.1)
    assert node.pool.lookup(chain) == BLOCKS
    assert node.counters.fetched_tokens == BLOCKS * BLOCK


def test_what_has_come_by_a_cancellation_stays_and_the_links_are_free() -> None:
    run, chain, takes_s = two_nodes()
    node, peer = run.partition.nodes["n0"], run.partition.nodes["n1"]
    node.prefetch(0.0, "r", chain, Fetch("n1", 0, BLOCKS))
    node.cancel_prefetch(takes_s / 2, "r")
    assert node.pool.lookup(chain) == pytest.approx(BLOCKS / 2, abs=1)
    assert node.nic.in_until == peer.nic.out_until == takes_s / 2
    run.partition.clock.run_until(2 * takes_s)
    assert node.pool.lookup(chain) == pytest.approx(BLOCKS / 2, abs=1)
    peer.pool.check_integrity()


def test_what_a_peer_no_longer_has_is_told_at_once() -> None:
    run, _, _ = two_nodes()
    told: list[str] = []
    run.partition.trace = lambda now, event, answer: told.append(type(event).__name__)
    run.partition.nodes["n0"].prefetch(0.0, "r", content("unknown", 10), Fetch("n1", 0, 10))
    run.partition.clock.run_until(0.01)
    assert "PrefetchEnded" in told


def test_under_load_contexts_come_ahead_and_nothing_is_lost_count_of() -> None:
    run = make_run(systems.PREFETCHING, prefill=2, decode=2, check_every=1)
    ClosedLoop(run.partition, {"CC": generated("CC", 1, BLOCK)}, [Population(0.0, {"CC": 24})], 1, stagger_s=5.0)
    run.partition.clock.run_until(60.0)
    run.partition.check_integrity()
    assert run.partition.recorder.prefetches > 0
    assert run.partition.answered >= 5
