"""Decode of a simulated node in macro-steps: the batch runs in lockstep iterations of T(B) seconds, and nothing happens
until the batch changes or tokens are due to be sent.

    anchor             anchor + T        anchor + 2T
      |--- iteration ----|--- iteration ----|          joins, ends and prefill gaps take effect at boundaries

Where a moment falls is computed from the anchor, never from when a timer fired, so timers may be late without any drift.
Pure: time comes in as `now` (seconds of any monotonic clock).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.agent.engines.base import IterationSample
from workers.agent.engines.simulated_timing import Timing

SEND_EVERY_S = 0.25
_SLACK_S = 1e-7


@dataclass(slots=True)
class DecodeRun:
    """A request in decode. `generated` tokens exist when it joins; it ends with `max_tokens`. `context_tokens` are its
    prompt and what was generated."""

    request_id: str
    context_tokens: int
    generated: int
    max_tokens: int
    joined_at: float = 0.0
    first_iteration: int = field(default=0, init=False)
    last_iteration: int = field(default=0, init=False)
    sent: int = field(default=0, init=False)
    sent_at: float = field(default=-math.inf, init=False)


class Progress(NamedTuple):
    """`tokens` new tokens of a request are due (0 where it ended right after some were sent); `finished_at` is set with the
    last ones."""

    run: DecodeRun
    tokens: int
    finished_at: float | None


class Steps(NamedTuple):
    """`iterations` of one batch, each of `iteration_s` seconds. `attended` context tokens in the first one, `growth`
    more in each after it; `finished` requests end with the last."""

    iterations: int
    batch: int
    iteration_s: float
    t_uc: int
    attended: float
    growth: float
    finished: int

    def samples(self) -> Iterator[IterationSample]:
        """One sample an iteration."""
        for done in range(self.iterations):
            finished = self.finished if done + 1 == self.iterations else 0
            attended = self.attended + done * self.growth
            yield IterationSample("decode", self.t_uc, attended, 0, self.batch, self.iteration_s, finished)


class DecodeLoop:
    """The running batch. Call `advance` first, then change it; `next_deadline` says when to come back.

    `send_every_s` None sends no tokens on the way, only with a run's end: a macro-step then lasts until the batch changes.
    """

    def __init__(
        self,
        timing: Timing,
        on_steps: Callable[[Steps], None],
        send_offset_s: float = 0.0,
        send_every_s: float | None = SEND_EVERY_S,
    ) -> None:
        self._timing = timing
        self._on_steps = on_steps
        self._send_offset_s = send_offset_s
        self._send_every_s = send_every_s
        self._running: dict[str, DecodeRun] = {}
        self._attended = 0.0  # context tokens of the running batch
        self._joining: dict[str, DecodeRun] = {}
        self._iterations = 0
        self._first_end = 0  # the iteration after which the next run ends
        self._anchor = 0.0  # start of the iteration that runs now
        self._iteration_s = 0.0  # its length, fixed while it runs
        self._changed = False  # the next iteration has another batch than this one
        self._gap_s = 0.0  # prefill that runs before the next iteration
        self._blocked_until = 0.0  # prefill that runs while nothing decodes
        self._unsent = False  # a run waits for its first tokens
        self._grid = 0.0  # the last moment of sending
        self._ready: list[Progress] = []

    def __len__(self) -> int:
        return len(self._running) + len(self._joining)

    def join(self, now: float, run: DecodeRun) -> None:
        """Add a run: at the next boundary, or at once when nothing runs. It must have tokens left to generate."""
        self.advance(now)
        if self._running:
            self._joining[run.request_id] = run
            self._changed = True
            return
        self._anchor = max(now, self._blocked_until)
        self._admit({run.request_id: run})

    def leave(self, now: float, run: DecodeRun) -> None:
        """Drop a run, if it is still here; the iteration that is under way keeps its length."""
        self.advance(now)
        if self._joining.get(run.request_id) is run:
            del self._joining[run.request_id]
        elif self._running.get(run.request_id) is run:
            self._drop(run)
            self._find_first_end()
        if not self._running:
            self._gap_s = 0.0
            self._anchor = max(now, self._blocked_until)
            self._admit({})

    def reserve_gap(self, now: float, gap_s: float) -> float:
        """Give the device to prefill for `gap_s` seconds; answers when that starts: at the next boundary, so that prefill
        and decode iterations alternate, or at once when nothing decodes."""
        self.advance(now)
        if self._running:
            starts_at = self._anchor + self._iteration_s
            self._gap_s = gap_s
        else:
            starts_at = max(now, self._blocked_until)
        self._blocked_until = starts_at + gap_s
        return starts_at

    def advance(self, now: float) -> None:
        """Let time pass up to `now`; what became due waits in `take_progress`."""
        while self._running:
            count = 1 if self._changed or self._gap_s else self._first_end - self._iterations
            if self._anchor + count * self._iteration_s > now + _SLACK_S:
                whole = math.floor((now - self._anchor + _SLACK_S) / self._iteration_s)
                if whole > 0:
                    self._step(min(whole, count - 1))
                break
            self._step(count)
            if self._gap_s:
                self._anchor += self._gap_s
                self._gap_s = 0.0
            self._admit({})
        if self._send_every_s is not None:
            self._send(now, self._send_every_s)

    def take_progress(self) -> list[Progress]:
        """Tokens due since the last call, in order."""
        ready, self._ready = self._ready, []
        return ready

    def next_deadline(self) -> float | None:
        """When the batch next changes or tokens are due; None while nothing runs."""
        if not self._running:
            return None
        boundary = self._anchor + self._iteration_s
        if self._changed or self._gap_s:
            return boundary
        end = self._anchor + (self._first_end - self._iterations) * self._iteration_s
        if self._send_every_s is None:
            return end
        return boundary if self._unsent else min(end, max(boundary, self._grid + self._send_every_s))

    def tokens_of(self, run: DecodeRun) -> int:
        """Tokens that a run has generated so far, whether they were sent or not."""
        return self._tokens(run) if self._running.get(run.request_id) is run else max(run.generated, run.sent)

    def retime(self, timing: Timing) -> None:
        """From the next change of the batch on, iterations take as long as `timing` says (its `t_acc` must be the same)."""
        self._timing = timing
        self._changed = bool(self._running)

    # --- iterations -------------------------------------------------------------------------------------------

    def _step(self, count: int) -> None:
        """Complete `count` iterations of the running batch; runs end only with the last of them."""
        if count <= 0:
            return
        batch = len(self._running)
        attended = self._attended
        growth = batch * self._timing.t_acc
        self._attended += count * growth
        self._iterations += count
        self._anchor += count * self._iteration_s
        ended = [run for run in self._running.values() if run.last_iteration <= self._iterations]
        for run in ended:
            self._drop(run)
            self._ready.append(Progress(run, run.max_tokens - run.sent, self._anchor))
        t_uc = round(batch * self._timing.decode.t_fwd)
        self._on_steps(Steps(count, batch, self._iteration_s, t_uc, attended, growth, len(ended)))

    def _drop(self, run: DecodeRun) -> None:
        """A run is out of the batch."""
        del self._running[run.request_id]
        self._changed = True
        self._attended -= run.context_tokens + (self._iterations - run.first_iteration) * self._timing.t_acc
        if not self._running:
            self._attended = 0.0

    def _admit(self, runs: dict[str, DecodeRun]) -> None:
        """Start the next iteration at the anchor with everyone who waits for it."""
        for run in (*runs.values(), *self._joining.values()):
            left = run.max_tokens - run.generated
            run.first_iteration = self._iterations
            run.last_iteration = self._iterations + max(1, math.ceil(left / self._timing.t_acc - 1e-9))
            run.joined_at = self._anchor
            run.sent = run.generated
            self._running[run.request_id] = run
            self._attended += run.context_tokens
            self._unsent = True
        self._joining.clear()
        self._changed = False
        if self._running:
            self._iteration_s = self._timing.decode_s(len(self._running))
            self._find_first_end()

    def _find_first_end(self) -> None:
        self._first_end = min((run.last_iteration for run in self._running.values()), default=0)

    # --- sending ----------------------------------------------------------------------------------------------

    def _tokens(self, run: DecodeRun) -> int:
        """Tokens a running run has after the iterations completed so far."""
        accepted = math.floor((self._iterations - run.first_iteration) * self._timing.t_acc + 1e-9)
        return min(run.max_tokens, run.generated + accepted)

    def _send(self, now: float, every_s: float) -> None:
        """Sending happens on one grid for all runs, so that a node wakes four times a second, not as often a request;
        only a run's first tokens go at once."""
        steps = math.floor((now - self._send_offset_s) / every_s + 1e-6)
        self._grid = steps * every_s + self._send_offset_s
        self._unsent = False
        for run in self._running.values():
            first = run.sent_at == -math.inf
            if not first and self._grid - run.sent_at < every_s - 1e-6:
                continue
            tokens = self._tokens(run)
            if tokens > run.sent:
                self._ready.append(Progress(run, tokens - run.sent, None))
                run.sent = tokens
                run.sent_at = now if first else self._grid
            elif first:
                self._unsent = True
