"""The planner's tick in the database: what is remembered and measured goes into `domain.loop`, what it decides is stored.

`tick` is all that the planner's task calls. It runs in one transaction that holds the partition's row, so what people
decide meanwhile comes before or after it. Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from django.db import transaction

from apps.planning import deciding, learning, orders, warmups
from apps.planning.choices import Cause, OrderState, StepState
from apps.planning.domain import loop
from apps.planning.domain.capacity import NodeCapacity
from apps.planning.domain.cost_model import PrefillCoefficients
from apps.planning.domain.plan_types import (
    EMPTY_PHASE,
    LastSwitch,
    PlannerNode,
    PlannerPolicy,
    PlannerState,
    SliceView,
)
from apps.planning.domain.slices import LoadPiece
from apps.planning.models import Decision, FittedModel, Slice, SwitchStep
from apps.planning.selectors import accepted_fits, last_switch, live_forces, policy_of, running_warm_up
from apps.telemetry.models import LoadWindow, RequestRecord
from apps.topology.choices import Engine, NodeState
from apps.topology.models import Node, Partition
from apps.topology.selectors import nodes_of
from controlplane import records
from controlplane.actors import PLANNER
from controlplane.audit import change

# An agent that pauses longer than this has gone away rather than thought.
LONGEST_THINK_S = 900.0
SWITCHES_REMEMBERED = 20
# What an SGLang server takes to become the other kind, until one has been seen: it builds its queues and graphs anew.
FIRST_ROLE_SWITCH_S = 15.0


def tick(partition: Partition, now: float, live: Mapping[str, Any] | None = None) -> str:
    """Close slices, undo a switch that hurts, decide what is due; says in one line what it came to.

    `live` is the gateway's newest snapshot, for the running work and referenced KV of each node. Call while holding the
    partition's planner lock.
    """
    with change(PLANNER, "the planner's tick"):
        partition = records.locked(partition)
        memory, policy = memory_of(partition, now), planner_policy(partition)
        warming_up = running_warm_up(partition) is not None
        closes = loop.slices_due(now, memory, policy)
        if closes:
            learning.watch_drift(partition, now)
        if loop.window_due(now, memory, policy) is not None and not warming_up:
            learning.refit(partition, now)
        state = planner_state(partition, now, live)
        since = loop.measured_since(now, memory, state)
        pauses = thinks(partition, since, now) if closes else []
        seen = loop.Measured(load_pieces(partition, since, now), pauses)
        memory, outcomes = loop.tick(now, memory, state, seen)
        said = [warmups.step(partition, now, state, memory.slices)]
        for outcome in outcomes:
            match outcome:
                case loop.SliceClosed(view):
                    store_slice(partition, view)
                case loop.Decided():
                    decision = deciding.store(partition, state, outcome)
                    said.append(f"{decision.verdict} ({decision.rule}): {decision.action}")
                case loop.UndoSwitch(reason):
                    said.append(deciding.undo_last_switch(partition, state, reason))
        if any(isinstance(outcome, loop.SliceClosed) for outcome in outcomes):
            deciding.spoil_stale_proposal(partition)
        return "; ".join(filter(None, said)) or "nothing to decide"


# -- what is remembered ----------------------------------------------------------------------------------------------


def memory_of(partition: Partition, now: float) -> loop.Memory:
    """The loop's memory at `now` out of the stored slices and decisions; not of a time that a wrong clock was at."""
    policy = policy_of(partition)
    past = Slice.objects.filter(partition=partition, t1__lte=now)
    newest = past.order_by("-t0").first()
    kept = past.filter(t1__gt=newest.t1 - 2 * policy.window_s) if newest else ()
    decisions = Decision.objects.filter(partition=partition, window_end__lte=now)
    windows = decisions.exclude(rule__in=(EMPTY_PHASE, deciding.WATCH)).order_by("-window_end").first()
    lately = decisions.filter(rule=EMPTY_PHASE, at__lte=datetime.fromtimestamp(now, UTC))
    restored = lately.order_by("-at").first()
    undone = decisions.filter(rule=deciding.WATCH).order_by("-window_end").first()
    return loop.Memory(
        slices=tuple(deciding.view_of(row) for row in kept),
        decided_until=windows.window_end if windows else None,
        restored_at=restored.at.timestamp() if restored else None,
        undo_asked_at=undone.window_end if undone else None,
    )


def store_slice(partition: Partition, view: SliceView) -> None:
    """Once for each begin."""
    values = asdict(view)
    Slice.objects.get_or_create(partition=partition, t0=values.pop("t0"), defaults=values)


# -- what was measured -----------------------------------------------------------------------------------------------


def load_pieces(partition: Partition, start: float, end: float) -> list[LoadPiece]:
    """The load windows whose middle lies in `[start, end)`."""
    rows = LoadWindow.objects.filter(partition=partition, t1__gt=start, t0__lt=end).order_by("t0")
    return [
        LoadPiece(
            t0=row.t0,
            t1=row.t1,
            prefilled=row.prefilled,
            t_uc=row.t_uc,
            pairs=row.pairs,
            t_rst=row.t_rst,
            prefill_iterations=row.prefill_iterations,
            finished=row.finished,
            t_out=row.t_out,
            decode_iterations_of_finished=row.decode_iterations_of_finished,
            in_flight_s=row.in_flight_s,
            prefill_utilisation=row.prefill_utilisation,
            decode_utilisation=row.decode_utilisation,
            prefill_waits_s=tuple(float(wait) for wait in row.prefill_waits_s),
            stale_ratio=row.stale_reports_ratio,
        )
        for row in rows
        if start <= (row.t0 + row.t1) / 2 < end
    ]


def thinks(partition: Partition, since: float, now: float) -> list[tuple[float, float]]:
    """Of every answer given in `[since, now)`: when, and how long its branch had paused before it asked, seconds."""
    rows = RequestRecord.objects.filter(
        partition=partition,
        at__gte=datetime.fromtimestamp(max(0.0, since - LONGEST_THINK_S), UTC),
        at__lt=datetime.fromtimestamp(now, UTC),
        e2e_s__isnull=False,
    ).exclude(branch="")
    answered_at: dict[str, float] = {}
    found = []
    for branch, at, e2e_s in rows.order_by("at", "id").values_list("branch", "at", "e2e_s"):
        moment = at.timestamp()
        before = answered_at.get(branch)
        answered_at[branch] = moment
        if before is None or moment < since:
            continue
        pause_s = moment - float(e2e_s or 0.0) - before
        if 0.0 <= pause_s <= LONGEST_THINK_S:
            found.append((moment, pause_s))
    return found


# -- what is planned with --------------------------------------------------------------------------------------------


def planner_policy(partition: Partition) -> PlannerPolicy:
    policy = policy_of(partition)
    return PlannerPolicy(
        mode=policy.mode,  # type: ignore[arg-type]
        freeze_reason=policy.freeze_reason,
        cooldown_s=policy.cooldown_s,
        slice_s=policy.slice_s,
        window_s=policy.window_s,
        slo_ttft_s=policy.slo_ttft_s,
        max_stale_ratio=policy.max_stale_ratio,
        min_utilisation=policy.min_utilisation,
    )


def planner_state(partition: Partition, now: float, live: Mapping[str, Any] | None = None) -> PlannerState:
    """What the domain plans with."""
    fits, problems = accepted_fits(partition), learning.problems(partition)
    loads = {node["name"]: node for node in (live or {}).get("nodes", [])}
    away_s = _seconds_away(partition)
    force = live_forces(partition).first()
    return PlannerState(
        now=now,
        nodes=tuple(
            _planner_node(
                node,
                fits.get(node.hardware_class),
                problems.get(node.hardware_class, ""),
                loads.get(node.name, {}),
                away_s.get(node.hardware_class),
                now,
            )
            for node in nodes_of(partition)
            if node.enabled
        ),
        policy=planner_policy(partition),
        last_switch=_last_switch(partition),
        switch_running=orders.moving_order(partition) is not None,
        forced_reason=f"{force.reason} ({force.forced_by})" if force else None,
        warming_up=running_warm_up(partition) is not None,
    )


def _last_switch(partition: Partition) -> LastSwitch | None:
    done = last_switch(partition)
    if done is None or done.switched_at is None:
        return None
    watched = done.cause in (Cause.PLANNER, Cause.PROPOSAL)
    return LastSwitch(done.switched_at.timestamp(), done.prefill_delta, watched)


def _planner_node(
    node: Node, fit: FittedModel | None, problem: str, load: Mapping[str, Any], away_s: float | None, now: float
) -> PlannerNode:
    prefill, decode = learning.learned(node, fit) if fit else learning.configured(node)
    down = node.observed_state == NodeState.DOWN
    return PlannerNode(
        name=node.name,
        order=node.order,
        phase=node.desired_phase,
        capacity=NodeCapacity(prefill, decode, float(node.decode_limit), learning.batch_range(fit) if fit else None),
        available=not down,
        down_s=now - node.observed_at.timestamp() if down and node.observed_at else 0.0,
        draining=node.draining,
        source="learned" if fit else "configured",
        fit_ok=not problem,
        fit_problem=problem,
        running=int(load.get("running_prefill") or 0) + int(load.get("running_decode") or 0),
        referenced_blocks=int(load.get("pool_referenced_blocks") or 0),
        switch_s=_switch_cost_s(node, away_s, int(load.get("pool_referenced_blocks") or 0), prefill),
    )


def _switch_cost_s(node: Node, away_s: float | None, referenced_blocks: int, prefill: PrefillCoefficients) -> float:
    """What a switch of this node costs, in seconds of its work: the time it serves nothing, as measured, and what it must
    compute again. A symmetric engine keeps its KV; SGLang loses it, and with it the context of the branches that count on it.
    """
    if node.engine != Engine.SGLANG:
        return away_s or 0.0
    lost_tokens = referenced_blocks * int(node.partition.model["block_tokens"])
    return (FIRST_ROLE_SWITCH_S if away_s is None else away_s) + prefill.c1 * lost_tokens


def _seconds_away(partition: Partition) -> dict[str, float]:
    """How long a drained node of each hardware class served nothing in its recent switches, mean seconds.

    A symmetric engine only turns a flag, and is back before anyone notices; one that must restart is away for minutes.
    """
    classes = {node.name: node.hardware_class for node in nodes_of(partition)}
    recent = SwitchStep.objects.filter(
        order__partition=partition, order__state__in=(OrderState.COOLING, OrderState.DONE), state=StepState.SWITCHED
    ).order_by("-finished_at")[:SWITCHES_REMEMBERED]
    away: dict[str, list[float]] = {}
    for step in recent:
        if step.finished_at is None or step.node not in classes:
            continue
        seconds = (step.finished_at - step.drained_at).total_seconds() if step.drained_at else 0.0
        away.setdefault(classes[step.node], []).append(seconds)
    return {name: sum(values) / len(values) for name, values in away.items()}


@transaction.atomic
def prune(partition: Partition, now: float, keep_s: float = 7 * 86_400.0) -> None:
    """Delete slices past their age. Decisions, proposals and orders are history and stay."""
    Slice.objects.filter(partition=partition, t1__lt=now - keep_s).delete()
