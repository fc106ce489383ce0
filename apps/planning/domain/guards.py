"""May the split change now, and may it change to this candidate? Two ordered lists of small rules.

Each rule is named as a sentence that is true when it accepts, and answers None (accepts) or an objection: a code for
programs and a sentence for people. The first objection decides. `BEFORE` looks at the partition, `CANDIDATE` at one
candidate that has passed the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apps.planning.domain.gate import judge
from apps.planning.domain.plan_types import Candidate, PlannerState, SliceView

REVERSE_STRICTNESS = 2.0
REVERSE_WINDOWS = 2.0


@dataclass(frozen=True, slots=True)
class Objection:
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules look at besides the state: the window, what the current split does, its predicted P95 wait."""

    slices: Sequence[SliceView]
    theta: float | None
    wait_p95_s: float | None


BeforeRule = Callable[[PlannerState, Evidence], Objection | None]
CandidateRule = Callable[[PlannerState, Evidence, Candidate], Objection | None]


def the_split_is_not_frozen(state: PlannerState, evidence: Evidence) -> Objection | None:
    if state.policy.mode != "frozen":
        return None
    return Objection("frozen", f"the split is frozen: {state.policy.freeze_reason or 'no reason given'}")


def no_operator_forces_the_split(state: PlannerState, evidence: Evidence) -> Objection | None:
    if state.forced_reason is None:
        return None
    return Objection("forced", f"an operator forces the split: {state.forced_reason}")


def the_model_is_not_being_learned_in_a_warm_up(state: PlannerState, evidence: Evidence) -> Objection | None:
    if not state.warming_up:
        return None
    return Objection("warming_up", "the partition warms up: its nodes serve both phases until the model is learned")


def at_least_two_nodes_are_available(state: PlannerState, evidence: Evidence) -> Objection | None:
    count = len(state.available)
    return None if count >= 2 else Objection("too_few_nodes", f"{count} nodes are available, two phases need two")


def no_switch_is_running(state: PlannerState, evidence: Evidence) -> Objection | None:
    return Objection("switch_running", "a switch is still running") if state.switch_running else None


def no_node_is_draining(state: PlannerState, evidence: Evidence) -> Objection | None:
    draining = [node.name for node in state.nodes if node.draining]
    return Objection("draining", f"{', '.join(draining)} is draining") if draining else None


def the_last_switch_has_cooled_down(state: PlannerState, evidence: Evidence) -> Objection | None:
    if state.last_switch is None:
        return None
    left_s = state.last_switch.finished_at + state.policy.cooldown_s - state.now
    if left_s > 2 * state.policy.cooldown_s:
        return None  # the clock has been set back since: how long ago it was is unknown, and it must not hold for ever
    return Objection("cooldown", f"the last switch cools down for another {left_s:.0f} s") if left_s > 0 else None


def the_model_is_good_enough_to_plan_with(state: PlannerState, evidence: Evidence) -> Objection | None:
    unfit = [node for node in state.available if not node.fit_ok]
    if not unfit:
        return None
    why = unfit[0].fit_problem or "is too wrong to plan with"
    return Objection("unfitted", f"the learned model of {', '.join(node.name for node in unfit)} {why}")


def reports_are_fresh(state: PlannerState, evidence: Evidence) -> Objection | None:
    if not evidence.slices:
        return None
    stale = sum(piece.stale_ratio for piece in evidence.slices) / len(evidence.slices)
    limit = state.policy.max_stale_ratio
    return (
        Objection("stale_reports", f"{stale:.0%} of node reports were stale, over {limit:.0%}")
        if stale > limit
        else None
    )


def some_stage_is_busy_enough(state: PlannerState, evidence: Evidence) -> Objection | None:
    """The demand guard: more capacity helps nobody while both stages have room in every slice."""
    measured = [
        max(piece.prefill_utilisation, piece.decode_utilisation)
        for piece in evidence.slices
        if piece.workload and piece.prefill_utilisation is not None and piece.decode_utilisation is not None
    ]
    limit = state.policy.min_utilisation
    if not measured or max(measured) >= limit:
        return None
    return Objection("low_demand", f"both stages stay under {limit:.0%} in every slice (most: {max(measured):.0%})")


def prefill_waits_stay_within_the_slo(
    state: PlannerState, evidence: Evidence, candidate: Candidate
) -> Objection | None:
    """The TTFT guard. A candidate that shortens the wait is welcome even while the SLO is missed."""
    slo_s, wait_s, now_s = state.policy.slo_ttft_s, candidate.prefill_wait_p95_s, evidence.wait_p95_s
    if slo_s is None or wait_s is None or wait_s <= slo_s or (now_s is not None and wait_s < now_s):
        return None
    return Objection("ttft_guard", f"P95 prefill wait would be {wait_s:.1f} s, the SLO is {slo_s:.1f} s")


def a_reverse_switch_passes_twice_the_gate(
    state: PlannerState, evidence: Evidence, candidate: Candidate
) -> Objection | None:
    """Hysteresis: undoing a switch of the last two windows needs twice the gain."""
    last = state.last_switch
    if last is None or last.prefill_delta * candidate.prefill_delta >= 0:
        return None
    if state.now - last.finished_at > REVERSE_WINDOWS * state.policy.window_s:
        return None
    result = judge(candidate.gains, evidence.theta or 0.0, REVERSE_STRICTNESS)
    return None if result.passed else Objection("hysteresis", f"it would undo a recent switch; {result.reason}")


def the_gain_pays_for_the_switch(state: PlannerState, evidence: Evidence, candidate: Candidate) -> Objection | None:
    """What the moving nodes do not serve while they switch must come back within one window."""
    moved = {move.node for move in candidate.moves}
    away_s = sum(node.switch_s for node in state.available if node.name in moved)
    if not away_s or not evidence.theta:
        return None
    lost = evidence.theta / len(state.available) * away_s
    won = (candidate.gate.gain or 0.0) * state.policy.window_s
    if won > lost:
        return None
    return Objection("switch_cost", f"switching loses {lost:.0f} requests, the gain brings {won:.0f} in one window")


BEFORE: tuple[BeforeRule, ...] = (
    at_least_two_nodes_are_available,
    no_operator_forces_the_split,
    the_split_is_not_frozen,
    the_model_is_not_being_learned_in_a_warm_up,
    no_switch_is_running,
    no_node_is_draining,
    the_last_switch_has_cooled_down,
    the_model_is_good_enough_to_plan_with,
    reports_are_fresh,
    some_stage_is_busy_enough,
)

# A phase without a node serves nobody: these few still hold, the rest would only prolong the outage.
BEFORE_EMPTY_PHASE: tuple[BeforeRule, ...] = (at_least_two_nodes_are_available, no_switch_is_running)

CANDIDATE: tuple[CandidateRule, ...] = (
    prefill_waits_stay_within_the_slo,
    a_reverse_switch_passes_twice_the_gate,
    the_gain_pays_for_the_switch,
)


def sentence(rule: Callable[..., object]) -> str:
    """The rule's name as people read it."""
    return rule.__name__.replace("_", " ")
