"""Which phase each node had when: one lane a node, read from the steps of switch orders. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.console import formats

SPANS = {"15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400, "7d": 604_800}
TICKS = 5
MIN_SPAN_S = 60.0
MAX_SPAN_S = 30 * 86_400.0


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
    phases: Mapping[str, str],
    moves: Iterable[Move],
    start: float,
    now: float,
    known_since: float = 0.0,
    least_s: float = 0.0,
) -> list[dict[str, Any]]:
    """One lane for each node of `phases` (name to desired phase), over `start` to `now`, empty before `known_since`.

    A successful switch that took less than `least_s` is drawn as the border between its phases.
    """
    by_node: dict[str, list[Move]] = {name: [] for name in phases}
    for move in sorted(moves, key=lambda move: move.began):
        if move.node in by_node and (move.finished is None or move.finished > start):
            by_node[move.node].append(move)
    return [
        {"name": name, "parts": _parts(phases[name], by_node[name], start, now, known_since, least_s)}
        for name in phases
    ]


def _parts(
    phase: str, moves: Sequence[Move], start: float, now: float, known_since: float, least_s: float
) -> list[dict[str, Any]]:
    parts = []
    at, kind = max(start, known_since), moves[0].from_phase if moves else phase
    for move in moves:
        began, ended = max(start, move.began), min(now, move.finished or now)
        if move.state == "switched" and ended - began < least_s and at <= began <= now:
            parts.append(_part(kind, at, began, start, now, kind))
            at, kind = began, move.to_phase
            continue
        parts.append(_part(kind, at, began, start, now, kind))
        running = move.state in ("draining", "switching")
        doing = move.state if running else "switching"
        said = f"{doing} to {move.to_phase}" if running or move.state == "switched" else f"{move.state}: {move.reason}"
        parts.append(_part(doing, max(at, began), ended, start, now, f"{said}, order {move.order}"))
        at, kind = ended, move.to_phase if move.state == "switched" else move.from_phase
    if not (moves and moves[-1].finished is None):
        parts.append(_part(kind, at, now, start, now, kind))
    return [part for part in parts if part]


def _part(kind: str, began: float, ended: float, start: float, now: float, said: str) -> dict[str, Any]:
    ended = min(ended, now)
    if ended <= began:
        return {}
    whole = now - start
    return {
        "kind": kind,
        "began": began,
        "ended": ended,
        "left": f"{(began - start) / whole * 100:.2f}%",
        "width": f"{(ended - began) / whole * 100:.2f}%",
        "text": f"{said} for {formats.duration(ended - began)}",
    }


@dataclass(frozen=True, slots=True)
class Window:
    """The time shown, `[start, end)` in unix seconds; it `follows` when it ends now and moves on with time."""

    start: float
    end: float
    now: float

    @property
    def span_s(self) -> float:
        return self.end - self.start

    @property
    def follows(self) -> bool:
        return self.end >= self.now - 1.0

    def query(self) -> str:
        return f"from={self.start:.0f}&to={self.end:.0f}" if not self.follows else f"span={self.span_s:.0f}"

    def _near(self, start: float, end: float) -> Window:
        span = min(MAX_SPAN_S, max(MIN_SPAN_S, end - start))
        end = min(self.now, end)
        return Window(end - span, end, self.now)

    def zoomed(self, factor: float) -> Window:
        """Closer (factor below 1) or wider, around the middle; a window that follows keeps its end."""
        span = self.span_s * factor
        if self.follows:
            return self._near(self.end - span, self.end)
        middle = (self.start + self.end) / 2
        return self._near(middle - span / 2, middle + span / 2)

    def moved(self, share: float) -> Window:
        """Earlier (negative) or later by a share of what is shown."""
        by = self.span_s * share
        return self._near(self.start + by, self.end + by)

    def steps(self) -> list[dict[str, str]]:
        """What the buttons and keys lead to."""
        return [
            {"key": "ArrowLeft", "label": "Earlier", "sign": "←", "query": self.moved(-0.5).query()},
            {"key": "+", "label": "Zoom in", "sign": "+", "query": self.zoomed(0.5).query()},
            {"key": "-", "label": "Zoom out", "sign": "−", "query": self.zoomed(2.0).query()},
            {"key": "ArrowRight", "label": "Later", "sign": "→", "query": self.moved(0.5).query()},
            {"key": "Home", "label": "Now", "sign": "Now", "query": f"span={self.span_s:.0f}"},
        ]


def window(asked: Mapping[str, str], now: float) -> Window:
    """The window that a query string asks for: `from` and `to`, or `span` up to now; 15 minutes without either."""
    start, end, span = (_number(asked.get(name)) for name in ("from", "to", "span"))
    if start is not None and end is not None and end > start:
        return Window(start, end, now)._near(start, end)
    span = SPANS.get(asked.get("span", ""), span) or SPANS["15m"]
    return Window(now - span, now, now)._near(now - span, now)


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 < number < 1e11 else None


def trace(shown: Sequence[Mapping[str, Any]], start: float) -> dict[str, Any]:
    """Lanes in the trace event format that Perfetto and chrome://tracing open; times in microseconds from `start`."""
    events: list[dict[str, Any]] = []
    for index, lane in enumerate(shown):
        events.append({"ph": "M", "pid": 1, "tid": index, "name": "thread_name", "args": {"name": lane["name"]}})
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": index,
                "name": part["kind"],
                "ts": round((part["began"] - start) * 1e6),
                "dur": round((part["ended"] - part["began"]) * 1e6),
                "args": {"what": part["text"]},
            }
            for part in lane["parts"]
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_unix_s": start}}


def ticks(start: float, now: float) -> list[dict[str, Any]]:
    """Times along the axis, the first and the last at its ends."""
    step = (now - start) / (TICKS - 1)
    return [{"at": start + i * step, "left": f"{i / (TICKS - 1) * 100:.1f}%"} for i in range(TICKS)]
