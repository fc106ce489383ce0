"""A decode node becomes a prefill node: what still runs there goes on on another one, as with real engines."""

from __future__ import annotations

import pytest

from tests.simulator.support import BLOCK, make_run, play, small, turns
from workers.simulator import systems
from workers.simulator.hardware import Hardware
from workers.simulator.node import SimNode
from workers.simulator.scenario import Run

LONG_TOKENS = 400 * BLOCK


def with_long_outputs(which: systems.System = systems.FIXED, hardware: Hardware | None = None) -> tuple[Run, SimNode]:
    """Long outputs on two decode nodes; the run at 20 s and one of these nodes."""
    run = make_run(which, prefill=2, decode=2, hardware=hardware or small())
    for number in range(8):
        play(run, turns(f"long{number}", [(50, LONG_TOKENS // BLOCK)]), at=number * 0.2)
    run.partition.clock.run_until(20.0)
    node = next(node for node in run.partition.nodes.values() if node.decode.outputs)
    return run, node


def switched_after_s(run: Run, node: SimNode, until_s: float) -> float | None:
    run.orders.order(20.0, [(node.name, "prefill")])
    run.partition.clock.run_until(until_s)
    return run.orders.finished[0][1] if run.orders.finished else None


def test_long_outputs_go_on_on_the_other_decode_node_and_the_switch_takes_seconds() -> None:
    run, node = with_long_outputs()
    outputs = len(node.decode.outputs)
    assert outputs > 1
    seconds = switched_after_s(run, node, until_s=60.0)
    assert seconds is not None
    assert seconds < 10.0
    other = next(other for other in run.partition.nodes.values() if other is not node and other.decode.outputs)
    assert other.counters.fetched_tokens >= outputs * 50 * BLOCK, "what the first had computed came from its pool"
    run.partition.clock.run_until(4000.0)
    assert run.partition.answered == 8
    assert set(run.partition.recorder.column("output_tokens")) == {LONG_TOKENS}


def test_what_moved_is_only_computed_anew_in_its_last_block() -> None:
    run, node = with_long_outputs()
    outputs = len(node.decode.outputs)
    before = sum(other.counters.recomputed_tokens for other in run.partition.nodes.values())
    switched_after_s(run, node, until_s=60.0)
    after = sum(other.counters.recomputed_tokens for other in run.partition.nodes.values())
    assert 0 < after - before <= outputs * BLOCK


@pytest.mark.parametrize("which", [systems.DYNAMO, systems.ARROW, systems.STATIC])
def test_engines_without_a_pool_that_decode_writes_to_wait_for_their_outputs(which: systems.System) -> None:
    run, node = with_long_outputs(which)
    running = set(node.decode.outputs)
    run.orders.order(20.0, [(node.name, "prefill")])
    run.partition.clock.run_until(40.0)
    assert set(node.decode.outputs) == running or not node.alive


def test_a_node_past_its_drain_whose_outputs_find_no_room_gets_no_prompts_while_another_takes_them() -> None:
    """It serves both phases until they end, and between prompts they would hardly move."""
    run, node = with_long_outputs(hardware=small(device_tokens=4 * 460 * BLOCK))
    run.orders.order(20.0, [(node.name, "prefill")])
    run.partition.clock.run_until(100.0)
    assert node.phase.phase == "mixed"
    assert node.decode.outputs
    ran_s = node.counters.prefill_busy_s
    for number in range(20):
        play(run, turns(f"short{number}", [(100, 2)]), at=100.0 + number)
    run.partition.clock.run_until(130.0)
    assert node.counters.prefill_busy_s == ran_s
    run.partition.clock.run_until(4000.0)
    assert node.phase.phase == "prefill"
    assert run.partition.answered == 28
