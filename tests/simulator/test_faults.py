"""Everything at once: nodes die and crawl, words get lost and repeated, fetches fail, the planner is away. Nobody is lost."""

from __future__ import annotations

import pytest

from tests.simulator.support import BLOCK, make_run, play, turns
from workers.simulator.faults import Fault, schedule
from workers.simulator.systems import SWITCHYARD
from workers.simulator.workloads.mixes import ClosedLoop, Population, generated

ALL = (
    Fault("lost-events", 5.0, 60.0, amount=0.1),
    Fault("repeated-events", 10.0, 60.0, amount=0.1),
    Fault("slow-node", 15.0, 50.0, "n0", 4.0),
    Fault("failed-fetches", 20.0, 60.0, amount=0.5),
    Fault("planner-down", 20.0, 40.0),
    Fault("node-loss", 30.0, 55.0, "n1"),
    Fault("node-loss", 35.0, 58.0, "n4"),
)


def test_under_every_fault_at_once_each_request_has_one_end() -> None:
    run = make_run(SWITCHYARD, prefill=3, decode=3, check_every=7, window_s=20.0, cooldown_s=10.0)
    schedule(run, ALL)
    ClosedLoop(run.partition, {"OSWorld": generated("OSWorld", 2, BLOCK)}, [Population(0.0, {"OSWorld": 12}), Population(70.0, {"OSWorld": 0})],
               stagger_s=3.0)  # fmt: skip
    run.partition.clock.run_until(2500.0)
    partition = run.partition
    assert partition.clients.living == 0 and not partition.living
    assert partition.arrived == partition.answered + partition.rejected
    assert partition.answered > 100
    partition.check_integrity()


def test_a_fault_ends_when_it_is_said_to() -> None:
    run = make_run(SWITCHYARD, prefill=2, decode=2)
    schedule(run, (*ALL[:2], Fault("slow-node", 1.0, 2.0, "n0", 3.0), Fault("planner-down", 1.0, 3.0)))
    play(run, turns("a", [(50, 4)] * 3))
    run.partition.clock.run_until(2.5)
    assert run.partition.nodes["n0"].timing == run.partition.nodes["n0"].spec.timing
    assert run.orders.down
    run.partition.clock.run_until(61.0)
    assert not run.orders.down
    assert run.partition.signals.lost_ratio == run.partition.signals.repeated_ratio == 0.0


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"kind": "flood", "at": 1.0}, "kind"),
        ({"kind": "node-loss", "at": 1.0}, "node"),
        ({"kind": "slow-node", "at": 1.0, "node": "n0", "amount": 0}, "amount"),
        ({"kind": "lost-events", "at": 1.0, "amount": 1.5}, "amount"),
        ({"kind": "lost-events", "at": 2.0, "until": 1.0, "amount": 0.5}, "until"),
    ],
)
def test_a_wrong_fault_is_refused_by_its_field(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected"):
        Fault(**wrong)  # type: ignore[arg-type]


def test_a_fault_of_an_unknown_node_is_refused() -> None:
    with pytest.raises(ValueError, match="node: expected one of n0"):
        schedule(make_run(), [Fault("node-loss", 1.0, node="n9")])
