"""The flow control machine: requests wait here, by band, flow and order, until the cluster has room.

Driven by events, answers with commands, keeps no clock. Every dispatch reserves a prefill place and announces a decode
place in the same step, so any number of requests arriving in one instant never exceeds a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf
from typing import Any, Final

from apps.flowcontrol.domain.bands import Band, RateMeter
from apps.flowcontrol.domain.capacity import admit
from apps.flowcontrol.domain.commands import Command, Dispatch, Drop, Outcome
from apps.flowcontrol.domain.config import BandConfig, FlowConfig
from apps.flowcontrol.domain.deadlines import DeadlineQueue
from apps.flowcontrol.domain.events import (
    Cancel,
    Drain,
    Enqueue,
    Event,
    FlowRequest,
    NodeReport,
    PoolChanged,
    PredictedTtft,
    Reconfigure,
    Stage,
    StageReleased,
    Tick,
    Withdraw,
)
from apps.flowcontrol.domain.expectations import OutputExpectation
from apps.flowcontrol.domain.gates import Gates
from apps.flowcontrol.domain.snapshot import FlowSnapshot, FlowTotals, band_snapshot
from apps.flowcontrol.domain.waiting import Place, Waiting

NO_ENDPOINTS: Final = "no healthy node serves this model"
SHUTTING_DOWN: Final = "the gateway is shutting down"
WITHDRAWN_RETRY_S: Final = 0.05
NO_ENDPOINTS_RETRY_S: Final = 10
SHUTTING_DOWN_RETRY_S: Final = 5
MIN_RETRY_S: Final = 1
MAX_RETRY_S: Final = 30
MAX_EMPTY_UNCONFIGURED_BANDS: Final = 64

_REJECTED = frozenset({Outcome.REJECTED_CAPACITY, Outcome.REJECTED_NO_ENDPOINTS, Outcome.REJECTED_SHUTTING_DOWN})
_EXPIRED = frozenset({Outcome.EVICTED_TTL, Outcome.EVICTED_NO_ENDPOINTS})


class FlowController:
    """One partition's queue and gate.

    `handle` may be called with any event at any time not before the last; it answers dispatches and drops in the order
    they happened. Call it again with `Tick()` at `next_deadline()`, so that waiting ends when it should.
    """

    def __init__(self, config: FlowConfig) -> None:
        self._requests: dict[str, Waiting] = {}
        self._bands: dict[str, Band] = {}
        self._by_priority: list[Band] = []
        self._guaranteed: list[Band] = []
        self._gates = Gates()
        self._deadlines = DeadlineQueue()
        self._empty_since: float | None = -inf
        self._filled_at = -inf
        self._retry_at = inf
        self._draining = False
        self._predicted_ttft_s: float | None = None
        self._expectation = OutputExpectation()
        self._meter = RateMeter()
        self._order = 0
        self._arrived = 0
        self._dispatched = 0
        self._waiting = 0
        self._waiting_bytes = 0
        self._outcomes: dict[Outcome, int] = {}
        self._handlers: dict[type, Callable[[float, Any, list[Command]], None]] = {
            Enqueue: self._on_enqueue,
            Cancel: self._on_cancel,
            StageReleased: self._on_stage_released,
            Withdraw: self._on_withdraw,
            PoolChanged: self._on_pool_changed,
            NodeReport: self._on_observation,
            PredictedTtft: self._on_observation,
            Reconfigure: self._on_reconfigure,
            Drain: self._on_drain,
            Tick: self._on_tick,
        }
        self._configure(0.0, config)

    # --- the machine ---------------------------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Command]:
        """Take one event. What ran out before `now` is dropped first; what runs out at `now` only after dispatching."""
        out: list[Command] = []
        self._expire(now, False, out)
        kind = type(event)
        self._handlers[kind](now, event, out)
        if kind is not Withdraw:
            self._dispatch_while_room(now, out)
        self._expire(now, True, out)
        return out

    def next_deadline(self) -> float | None:
        """When `handle` must be called again even if nothing happens; None while nothing waits with an end."""
        earliest = min(self._retry_at, self._deadlines.earliest())
        return None if earliest == inf else earliest

    def saturation(self, now: float, stage: Stage) -> float:
        """1.0 is full; more when a limit was lowered under running requests; infinite without a node."""
        return self._gates.saturation(now, stage)

    @property
    def wants_predictions(self) -> bool:
        """Somebody waits for the predicted TTFT to fall: report it again as work is done."""
        return self._waiting > 0 and self._gates.wants_predictions

    @property
    def totals(self) -> FlowTotals:
        outcomes = self._outcomes
        shutdown = outcomes.get(Outcome.EVICTED_SHUTTING_DOWN, 0)
        return FlowTotals(
            arrived=self._arrived,
            dispatched=self._dispatched,
            rejected=sum(outcomes.get(outcome, 0) for outcome in _REJECTED) + shutdown,
            expired=sum(outcomes.get(outcome, 0) for outcome in _EXPIRED),
            displaced=outcomes.get(Outcome.DISPLACED, 0),
            cancelled=outcomes.get(Outcome.EVICTED_CONTEXT_CANCELLED, 0),
            waiting=self._waiting,
            waiting_bytes=self._waiting_bytes,
        )

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """How many requests left with each outcome, `Dispatched` included."""
        return {Outcome.DISPATCHED: self._dispatched, **self._outcomes}

    def band_config(self, name: str) -> BandConfig:
        """What counts for this band now: a band that was removed keeps its settings while something of it is here."""
        band = self._bands.get(name)
        return self.config.band_for(name, None) if band is None else band.config

    def snapshot(self, now: float) -> FlowSnapshot:
        """Everything a page shows, bands from the highest priority down."""
        return FlowSnapshot(
            bands=tuple(
                band_snapshot(now, band, self._expected_wait_s(now, band), self._why_waiting(now, band))
                for band in self._by_priority
            ),
            stages=self._gates.snapshot(now),
            totals=self.totals,
            gating_stage=self._gates.fullest_if_full(now) if self._waiting else None,
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what disagrees: counts, sums, places, and the accounting identity."""
        t = self.totals
        gone = t.dispatched + t.rejected + t.expired + t.displaced + t.cancelled
        assert t.arrived == gone + t.waiting, f"arrived {t.arrived}, left {gone}, waiting {t.waiting}"
        assert t.waiting == sum(band.waiting_requests for band in self._by_priority), "waiting and bands differ"
        assert t.waiting_bytes == sum(band.waiting_bytes for band in self._by_priority), "waiting bytes differ"
        waiting = sum(request.place is Place.WAITING for request in self._requests.values())
        assert waiting == t.waiting, "waiting and places differ"
        self._gates.check_integrity(self._requests.values())
        for band in self._by_priority:
            band.check_integrity()

    # --- events --------------------------------------------------------------------------------------------------

    def _on_enqueue(self, now: float, event: Enqueue, out: list[Command]) -> None:
        request = event.request
        if request.request_id in self._requests:
            raise ValueError(f"request_id: expected one that is not known, got {request.request_id!r} again")
        band = self._bands.get(request.band)
        if band is None:
            band = self._new_band(request)
        self._arrived += 1
        self._order += 1
        output_tokens = self._expectation.expect(request.flow_id, request.output_tokens)
        waiting = Waiting(request, band, self._order, now, output_tokens)
        if self._draining:
            self._refuse(now, waiting, Outcome.REJECTED_SHUTTING_DOWN, SHUTTING_DOWN, out)
        elif self._empty_since is not None and self.config.empty_pool_ttl_s == 0:
            self._refuse(now, waiting, Outcome.REJECTED_NO_ENDPOINTS, NO_ENDPOINTS, out)
        else:
            admission = admit(request, band, self.config, self._by_priority, self._waiting, self._waiting_bytes)
            if admission.full is not None:
                self._refuse(now, waiting, Outcome.REJECTED_CAPACITY, admission.full, out)
                return
            for victim in admission.victims:
                text = f"gave way to a request of the higher band {band.name}"
                self._evict(now, victim, Outcome.DISPLACED, text, out)
            self._start_waiting(now, waiting)

    def _on_cancel(self, now: float, event: Cancel, out: list[Command]) -> None:
        waiting = self._requests.get(event.request_id)
        if waiting is None:
            return
        if waiting.place is Place.WAITING:
            self._evict(now, waiting, Outcome.EVICTED_CONTEXT_CANCELLED, "the client closed the connection", out)
        else:
            self._gates.free(waiting)
            self._forget(waiting)

    def _on_stage_released(self, now: float, event: StageReleased, out: list[Command]) -> None:
        waiting = self._requests.get(event.request_id)
        if waiting is None or waiting.place is Place.WAITING:
            return
        if event.stage == "decode":
            self._gates.free(waiting)
            self._forget(waiting)
            if event.tokens is not None:
                self._expectation.learn(waiting.request.flow_id, event.tokens)
                waiting.band.settle(now, waiting, event.tokens - waiting.output_tokens)
        elif waiting.place is Place.PREFILL:
            self._gates.finish_prefill(waiting)
            if event.tokens is not None:
                waiting.band.settle(now, waiting, event.tokens - waiting.request.uncached_tokens)

    def _on_withdraw(self, now: float, event: Withdraw, out: list[Command]) -> None:
        waiting = self._requests.get(event.request_id)
        if waiting is None or waiting.place is Place.WAITING:
            return
        self._gates.free(waiting)
        self._dispatched -= 1
        waiting.band.in_flight -= 1
        waiting.band.uncount_dispatch(waiting.request.flow_id)
        if self._draining:
            self._refuse(now, waiting, Outcome.EVICTED_SHUTTING_DOWN, SHUTTING_DOWN, out)
            return
        waiting.place = Place.WAITING
        waiting.band.give_back(now, waiting)
        self._count_waiting(waiting, 1)
        self._watch_deadline(waiting)
        self._retry_at = min(self._retry_at, now + WITHDRAWN_RETRY_S)

    def _on_pool_changed(self, now: float, event: PoolChanged, out: list[Command]) -> None:
        self._gates.pool_changed(event)
        was_empty = self._empty_since is not None
        if self._gates.empty == was_empty:
            return
        self._empty_since = None if was_empty else now
        if was_empty:
            self._filled_at = now
        self._watch_all_deadlines()

    def _on_observation(self, now: float, event: NodeReport | PredictedTtft, out: list[Command]) -> None:
        if isinstance(event, PredictedTtft):
            self._predicted_ttft_s = event.seconds
        self._gates.observe(event)

    def _on_reconfigure(self, now: float, event: Reconfigure, out: list[Command]) -> None:
        self._configure(now, event.config)

    def _on_drain(self, now: float, event: Drain, out: list[Command]) -> None:
        self._draining = True
        for waiting in [w for w in self._requests.values() if w.place is Place.WAITING]:
            self._evict(now, waiting, Outcome.EVICTED_SHUTTING_DOWN, SHUTTING_DOWN, out)

    def _on_tick(self, now: float, event: Tick, out: list[Command]) -> None:
        """Only time passed; expiry and dispatch follow every event."""

    # --- dispatching ---------------------------------------------------------------------------------------------

    def _dispatch_while_room(self, now: float, out: list[Command]) -> None:
        """Releases all there is room for. A next request that is too large for the room left is waited for, so that it is
        not passed by smaller ones for ever."""
        self._retry_at = inf
        while self._waiting:
            saturation = self._gates.shared_saturation(now)
            if saturation >= 1.0:
                return
            guaranteed = self._due_share(now, saturation) if self._guaranteed else None
            band = guaranteed if guaranteed is not None else self._highest(now, saturation)
            if band is None or not self._gates.next_fits(band):
                return
            self._dispatch_one(now, band, guaranteed is not None, out)

    def _highest(self, now: float, saturation: float) -> Band | None:
        """The highest band that waits and that may go."""
        for band in self._by_priority:
            if band.waiting_requests and self._gates.may_go(now, band, saturation):
                return band
        return None

    def _due_share(self, now: float, saturation: float) -> Band | None:
        """The band that is owed most of its guaranteed share, if any is owed a whole dispatch."""
        due = [
            band for band in self._guaranteed if band.credit > 1 - 1e-9 and self._gates.may_go(now, band, saturation)
        ]
        return max(due, key=lambda band: band.credit) if due else None

    def _dispatch_one(self, now: float, band: Band, by_share: bool, out: list[Command]) -> None:
        for waiting_band in self._guaranteed:
            if waiting_band.waiting_requests:
                waiting_band.credit = min(waiting_band.credit + waiting_band.config.min_share, 2.0)
        band.credit = max(0.0, band.credit - 1.0)
        waiting = band.take_next(now)
        self._count_waiting(waiting, -1)
        self._gates.take(waiting)
        self._dispatched += 1
        self._meter.count(now)
        band.in_flight += 1
        request = waiting.request
        band.count_dispatch(now, request.flow_id)
        why = "is owed its share" if by_share else "is the highest band waiting"
        reason = f"band {band.name} ({band.config.priority}) {why}, {band.explanation}; {self._gates.describe()}"
        code = "min-share" if by_share else "highest-priority"
        out.append(Dispatch(request.request_id, band.name, request.flow_id, now - waiting.enqueued_at, code, reason))

    def _forget(self, waiting: Waiting) -> None:
        """A dispatched request is over."""
        waiting.place = Place.GONE
        waiting.band.in_flight -= 1
        del self._requests[waiting.request.request_id]

    # --- waiting and its end -------------------------------------------------------------------------------------

    def _start_waiting(self, now: float, waiting: Waiting) -> None:
        request = waiting.request
        waiting.ttl_s = waiting.band.config.ttl_s or self.config.default_ttl_s or inf
        if request.ttl_s is not None:
            waiting.own_deadline_at = now + request.ttl_s
        waiting.deadline_at = min(now + waiting.ttl_s, waiting.own_deadline_at)
        self._requests[request.request_id] = waiting
        waiting.band.add(now, waiting)
        self._count_waiting(waiting, 1)
        self._watch_deadline(waiting)

    def _count_waiting(self, waiting: Waiting, step: int) -> None:
        self._waiting += step
        self._waiting_bytes += step * waiting.request.bytes

    def _watch_deadline(self, waiting: Waiting) -> None:
        self._deadlines.watch(self._ends_at(waiting), waiting, self._waiting)

    def _ends_at(self, waiting: Waiting) -> float:
        """When waiting ends as things are. The empty pool's TTL takes the place of the band's while the pool is empty; each
        change between the two starts afresh, and the longer one bounds the whole. A client's own TTL counts always."""
        empty_ttl_s = self.config.empty_pool_ttl_s
        if self._empty_since is None:
            since, ttl_s = self._filled_at, waiting.ttl_s
        else:
            since, ttl_s = self._empty_since, empty_ttl_s
        longest = waiting.enqueued_at + max(waiting.ttl_s, empty_ttl_s)
        return min(max(waiting.enqueued_at, since) + ttl_s, longest, waiting.own_deadline_at)

    def _watch_all_deadlines(self) -> None:
        here = [waiting for waiting in self._requests.values() if waiting.place is Place.WAITING]
        self._deadlines.replace((self._ends_at(waiting), waiting) for waiting in here)

    def _expire(self, now: float, at_now_too: bool, out: list[Command]) -> None:
        while waiting := self._deadlines.pop_due(now, at_now_too):
            if self._empty_since is None:
                self._evict(now, waiting, Outcome.EVICTED_TTL, "waited as long as it may", out)
            else:
                self._evict(now, waiting, Outcome.EVICTED_NO_ENDPOINTS, NO_ENDPOINTS, out)

    def _evict(self, now: float, waiting: Waiting, outcome: Outcome, message: str, out: list[Command]) -> None:
        """A waiting request leaves without being dispatched."""
        waiting.band.remove(now, waiting)
        self._count_waiting(waiting, -1)
        self._refuse(now, waiting, outcome, message, out)

    def _refuse(self, now: float, waiting: Waiting, outcome: Outcome, message: str, out: list[Command]) -> None:
        waiting.place = Place.GONE
        request = waiting.request
        self._requests.pop(request.request_id, None)
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
        waiting.band.count_drop(outcome)
        out.append(
            Drop(
                request_id=request.request_id,
                band=waiting.band.name,
                flow_id=request.flow_id,
                waited_s=now - waiting.enqueued_at,
                outcome=outcome,
                http_status=outcome.http_status,
                reason_code=outcome.reason_code,
                retry_after_s=self._retry_after_s(now, waiting.band, outcome),
                message=message,
            )
        )

    # --- configuration and estimates -----------------------------------------------------------------------------

    def _configure(self, now: float, config: FlowConfig) -> None:
        self._gates.configure(config)
        self.config = config
        configured = {band.name: band for band in config.bands}
        for name, band_config in configured.items():
            if name in self._bands:
                self._bands[name].reconfigure(now, band_config, True)
            else:
                self._bands[name] = Band(band_config, True)
        for name, band in self._bands.items():
            if name not in configured:
                band.reconfigure(now, replace(band.config, min_share=0.0), False)
        self._drop_unused_bands(0)
        self._sort_bands()
        self._watch_all_deadlines()

    def _new_band(self, request: FlowRequest) -> Band:
        """A band nobody configured, from the default template, so that it never gets another band's treatment."""
        self._drop_unused_bands(MAX_EMPTY_UNCONFIGURED_BANDS - 1)
        band = Band(self.config.band_for(request.band, request.priority), False)
        self._bands[request.band] = band
        self._sort_bands()
        return band

    def _drop_unused_bands(self, keep: int) -> None:
        unused = [
            n for n, band in self._bands.items() if not (band.configured or band.waiting_requests or band.in_flight)
        ]
        for name in unused[: max(0, len(unused) - keep)]:
            del self._bands[name]

    def _sort_bands(self) -> None:
        self._by_priority = sorted(self._bands.values(), key=lambda b: (-b.config.priority, not b.configured, b.name))
        self._guaranteed = [band for band in self._by_priority if band.config.min_share > 0]
        for rank, band in enumerate(self._by_priority):
            band.ceiling = min(band.config.ceiling, self.config.ceilings.of_rank(rank, len(self._by_priority)))

    def _why_waiting(self, now: float, band: Band) -> str | None:
        """What the band's next request waits for, in words; None while it has none."""
        if not band.waiting_requests:
            return None
        closed = self._gates.why_closed(now, band)
        if closed is not None:
            return closed
        ahead = next((other for other in self._by_priority if other.waiting_requests), band)
        return f"band {ahead.name} goes first" if ahead is not band else "its turn is next"

    def _expected_wait_s(self, now: float, band: Band) -> float | None:
        ahead = sum(
            other.waiting_requests for other in self._by_priority if other.config.priority >= band.config.priority
        )
        if ahead == 0:
            return 0.0
        rate = self._meter.per_second(now)
        return ahead / rate if rate > 1e-6 else None

    def _retry_after_s(self, now: float, band: Band, outcome: Outcome) -> int | None:
        """Whole seconds: for a full queue what the queue ahead takes and the predicted TTFT, from 1 to 30."""
        if outcome is Outcome.EVICTED_CONTEXT_CANCELLED:
            return None
        if outcome in (Outcome.REJECTED_SHUTTING_DOWN, Outcome.EVICTED_SHUTTING_DOWN):
            return SHUTTING_DOWN_RETRY_S
        if outcome in (Outcome.REJECTED_NO_ENDPOINTS, Outcome.EVICTED_NO_ENDPOINTS):
            return NO_ENDPOINTS_RETRY_S
        wait_s = self._expected_wait_s(now, band)
        if wait_s is None:
            return MAX_RETRY_S
        return max(MIN_RETRY_S, min(MAX_RETRY_S, ceil(wait_s + (self._predicted_ttft_s or 0.0))))
