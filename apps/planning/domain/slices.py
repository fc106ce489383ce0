"""From the gateway's 2 s load windows to a slice's averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from apps.planning.domain.capacity import Workload
from apps.planning.domain.plan_types import SliceView


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """One load window as the gateway sent it: sums over `[t0, t1)`, unix seconds."""

    t0: float
    t1: float
    prefilled: int = 0
    t_uc: int = 0
    pairs: int = 0
    t_rst: int = 0
    prefill_iterations: int = 0
    finished: int = 0
    t_out: int = 0
    decode_iterations_of_finished: float = 0.0
    in_flight_s: float = 0.0
    prefill_utilisation: float = 0.0
    decode_utilisation: float = 0.0
    prefill_waits_s: tuple[float, ...] = field(default=())
    stale_ratio: float = 0.0

    @property
    def length_s(self) -> float:
        return max(0.0, self.t1 - self.t0)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, ceil(percent / 100 * len(ordered)) - 1)] if ordered else None


def close_slice(
    t0: float, t1: float, pieces: Sequence[LoadPiece], thinks_s: Sequence[float] | None = None
) -> SliceView:
    """Sum the pieces of `[t0, t1)`. A slice in which nothing was prefilled or nothing finished is empty.

    `thinks_s` are the pauses, in seconds, after which agents that had been answered asked again within the slice. With
    them the number of agents follows from Little's law: those in flight, and those who think.
    """
    measured_s = sum(piece.length_s for piece in pieces)
    if measured_s <= 0:
        return SliceView(t0, t1, None)

    def over_time(name: str) -> float:
        return float(sum(getattr(piece, name) * piece.length_s for piece in pieces) / measured_s)

    prefilled = sum(piece.prefilled for piece in pieces)
    workload, rate = _workload(pieces, prefilled, measured_s), prefilled / measured_s
    think_s = sum(thinks_s) / len(thinks_s) if thinks_s else None
    return SliceView(
        t0=t0,
        t1=t1,
        workload=workload,
        rate=rate,
        think_s=think_s,
        agents=workload.in_flight + rate * think_s if workload and think_s is not None else None,
        prefill_utilisation=over_time("prefill_utilisation"),
        decode_utilisation=over_time("decode_utilisation"),
        prefill_wait_p95_s=percentile([wait for piece in pieces for wait in piece.prefill_waits_s], 95),
        stale_ratio=over_time("stale_ratio"),
    )


def _workload(pieces: Sequence[LoadPiece], prefilled: int, measured_s: float) -> Workload | None:
    finished = sum(piece.finished for piece in pieces)
    t_out = sum(piece.t_out for piece in pieces)
    if not prefilled or not finished or not t_out:
        return None
    t_uc = sum(piece.t_uc for piece in pieces)
    prefill_iterations = sum(piece.prefill_iterations for piece in pieces)
    decode_iterations = sum(piece.decode_iterations_of_finished for piece in pieces)
    return Workload(
        t_uc=max(1.0, t_uc / prefilled),
        pairs=sum(piece.pairs for piece in pieces) / prefilled,
        t_rst=sum(piece.t_rst for piece in pieces) / prefilled,
        t_out=t_out / finished,
        t_acc=t_out / decode_iterations if decode_iterations > 0 else 1.0,
        u_tokens=max(1.0, t_uc / prefill_iterations if prefill_iterations else t_uc / prefilled),
        in_flight=sum(piece.in_flight_s for piece in pieces) / measured_s,
    )
