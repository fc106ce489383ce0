"""Which phase each node had when: one lane a node, read from the steps of switch orders. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.console import formats

SPANS_MIN = (15, 60, 360)
TICKS = 5


@dataclass(frozen=True, slots=True)
class Move:
    """One step of an order that took a node. Times in unix seconds; `finished` is None while it runs."""

    node: str
    from_phase: str
    to_phase: str
    state: str
    began: float
    finished: float | None
    order: int
    reason: str = ""


def lanes(
    phases: Mapping[str, str], moves: Iterable[Move], start: float, now: float, known_since: float = 0.0
) -> list[dict[str, Any]]:
    """One lane for each node of `phases` (name to desired phase), over `start` to `now`, empty before `known_since`."""
    by_node: dict[str, list[Move]] = {name: [] for name in phases}
    for move in sorted(moves, key=lambda move: move.began):
        if move.node in by_node and (move.finished is None or move.finished > start):
            by_node[move.node].append(move)
    return [{"name": name, "parts": _parts(phases[name], by_node[name], start, now, known_since)} for name in phases]


def _parts(phase: str, moves: Sequence[Move], start: float, now: float, known_since: float) -> list[dict[str, str]]:
    parts = []
    at, kind = max(start, known_since), moves[0].from_phase if moves else phase
    for move in moves:
        began, ended = max(start, move.began), min(now, move.finished or now)
        parts.append(_part(kind, at, began, start, now, kind))
        running = move.state in ("draining", "switching")
        doing = move.state if running else "switching"
        said = f"{doing} to {move.to_phase}" if running or move.state == "switched" else f"{move.state}: {move.reason}"
        parts.append(_part(doing, max(at, began), ended, start, now, f"{said}, order {move.order}"))
        at, kind = ended, move.to_phase if move.state == "switched" else move.from_phase
    if not (moves and moves[-1].finished is None):
        parts.append(_part(kind, at, now, start, now, kind))
    return [part for part in parts if part]


def _part(kind: str, began: float, ended: float, start: float, now: float, said: str) -> dict[str, str]:
    if ended <= began:
        return {}
    whole = now - start
    return {
        "kind": kind,
        "left": f"{(began - start) / whole * 100:.2f}%",
        "width": f"{(ended - began) / whole * 100:.2f}%",
        "text": f"{said} for {formats.duration(ended - began)}",
    }


def ticks(start: float, now: float) -> list[dict[str, Any]]:
    """Times along the axis, the first and the last at its ends."""
    step = (now - start) / (TICKS - 1)
    return [{"at": start + i * step, "left": f"{i / (TICKS - 1) * 100:.1f}%"} for i in range(TICKS)]
