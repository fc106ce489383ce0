"""Prefill queue of a simulated node: which prompts share the next iteration, and how much of each.

An iteration takes up to a chunk of new tokens: of the prompts under way first, then of those that are next in line and
whose KV has arrived. A prompt whose KV is still under way lets others pass, a bounded number of times.
Pure: time comes in as `now` (seconds of any monotonic clock).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from apps.planning.domain.cost_model import pairs
from workers.agent.engines.base import IterationSample
from workers.agent.engines.simulated_timing import Timing

MAX_OVERTAKEN = 8


@dataclass(slots=True, eq=False)
class PrefillWork:
    """A prompt to compute. `cached_tokens` is asked once, when it starts: `[0, cached_tokens)` is in the host pool then,
    `[cached_tokens, prompt_tokens)` is computed. `may_start` claims device memory and says whether there was enough.
    `stall_s`: how long the iteration it starts in waits for its KV (data planes that begin to move it only then).
    `on_device`: its cached tokens are there already and need no restoring from host memory."""

    request_id: str
    prompt_tokens: int
    queued_at: float
    may_start: Callable[[PrefillWork], bool]
    find_cached: Callable[[PrefillWork], int]
    resident: bool = True
    cached_tokens: int = 0
    computed_tokens: int = 0
    started_at: float | None = None
    overtaken: int = 0
    stall_s: float = 0.0
    on_device: bool = False

    @property
    def remaining_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens - self.computed_tokens


@dataclass(slots=True)
class PrefillIteration:
    """An iteration under way: `[starts_at, ends_at)`, the tokens it computes of each prompt, and its sample."""

    parts: list[tuple[PrefillWork, int]]
    t_uc: int = 0
    pairs: int = 0
    t_rst: int = 0
    seconds: float = 0.0
    ends_at: float = 0.0


@dataclass(slots=True)
class PrefillLoop:
    """Queue, prompts under way, and at most one iteration."""

    timing: Timing
    chunk_tokens: int
    queue: list[PrefillWork] = field(default_factory=list)
    under_way: list[PrefillWork] = field(default_factory=list)
    iteration: PrefillIteration | None = None

    def add(self, work: PrefillWork) -> None:
        self.queue.append(work)

    def remove(self, work: PrefillWork) -> None:
        """Drop a prompt; an iteration that is under way keeps its length."""
        if work in self.queue:
            self.queue.remove(work)
        if work in self.under_way:
            self.under_way.remove(work)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens not computed yet of prompts that have not started."""
        return sum(work.prompt_tokens for work in self.queue)

    def plan(self, now: float) -> PrefillIteration | None:
        """The next iteration, not started yet; None while one runs or nothing can. Starts prompts that fit in it."""
        if self.iteration is not None:
            return None
        planned = PrefillIteration([])
        stall_s = 0.0
        budget = self.chunk_tokens
        for work in self.under_way:
            if budget <= 0:
                break
            budget -= self._take(planned, work, budget)
        while budget > 0:
            starting = self._next_to_start()
            if starting is None or not starting.may_start(starting):
                break
            for passed in self.queue[: self.queue.index(starting)]:
                passed.overtaken += 1
            self.queue.remove(starting)
            self.under_way.append(starting)
            starting.started_at = now
            starting.cached_tokens = starting.find_cached(starting)
            planned.t_rst += 0 if starting.on_device else starting.cached_tokens
            stall_s = max(stall_s, starting.stall_s)
            budget -= self._take(planned, starting, budget)
        if not planned.parts:
            return None
        planned.seconds = stall_s + self.timing.prefill_s(planned.t_uc, planned.pairs, planned.t_rst)
        return planned

    def start(self, planned: PrefillIteration, starts_at: float) -> None:
        planned.ends_at = starts_at + planned.seconds
        self.iteration = planned

    def finish(self) -> tuple[list[PrefillWork], IterationSample]:
        """End the iteration; the prompts that are complete with it, and its sample."""
        done = self.iteration
        assert done is not None, "there is no iteration to finish"
        self.iteration = None
        complete = []
        for work, tokens in done.parts:
            work.computed_tokens += tokens
            if work.remaining_tokens <= 0 and work in self.under_way:
                self.under_way.remove(work)
                complete.append(work)
        sample = IterationSample(
            "prefill", done.t_uc, done.pairs, done.t_rst, len(done.parts), done.seconds, len(complete)
        )
        return complete, sample

    def _take(self, planned: PrefillIteration, work: PrefillWork, budget: int) -> int:
        tokens = min(budget, work.remaining_tokens)
        planned.parts.append((work, tokens))
        planned.t_uc += tokens
        planned.pairs += pairs(tokens, work.cached_tokens + work.computed_tokens)
        return tokens

    def _next_to_start(self) -> PrefillWork | None:
        for work in self.queue:
            if work.resident:
                return work
            if work.overtaken >= MAX_OVERTAKEN:
                return None
        return None
