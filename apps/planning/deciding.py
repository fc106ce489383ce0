"""What becomes of a decision: it is stored with everything it was made of, and ordered, proposed or only said.

Also the planner's own second thoughts: a proposal whose ground has moved goes stale, a switch that hurts is undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from apps.planning import dryruns, orders
from apps.planning.choices import Action, Cause, Mode, ProposalState, Source, Verdict
from apps.planning.domain import watch
from apps.planning.domain.capacity import Workload
from apps.planning.domain.loop import LAG_S, Decided
from apps.planning.domain.plan_types import EMPTY_PHASE, PlannerState, SliceView
from apps.planning.domain.replay import slice_from, state_document
from apps.planning.models import Decision, Proposal, Slice, SwitchOrder
from apps.planning.selectors import accepted_fits, desired_split, last_switch, policy_document, policy_of
from apps.planning.services import close, roll_back
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from controlplane.actors import PLANNER
from controlplane.audit import change
from controlplane.errors import Conflict

WATCH = "watch"


def store(partition: Partition, state: PlannerState, decided: Decided) -> Decision:
    """Store a decision with all its numbers, and do what the mode allows. Call while holding the partition's row."""
    verdict = decided.decision
    chosen = verdict.chosen
    best = chosen or max(
        (c for c in verdict.candidates if c.gate.gain is not None), key=lambda c: c.gate.gain or 0.0, default=None
    )
    decision = Decision.objects.create(
        partition=partition,
        at=datetime.fromtimestamp(state.now, UTC),
        window_start=decided.start,
        window_end=decided.end,
        verdict=verdict.verdict,
        rule=verdict.rule,
        reason=verdict.reason[:500],
        source=Source(verdict.source),
        mode=state.policy.mode,
        current_prefill=list(verdict.current_prefill),
        current_decode=list(verdict.current_decode),
        chosen_prefill=list(chosen.prefill) if chosen else None,
        chosen_decode=list(chosen.decode) if chosen else None,
        theta=verdict.theta,
        gain=best.gate.gain if best else None,
        standard_error=best.gate.standard_error if best else None,
        threshold=best.gate.threshold if best else None,
        slices=verdict.slices,
        slices_used=verdict.slices_used,
        detail=_finite(
            {
                **verdict.as_dict(),
                "window": [_slice_document(piece) for piece in decided.window],
                "state": state_document(state),
                "fits": _fit_ids(partition),
            }
        ),
    )
    if chosen is not None:
        try:
            decision.action = _act(partition, state, decision, decided).value
        except Conflict as error:  # the verdict is kept, and the tick goes on
            decision.reason = f"{decision.reason}; not ordered: {error.message}"[:500]
        decision.save(update_fields=["action", "reason"])
    _tell(decision)
    return decision


def _act(partition: Partition, state: PlannerState, decision: Decision, decided: Decided) -> Action:
    """Do what the mode allows with a chosen split."""
    assert decision.chosen_prefill is not None and decision.chosen_decode is not None
    if state.policy.mode == Mode.AUTOMATIC:
        targets = dict.fromkeys(decision.chosen_prefill, "prefill") | dict.fromkeys(decision.chosen_decode, "decode")
        placed = orders.place(partition, targets, Cause.PLANNER, PLANNER, decision.reason, decision=decision)
        return Action.ORDERED if placed else Action.NONE
    if state.policy.mode == Mode.APPROVE:
        return _propose(partition, state, decision, decided)
    return Action.ADVISED


def _propose(partition: Partition, state: PlannerState, decision: Decision, decided: Decided) -> Action:
    """Put the choice before people until the next window ends; it takes the place of an older proposal."""
    for older in Proposal.objects.select_for_update(of=("self",)).filter(partition=partition, state=ProposalState.OPEN):
        if decision.rule == EMPTY_PHASE and older.prefill == decision.chosen_prefill:
            return Action.NONE  # it waits for people already
        close(older, ProposalState.STALE, f"the planner proposes something newer (decision {decision.pk})")
    split = desired_split(nodes_of(partition))
    last = next((piece.workload for piece in reversed(decided.window) if piece.workload), None)
    policy = policy_document(policy_of(partition))
    proposal = Proposal.objects.create(
        partition=partition,
        decision=decision,
        prefill=decision.chosen_prefill,
        decode=decision.chosen_decode,
        from_prefill=split["prefill"],
        from_decode=split["decode"],
        gain=decision.gain,
        standard_error=decision.standard_error,
        threshold=decision.threshold,
        reason=decision.reason,
        proposed_by=str(PLANNER),
        evidence={"workload": _plain(last), "fits": _fit_ids(partition)},
        policy={**policy, "frozen_until": None},
        expires_at=datetime.fromtimestamp(decision.window_end + state.policy.window_s + LAG_S, UTC),
    )
    dryruns.ask_for(proposal)
    orders.tell(partition.name, "proposal", proposal=proposal.pk, state=proposal.state, reason=proposal.reason)
    return Action.PROPOSED


def spoil_stale_proposal(partition: Partition) -> None:
    """Close an open proposal whose ground has moved: the split, the fit, or the workload."""
    proposal = Proposal.objects.filter(partition=partition, state=ProposalState.OPEN).first()
    if proposal is None:
        return
    why = None
    split = desired_split(nodes_of(partition))
    if (split["prefill"], split["decode"]) != (proposal.from_prefill, proposal.from_decode):
        why = "the split has changed since"
    elif "fits" in proposal.evidence and proposal.evidence["fits"] != _fit_ids(partition):
        why = "the learned model has changed since"
    elif proposal.evidence.get("workload"):
        newest = Slice.objects.filter(partition=partition).exclude(workload=None).order_by("-t0").first()
        if newest is not None and newest.workload and newest.t0 > proposal.created_at.timestamp():
            why = watch.workload_moved(Workload(**proposal.evidence["workload"]), Workload(**newest.workload))
    if why is None:
        return
    with change(PLANNER, why):
        row = Proposal.objects.select_for_update(of=("self",)).select_related("partition").get(pk=proposal.pk)
        if row.state == ProposalState.OPEN:
            close(row, ProposalState.STALE, why)


def undo_last_switch(partition: Partition, state: PlannerState, reason: str) -> str | None:
    """Roll the newest switch back because it hurts; says what came of it. The decision is stored as every other, also when
    the switch cannot be undone."""
    order = last_switch(partition)
    if order is None or order.switched_at is None:
        return None
    try:
        reverse = roll_back(order, PLANNER, reason, Cause.WATCH)
    except Conflict as error:
        _store_watch(
            partition, state, order, reason, None, f"order {order.pk} cannot be undone ({error.message}): {reason}"
        )
        return f"order {order.pk} hurts and cannot be undone"
    _store_watch(partition, state, order, reason, reverse, f"order {order.pk} is undone: {reason}")
    return f"order {reverse.pk} undoes a switch"


def _store_watch(
    partition: Partition,
    state: PlannerState,
    order: SwitchOrder,
    hurts: str,
    reverse: SwitchOrder | None,
    reason: str,
) -> None:
    """What the watch over a switch led to; `reverse` is the order that undoes it, None when it stays."""
    assert order.switched_at is not None
    decision = Decision.objects.create(
        partition=partition,
        at=datetime.fromtimestamp(state.now, UTC),
        window_start=order.switched_at.timestamp() - watch.BREACH_S,
        window_end=state.now,
        verdict=Verdict.SWITCH if reverse else Verdict.HOLD,
        rule=WATCH,
        reason=reason[:500],
        source=Source.LEARNED if all(node.source == "learned" for node in state.nodes) else Source.CONFIGURED,
        mode=state.policy.mode,
        action=Action.ORDERED if reverse else Action.NONE,
        current_prefill=list(state.names("prefill")),
        current_decode=list(state.names("decode")),
        chosen_prefill=reverse.to_prefill if reverse else None,
        chosen_decode=reverse.to_decode if reverse else None,
        slices=0,
        slices_used=0,
        detail=_finite(
            {
                "rules": [[watch.SENTENCE, WATCH, hurts if reverse else reason]],
                "window": _slices_since(partition, order.switched_at.timestamp() - watch.BREACH_S),
                "state": state_document(state),
                "fits": _fit_ids(partition),
                "undoes": order.pk,
            }
        ),
    )
    if reverse is not None:
        SwitchOrder.objects.filter(pk=reverse.pk).update(decision=decision)
    _tell(decision)


def _tell(decision: Decision) -> None:
    orders.tell(
        decision.partition.name,
        "decision",
        decision=decision.pk,
        verdict=decision.verdict,
        rule=decision.rule,
        reason=decision.reason,
        action=decision.action,
    )


def _fit_ids(partition: Partition) -> list[int]:
    return sorted(fit.pk for fit in accepted_fits(partition).values())


def _slice_document(piece: SliceView) -> dict[str, Any]:
    document = {name: getattr(piece, name) for name in SliceView.__slots__}
    return {**document, "workload": _plain(piece.workload)}


def _slices_since(partition: Partition, start: float) -> list[dict[str, Any]]:
    rows = Slice.objects.filter(partition=partition, t1__gt=start).order_by("t0")
    return [_slice_document(view_of(row)) for row in rows]


def view_of(row: Slice) -> SliceView:
    return slice_from({name: getattr(row, name) for name in SliceView.__slots__})


def _plain(workload: Workload | None) -> dict[str, float] | None:
    return {name: getattr(workload, name) for name in Workload.__slots__} if workload else None


def _finite(value: Any) -> Any:
    """PostgreSQL's JSON knows no infinity; an infinite wait becomes null."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
