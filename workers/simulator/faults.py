"""What breaks in a run, and when: nodes that die or crawl, words that get lost or come twice, fetches that fail, no planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from workers.simulator.clock import ARRIVAL
from workers.simulator.scenario import Run

FaultKind = Literal["node-loss", "slow-node", "lost-events", "repeated-events", "failed-fetches", "planner-down"]


@dataclass(frozen=True, slots=True)
class Fault:
    """From `at` until `until` (seconds; None: for good). `node` for faults of one node; `amount`: how many times as slow, or
    the share of events or fetches concerned. Raises ValueError naming the field."""

    kind: FaultKind
    at: float
    until: float | None = None
    node: str = ""
    amount: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"kind: expected one of {', '.join(get_args(FaultKind))}, got {self.kind!r}")
        if self.until is not None and self.until <= self.at:
            raise ValueError(f"until: expected a time after {self.at}, got {self.until}")
        if self.kind in ("node-loss", "slow-node") and not self.node:
            raise ValueError("node: expected the name of a node")
        most = float("inf") if self.kind == "slow-node" else 1.0
        if not 0 < self.amount <= most:
            raise ValueError(f"amount: expected a number above 0, at most {most:g}, got {self.amount}")


def schedule(run: Run, faults: Sequence[Fault]) -> None:
    """Have them all happen. Raises ValueError for a node that the run does not have."""
    for fault in faults:
        if fault.node and fault.node not in run.partition.nodes:
            raise ValueError(f"node: expected one of {', '.join(run.partition.nodes)}, got {fault.node!r}")
        run.partition.clock.at(fault.at, ARRIVAL, lambda now, one: _begin(run, now, one), fault)
        if fault.until is not None:
            run.partition.clock.at(fault.until, ARRIVAL, lambda now, one: _end(run, now, one), fault)


def _begin(run: Run, now: float, fault: Fault) -> None:
    partition = run.partition
    match fault.kind:
        case "node-loss":
            partition.crash(now, fault.node)
        case "slow-node":
            node = partition.nodes[fault.node]
            node.slow_down(now, replace(node.spec.timing, speed=node.spec.timing.speed / fault.amount))
        case "lost-events":
            partition.signals = replace(partition.signals, lost_ratio=fault.amount)
        case "repeated-events":
            partition.signals = replace(partition.signals, repeated_ratio=fault.amount)
        case "failed-fetches":
            partition.failed_fetch_ratio = fault.amount
        case "planner-down":
            _planner(run, down=True)


def _end(run: Run, now: float, fault: Fault) -> None:
    partition = run.partition
    match fault.kind:
        case "node-loss":
            partition.restart(now, fault.node)
        case "slow-node":
            node = partition.nodes[fault.node]
            node.slow_down(now, node.spec.timing)
        case "lost-events":
            partition.signals = replace(partition.signals, lost_ratio=0.0)
        case "repeated-events":
            partition.signals = replace(partition.signals, repeated_ratio=0.0)
        case "failed-fetches":
            partition.failed_fetch_ratio = 0.0
        case "planner-down":
            _planner(run, down=False)


def _planner(run: Run, down: bool) -> None:
    run.orders.down = down
    planner: Any = run.planner
    if planner is not None:
        planner.down = down
