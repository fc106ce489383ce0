"""The planner's own writes: closing slices, fitting the cost model, deciding at a window's end, watching a switch.

Each function loads rows, calls the domain, stores the result with its reasons. `now` is unix seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from django.db import transaction
from django.db.models import Min

from apps.planning import orders
from apps.planning.choices import Action, Cause, FitState, Mode, OrderState, ProposalState, Source
from apps.planning.domain import fitting, watch
from apps.planning.domain.capacity import BatchRange, NodeCapacity, Workload
from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients, decode_iteration_s, prefill_work_s
from apps.planning.domain.plan_types import Candidate, LastSwitch, PlannerNode, PlannerPolicy, PlannerState, SliceView
from apps.planning.domain.plan_types import Decision as Verdict
from apps.planning.domain.planner import evaluate
from apps.planning.domain.slices import LoadPiece, close_slice
from apps.planning.models import Decision, FittedModel, Proposal, Slice, SwitchOrder
from apps.planning.selectors import (
    accepted_fits,
    desired_split,
    last_switch,
    live_forces,
    policy_document,
    policy_of,
    refused_classes,
    window_of,
)
from apps.planning.services import close, roll_back
from apps.telemetry.models import CostWindow, LoadWindow
from apps.topology.choices import NodeState
from apps.topology.models import Node, Partition
from apps.topology.selectors import nodes_of
from controlplane.actors import PLANNER
from controlplane.audit import change
from controlplane.errors import Conflict

# Load windows reach the database a moment after their end.
LAG_S = 4.0
FIRST_MINUTE_S = 60.0
FIT_HISTORY_S = 3600.0
DRIFT_ERROR_RATIO = 0.25
DRIFT_S = 60.0
DRIFT_ROWS = 10


# -- slices ----------------------------------------------------------------------------------------------------------


def close_slices(partition: Partition, now: float) -> list[Slice]:
    """Store every slice that has ended and is not stored, at most one window back; returns the new ones."""
    policy = policy_of(partition)
    newest_end = (now - LAG_S) // policy.slice_s * policy.slice_s
    oldest = newest_end - policy.window_s
    last = Slice.objects.filter(partition=partition).order_by("-t0").first()
    start = max(oldest, last.t1 if last else newest_end - policy.slice_s)
    # A changed slice length moves the borders; the first slice then starts on the new grid.
    start = -(-start // policy.slice_s) * policy.slice_s
    added = []
    while start + policy.slice_s <= newest_end + 1e-6:
        end = start + policy.slice_s
        view = close_slice(start, end, load_pieces(partition, start, end))
        row, created = Slice.objects.get_or_create(
            partition=partition,
            t0=start,
            defaults={
                "t1": end,
                "workload": asdict(view.workload) if view.workload else None,
                "rate": view.rate,
                "prefill_utilisation": view.prefill_utilisation,
                "decode_utilisation": view.decode_utilisation,
                "prefill_wait_p95_s": view.prefill_wait_p95_s,
                "stale_ratio": view.stale_ratio,
            },
        )
        if created:
            added.append(row)
        start = end
    return added


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


def view_of(row: Slice) -> SliceView:
    return SliceView(
        t0=row.t0,
        t1=row.t1,
        workload=Workload(**row.workload) if row.workload else None,
        rate=row.rate,
        prefill_utilisation=row.prefill_utilisation,
        decode_utilisation=row.decode_utilisation,
        prefill_wait_p95_s=row.prefill_wait_p95_s,
        stale_ratio=row.stale_ratio,
    )


# -- fits ------------------------------------------------------------------------------------------------------------


def refit(partition: Partition, now: float) -> list[FittedModel]:
    """Fit every hardware class that has no fit in use, and those whose fit reality has left; returns the new fits.

    Samples of a node's first minute and of a node that was switching are left out. A fit in use is frozen: only its error
    over the newest rows is watched.
    """
    found = []
    fits = accepted_fits(partition)
    classes: dict[str, list[Node]] = {}
    for node in nodes_of(partition):
        classes.setdefault(node.hardware_class, []).append(node)
    for hardware_class, nodes in sorted(classes.items()):
        names = [node.name for node in nodes]
        fit = fits.get(hardware_class)
        if fit is not None:
            newest = fit_windows(partition, names, now - DRIFT_S)
            error = _error_ratio(fit, nodes[0], newest)
            if len(newest) < DRIFT_ROWS or error <= DRIFT_ERROR_RATIO:
                continue
            _retire(fit, now, f"predictions were off by {error:.0%} over the last {DRIFT_S:.0f} s")
        windows = fit_windows(partition, names, max(now - FIT_HISTORY_S, _drifted_since(partition, hardware_class)))
        created = _fit(partition, hardware_class, nodes[0], windows)
        if created is not None:
            found.append(created)
    return found


def _drifted_since(partition: Partition, hardware_class: str) -> float:
    """From when on measurements tell of the class as it is now: since its last fit began to be wrong."""
    retired = FittedModel.objects.filter(
        partition=partition, hardware_class=hardware_class, state=FitState.RETIRED, retired_at__isnull=False
    )
    newest = retired.order_by("-retired_at").first()
    return newest.retired_at.timestamp() - DRIFT_S if newest and newest.retired_at else 0.0


def fit_windows(partition: Partition, nodes: Sequence[str], since: float) -> list[fitting.FitWindow]:
    """Usable measurements of these nodes that began at `since` or later (unix seconds), oldest first."""
    rows = list(
        CostWindow.objects.filter(partition=partition, node__in=nodes, switching=False, t0__gte=since).order_by(
            "t0", "node"
        )
    )
    boots = CostWindow.objects.filter(partition=partition, node__in=nodes).values("node", "boot_id")
    first_seen = {(boot["node"], boot["boot_id"]): boot["first"] for boot in boots.annotate(first=Min("t0")).order_by()}
    return [
        fitting.FitWindow(
            prefill_iterations=row.prefill_iterations,
            t_uc=row.t_uc,
            pairs=row.pairs,
            t_rst=row.t_rst,
            busy_prefill_s=row.busy_prefill_s,
            decode_iterations=row.decode_iterations,
            batch_counts=tuple((int(batch), float(count)) for batch, count in row.batch_counts.items()),
            busy_decode_s=row.busy_decode_s,
        )
        for row in rows
        if row.t0 - first_seen[row.node, row.boot_id] >= FIRST_MINUTE_S
    ]


def configured(node: Node) -> tuple[PrefillCoefficients, DecodeCoefficients]:
    c = node.coefficients
    prefill = PrefillCoefficients(c["c0"], c["c1"], c["c2"], c["c3"])
    return prefill, DecodeCoefficients(
        c["d0"], c["d1"], c["d2"], int(c["experts"]), int(c["experts_per_token"]), c["t_fwd"]
    )


def learned(node: Node, fit: FittedModel) -> tuple[PrefillCoefficients, DecodeCoefficients]:
    _, shape = configured(node)
    decode = DecodeCoefficients(
        **fit.decode, experts=shape.experts, experts_per_token=shape.experts_per_token, t_fwd=shape.t_fwd
    )
    return PrefillCoefficients(**fit.prefill), decode


def _fit(
    partition: Partition, hardware_class: str, node: Node, windows: Sequence[fitting.FitWindow]
) -> FittedModel | None:
    believed_prefill, believed_decode = configured(node)
    prefill = fitting.fit_prefill(windows, believed_prefill)
    decode = fitting.fit_decode(windows, believed_decode)
    if isinstance(prefill, fitting.NotEnough) or isinstance(decode, fitting.NotEnough):
        return None
    assert decode.batch_range is not None
    state = FitState.ACCEPTED if prefill.usable and decode.usable else FitState.REFUSED
    warnings = [f"prefill: {text}" for text in prefill.warnings] + [f"decode: {text}" for text in decode.warnings]
    # A refused fit says only that the newest try failed; the one before has nothing more to tell.
    FittedModel.objects.filter(partition=partition, hardware_class=hardware_class, state=FitState.REFUSED).delete()
    fit = FittedModel.objects.create(
        partition=partition,
        hardware_class=hardware_class,
        state=state,
        prefill=prefill.coefficients,
        decode=decode.coefficients,
        prefill_rows=prefill.rows,
        decode_rows=decode.rows,
        prefill_error_ratio=prefill.error_ratio,
        decode_error_ratio=decode.error_ratio,
        prefill_condition=min(prefill.condition, 1e18),
        decode_condition=min(decode.condition, 1e18),
        batch_low=decode.batch_range.low,
        batch_high=decode.batch_range.high,
        warnings=warnings,
    )
    orders.tell(partition.name, "fit", hardware_class=hardware_class, state=state.value, warnings=warnings)
    return fit


def _error_ratio(fit: FittedModel, node: Node, windows: Sequence[fitting.FitWindow]) -> float:
    """Mean relative error of a fit's busy seconds over the windows; 0 when there is nothing to compare."""
    prefill, decode = learned(node, fit)
    errors = []
    for window in windows:
        if window.busy_prefill_s >= fitting.MIN_BUSY_S:
            predicted_s = prefill_work_s(prefill, window.t_uc, window.pairs, window.t_rst, window.prefill_iterations)
            errors.append(abs(predicted_s / window.busy_prefill_s - 1))
        if window.busy_decode_s >= fitting.MIN_BUSY_S:
            predicted_s = sum(count * decode_iteration_s(decode, batch) for batch, count in window.batch_counts)
            errors.append(abs(predicted_s / window.busy_decode_s - 1))
    return sum(errors) / len(errors) if errors else 0.0


def _retire(fit: FittedModel, now: float, reason: str) -> None:
    fit.state, fit.retired_at, fit.retired_reason = FitState.RETIRED.value, datetime.fromtimestamp(now, UTC), reason
    fit.save(update_fields=["state", "retired_at", "retired_reason"])


# -- decisions -------------------------------------------------------------------------------------------------------


def planner_state(partition: Partition, now: float, live: Mapping[str, Any] | None = None) -> PlannerState:
    """What the domain plans with. `live` is the gateway's newest snapshot, for running work and referenced KV per node."""
    policy = policy_of(partition)
    fits, refused = accepted_fits(partition), refused_classes(partition)
    loads = {node["name"]: node for node in (live or {}).get("nodes", [])}
    force = live_forces(partition).first()
    done = last_switch(partition)
    return PlannerState(
        now=now,
        nodes=tuple(
            _planner_node(
                node, fits.get(node.hardware_class), node.hardware_class in refused, loads.get(node.name, {}), now
            )
            for node in nodes_of(partition)
            if node.enabled
        ),
        policy=PlannerPolicy(
            mode=policy.mode,  # type: ignore[arg-type]
            freeze_reason=policy.freeze_reason,
            cooldown_s=policy.cooldown_s,
            window_s=policy.window_s,
            slo_ttft_s=policy.slo_ttft_s,
            max_stale_ratio=policy.max_stale_ratio,
            min_utilisation=policy.min_utilisation,
        ),
        last_switch=LastSwitch(done.switched_at.timestamp(), done.prefill_delta) if done and done.switched_at else None,
        switch_running=orders.moving_order(partition) is not None,
        forced_reason=f"{force.reason} ({force.forced_by})" if force else None,
    )


def _planner_node(
    node: Node, fit: FittedModel | None, refused: bool, load: Mapping[str, Any], now: float
) -> PlannerNode:
    prefill, decode = learned(node, fit) if fit else configured(node)
    seen = BatchRange(fit.batch_low, fit.batch_high) if fit else None
    down = node.observed_state == NodeState.DOWN
    return PlannerNode(
        name=node.name,
        order=node.order,
        phase=node.desired_phase,
        capacity=NodeCapacity(prefill, decode, float(node.decode_limit), seen),
        available=not down,
        down_s=now - node.observed_at.timestamp() if down and node.observed_at else 0.0,
        draining=node.draining,
        source="learned" if fit else "configured",
        fit_ok=not refused,
        running=int(load.get("running_prefill") or 0) + int(load.get("running_decode") or 0),
        referenced_blocks=int(load.get("pool_referenced_blocks") or 0),
    )


def window_to_decide(partition: Partition) -> tuple[float, float] | None:
    """The newest window that has ended, has slices and has no decision yet; also after the planner was away."""
    policy = policy_of(partition)
    newest = Slice.objects.filter(partition=partition).order_by("-t0").first()
    if newest is None:
        return None
    end = (newest.t1 + 1e-6) // policy.window_s * policy.window_s
    start = end - policy.window_s
    if not window_of(partition, start, end) or _decision_of(partition, end):
        return None
    return start, end


def _decision_of(partition: Partition, end: float) -> Decision | None:
    return Decision.objects.filter(partition=partition, window_end=end).exclude(rule="empty_phase").first()


def decide(
    partition: Partition, start: float, end: float, now: float, live: Mapping[str, Any] | None = None
) -> Decision:
    """Evaluate a window, store the decision with all its numbers, and propose or order what it says. Once per window."""
    with change(PLANNER, f"window {start:.0f} to {end:.0f}"):
        partition = Partition.objects.select_for_update(of=("self",)).get(pk=partition.pk)
        known = _decision_of(partition, end)
        if known is not None:
            return known
        state = planner_state(partition, now, live)
        slices = window_of(partition, start, end)
        return _store(partition, state, slices, evaluate(state, [view_of(row) for row in slices]), start, end)


def decide_at_once(partition: Partition, now: float, live: Mapping[str, Any] | None = None) -> Decision | None:
    """Between windows: act only if a phase has no node left. None when there is nothing to do or it was decided already."""
    with change(PLANNER, "a phase has no node"):
        state = planner_state(partition, now, live)
        if not state.outage or state.switch_running or len(state.available) < 2:
            return None
        if Proposal.objects.filter(
            partition=partition, state=ProposalState.OPEN, decision__rule="empty_phase"
        ).exists():
            return None
        partition = Partition.objects.select_for_update(of=("self",)).get(pk=partition.pk)
        policy = policy_of(partition)
        recent = Decision.objects.filter(partition=partition, rule="empty_phase").first()
        if recent is not None and now - recent.at.timestamp() < policy.slice_s:
            return None
        slices = window_of(partition, now - policy.window_s, now)
        verdict = evaluate(state, [view_of(row) for row in slices])
        return _store(partition, state, slices, verdict, now - policy.window_s, now)


def _store(
    partition: Partition, state: PlannerState, slices: Sequence[Slice], verdict: Verdict, start: float, end: float
) -> Decision:
    chosen = verdict.chosen
    best = chosen or max(
        (c for c in verdict.candidates if c.gate.gain is not None), key=lambda c: c.gate.gain or 0.0, default=None
    )
    decision = Decision.objects.create(
        partition=partition,
        at=datetime.fromtimestamp(state.now, UTC),
        window_start=start,
        window_end=end,
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
        detail=_finite({**verdict.as_dict(), "window": [_slice_document(row) for row in slices]}),
    )
    decision.action = _act(partition, state, decision, chosen, slices) if chosen else Action.NONE
    decision.save(update_fields=["action"])
    orders.tell(
        partition.name,
        "decision",
        decision=decision.pk,
        verdict=decision.verdict,
        rule=decision.rule,
        reason=decision.reason,
        action=decision.action,
    )
    return decision


def _act(
    partition: Partition, state: PlannerState, decision: Decision, chosen: Candidate, slices: Sequence[Slice]
) -> Action:
    """Do what the mode allows with a chosen split."""
    if state.policy.mode == Mode.AUTOMATIC:
        targets = dict.fromkeys(chosen.prefill, "prefill") | dict.fromkeys(chosen.decode, "decode")
        placed = orders.place(partition, targets, Cause.PLANNER, PLANNER, decision.reason, decision=decision)
        return Action.ORDERED if placed else Action.NONE
    if state.policy.mode == Mode.APPROVE:
        _propose(partition, state, decision, chosen, slices)
        return Action.PROPOSED
    return Action.ADVISED


def _propose(
    partition: Partition, state: PlannerState, decision: Decision, chosen: Candidate, slices: Sequence[Slice]
) -> None:
    """Put the choice before people until the next window ends; it takes the place of an older proposal."""
    for older in Proposal.objects.select_for_update(of=("self",)).filter(partition=partition, state=ProposalState.OPEN):
        close(older, ProposalState.STALE, f"the planner proposes something newer (decision {decision.pk})")
    split = desired_split(nodes_of(partition))
    last = next((row.workload for row in reversed(slices) if row.workload), None)
    policy = policy_document(policy_of(partition))
    proposal = Proposal.objects.create(
        partition=partition,
        decision=decision,
        prefill=list(chosen.prefill),
        decode=list(chosen.decode),
        from_prefill=split["prefill"],
        from_decode=split["decode"],
        gain=chosen.gate.gain,
        standard_error=chosen.gate.standard_error,
        threshold=chosen.gate.threshold,
        reason=decision.reason,
        proposed_by=str(PLANNER),
        evidence={"workload": last, "fits": _fit_ids(partition)},
        policy={**policy, "frozen_until": None},
        expires_at=datetime.fromtimestamp(decision.window_end + state.policy.window_s + LAG_S, UTC),
    )
    orders.tell(partition.name, "proposal", proposal=proposal.pk, state=proposal.state, reason=proposal.reason)


def _fit_ids(partition: Partition) -> list[int]:
    return sorted(fit.pk for fit in accepted_fits(partition).values())


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


# -- watching a switch -----------------------------------------------------------------------------------------------


def undo_a_switch_that_hurts(partition: Partition, now: float) -> SwitchOrder | None:
    """Roll back a planned switch after which prefill waits broke their target; returns the order that does it.

    A forced switch is left alone: a person wanted it. In mode `advisory` or `frozen` the planner touches nothing.
    """
    policy = policy_of(partition)
    order = last_switch(partition)
    if order is None or order.switched_at is None or order.cause not in (Cause.PLANNER, Cause.PROPOSAL):
        return None
    if policy.mode not in (Mode.AUTOMATIC, Mode.APPROVE) or live_forces(partition).exists():
        return None
    if order.state not in (OrderState.COOLING, OrderState.DONE):
        return None
    switched_at = order.switched_at.timestamp()
    if now - switched_at > watch.WATCH_S + LAG_S:
        return None
    # What has not arrived yet cannot be judged: look at the time up to the newest load window.
    pieces = load_pieces(partition, switched_at - watch.BREACH_S, now)
    seen_until = max((piece.t1 for piece in pieces), default=now)
    why = watch.breach(seen_until, switched_at, policy.slo_ttft_s, pieces)
    if why is None:
        return None
    try:
        return roll_back(order, PLANNER, why, Cause.WATCH)
    except Conflict:
        return None


# -- helpers ---------------------------------------------------------------------------------------------------------


def _slice_document(row: Slice) -> dict[str, Any]:
    return {
        "t0": row.t0,
        "t1": row.t1,
        "workload": row.workload,
        "rate": row.rate,
        "prefill_utilisation": row.prefill_utilisation,
        "decode_utilisation": row.decode_utilisation,
        "prefill_wait_p95_s": row.prefill_wait_p95_s,
        "stale_ratio": row.stale_ratio,
    }


def _finite(value: Any) -> Any:
    """PostgreSQL's JSON knows no infinity; an infinite wait becomes null."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


@transaction.atomic
def prune(partition: Partition, now: float, keep_s: float = 7 * 86_400.0) -> None:
    """Delete slices past their age. Decisions, proposals and orders are history and stay."""
    Slice.objects.filter(partition=partition, t1__lt=now - keep_s).delete()
