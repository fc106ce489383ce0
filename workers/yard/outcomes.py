"""What became of requests: counters, sliding windows, the list of recent ones, and each one's telemetry record."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from apps.planning.domain.cost_model import pairs
from apps.routing.domain.board import best_rows
from apps.routing.domain.views import CandidateTerms
from workers.yard.events import PrefillResult
from workers.yard.foresight import Foresight
from workers.yard.requests import RequestState, Stage
from workers.yard.windows import RateWindow, SampleWindow

WINDOW_S = 60
RECENT = 50
TERMS_KEPT = 32
STORY_KEPT = 20
OUTCOMES = {
    Stage.DONE: "completed",
    Stage.FAILED: "failed",
    Stage.CANCELLED: "cancelled",
    Stage.DROPPED: "dropped",
}


@dataclass(slots=True)
class Counters:
    arrived: int = 0
    dispatched: int = 0
    completed: int = 0
    failed: int = 0
    dropped: int = 0
    cancelled: int = 0


class Outcomes:
    """Takes note of each step of each request; answers the snapshot's statistics."""

    def __init__(self, now: float) -> None:
        self.counters = Counters()
        self.recoveries: Counter[str] = Counter()
        self._recent: deque[tuple[float, RequestState, str]] = deque(maxlen=RECENT)
        self._ttft_s, self._e2e_s, self._tpot_s, self._queue_s = (SampleWindow(WINDOW_S) for _ in range(4))
        self.foresight = Foresight(WINDOW_S)
        self._requests, self._prompt, self._computed, self._output = (RateWindow(WINDOW_S, now) for _ in range(4))

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The requests that ended last, newest first."""
        return [_row(*ended) for ended in self._recent]

    def arrived(self) -> None:
        self.counters.arrived += 1

    def dispatched(self, now: float, queue_s: float) -> None:
        self.counters.dispatched += 1
        self._queue_s.add(now, queue_s)

    def prefilled(self, now: float, prompt_tokens: int, computed_tokens: int) -> None:
        self._prompt.add(now, prompt_tokens)
        self._computed.add(now, computed_tokens)

    def output(self, now: float, tokens: int) -> None:
        self._output.add(now, tokens)

    def recovered(self, reason: str) -> None:
        """A broken attempt is followed by another one."""
        self.recoveries[reason] += 1

    def first_token(self, now: float, state: RequestState) -> None:
        ttft_s = now - state.arrived_at
        self._ttft_s.add(now, ttft_s)
        if state.predicted_ttft_s is not None and ttft_s > 0:
            self.foresight.measured(now, state.prefill_node, state.predicted_ttft_s, ttft_s)

    def ended(
        self, now: float, state: RequestState, drop_code: str | None, t_acc: float
    ) -> Callable[[], dict[str, Any]]:
        """Counts the end of a request; answers what makes its telemetry record when somebody reads it."""
        outcome = OUTCOMES[state.stage]
        setattr(self.counters, outcome, getattr(self.counters, outcome) + 1)
        if state.stage is Stage.DONE:
            self._requests.add(now)
            self._e2e_s.add(now, now - state.arrived_at)
            if state.sent_tokens > 1 and state.first_token_at is not None and state.last_token_at is not None:
                self._tpot_s.add(now, (state.last_token_at - state.first_token_at) / (state.sent_tokens - 1))
        self._recent.appendleft((now, state, outcome))
        return lambda: _record(_row(now, state, outcome), state, drop_code, t_acc)

    def latency(self, now: float) -> dict[str, Any]:
        return {
            "window_s": WINDOW_S,
            "ttft_s": self._ttft_s.percentiles(now),
            "e2e_s": self._e2e_s.percentiles(now),
            "tpot_s": self._tpot_s.percentiles(now),
            "queue_s": self._queue_s.percentiles(now),
            "ttft_error_ratio": self.foresight.error_ratio(now),
        }

    def throughput(self, now: float) -> dict[str, float]:
        return {
            "requests_per_s": round(self._requests.per_s(now), 3),
            "prompt_tokens_per_s": round(self._prompt.per_s(now), 1),
            "computed_tokens_per_s": round(self._computed.per_s(now), 1),
            "output_tokens_per_s": round(self._output.per_s(now), 1),
        }


def _row(now: float, state: RequestState, outcome: str) -> dict[str, Any]:
    """The request as the snapshot's `recent` shows it. `cached_tokens` were not computed: found locally or fetched."""
    request, result = state.request, state.result
    first_at = state.first_token_at
    return {
        "id": request.request_id,
        "t": now,
        "tenant": request.tenant,
        "band": request.band,
        "branch": state.branch_id,
        "prefill_node": state.prefill_node,
        "decode_node": state.decode_node,
        "prompt_tokens": request.prompt.tokens,
        "cached_tokens": result.cached_tokens + result.fetched_tokens if result else None,
        "output_tokens": state.sent_tokens,
        "queue_s": state.queue_s,
        "ttft_s": None if first_at is None else first_at - state.arrived_at,
        "predicted_ttft_s": state.predicted_ttft_s,
        "e2e_s": now - state.arrived_at,
        "outcome": outcome,
        "reason": state.reason,
    }


def _record(row: dict[str, Any], state: RequestState, drop_code: str | None, t_acc: float) -> dict[str, Any]:
    result = state.result
    reused = result.cached_tokens + result.fetched_tokens if result else 0
    return row | {
        "kind": "request",
        "router_terms": [terms_document(terms) for terms in best_rows(state.terms, TERMS_KEPT)],
        "router_nodes": len(state.terms),
        "router_blind": list(state.blind),
        "branch_kind": state.branch_kind,
        "computed_tokens": result.computed_tokens if result else None,
        "fetched_tokens": result.fetched_tokens if result else None,
        "pairs": pairs(result.computed_tokens, reused) if result else None,
        "t_acc": t_acc,
        "drop_code": drop_code,
        "flow_outcome": state.flow_outcome,
        "flow_id": state.request.flow_id,
        "lost": state.lost_tokens,
        "arrived_at": state.arrived_at,
        "timings": _timings(result),
        "story": state.story[-STORY_KEPT:],
    }


def terms_document(terms: CandidateTerms) -> dict[str, Any]:
    """One row of the router's table as a record holds it."""
    fetch = terms.fetch
    return {
        "node": terms.node,
        "remaining_s": terms.remaining_s,
        "queue_s": terms.queue_s,
        "service_s": terms.service_s,
        "fetch_s": terms.fetch_s,
        "fetch_overflow_s": terms.fetch_overflow_s,
        "duplicate_s": terms.duplicate_s,
        "total_s": terms.total_s,
        "cached_tokens": terms.cached_tokens,
        "fetch_tokens": terms.fetch_tokens,
        "mode": terms.mode,
        "fetch": None
        if fetch is None
        else {"source_node": fetch.source_node, "from_block": fetch.from_block, "to_block": fetch.to_block},
        "why_not": terms.why_not,
    }


def _timings(result: PrefillResult | None) -> dict[str, float] | None:
    """What the prefill node said it spent, in seconds; None before it answered."""
    if result is None:
        return None
    return {"queued_s": result.queued_s, "fetch_s": result.fetch_s, "prefill_s": result.prefill_s}
