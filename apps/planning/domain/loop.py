"""The planning loop: what one tick leads to, given what is remembered and what was measured.

`tick` closes slices that have ended, undoes a switch that hurts, and decides when a window has ended or a phase has lost
its last node. It is a function of its arguments alone: the planner's task keeps `Memory` in the database, the simulator
in a variable, and both do what the commands ask. Times are seconds of the driver's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from apps.planning.domain import watch
from apps.planning.domain.plan_types import EMPTY_PHASE, Decision, PlannerPolicy, PlannerState, SliceView
from apps.planning.domain.planner import evaluate
from apps.planning.domain.slices import LoadPiece, close_slice

# Load windows reach the planner a moment after their end.
LAG_S = 4.0
# Multiples of a slice that is no whole number of seconds are off by rounding; a slice is 2 s at least.
_EPSILON_S = 1e-3


@dataclass(frozen=True, slots=True)
class Memory:
    """What the loop remembers between ticks.

    `slices` are the closed ones, oldest first, of the last window at least; `decided_until` is the end of the newest
    decided window; `restored_at` when a lost phase was last decided about, `undo_asked_at` when a switch was last found to
    hurt.
    """

    slices: tuple[SliceView, ...] = ()
    decided_until: float | None = None
    restored_at: float | None = None
    undo_asked_at: float | None = None

    @property
    def closed_until(self) -> float | None:
        return self.slices[-1].t1 if self.slices else None

    def as_of(self, now: float) -> Memory:
        """Without what lies in the future: the clock was ahead when that was remembered, and time comes there again."""

        def past(moment: float | None) -> float | None:
            return moment if moment is None or moment <= now else None

        return Memory(
            tuple(piece for piece in self.slices if piece.t1 <= now),
            past(self.decided_until),
            past(self.restored_at),
            past(self.undo_asked_at),
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """What has been measured since `measured_since`: load pieces, and pauses of agents as `(asked again at, seconds)`."""

    pieces: Sequence[LoadPiece] = ()
    thinks: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class SliceClosed:
    slice: SliceView


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision over `[start, end)`; `window` are the slices it was made of."""

    start: float
    end: float
    decision: Decision
    window: tuple[SliceView, ...]


@dataclass(frozen=True, slots=True)
class UndoSwitch:
    """Undo the newest switch at once, cooldown or not. Where that proves impossible it is asked for again half a minute
    later, and what else is due is not held up by it."""

    reason: str


Outcome = SliceClosed | Decided | UndoSwitch


def measured_since(now: float, memory: Memory, state: PlannerState) -> float:
    """From when on `tick` needs measurements."""
    since = _first_open(now, memory, state.policy) * state.policy.slice_s
    if _is_watched(now, state) and state.last_switch is not None:
        since = min(since, state.last_switch.finished_at - watch.BREACH_S)
    return since


def slices_due(now: float, memory: Memory, policy: PlannerPolicy) -> bool:
    """Whether `tick` would close a slice."""
    return _first_open(now, memory, policy) < _ended_slices(now, policy)


def window_due(now: float, memory: Memory, policy: PlannerPolicy) -> tuple[float, float] | None:
    """The newest window that has ended by `now` and is not decided; also after the planner was away."""
    closed_until = _ended_slices(now, policy) * policy.slice_s
    end = floor((closed_until + _EPSILON_S) / policy.window_s) * policy.window_s
    if memory.decided_until is not None and end <= memory.decided_until + _EPSILON_S:
        return None
    return end - policy.window_s, end


def tick(now: float, memory: Memory, state: PlannerState, measured: Measured) -> tuple[Memory, list[Outcome]]:
    """What has become due by `now`. The outcomes are in the order in which to do them."""
    memory = memory.as_of(now)
    memory, closed = _close_slices(now, memory, state.policy, measured)
    outcomes: list[Outcome] = list(closed)
    hurts = None if _undo_asked_lately(now, memory, state) else _hurts(now, state, measured)
    if hurts is not None:
        return replace(memory, undo_asked_at=now), [*outcomes, UndoSwitch(hurts)]
    due = window_due(now, memory, state.policy)
    if due is not None and not (state.outage and _restored_lately(now, memory, state)):
        start, end = due
        window = _between(memory, start, end)
        if window:
            decision = evaluate(state, window)
            outcomes.append(Decided(start, end, decision, window))
            if decision.rule == EMPTY_PHASE:  # the window's own question is open until every phase has a node again
                return replace(memory, restored_at=now), outcomes
            return replace(memory, decided_until=end), outcomes
    if _must_restore(now, memory, state):
        window = _between(memory, now - state.policy.window_s, now)
        outcomes.append(Decided(now - state.policy.window_s, now, evaluate(state, window), window))
        memory = replace(memory, restored_at=now)
    return memory, outcomes


def _first_open(now: float, memory: Memory, policy: PlannerPolicy) -> int:
    """The next slice, `[n, n + 1) * slice_s`: at most one window back, and on the grid even after its length was edited.

    Counted in whole slices, so that rounding cannot add up.
    """
    newest_end = _ended_slices(now, policy) * policy.slice_s
    last = memory.closed_until
    start = max(newest_end - policy.window_s, last if last is not None else newest_end - policy.slice_s)
    return ceil((start - _EPSILON_S) / policy.slice_s)


def _ended_slices(now: float, policy: PlannerPolicy) -> int:
    """How many slices have ended, since zero, whose last load has arrived by `now`."""
    return floor((now - LAG_S + _EPSILON_S) / policy.slice_s)


def _close_slices(
    now: float, memory: Memory, policy: PlannerPolicy, measured: Measured
) -> tuple[Memory, list[SliceClosed]]:
    ended = _ended_slices(now, policy)
    added = []
    for index in range(_first_open(now, memory, policy), ended):
        start, end = index * policy.slice_s, (index + 1) * policy.slice_s
        pieces = [piece for piece in measured.pieces if start <= (piece.t0 + piece.t1) / 2 < end]
        thinks_s = [seconds for asked_at, seconds in measured.thinks if start <= asked_at < end]
        added.append(SliceClosed(close_slice(start, end, pieces, thinks_s)))
    kept = tuple(piece for piece in memory.slices if piece.t1 > ended * policy.slice_s - 2 * policy.window_s)
    return replace(memory, slices=(*kept, *(outcome.slice for outcome in added))), added


def _between(memory: Memory, start: float, end: float) -> tuple[SliceView, ...]:
    return tuple(piece for piece in memory.slices if piece.t0 >= start - _EPSILON_S and piece.t1 <= end + _EPSILON_S)


def _is_watched(now: float, state: PlannerState) -> bool:
    last = state.last_switch
    if last is None or not last.watched or state.switch_running or state.forced_reason is not None:
        return False
    # Where people alone decide, the planner touches nothing.
    return state.policy.mode in ("automatic", "approve") and now - last.finished_at <= watch.WATCH_S + LAG_S


def _hurts(now: float, state: PlannerState, measured: Measured) -> str | None:
    if not _is_watched(now, state) or state.last_switch is None:
        return None
    # What has not arrived yet cannot be judged: look at the time up to the newest load piece.
    seen_until = max((piece.t1 for piece in measured.pieces), default=now)
    return watch.breach(seen_until, state.last_switch.finished_at, state.policy.slo_ttft_s, measured.pieces)


def _undo_asked_lately(now: float, memory: Memory, state: PlannerState) -> bool:
    """Of this switch: one that was asked to be undone before the newest switch had ended was another."""
    asked_at, last = memory.undo_asked_at, state.last_switch
    if asked_at is None or last is None or asked_at < last.finished_at:
        return False
    return now - asked_at < watch.BREACH_S


def _must_restore(now: float, memory: Memory, state: PlannerState) -> bool:
    if not state.outage or state.switch_running or state.warming_up or len(state.available) < 2:
        return False
    return not _restored_lately(now, memory, state)


def _restored_lately(now: float, memory: Memory, state: PlannerState) -> bool:
    return memory.restored_at is not None and now - memory.restored_at < state.policy.slice_s
