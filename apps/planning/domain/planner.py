"""The planner: at the end of a window, which split would carry more, and is that certain enough to switch?

`evaluate` is a function of the state and the window's slices alone, so a decision can be replayed later from what was
stored. Every candidate keeps its numbers and the rule that stopped it; *hold* says why as fully as *switch* does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from apps.planning.domain.capacity import (
    SplitCapacity,
    Workload,
    closed_loop_rate,
    decode_rate,
    prefill_rate,
    prefill_wait_s,
    split_capacity,
)
from apps.planning.domain.gate import judge
from apps.planning.domain.guards import BEFORE, BEFORE_EMPTY_PHASE, CANDIDATE, Evidence, Objection, sentence
from apps.planning.domain.plan_types import EMPTY_PHASE, Candidate, Decision, Move, PlannerNode, PlannerState, SliceView

# A swap of two nodes must promise this much more, or measurement noise would reshuffle equal nodes.
SWAP_GAIN_RATIO = 0.01

Assignment = dict[str, str]


def evaluate(state: PlannerState, window: Sequence[SliceView]) -> Decision:
    """Decide what the window's end leads to: switch to one candidate, or hold; either with its reasons.

    A mixed node counts half in each phase until a plan gives it one. If a phase has no node at all, the best split is
    taken at once, without gate or cooldown.
    """
    current: Assignment = {node.name: node.phase for node in state.available}
    emergency = state.outage is not None
    loads = [piece.workload for piece in window if piece.workload]
    base = _mean([_theta(state, current, load).theta for load in loads])
    evidence = Evidence(window, base, _worst_wait(state, current, window))

    objection, rules = _before(state, evidence, emergency)
    candidates = tuple(
        _examine(state, evidence, current, assignment) for assignment in _assignments(state, current, loads)
    )
    chosen = None
    if emergency:
        chosen = max(candidates, key=lambda c: (c.theta, -len(c.moves)), default=None)
    else:
        passing = [candidate for candidate in candidates if candidate.rule == "switch"]
        chosen = max(passing, key=lambda c: (c.gate.gain or 0.0, -len(c.moves)), default=None)

    if objection:
        verdict, rule, reason = "hold", objection.code, objection.reason
    elif chosen is None:
        verdict, rule, reason = "hold", *_why_none(candidates)
    elif emergency:
        verdict, rule, reason = (
            "switch",
            EMPTY_PHASE,
            f"no node is left to {state.outage}: the split is restored at once",
        )
    else:
        verdict, rule, reason = "switch", "switch", f"{_label(chosen)}: {chosen.gate.reason}"
    return Decision(
        verdict="switch" if verdict == "switch" else "hold",
        rule=rule,
        reason=reason,
        source="learned" if state.available and all(n.source == "learned" for n in state.available) else "configured",
        current_prefill=state.names("prefill"),
        current_decode=state.names("decode"),
        theta=base,
        closed_loop=_closed_loop(state, current, window),
        current_wait_p95_s=evidence.wait_p95_s,
        chosen=chosen if verdict == "switch" else None,
        candidates=candidates,
        slices=len(window),
        slices_used=len(loads),
        rules=rules,
    )


def _before(
    state: PlannerState, evidence: Evidence, emergency: bool
) -> tuple[Objection | None, tuple[tuple[str, str, str], ...]]:
    """The first objection, and every rule with its answer, so that a page can show the whole list."""
    first, answers = None, []
    for rule in BEFORE_EMPTY_PHASE if emergency else BEFORE:
        objection = rule(state, evidence)
        first = first or objection
        answers.append((sentence(rule), objection.code if objection else "ok", objection.reason if objection else ""))
    return first, tuple(answers)


def _label(candidate: Candidate) -> str:
    return f"{len(candidate.prefill)}P{len(candidate.decode)}D"


def _why_none(candidates: Sequence[Candidate]) -> tuple[str, str]:
    """Why no candidate was taken: the objection against the best one."""
    best = max(candidates, key=lambda c: (c.gate.gain is not None, c.gate.gain or 0.0), default=None)
    if best is None:
        return "no_candidate", "there is no other split of the available nodes"
    if best.rule == "too_few_slices":
        return best.rule, best.reason
    return best.rule, f"best other split {_label(best)}: {best.reason}"


def _examine(state: PlannerState, evidence: Evidence, current: Assignment, assignment: Assignment) -> Candidate:
    gains: list[float | None] = []
    thetas: list[float] = []
    outside = False
    for piece in evidence.slices:
        if piece.workload is None:
            gains.append(None)
            continue
        there = _theta(state, assignment, piece.workload)
        thetas.append(there.theta)
        outside = outside or there.outside_fit
        gains.append(there.theta - _theta(state, current, piece.workload).theta)
    gate = judge(gains, evidence.theta or 0.0)
    bottleneck = _theta(state, assignment, _last(evidence.slices)).bottleneck if thetas else "unknown"
    candidate = Candidate(
        prefill=tuple(name for name, phase in assignment.items() if phase == "prefill"),
        decode=tuple(name for name, phase in assignment.items() if phase == "decode"),
        moves=tuple(Move(name, current[name], phase) for name, phase in assignment.items() if current[name] != phase),
        theta=_mean(thetas) or 0.0,
        bottleneck=bottleneck,
        gate=gate,
        gains=tuple(gains),
        prefill_wait_p95_s=_worst_wait(state, assignment, evidence.slices),
        closed_loop=_closed_loop(state, assignment, evidence.slices),
        outside_fit=outside,
        rule=gate.code,
        reason=gate.reason,
    )
    if not gate.passed:
        return candidate
    for rule in CANDIDATE:
        objection = rule(state, evidence, candidate)
        if objection:
            return _with_rule(candidate, objection)
    return candidate


def _with_rule(candidate: Candidate, objection: Objection) -> Candidate:
    return replace(candidate, rule=objection.code, reason=objection.reason)


def _last(slices: Sequence[SliceView]) -> Workload:
    return next(piece.workload for piece in reversed(slices) if piece.workload)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _theta(state: PlannerState, assignment: Assignment, workload: Workload) -> SplitCapacity:
    """Capacity of an assignment; a mixed node counts half in each phase."""
    by_name = {node.name: node.capacity for node in state.available}
    prefill = [by_name[name] for name, phase in assignment.items() if phase == "prefill"]
    decode = [by_name[name] for name, phase in assignment.items() if phase == "decode"]
    mixed = [by_name[name] for name, phase in assignment.items() if phase == "mixed"]
    if not mixed:
        return split_capacity(prefill, decode, workload)
    with_mixed = split_capacity(prefill + mixed, decode + mixed, workload)
    batch = with_mixed.batch
    mu_prefill = with_mixed.prefill - sum(prefill_rate(node.prefill, workload) for node in mixed) / 2
    mu_decode = with_mixed.decode - sum(decode_rate(node, workload, min(batch, node.batch_limit)) for node in mixed) / 2
    return SplitCapacity(min(mu_prefill, mu_decode), mu_prefill, mu_decode, batch, with_mixed.outside_fit)


def _worst_wait(state: PlannerState, assignment: Assignment, slices: Sequence[SliceView]) -> float | None:
    """The largest predicted P95 prefill wait over the window's slices, seconds."""
    waits = []
    servers = sum(phase in ("prefill", "mixed") for phase in assignment.values())
    for piece in slices:
        if piece.workload:
            mu_total = _theta(state, assignment, piece.workload).prefill
            waits.append(prefill_wait_s(servers, piece.rate, mu_total, piece.workload.in_flight))
    return max(waits, default=None)


def _closed_loop(state: PlannerState, assignment: Assignment, slices: Sequence[SliceView]) -> float | None:
    """The closed-loop estimate beside Theta, where agents and think times are known; mean over the slices."""
    by_name = {node.name: node.capacity for node in state.available}
    prefill = [by_name[name] for name, phase in assignment.items() if phase == "prefill"]
    decode = [by_name[name] for name, phase in assignment.items() if phase == "decode"]
    return _mean(
        [
            closed_loop_rate(prefill, decode, piece.workload, piece.agents, piece.think_s)
            for piece in slices
            if piece.workload and piece.agents is not None and piece.think_s is not None
        ]
    )


def _assignments(state: PlannerState, current: Assignment, loads: Sequence[Workload]) -> list[Assignment]:
    """For every number of prefill nodes the best choice of which: fewest moves first, then local search."""
    nodes = state.available
    found = []
    for count in range(1, len(nodes)):
        assignment = _nearest(nodes, current, count, loads)
        if loads:
            assignment = _improved(state, assignment, loads)
        if assignment != current:
            found.append(assignment)
    return found


def _nearest(nodes: Sequence[PlannerNode], current: Assignment, count: int, loads: Sequence[Workload]) -> Assignment:
    """`count` prefill nodes with the fewest moves; the movers suit prefill best, then have least to leave behind."""

    def prefill_affinity(node: PlannerNode) -> float:
        if not loads:
            return 0.0
        load = loads[-1]
        batch = min(node.capacity.batch_limit, max(1.0, load.in_flight / max(1, len(nodes) - count)))
        return prefill_rate(node.capacity.prefill, load) / max(1e-12, decode_rate(node.capacity, load, batch))

    def stays_prefill_first(node: PlannerNode) -> tuple[object, ...]:
        rank = {"prefill": 0, "mixed": 1, "decode": 2}[current[node.name]]
        # Of the nodes that must move, the one with least running work and least referenced KV goes first; seen from
        # prefill's end of the line that is last among prefill nodes and first among decode nodes.
        load = (node.running, node.referenced_blocks)
        busy = tuple(-value for value in load) if rank == 0 else load
        return (rank, -round(prefill_affinity(node), 9), *busy, node.order)

    line = sorted(nodes, key=stays_prefill_first)
    chosen = {node.name for node in line[:count]}
    return {node.name: "prefill" if node.name in chosen else "decode" for node in nodes}


def _improved(state: PlannerState, assignment: Assignment, loads: Sequence[Workload]) -> Assignment:
    """Swap one prefill node with one decode node while that promises clearly more."""

    def value(candidate: Assignment) -> float:
        return sum(_theta(state, candidate, load).theta for load in loads)

    best, best_value = assignment, value(assignment)
    for _ in range(len(assignment)):
        swaps = []
        prefill = [name for name, phase in best.items() if phase == "prefill"]
        decode = [name for name, phase in best.items() if phase == "decode"]
        by_name = {node.name: node.capacity for node in state.available}
        for one, other in product(prefill, decode):
            if by_name[one] != by_name[other]:
                swapped = {**best, one: "decode", other: "prefill"}
                swaps.append((value(swapped), swapped))
        top_value, top = max(swaps, key=lambda pair: pair[0], default=(0.0, best))
        if top_value <= best_value * (1 + SWAP_GAIN_RATIO):
            break
        best, best_value = top, top_value
    return best
