"""The learned cost model in the database: fitting it from what nodes measured, watching it drift, using it.

A fit in use is frozen. It is replaced when reality has left it (a CUSUM over every new window) or when nodes have run at
batch sizes it never saw. Times are unix seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from django.db.models import Min

from apps.planning import orders
from apps.planning.choices import FitState
from apps.planning.domain import drift as drifting
from apps.planning.domain import fitting
from apps.planning.domain.capacity import BatchRange
from apps.planning.domain.cost_model import (
    DecodeCoefficients,
    PrefillCoefficients,
    decode_iteration_s,
    prefill_work_s,
)
from apps.planning.domain.drift import Drift
from apps.planning.models import FittedModel
from apps.planning.selectors import accepted_fits
from apps.telemetry.models import CostWindow
from apps.topology import configuration
from apps.topology.models import Node, Partition
from apps.topology.selectors import nodes_of
from controlplane.actors import PLANNER

FIRST_MINUTE_S = 60.0
BOOT_LOOKBACK_S = 600.0
FIT_HISTORY_S = 3600.0
# Batches beyond the fitted range by this factor, in this many windows of the last five minutes, ask for a wider fit.
WIDER_FACTOR = 1.25
WIDER_ROWS = 10
WIDER_S = 300.0
RESIDUALS_KEPT = 240
# So many windows of a phase tell how much slower it has become; to tell its coefficients apart takes more.
LEVEL_ROWS = 5


# -- learning --------------------------------------------------------------------------------------------------------


def refit(partition: Partition, now: float, older_than: datetime | None = None) -> list[FittedModel]:
    """Fit every hardware class that has no fit in use, and those whose fit no longer covers what nodes do.

    Fits made before `older_than` are also made anew. Samples of a node's first minute and of a node that was switching
    are left out. Returns the new fits; the router learns of them with the next configuration.
    """
    found = []
    fits = accepted_fits(partition)
    for hardware_class, nodes in nodes_by_class(partition).items():
        fit = fits.get(hardware_class)
        why = None
        if fit is not None:
            why = _outgrown(partition, fit, nodes, now)
            if why is None and fit.summary.get("provisional"):
                why = "it was only corrected in its level"
            if why is None and older_than is not None and fit.created_at < older_than:
                why = "a warm-up has measured it anew"
            if why is None:
                continue
        created = _learn(partition, hardware_class, nodes, _history(partition, nodes, now), now, fit, why or "")
        if created is not None:
            found.append(created)
    if any(fit.state == FitState.ACCEPTED for fit in found):
        configuration.publish(partition, PLANNER, "the cost model was learned")
    return found


def nodes_by_class(partition: Partition) -> dict[str, list[Node]]:
    """The partition's nodes by hardware class; those of one class share a fit."""
    classes: dict[str, list[Node]] = {}
    for node in nodes_of(partition):
        classes.setdefault(node.hardware_class, []).append(node)
    return dict(sorted(classes.items()))


def why_unlearned(partition: Partition, now: float) -> dict[str, str]:
    """Of each hardware class without a fit in use, why there is none yet."""
    fits = accepted_fits(partition)
    reasons = {}
    for hardware_class, nodes in nodes_by_class(partition).items():
        if hardware_class in fits:
            continue
        prefill, decode = _fit_both(nodes, _history(partition, nodes, now))
        problems = [
            f"{phase}: {fit.reason}" if isinstance(fit, fitting.NotEnough) else f"{phase}: {'; '.join(fit.warnings)}"
            for phase, fit in (("prefill", prefill), ("decode", decode))
            if isinstance(fit, fitting.NotEnough) or not fit.usable
        ]
        reasons[hardware_class] = ", ".join(problems) or "not fitted yet"
    return reasons


def fit_windows(partition: Partition, nodes: Sequence[Node], since: float) -> list[fitting.FitWindow]:
    """Usable measurements of these nodes that began at `since` or later, oldest first."""
    names = [node.name for node in nodes]
    rows = list(
        CostWindow.objects.filter(partition=partition, node__in=names, switching=False, t0__gte=since).order_by(
            "t0", "node"
        )
    )
    # A boot whose rows go back further than this is past its first minute anyway.
    lately = CostWindow.objects.filter(partition=partition, node__in=names, t0__gte=since - BOOT_LOOKBACK_S)
    boots = lately.values("node", "boot_id")
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
            node=row.node,
            t0=row.t0,
        )
        for row in rows
        if row.t0 - first_seen[row.node, row.boot_id] >= FIRST_MINUTE_S
    ]


def _history(partition: Partition, nodes: Sequence[Node], now: float) -> list[fitting.FitWindow]:
    """What tells of these nodes (of one class) as they are now."""
    since = max(now - FIT_HISTORY_S, _drifted_since(partition, nodes[0].hardware_class))
    return fit_windows(partition, nodes, since)


def _fit_both(
    nodes: Sequence[Node], windows: Sequence[fitting.FitWindow]
) -> tuple[fitting.Fit | fitting.NotEnough, fitting.Fit | fitting.NotEnough]:
    believed_prefill, believed_decode = configured(nodes[0])
    return fitting.fit_prefill(windows, believed_prefill), fitting.fit_decode(windows, believed_decode)


def _learn(
    partition: Partition,
    hardware_class: str,
    nodes: Sequence[Node],
    windows: Sequence[fitting.FitWindow],
    now: float,
    replaced: FittedModel | None,
    why_replaced: str,
) -> FittedModel | None:
    prefill, decode = _fit_both(nodes, windows)
    if isinstance(prefill, fitting.NotEnough) or isinstance(decode, fitting.NotEnough):
        return None
    assert decode.batch_range is not None
    usable = prefill.usable and decode.usable
    if replaced is not None:
        if not usable:  # the one in use is better than none
            return None
        _retire(replaced, now, why_replaced)
    warnings = [f"prefill: {text}" for text in prefill.warnings] + [f"decode: {text}" for text in decode.warnings]
    # A refused fit says only that the newest try failed; the one before has nothing more to tell.
    FittedModel.objects.filter(partition=partition, hardware_class=hardware_class, state=FitState.REFUSED).delete()
    state = FitState.ACCEPTED if usable else FitState.REFUSED
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
        summary={
            "from": min(window.t0 for window in windows),
            "until": max(window.t0 for window in windows),
            "windows": len(windows),
            "nodes": sorted({window.node for window in windows}),
            "prefill": _part_summary(prefill),
            "decode": _part_summary(decode),
        },
        residuals={"prefill": _residual_rows(prefill), "decode": _residual_rows(decode)},
        drift=asdict(Drift(seen_until=max(window.t0 for window in windows))),
        created_at=datetime.fromtimestamp(now, UTC),
    )
    orders.tell(partition.name, "fit", hardware_class=hardware_class, state=state.value, warnings=warnings)
    return fit


def _part_summary(fit: fitting.Fit) -> dict[str, Any]:
    return {
        "rows": fit.rows,
        "error_ratio": fit.error_ratio,
        "deviation": fit.deviation,
        "condition": min(fit.condition, 1e18),
        "merged": [list(group) for group in fit.merged],
        "unidentified": list(fit.unidentified),
        "columns": {name: asdict(spread) for name, spread in fit.columns.items()},
        "odd_nodes": fit.odd_nodes,
    }


def _residual_rows(fit: fitting.Fit) -> list[list[Any]]:
    """At most `RESIDUALS_KEPT` of the residuals, evenly."""
    step = max(1, -(-len(fit.residuals) // RESIDUALS_KEPT))
    return [
        [row.node, row.t0, round(row.measured_s, 6), round(row.predicted_s, 6), row.held_out]
        for row in fit.residuals[::step]
    ]


# -- what the fits say -----------------------------------------------------------------------------------------------


def configured(node: Node) -> tuple[PrefillCoefficients, DecodeCoefficients]:
    """The coefficients people gave the node."""
    c = node.coefficients
    prefill = PrefillCoefficients(c["c0"], c["c1"], c["c2"], c["c3"])
    return prefill, DecodeCoefficients(
        c["d0"], c["d1"], c["d2"], int(c["experts"]), int(c["experts_per_token"]), c["t_fwd"]
    )


def learned(node: Node, fit: FittedModel) -> tuple[PrefillCoefficients, DecodeCoefficients]:
    """The fit's coefficients for this node; one that is clearly slower or faster than its class has its own speed."""
    _, shape = configured(node)
    slow_prefill, slow_decode = (
        float(fit.summary.get(phase, {}).get("odd_nodes", {}).get(node.name, 1.0)) for phase in ("prefill", "decode")
    )
    prefill = PrefillCoefficients(**{name: value * slow_prefill for name, value in fit.prefill.items()})
    d0, d1, d2 = (fit.decode[name] * slow_decode for name in fitting.DECODE_COLUMNS)
    return prefill, replace(shape, d0=d0, d1=d1, d2=d2)


def batch_range(fit: FittedModel) -> BatchRange:
    return BatchRange(fit.batch_low, fit.batch_high)


def problems(partition: Partition) -> dict[str, str]:
    """Hardware classes that must not be planned with now, and why: the newest try failed, or reality has left the fit."""
    newest: dict[str, FittedModel] = {}
    for fit in FittedModel.objects.filter(partition=partition).order_by("created_at", "id"):
        newest[fit.hardware_class] = fit
    said = {FitState.REFUSED: "is too wrong to plan with", FitState.RETIRED: "has drifted and is learned anew"}
    return {name: said[FitState(fit.state)] for name, fit in newest.items() if fit.state in said}


# -- drift -----------------------------------------------------------------------------------------------------------


def watch_drift(partition: Partition, now: float) -> list[FittedModel]:
    """Compare every new window with the fits in use; retires, and returns, those that reality has left.

    In the place of a retired one comes the same fit with its level corrected, if that describes the newest windows well
    enough to plan with; the next `refit` replaces it.
    """
    retired = []
    classes = nodes_by_class(partition)
    for hardware_class, fit in accepted_fits(partition).items():
        nodes = classes.get(hardware_class)
        if not nodes:
            continue
        known = Drift(**fit.drift) if fit.drift else Drift(seen_until=fit.created_at.timestamp())
        windows = fit_windows(partition, nodes, known.seen_until + 1e-3)
        if not windows:
            continue
        deviation = max(
            (float(fit.summary.get(phase, {}).get("deviation", 0.0)) for phase in ("prefill", "decode")), default=0.0
        )
        drift, alarm = drifting.watch(known, _slowness(fit, {node.name: node for node in nodes}, windows), deviation)
        fit.drift = asdict(drift)
        fit.save(update_fields=["drift"])
        if alarm is not None:
            _retire(fit, now, alarm.reason, alarm.since)
            _correct_level(fit, nodes, now, alarm)
            orders.tell(partition.name, "fit", hardware_class=hardware_class, state=fit.state, warnings=[alarm.reason])
            retired.append(fit)
    if retired:
        configuration.publish(partition, PLANNER, "the learned cost model has drifted")
    return retired


def _correct_level(fit: FittedModel, nodes: Sequence[Node], now: float, alarm: drifting.Alarm) -> FittedModel | None:
    """A slower or faster copy of a drifted fit; None when more than the level has changed, or too little was measured."""
    by_name = {node.name: node for node in nodes}
    windows = fit_windows(fit.partition, nodes, alarm.since)
    levels = {}
    for phase in ("prefill", "decode"):
        values = [slowness for _, slowness in _slowness(fit, by_name, windows, (phase,))]
        if len(values) < LEVEL_ROWS:
            # Nothing says that this phase has changed: it keeps its level.
            levels[phase] = drifting.Level(1.0, float(getattr(fit, f"{phase}_error_ratio")), len(values))
        else:
            levels[phase] = drifting.level(values)
    if max(found.error_ratio for found in levels.values()) > fitting.REFUSE_ERROR_RATIO:
        return None
    prefill, decode = levels["prefill"], levels["decode"]
    said = f"{alarm.reason}; corrected in its level (prefill x{prefill.ratio:.2f}, decode x{decode.ratio:.2f})"
    copied = ("prefill_rows", "decode_rows", "prefill_condition", "decode_condition", "batch_low", "batch_high")
    return FittedModel.objects.create(
        partition=fit.partition,
        hardware_class=fit.hardware_class,
        state=FitState.ACCEPTED,
        prefill={name: value * prefill.ratio for name, value in fit.prefill.items()},
        decode={name: value * decode.ratio for name, value in fit.decode.items()},
        prefill_error_ratio=prefill.error_ratio,
        decode_error_ratio=decode.error_ratio,
        warnings=[f"{said} until it is learned anew"],
        summary={**fit.summary, "provisional": True},
        residuals=fit.residuals,
        drift=asdict(Drift(seen_until=max(window.t0 for window in windows))),
        created_at=datetime.fromtimestamp(now, UTC),
        **{name: getattr(fit, name) for name in copied},
    )


def _slowness(
    fit: FittedModel,
    nodes: Mapping[str, Node],
    windows: Iterable[fitting.FitWindow],
    phases: Sequence[str] = ("prefill", "decode"),
) -> Iterable[tuple[float, float]]:
    """`(t0, measured/predicted)` of each window; both phases of a collocated node count together."""
    models = {name: learned(node, fit) for name, node in nodes.items()}
    for window in windows:
        prefill, decode = models[window.node]
        measured_s = predicted_s = 0.0
        if "prefill" in phases and window.busy_prefill_s >= fitting.MIN_BUSY_S and _prefill_within(fit, window):
            measured_s += window.busy_prefill_s
            predicted_s += prefill_work_s(prefill, window.t_uc, window.pairs, window.t_rst, window.prefill_iterations)
        if "decode" in phases and window.busy_decode_s >= fitting.MIN_BUSY_S and _decode_within(fit, window):
            measured_s += window.busy_decode_s
            predicted_s += sum(count * decode_iteration_s(decode, batch) for batch, count in window.batch_counts)
        if measured_s > 0 and predicted_s > 0:
            yield window.t0, measured_s / predicted_s


# Where the fit has seen nothing its formula is a guess. Being off there is no drift: it asks for a wider fit.


def _decode_within(fit: FittedModel, window: fitting.FitWindow) -> bool:
    return all(fit.batch_low <= batch <= WIDER_FACTOR * fit.batch_high for batch, _ in window.batch_counts)


def _prefill_within(fit: FittedModel, window: fitting.FitWindow) -> bool:
    seen = fit.summary.get("prefill", {}).get("columns", {}).get("c1")
    if seen is None or window.prefill_iterations <= 0:
        return True
    tokens = window.t_uc / window.prefill_iterations
    return bool(seen["low"] / WIDER_FACTOR <= tokens <= seen["high"] * WIDER_FACTOR)


def _outgrown(partition: Partition, fit: FittedModel, nodes: Sequence[Node], now: float) -> str | None:
    """Why nodes now do what this fit has never seen, or None."""
    windows = fit_windows(partition, nodes, now - WIDER_S)
    highest = [max(batch for batch, _ in window.batch_counts) for window in windows if window.batch_counts]
    beyond = [batch for batch in highest if batch > WIDER_FACTOR * fit.batch_high]
    if len(beyond) >= WIDER_ROWS:
        return f"nodes decode up to {max(beyond)} requests at once; this fit had seen {fit.batch_high:.0f}"
    strange = [
        window for window in windows if window.busy_prefill_s >= fitting.MIN_BUSY_S and not _prefill_within(fit, window)
    ]
    if len(strange) < WIDER_ROWS:
        return None
    tokens = sum(window.t_uc for window in strange) / max(1.0, sum(window.prefill_iterations for window in strange))
    seen = fit.summary["prefill"]["columns"]["c1"]
    return (
        f"nodes compute {tokens:.0f} tokens in a prefill iteration; "
        f"this fit had seen {seen['low']:.0f} to {seen['high']:.0f}"
    )


def _drifted_since(partition: Partition, hardware_class: str) -> float:
    """From when on measurements tell of the class as it is now: since its last fit began to be wrong."""
    retired = FittedModel.objects.filter(
        partition=partition, hardware_class=hardware_class, state=FitState.RETIRED
    ).values_list("drift", flat=True)
    return max((float(drift.get("wrong_since") or 0.0) for drift in retired), default=0.0)


def _retire(fit: FittedModel, now: float, reason: str, wrong_since: float | None = None) -> None:
    """`wrong_since` is None for a fit that was right and is only replaced by a wider one."""
    fit.state, fit.retired_reason = FitState.RETIRED.value, reason[:500]
    fit.retired_at = datetime.fromtimestamp(now, UTC)
    fit.drift = {**fit.drift, "wrong_since": wrong_since}
    fit.save(update_fields=["state", "retired_at", "retired_reason", "drift"])


def coefficient_overlay(partition: Partition) -> dict[str, dict[str, Any]]:
    """The learned coefficients for the configuration document, so that the router predicts with what was measured."""
    fits = accepted_fits(partition)
    overlay = {}
    for node in nodes_of(partition):
        fit = fits.get(node.hardware_class)
        if fit is None:
            continue
        prefill, decode = learned(node, fit)
        values = asdict(prefill) | {"d0": decode.d0, "d1": decode.d1, "d2": decode.d2}
        overlay[node.name] = {"coefficients": {**node.coefficients, **values}}
    return overlay
