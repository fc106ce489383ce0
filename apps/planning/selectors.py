"""Reads of planning: what a page, REST or the planner itself needs to know about a partition's split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone

from apps.planning.choices import FitState, OrderState, ProposalState, WarmUpState
from apps.planning.models import (
    Decision,
    DryRun,
    FittedModel,
    ForcedSplit,
    PlannerPolicy,
    Proposal,
    SwitchOrder,
    SwitchStep,
    WarmUp,
)
from apps.topology.models import Node, Partition
from apps.topology.selectors import nodes_of
from controlplane.errors import NotFound

HISTORY_SHOWN = 20
OPEN_STATES = (OrderState.ORDERED, OrderState.DRAINING, OrderState.SWITCHING, OrderState.COOLING)


def policy_of(partition: Partition) -> PlannerPolicy:
    """The partition's policy; the defaults (mode approve), not stored, until someone decides otherwise."""
    return PlannerPolicy.objects.filter(partition=partition).first() or PlannerPolicy(partition=partition)


def proposal_numbered(number: int, partition: Partition | None = None) -> Proposal:
    """Raises NotFound."""
    return _numbered(Proposal, "proposal", number, partition)


def order_numbered(number: int, partition: Partition | None = None) -> SwitchOrder:
    """Raises NotFound."""
    return _numbered(SwitchOrder, "switch order", number, partition)


def decision_numbered(number: int, partition: Partition | None = None) -> Decision:
    """Raises NotFound."""
    return _numbered(Decision, "decision", number, partition)


def dry_run_numbered(number: int, partition: Partition | None = None) -> DryRun:
    """Raises NotFound."""
    return _numbered(DryRun, "dry run", number, partition)


def fit_numbered(number: int, partition: Partition | None = None) -> FittedModel:
    """Raises NotFound."""
    return _numbered(FittedModel, "fit", number, partition)


def _numbered(model: Any, kind: str, number: int, partition: Partition | None) -> Any:
    rows = model.objects.select_related("partition").filter(pk=number)
    row = (rows if partition is None else rows.filter(partition=partition)).first()
    if row is None:
        raise NotFound(kind, number)
    return row


def desired_split(nodes: Iterable[Node], changes: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Names by desired phase, in node order; disabled nodes are in none. `changes` are phases laid over it."""
    split: dict[str, list[str]] = {"prefill": [], "decode": [], "mixed": []}
    for node in sorted(nodes, key=lambda node: node.order):
        if node.enabled:
            split[(changes or {}).get(node.name, node.desired_phase)].append(node.name)
    return split


def live_forces(partition: Partition, now: datetime | None = None) -> QuerySet[ForcedSplit]:
    """Forces that hold now, newest first."""
    moment = now or timezone.now()
    return ForcedSplit.objects.filter(partition=partition, cleared_at=None).filter(
        Q(expires_at=None) | Q(expires_at__gt=moment)
    )


def forced_phases(partition: Partition, now: datetime | None = None) -> dict[str, str]:
    """The phase each forced node must have; the newest force wins."""
    phases: dict[str, str] = {}
    for force in live_forces(partition, now):
        phases = {**force.phases, **phases}
    return phases


def accepted_fits(partition: Partition) -> dict[str, FittedModel]:
    """The fit in use of each hardware class."""
    return {fit.hardware_class: fit for fit in FittedModel.objects.filter(partition=partition, state=FitState.ACCEPTED)}


def running_warm_up(partition: Partition) -> WarmUp | None:
    """The warm-up under way, if any."""
    return WarmUp.objects.filter(partition=partition, state=WarmUpState.RUNNING).first()


def last_switch(partition: Partition) -> SwitchOrder | None:
    """The newest order that changed the split and has ended its moves."""
    done = (OrderState.COOLING, OrderState.DONE)
    return SwitchOrder.objects.filter(partition=partition, state__in=done).order_by("-switched_at").first()


def split_view(partition: Partition, decided: Callable[[Decision], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Everything about a partition's split: current, proposed, forced, policy, last decision, orders, history.

    `decided` tells of the last decision in place of `decision_document`; its `detail`, megabytes in a large partition,
    is read only where it asks for it.
    """
    nodes = list(nodes_of(partition).defer("coefficients", "direct", "url"))
    waiting = Proposal.objects.filter(partition=partition, state=ProposalState.OPEN)
    proposal = waiting.prefetch_related("votes", "dry_runs").first()
    decision = Decision.objects.filter(partition=partition).defer("detail").first()
    orders = SwitchOrder.objects.filter(partition=partition).prefetch_related("steps")
    forces = list(live_forces(partition))
    warm_up = running_warm_up(partition)
    return {
        "partition": partition.name,
        "current": {**desired_split(nodes), "nodes": [_node(node) for node in nodes]},
        "proposed": {"prefill": proposal.prefill, "decode": proposal.decode, "mixed": []} if proposal else None,
        "forced": _forced(nodes, forces),
        "policy": policy_document(policy_of(partition)),
        "last_decision": (decided or decision_document)(decision) if decision else None,
        "open_proposal": proposal_document(proposal) if proposal else None,
        "active_orders": [order_document(order) for order in orders.filter(state__in=OPEN_STATES)],
        "history": [order_document(order) for order in orders.exclude(state__in=OPEN_STATES)[:HISTORY_SHOWN]],
        "fits": [fit_document(fit) for fit in FittedModel.objects.filter(partition=partition)[:5]],
        "warm_up": warm_up_document(warm_up) if warm_up else None,
    }


def _node(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "desired_phase": node.desired_phase,
        "observed_phase": node.observed_phase or None,
        "observed_state": node.observed_state or None,
        "observed_at": node.observed_at,
        "generation": node.generation,
        "draining": node.draining,
        "enabled": node.enabled,
    }


def _forced(nodes: list[Node], forces: list[ForcedSplit]) -> dict[str, Any] | None:
    if not forces:
        return None
    phases: dict[str, str] = {}
    for force in forces:
        phases = {**force.phases, **phases}
    return {
        **desired_split(nodes, phases),
        "phases": phases,
        "forces": [
            {
                "id": force.pk,
                "node": force.node or None,
                "phases": force.phases,
                "reason": force.reason,
                "forced_by": force.forced_by,
                "created_at": force.created_at,
                "expires_at": force.expires_at,
            }
            for force in forces
        ],
    }


def policy_document(policy: PlannerPolicy) -> dict[str, Any]:
    return {
        "mode": policy.mode,
        "thaw_mode": policy.thaw_mode,
        "frozen_until": policy.frozen_until,
        "freeze_reason": policy.freeze_reason,
        "frozen_by": policy.frozen_by,
        "slice_s": policy.slice_s,
        "slices_per_window": policy.slices_per_window,
        "cooldown_s": policy.cooldown_s,
        "drain_deadline_s": policy.drain_deadline_s,
        "slo_ttft_s": policy.slo_ttft_s,
        "max_stale_ratio": policy.max_stale_ratio,
        "min_utilisation": policy.min_utilisation,
        "approvals_required": policy.approvals_required,
        "self_approval": policy.self_approval,
        "auto_warm_up": policy.auto_warm_up,
        "warm_up_rung_s": policy.warm_up_rung_s,
        "warm_up_limit_s": policy.warm_up_limit_s,
    }


def decision_document(decision: Decision) -> dict[str, Any]:
    """A decision with its candidates; `detail` as the domain's `Decision.as_dict`."""
    return {
        "id": decision.pk,
        "at": decision.at,
        "window_start": decision.window_start,
        "window_end": decision.window_end,
        "verdict": decision.verdict,
        "rule": decision.rule,
        "reason": decision.reason,
        "source": decision.source,
        "mode": decision.mode,
        "action": decision.action,
        "current": {"prefill": decision.current_prefill, "decode": decision.current_decode},
        "chosen": {"prefill": decision.chosen_prefill, "decode": decision.chosen_decode}
        if decision.chosen_prefill is not None
        else None,
        "theta": decision.theta,
        "closed_loop": decision.detail.get("closed_loop"),
        "gain": decision.gain,
        "standard_error": decision.standard_error,
        "threshold": decision.threshold,
        "slices": decision.slices,
        "slices_used": decision.slices_used,
        "candidates": decision.detail.get("candidates", []),
        "rules": decision.detail.get("rules", []),
        "window": decision.detail.get("window", []),
    }


def decision_with_inputs(decision: Decision) -> dict[str, Any]:
    return decision_document(decision) | {
        "state": decision.detail.get("state", {}),
        "fits": decision.detail.get("fits", []),
    }


def proposal_document(proposal: Proposal) -> dict[str, Any]:
    return {
        "id": proposal.pk,
        "state": proposal.state,
        "prefill": proposal.prefill,
        "decode": proposal.decode,
        "from_prefill": proposal.from_prefill,
        "from_decode": proposal.from_decode,
        "gain": proposal.gain,
        "standard_error": proposal.standard_error,
        "threshold": proposal.threshold,
        "reason": proposal.reason,
        "proposed_by": proposal.proposed_by,
        "proposer": proposal.proposer or None,
        "created_at": proposal.created_at,
        "expires_at": proposal.expires_at,
        "closed_at": proposal.closed_at,
        "closed_reason": proposal.closed_reason,
        "approvals_required": proposal.policy.get("approvals_required", 1),
        "votes": [
            {"actor": vote.actor, "person": vote.person, "choice": vote.choice, "reason": vote.reason, "at": vote.at}
            for vote in proposal.votes.all()
        ],
        "dry_run": next((dry_run_document(run) for run in proposal.dry_runs.all()), None),
    }


def dry_run_document(run: DryRun) -> dict[str, Any]:
    return {
        "id": run.pk,
        "state": run.state,
        "proposal": run.proposal_id,
        "prefill": run.prefill,
        "decode": run.decode,
        "asked_by": run.asked_by,
        "asked_at": run.asked_at,
        "finished_at": run.finished_at,
        "result": run.result,
        "problem": run.problem,
    }


def order_document(order: SwitchOrder) -> dict[str, Any]:
    return {
        "id": order.pk,
        "state": order.state,
        "cause": order.cause,
        "ordered_by": order.ordered_by,
        "reason": order.reason,
        "outcome": order.outcome,
        "undoing": order.undoing,
        "rolls_back": order.rolls_back_id,
        "from": {"prefill": order.from_prefill, "decode": order.from_decode},
        "to": {"prefill": order.to_prefill, "decode": order.to_decode},
        "ordered_at": order.ordered_at,
        "switched_at": order.switched_at,
        "cooling_until": order.cooling_until,
        "finished_at": order.finished_at,
        "can_roll_back": order.state not in (OrderState.FAILED, OrderState.ROLLED_BACK) and not order.undoing,
        "steps": [_step(step) for step in order.steps.all()],
    }


def _step(step: SwitchStep) -> dict[str, Any]:
    return {
        "node": step.node,
        "from_phase": step.from_phase,
        "to_phase": step.to_phase,
        "state": step.state,
        "generation": step.generation,
        "began_at": step.began_at,
        "pushed_at": step.pushed_at,
        "accepted": step.accepted,
        "drained_at": step.drained_at,
        "finished_at": step.finished_at,
        "drain_s": _between(step.began_at, step.drained_at or step.finished_at),
        "switch_s": _between(step.began_at, step.finished_at),
        "reason": step.reason,
    }


def _between(start: datetime | None, end: datetime | None) -> float | None:
    return (end - start).total_seconds() if start and end else None


def fit_document(fit: FittedModel) -> dict[str, Any]:
    return {
        "id": fit.pk,
        "hardware_class": fit.hardware_class,
        "state": fit.state,
        "prefill": fit.prefill,
        "decode": fit.decode,
        "prefill_rows": fit.prefill_rows,
        "decode_rows": fit.decode_rows,
        "prefill_error_ratio": fit.prefill_error_ratio,
        "decode_error_ratio": fit.decode_error_ratio,
        "batch_low": fit.batch_low,
        "batch_high": fit.batch_high,
        "warnings": fit.warnings,
        "summary": fit.summary,
        "created_at": fit.created_at,
        "retired_at": fit.retired_at,
        "retired_reason": fit.retired_reason,
    }


def fit_with_residuals(fit: FittedModel) -> dict[str, Any]:
    """A fit and, for each phase, its windows as measured and as predicted."""
    names = ("node", "t0", "measured_s", "predicted_s", "held_out")
    residuals = {phase: [dict(zip(names, row, strict=True)) for row in rows] for phase, rows in fit.residuals.items()}
    return fit_document(fit) | {"residuals": residuals}


def warm_up_document(warm_up: WarmUp) -> dict[str, Any]:
    return {
        "id": warm_up.pk,
        "state": warm_up.state,
        "rung": warm_up.rung,
        "rung_s": warm_up.rung_s,
        "limit_s": warm_up.limit_s,
        "reason": warm_up.reason,
        "started_by": warm_up.started_by,
        "started_at": warm_up.started_at,
        "climbing_since": warm_up.climbing_since,
        "ended_at": warm_up.ended_at,
        "outcome": warm_up.outcome,
    }


def slo_section(partition: Partition) -> dict[str, float | None]:
    """The configuration document's `slo`: what the gateway judges latency by; seconds, null without a target."""
    policy = PlannerPolicy.objects.filter(partition=partition).first()
    return {"ttft_s": policy.slo_ttft_s if policy else None}
