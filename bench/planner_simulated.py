"""The planner in the simulator: nine nodes, the product's own loop, router, queues and phase machine, in virtual time.

Five questions, each with its target: does it matter where it starts; does a burst of sub-agents disturb it; does it follow a
workload that really changes; how long does a switch take; does it take back a switch that turns out to hurt.

**What adapting costs** is, as published (4P5D: 6.27 requests/s without a planner, 6.25 with it), the throughput that a run at
the best split loses by having a planner: its needless switches. What a run loses that begins at another split is no cost of
adapting but what adapting wins back; it is printed beside it (`lost_from_there`), without a target. Most of it is the first
window: every agent's first context is computed at once, on the prefill nodes that the start has, and the planner's first
decision comes at that window's end.

**How long a switch takes**: the published mean, 6.2 s, is that of its table of nine stationary loads, and `switches` measures
it there. It is nearly all draining: a node that leaves decode ends its running outputs first (published: 18 s where all
switches are such, OSWorld), one that leaves prefill has nothing to end. In the `shift` nearly all switches leave decode, so
its mean is higher; `drain` and `rest` say how much of it is draining. Outputs of real engines go on on other decode nodes and
need no draining (docs/adr/0014); symbolic ones, of which nobody has the ids, stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import HASH_BYTES
from apps.planning.domain.loop import LAG_S
from apps.planning.domain.phase_machine import MovePlan
from bench.report import report
from workers.simulator.clients import Script, Turn
from workers.simulator.clock import TIMEOUT
from workers.simulator.experiments.runs import prepare, stationary
from workers.simulator.experiments.shapes import rows
from workers.simulator.planners import OwnPlanner
from workers.simulator.scenario import Cluster, Run, Settings, build
from workers.simulator.systems import system
from workers.simulator.workloads.blocks import content
from workers.simulator.workloads.generators import draw, parameters
from workers.simulator.workloads.mixes import ClosedLoop, Population, ScriptMaker, generated

SEED = 1
BLOCK_TOKENS = 128
WINDOW_S = 600.0
STARTS = ("3P6D", "4P5D", "5P4D", "6P3D")
ADAPTATION_SEEDS = (SEED, 2, 3)
CC_AGENTS = 126
# Decided at the end of the second window, when its last load has arrived, and switched.
FOLLOWED_WITHIN_S = 2 * WINDOW_S + LAG_S + 6.2
SWITCH_S = 6.2
FIRST_HOUR_S = 3600.0
SETTLE_S, SCORED_S = 2 * WINDOW_S, 4 * WINDOW_S


@dataclass
class Played:
    """A run with its workload."""

    run: Run
    load: ClosedLoop

    @property
    def planner(self) -> OwnPlanner:
        assert isinstance(self.run.planner, OwnPlanner)
        return self.run.planner

    @property
    def switches(self) -> list[tuple[float, int]]:
        """When each switch was over, and how many nodes prefill gained."""
        return [(at, delta) for at, _, delta in self.run.orders.finished]

    def split(self) -> tuple[int, int]:
        split = self.run.partition.yard.fleet.nodes.split()
        return split["prefill"], split["decode"]


def play(
    start: str,
    plan: list[Population],
    makers: dict[str, ScriptMaker] | None = None,
    name: str = "switchyard",
    seed: int = SEED,
) -> Played:
    """A partition at a split, with this plan of agents; not yet run."""
    run = build(Cluster(), system(f"{name}:{start}"), Settings(block_tokens=BLOCK_TOKENS, seed=seed, window_s=WINDOW_S))
    known = {workload: generated(workload, seed, BLOCK_TOKENS) for workload in ("CC", "Putnam", "OSWorld")}
    return Played(run, ClosedLoop(run.partition, {**known, **(makers or {})}, plan, seed=seed))


def figures(played: Played, since: float, until: float) -> dict[str, Any]:
    """Run to `until`; what was measured from `since` on."""
    clock = played.run.partition.clock
    clock.run_until(since)
    before = played.run.partition.yard.kv.reuse()
    clock.run_until(until)
    return played.run.figures(since, until, before)


# -- where it starts -------------------------------------------------------------------------------------------------


def initial_splits() -> None:
    """CC with 126 agents from four splits: the same end, the same latency; and what having a planner costs at that end."""
    ends, e2e, whole = {}, {}, {}
    until = SETTLE_S + SCORED_S
    for start in STARTS:
        played = play(start, [Population(0.0, {"CC": CC_AGENTS})])
        scored = figures(played, SETTLE_S, until)
        ends[start], e2e[start] = played.split(), scored["e2e_mean_s"]
        whole[start] = scored["all_requests"] / until
        prefill, decode = ends[start]
        report(f"initial_split.{start}.end_prefill_nodes", float(prefill), "nodes")
        report(f"initial_split.{start}.e2e_mean", e2e[start], "s")
        report(f"initial_split.{start}.throughput_whole_run", whole[start], "requests/s")
        if played.switches:
            report(f"initial_split.{start}.first_switch_after", played.switches[0][0], "s")
        assert prefill + decode == 9
    prefills = [prefill for prefill, _ in ends.values()]
    report("initial_split.end_spread", float(max(prefills) - min(prefills)), "nodes", target=1.0, aim="at_most")
    spread = max(e2e.values()) / min(e2e.values()) - 1
    report("initial_split.e2e_spread", spread, "ratio", target=0.05, aim="at_most")
    common = max(set(ends.values()), key=list(ends.values()).count)
    best = f"{common[0]}P{common[1]}D"
    fixed, own, switches = [], [], 0
    for seed in ADAPTATION_SEEDS:
        without = play(best, [Population(0.0, {"CC": CC_AGENTS})], name="switchyard-fixed", seed=seed)
        fixed.append(figures(without, SETTLE_S, until)["all_requests"] / until)
        having = play(best, [Population(0.0, {"CC": CC_AGENTS})], seed=seed)
        own.append(figures(having, SETTLE_S, until)["all_requests"] / until)
        switches += len(having.switches)
    for start in STARTS:
        report(f"initial_split.{start}.lost_from_there", 1 - whole[start] / fixed[0], "ratio")
    report("adaptation.switches_at_best_split", float(switches), "switches")
    cost = 1 - sum(own) / sum(fixed)
    report("adaptation_cost_at_best_split", cost, "ratio", target=0.01, aim="at_most")


# -- a burst ---------------------------------------------------------------------------------------------------------


def helper(number: int) -> Script:
    """A sub-agent as the CC workload spawns them, without its parent."""
    return _helper_turns(number, parameters()["CC"]["subagents"])


def _helper_turns(number: int, p: dict[str, Any]) -> Iterator[Turn]:
    name, rng = f"burst-{number}", Random(f"burst-{number}")
    context = content("CC/helper", round(p["system_tokens"] / BLOCK_TOKENS))
    context += content(f"{name}/0", max(1, round(draw(rng, p["private_tokens"]) / BLOCK_TOKENS)))
    total = max(1, round(draw(rng, p["requests"])))
    for turn in range(total):
        signal = BranchSignal(name, 0, None, None, turn == total - 1, name, None, "")
        pause_s = draw(rng, p["pause_s"]) if turn else 0.0
        tokens = len(context) // HASH_BYTES * BLOCK_TOKENS
        yield Turn(pause_s, context, tokens, max(1, round(draw(rng, p["output_tokens"]))), signal)
        context += content(f"{name}/{turn + 1}", max(1, round(draw(rng, p["append_tokens"]) / BLOCK_TOKENS)))


def burst() -> None:
    """Sixty sub-agents within ten seconds in the middle of a window, on a split that has settled."""
    at = SETTLE_S + WINDOW_S + 150.0
    plan = [
        Population(0.0, {"CC": CC_AGENTS}),
        Population(at, {"CC": CC_AGENTS, "burst": 60}),
        Population(at + 70.0, {"CC": CC_AGENTS}),
    ]
    played = play("4P5D", plan, {"burst": helper})
    figures(played, SETTLE_S, at + 2 * WINDOW_S)
    after = [moment for moment, _ in played.switches if moment > at]
    report("burst.switches", float(len(after)), "switches", target=0.0, aim="at_most")
    judged = [decision for moment, decision in played.planner.decisions if moment > at]
    for decision in judged:
        report(f"burst.held_by.{decision.rule}", 1.0, "decisions")


# -- a workload that changes -----------------------------------------------------------------------------------------


def shift() -> None:
    """Putnam, then half of it with OSWorld, then OSWorld alone: four windows each; followed within two."""
    period = 4 * WINDOW_S
    plan = [
        Population(0.0, {"Putnam": 288, "OSWorld": 0}),
        Population(period, {"Putnam": 144, "OSWorld": 72}),
        Population(2 * period, {"Putnam": 0, "OSWorld": 144}),
    ]
    played = play("4P5D", plan)
    splits = []
    for number, name in enumerate(("Putnam", "mixed", "OSWorld")):
        measured = figures(played, number * period, (number + 1) * period)
        splits.append(played.split())
        since = [moment - number * period for moment, _ in played.switches if moment > number * period]
        report(f"shift.{name}.prefill_nodes", float(splits[-1][0]), "nodes")
        report(f"shift.{name}.throughput", measured["throughput_rps"], "requests/s")
        if since:
            # Putnam is where the run begins, from nothing and from another workload's split: no shift.
            target = None if name == "Putnam" else FOLLOWED_WITHIN_S
            report(f"shift.{name}.first_switch_after", since[0], "s", target=target, aim="at_most")
    moved = splits[2][0] - splits[0][0]
    report("shift.prefill_nodes_gained", float(moved), "nodes", target=1.0)
    for phase in ("prefill", "decode"):
        _report_moves(f"shift.leaving_{phase}", [m for m in played.run.orders.moved if m.from_phase == phase])
    _report_moves("shift", played.run.orders.moved, target=SWITCH_S)


def _report_moves(name: str, moves: list[MovePlan], target: float | None = None) -> None:
    """How long nodes took to change phase, and how much of that their old work took to end."""
    if not moves:
        return
    took = [_between(move.began_at, move.finished_at) for move in moves]
    drained = [_between(move.began_at, move.drained_at or move.finished_at) for move in moves]
    whole_s, drain_s = sum(took) / len(moves), sum(drained) / len(moves)
    report(f"{name}.switch_mean", whole_s, "s", target=target, aim="at_most")
    report(f"{name}.switch_mean.drain", drain_s, "s")
    report(f"{name}.switch_mean.rest", whole_s - drain_s, "s")


def _between(start: float | None, end: float | None) -> float:
    assert start is not None and end is not None
    return end - start


# -- how long a switch takes -----------------------------------------------------------------------------------------


def switches() -> None:
    """The nine stationary loads of which the published mean is: their switches by node, the first hour of each."""
    moves: list[MovePlan] = []
    theirs = []
    for row in rows("table1_switches_and_lost_reuse"):
        spec = stationary("switchyard", row["workload"], row["agents"], seed=SEED)
        run, _load = prepare(spec)
        run.partition.clock.run_until(FIRST_HOUR_S)
        name = f"switches.{row['workload']}_{row['agents']}"
        report(f"{name}.nodes", float(len(run.orders.moved)), "nodes")
        if run.orders.moved:
            mean_s = sum(_between(m.began_at, m.finished_at) for m in run.orders.moved) / len(run.orders.moved)
            report(f"{name}.switch_mean", mean_s, "s")
        report(f"{name}.switch_mean.published", row["ours_switch_s"], "s")
        moves += run.orders.moved
        theirs += [row["ours_switch_s"]] * row["ours_switches"]
    report("switches.switch_mean.published", sum(theirs) / len(theirs), "s")
    _report_moves("switches", moves, target=SWITCH_S)


# -- a switch that hurts ---------------------------------------------------------------------------------------------


def hurtful() -> None:
    """Long answers make the planner give nodes to decode; the moment it has done so, the work turns to long prompts."""
    played = play("5P4D", [Population(0.0, {"Putnam": 288, "OSWorld": 0})])
    clock = played.run.partition.clock

    def turn_when_switched(now: float, _: object) -> None:
        if not played.switches:
            clock.at(now + 0.5, TIMEOUT, turn_when_switched)
            return
        played.load.set_target(now, "OSWorld", 400)

    clock.at(1.0, TIMEOUT, turn_when_switched)
    clock.run_until(3 * WINDOW_S)
    if not played.switches:
        report("hurtful_switch.undone_after", None, "s", target=120.0, aim="at_most")
        return
    switched_at = played.switches[0][0]
    undone = [moment - switched_at for moment, _ in played.planner.rollbacks if moment > switched_at]
    report("hurtful_switch.undone_after", undone[0] if undone else None, "s", target=120.0, aim="at_most")
    back = [moment - switched_at for moment, delta in played.switches if moment > switched_at and delta > 0]
    report("hurtful_switch.back_after", back[0] if back else None, "s", target=130.0, aim="at_most")


PARTS = {"initial": initial_splits, "burst": burst, "shift": shift, "switches": switches, "hurtful": hurtful}
