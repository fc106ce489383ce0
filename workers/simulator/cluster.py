"""Many partitions as processes: each runs on its own between epochs, then all exchange their demand.

At an epoch (60 s of virtual time) every partition says how many agents it has, how long their requests take and what it
answered. Agents belong to a partition for life, as their KV does; only where the next ones start is decided here, so demand
moves as agents come and go. Everything follows from the plan and its seed, whatever the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import pi, sin
from multiprocessing.connection import Connection
from typing import Any

from workers.collecting import SIMULATED_YOUNG_OBJECTS, collect_seldom
from workers.simulator.hardware import GLM, KIMI, hardware
from workers.simulator.scenario import Cluster, Run, Settings, build
from workers.simulator.systems import system
from workers.simulator.workloads.mixes import ClosedLoop, Population, generated

EPOCH_S = 60.0
MOVED_SHARE = 0.05
SLOWER_RATIO = 1.25
STEPS_A_PERIOD = 12


@dataclass(frozen=True)
class Swing:
    """Two workloads whose share of a partition's agents goes up and down, each partition at another time. `depth` 0.8: from
    10 % to 90 %."""

    workloads: tuple[str, str] = ("Putnam", "OSWorld")
    agents: tuple[int, int] = (288, 144)
    depth: float = 0.8
    period_s: float = 7200.0

    def populations(self, partition: int, partitions: int, seconds: float) -> list[Population]:
        step_s = self.period_s / STEPS_A_PERIOD
        first, second = self.workloads
        found = []
        for step in range(int(seconds / step_s) + 1):
            share = 0.5 + self.depth / 2 * sin(2 * pi * (step / STEPS_A_PERIOD + partition / partitions))
            agents = {first: round(self.agents[0] * share), second: round(self.agents[1] * (1 - share))}
            found.append(Population(step * step_s, agents))
        return found


@dataclass(frozen=True)
class Plan:
    """What all partitions do. `agents` of `workload` each, or a `swing`. `exchange` False: no demand moves between them."""

    partitions: int
    nodes: int
    prefill_nodes: int
    seconds: float
    agents: int = 0
    workload: str = "CC"
    swing: Swing | None = None
    system: str = "switchyard"
    hardware: str = GLM
    block_tokens: int = 256
    seed: int = 0
    warm_up_s: float = 0.0
    exchange: bool = True
    fixed_splits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """One partition's word at an epoch."""

    partition: int
    agents: int
    answered: int
    e2e_mean_s: float


@dataclass
class ClusterResult:
    requests: int
    epochs: int
    figures: list[dict[str, Any]]
    demands: list[list[Demand]] = field(default_factory=list)
    memory_mib: float = 0.0

    @property
    def throughput_rps(self) -> float:
        return float(sum(figures["throughput_rps"] for figures in self.figures))


def exchange(demands: Sequence[Demand], total: int) -> list[int]:
    """How many agents each partition is to have from here on: a few start where requests are answered fastest instead of
    where they take clearly longest. The sum is `total`."""
    targets = [demand.agents for demand in demands]
    measured = [demand for demand in demands if demand.e2e_mean_s > 0]
    if len(measured) >= 2:
        slowest = max(measured, key=lambda demand: (demand.e2e_mean_s, -demand.partition))
        fastest = min(measured, key=lambda demand: (demand.e2e_mean_s, demand.partition))
        if slowest.e2e_mean_s > SLOWER_RATIO * fastest.e2e_mean_s:
            moved = max(1, round(MOVED_SHARE * slowest.agents))
            targets[slowest.partition] -= moved
            targets[fastest.partition] += moved
    targets[0] += total - sum(targets)
    return targets


class Member:
    """One partition in a worker process."""

    def __init__(self, plan: Plan, index: int) -> None:
        self.plan, self.index = plan, index
        seed = plan.seed * 1000 + index
        name = plan.system
        if plan.fixed_splits:
            name = f"{plan.system}:{plan.fixed_splits[index % len(plan.fixed_splits)]}"
        prefill = plan.prefill_nodes
        self.run: Run = build(
            Cluster(plan.nodes, prefill, hardware(plan.hardware), name=f"part{index}"),
            system(name),
            Settings(block_tokens=plan.block_tokens, seed=seed),
        )
        scale = 3.0 if plan.hardware == KIMI else 1.0
        if plan.swing is None:
            workloads: tuple[str, ...] = (plan.workload,)
            populations = [Population(0.0, {plan.workload: plan.agents})]
        else:
            workloads = plan.swing.workloads
            populations = plan.swing.populations(index, plan.partitions, plan.seconds + plan.warm_up_s)
        makers = {
            workload: generated(workload, seed, plan.block_tokens, scale if workload == "Putnam" else 1.0)
            for workload in workloads
        }
        self.loop = ClosedLoop(self.run.partition, makers, populations, seed, mature=False)
        self._rows = 0
        self._before = self.run.partition.yard.kv.reuse()

    def advance(self, until_s: float) -> Demand:
        partition = self.run.partition
        if partition.clock.now < self.plan.warm_up_s <= until_s:
            partition.clock.run_until(self.plan.warm_up_s)
            self._before = partition.yard.kv.reuse()
        partition.clock.run_until(until_s)
        recorder = partition.recorder
        e2e = recorder.latest("e2e_s", self._rows)
        self._rows = recorder.rows
        agents = sum(self.loop.active.values())
        return Demand(self.index, agents, partition.answered, float(e2e.mean()) if len(e2e) else 0.0)

    def retarget(self, agents: int) -> None:
        self.loop.set_target(self.run.partition.clock.now, self.plan.workload, agents)

    def figures(self, until_s: float) -> dict[str, Any]:
        return self.run.figures(self.plan.warm_up_s, until_s, self._before)


def _serve(pipe: Connection, plan: Plan, indexes: Sequence[int]) -> None:
    """A worker: builds its partitions, then does what it is told until the pipe closes."""
    collect_seldom(SIMULATED_YOUNG_OBJECTS)
    members = [Member(plan, index) for index in indexes]
    while True:
        order, argument = pipe.recv()
        if order == "advance":
            pipe.send([member.advance(argument) for member in members])
        elif order == "retarget":
            for member in members:
                member.retarget(argument[member.index])
            pipe.send(None)
        else:
            memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            pipe.send(([member.figures(argument) for member in members], memory_mib))
            pipe.close()
            return


@dataclass
class ClusterRun:
    """Runs a plan. `progress(share)` is told after each epoch; what it answers False to is stopped early."""

    plan: Plan
    processes: int = 2
    progress: Callable[[float], bool] | None = None

    def run(self) -> ClusterResult:
        plan = self.plan
        context = multiprocessing.get_context("spawn")
        count = max(1, min(self.processes, plan.partitions))
        shares = [list(range(plan.partitions))[start::count] for start in range(count)]
        pipes, workers = [], []
        for indexes in shares:
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, plan, indexes), daemon=True)
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        try:
            return self._epochs(pipes)
        finally:
            for pipe in pipes:
                pipe.close()
            for worker in workers:
                worker.join(timeout=10)
                if worker.is_alive():
                    worker.terminate()

    def _epochs(self, pipes: Sequence[Connection]) -> ClusterResult:
        plan = self.plan
        end_s = plan.warm_up_s + plan.seconds
        total = plan.agents * plan.partitions
        result = ClusterResult(0, 0, [])
        now = 0.0
        while now < end_s:
            now = min(end_s, now + EPOCH_S)
            demands = sorted(_ask(pipes, "advance", now), key=lambda demand: demand.partition)
            result.demands.append(demands)
            result.epochs += 1
            if self.progress is not None and not self.progress(now / end_s):
                break
            if plan.exchange and plan.swing is None and now < end_s:
                targets = exchange(demands, total)
                if targets != [demand.agents for demand in demands]:
                    _ask(pipes, "retarget", targets)
        for pipe in pipes:
            pipe.send(("finish", now))
        answers = [pipe.recv() for pipe in pipes]
        result.figures = [figures for found, _ in answers for figures in found]
        result.memory_mib = sum(memory for _, memory in answers)
        result.requests = sum(demand.answered for demand in result.demands[-1])
        return result


def _ask(pipes: Sequence[Connection], order: str, argument: Any) -> list[Any]:
    """Tell all workers, then hear all: they work at the same time."""
    for pipe in pipes:
        pipe.send((order, argument))
    return [entry for pipe in pipes for entry in (pipe.recv() or ())]


def default_processes() -> int:
    return max(1, os.cpu_count() or 1)
