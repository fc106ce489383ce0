"""Warm-ups in the database: starting one, climbing its ladder, ending it with a split. See `domain/warmup.py`.

A warm-up changes two things of the published configuration: every node's phase is `mixed` (by an ordinary switch order),
and each node's decode limit follows the ladder (`trial_limits`, an overlay of the configuration document).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from django.db import transaction

from apps.planning import learning, orders
from apps.planning.choices import Cause, Mode, WarmUpState
from apps.planning.domain import warmup
from apps.planning.domain.plan_types import PlannerState, SliceView
from apps.planning.domain.planner import evaluate
from apps.planning.models import FittedModel, PlannerPolicy, WarmUp
from apps.planning.selectors import live_forces, policy_of, running_warm_up
from apps.topology import configuration
from apps.topology.choices import Phase
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from controlplane import records
from controlplane.actors import PLANNER, Actor
from controlplane.audit import change
from controlplane.errors import Conflict


def start(partition: Partition, actor: Actor, reason: str) -> WarmUp:
    """Begin a warm-up. Administrator; needs a reason.

    Raises Conflict while one is running, a switch is under way, the split is forced or frozen, or when it could not end
    in time.
    """
    with change(actor, reason, role="administrator", needs_reason=True):
        return _begin(records.locked(partition), actor, reason)


def stop(partition: Partition, actor: Actor, reason: str) -> WarmUp:
    """End the running warm-up: nodes get back the phases they had. Administrator. Raises Conflict when there is none."""
    with change(actor, reason, role="administrator"):
        partition = records.locked(partition)
        running = running_warm_up(partition)
        if running is None:
            raise Conflict(f"{partition.name} is not warming up", "not-warming-up")
        _end(running, WarmUpState.STOPPED, f"stopped by {actor}: {reason}", actor, running.phases)
        return running


def too_short(partition: Partition, policy: PlannerPolicy) -> str | None:
    """Why a warm-up under this policy would always end before its first fit, or None."""
    limits = tuple((node.name, node.decode_limit) for node in nodes_of(partition) if node.enabled)
    plan = warmup.WarmUpPlan(0.0, policy.warm_up_rung_s, policy.warm_up_limit_s, limits)
    if plan.first_fit_s <= plan.limit_s:
        return None
    return (
        f"{len(plan.ladder)} rungs of {plan.rung_s:g} s, and a first minute that teaches nothing, take {plan.first_fit_s:g} s, "
        f"and warm_up_limit_s is {plan.limit_s:g} s"
    )


def trial_limits(partition: Partition) -> Mapping[str, Mapping[str, Any]]:
    """The configuration overlay of a running warm-up: each node's decode limit on the present rung."""
    running = running_warm_up(partition)
    if running is None or running.climbing_since is None:
        return {}
    limits = warmup.decode_limits(_plan(running), running.rung)
    return {name: {"decode_limit": limit} for name, limit in limits.items()}


def step(partition: Partition, now: float, state: PlannerState, slices: tuple[SliceView, ...]) -> str | None:
    """What the planner's tick does about a warm-up; says what, or None. Call while holding the partition's row."""
    running = running_warm_up(partition)
    if running is None:
        return _begin_by_itself(partition)
    forced = live_forces(partition).first()
    if forced is not None or state.policy.mode == Mode.FROZEN:
        why = f"forced by {forced.forced_by}: {forced.reason}" if forced else "the split was frozen"
        _end(running, WarmUpState.STOPPED, why, PLANNER, None)
        return "warm-up stopped"
    if orders.moving_order(partition) is not None:
        return "warm-up waits for its nodes"
    if any(node.phase != Phase.MIXED for node in state.nodes):
        _end(running, WarmUpState.GIVEN_UP, "not every node came to serve both phases", PLANNER, running.phases)
        return "warm-up given up"
    if running.climbing_since is None:
        running.climbing_since = datetime.fromtimestamp(now, UTC)
        running.save(update_fields=["climbing_since"])
        configuration.publish(partition, PLANNER, "warm-up: the concurrency ramps")
        return "warm-up climbs"
    return _climb(partition, running, now, state, slices)


def _climb(
    partition: Partition, running: WarmUp, now: float, state: PlannerState, slices: tuple[SliceView, ...]
) -> str | None:
    plan = _plan(running)
    if warmup.rung_at(plan, now) == running.rung:
        return None
    if warmup.ladder_ended(plan, now):
        learning.refit(partition, now, older_than=running.started_at)
    unlearned = learning.why_unlearned(partition, now) if warmup.ladder_ended(plan, now) else {}
    verdict = warmup.judge(plan, now, unlearned)
    running.rung, running.outcome = verdict.rung, verdict.reason[:500]
    running.save(update_fields=["rung", "outcome"])
    if verdict.what == "go-on":
        configuration.publish(partition, PLANNER, f"warm-up: rung {verdict.rung}")
        return f"warm-up on rung {verdict.rung}"
    ended = WarmUpState.DONE if verdict.what == "done" else WarmUpState.GIVEN_UP
    best = _best_split(state, slices, plan.started_at) if state.policy.mode == Mode.AUTOMATIC else None
    _end(running, ended, verdict.reason, PLANNER, best or running.phases)
    return f"warm-up {ended.label.lower()}"


def _begin_by_itself(partition: Partition) -> str | None:
    """If the policy says so, and nothing was ever learned or tried here."""
    if not policy_of(partition).auto_warm_up:
        return None
    if FittedModel.objects.filter(partition=partition).exists() or WarmUp.objects.filter(partition=partition).exists():
        return None
    try:
        with transaction.atomic():  # what was written before the refusal goes with it
            _begin(partition, PLANNER, "no hardware class has been learned yet")
    except Conflict:
        return None
    return "warm-up begins"


def _begin(partition: Partition, actor: Actor, reason: str) -> WarmUp:
    if running_warm_up(partition) is not None:
        raise Conflict(f"{partition.name} is warming up already", "warming-up")
    if live_forces(partition).exists():
        raise Conflict("the split is forced; clear that first", "forced")
    policy = policy_of(partition)
    if policy.mode == Mode.FROZEN:
        raise Conflict("the split is frozen; unfreeze it first", "frozen")
    nodes = [node for node in nodes_of(partition) if node.enabled]
    short = too_short(partition, policy)
    if short:  # since the policy was edited a node has come, or may decode more
        raise Conflict(f"the warm-up could not end in time: {short}", "warm-up-too-short")
    running = WarmUp.objects.create(
        partition=partition,
        phases={node.name: node.desired_phase for node in nodes},
        rung_s=policy.warm_up_rung_s,
        limit_s=policy.warm_up_limit_s,
        reason=reason,
        started_by=str(actor),
    )
    targets = {node.name: Phase.MIXED.value for node in nodes}
    orders.place(partition, targets, Cause.WARM_UP, actor, f"warm-up: {reason}"[:500])
    orders.tell(partition.name, "policy", warm_up=running.pk, state=running.state, reason=reason)
    return running


def _end(running: WarmUp, state: WarmUpState, why: str, actor: Actor, phases: Mapping[str, str] | None) -> None:
    """`phases` is what the nodes get; None leaves them to whoever took them."""
    running.state, running.outcome = state.value, why[:500]
    running.ended_at = datetime.now(UTC)
    running.save(update_fields=["state", "outcome", "ended_at"])
    moving = orders.moving_order(running.partition)
    if phases is not None and moving is None:
        known = {node.name for node in nodes_of(running.partition)}
        targets = {name: phase for name, phase in phases.items() if name in known}
        try:
            orders.place(
                running.partition, targets, Cause.WARM_UP, actor, f"warm-up {state.label.lower()}: {why}"[:500]
            )
        except Conflict as error:  # nodes were taken away meanwhile: the warm-up ends all the same
            running.outcome = f"{why}; the nodes serve both phases still: {error.message}"[:500]
            running.save(update_fields=["outcome"])
    elif phases is not None and moving is not None and moving.cause == Cause.WARM_UP:
        orders.turn_round(moving, actor, why)
    configuration.publish(running.partition, actor, f"warm-up {state.label.lower()}")
    orders.tell(running.partition.name, "policy", warm_up=running.pk, state=running.state, reason=why)


def _best_split(state: PlannerState, slices: tuple[SliceView, ...], since: float) -> dict[str, str] | None:
    """The split that would carry most of what came in since then; None when nothing came in."""
    seen = [piece for piece in slices if piece.t0 >= since and piece.workload]
    if not seen:
        return None
    candidates = evaluate(replace(state, warming_up=False), seen).candidates
    best = max(candidates, key=lambda candidate: candidate.theta, default=None)
    if best is None:
        return None
    return dict.fromkeys(best.prefill, Phase.PREFILL.value) | dict.fromkeys(best.decode, Phase.DECODE.value)


def _plan(running: WarmUp) -> warmup.WarmUpPlan:
    assert running.climbing_since is not None
    nodes = [node for node in nodes_of(running.partition) if node.enabled]
    return warmup.WarmUpPlan(
        started_at=running.climbing_since.timestamp(),
        rung_s=running.rung_s,
        limit_s=running.limit_s,
        limits=tuple((node.name, node.decode_limit) for node in nodes),
    )
