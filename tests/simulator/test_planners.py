"""The planner's own loop in virtual time: it follows the workload, holds while it is down, and undoes what makes people wait."""

from __future__ import annotations

import pytest

from tests.simulator.support import BLOCK, make_run, small
from workers.simulator.planners import BaselineDriver, OwnPlanner
from workers.simulator.scenario import Run
from workers.simulator.systems import ARROW, DYNAMO, SWITCHYARD, System
from workers.simulator.workloads.mixes import ClosedLoop, Population, generated


def putnam(system: System, agents: int = 100, device_tokens: int = 5_000_000) -> Run:
    """Decode-heavy work on a split that suits prefill."""
    machine = small(device_tokens=device_tokens)
    run = make_run(system, prefill=4, decode=1, hardware=machine, check_every=0, window_s=100.0, cooldown_s=30.0)
    ClosedLoop(
        run.partition,
        {"Putnam": generated("Putnam", 1, BLOCK)},
        [Population(0.0, {"Putnam": agents})],
        1,
        stagger_s=20.0,
    )
    return run


def split(run: Run) -> tuple[int, int]:
    counts = run.partition.yard.fleet.nodes.split()
    return counts["prefill"], counts["decode"]


def test_ours_moves_nodes_to_where_the_work_is_and_loses_nothing() -> None:
    run = putnam(SWITCHYARD)
    run.partition.clock.run_until(330.0)
    assert split(run) == (1, 4)
    assert isinstance(run.planner, OwnPlanner)
    assert [decision.verdict for _, decision in run.planner.decisions].count("switch") >= 1
    assert run.partition.recorder.failed == 0
    assert run.partition.yard.kv.reuse().lost["switched"] == 0
    run.partition.check_integrity()


def test_a_planner_that_is_down_changes_nothing_and_goes_on_when_it_is_back() -> None:
    run = putnam(SWITCHYARD)
    assert isinstance(run.planner, OwnPlanner)
    run.planner.down = run.orders.down = True
    run.partition.clock.run_until(250.0)
    assert split(run) == (4, 1)
    assert run.planner.decisions == []
    assert run.partition.answered > 100
    run.planner.down = run.orders.down = False
    run.partition.clock.run_until(560.0)
    assert split(run) != (4, 1)


@pytest.mark.parametrize("system", [DYNAMO, ARROW])
def test_a_baselines_flips_go_through_the_same_orders(system: System) -> None:
    run = putnam(system, agents=60, device_tokens=600_000)
    run.partition.clock.run_until(400.0)
    assert isinstance(run.planner, BaselineDriver)
    assert run.planner.flips
    at, node, phase, reason = run.planner.flips[0]
    assert at <= 240.0 and phase in ("prefill", "decode") and node in run.partition.nodes and reason
