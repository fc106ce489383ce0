"""What happens to requests between their arrival and their one end: queue, placement, hand-over, decode.

`requests.py` says which moves exist; here is why they are made. Late or repeated reports about a request find nothing.
Requests are sent to nodes by `sending.py`, go on after failures by `failures.py` and end by `ends.py`.
"""

from __future__ import annotations

from apps.flowcontrol.domain import commands as flow_commands
from apps.flowcontrol.domain import events as flow_events
from apps.kvcache.domain import events as kv_events
from apps.planning.domain.cost_model import pairs
from workers.yard import commands, events
from workers.yard.ends import Ends
from workers.yard.failures import Failures
from workers.yard.machines import Machines
from workers.yard.prefetch import Prefetching
from workers.yard.recovery import HandedOver
from workers.yard.requests import RequestState, Stage
from workers.yard.sending import Sending


class RequestLife:
    """Moves requests from stage to stage. `waiting` holds admitted ones that no node can take at the moment."""

    def __init__(self, machines: Machines) -> None:
        self._m = machines
        self.prefetching = Prefetching(machines)
        self._ends = Ends(machines, self.prefetching)
        self._sending = Sending(machines, self._ends)
        self.failures = Failures(machines, self._ends, self._sending)
        self.predicted_at = 0.0

    @property
    def waiting(self) -> dict[str, RequestState]:
        return self._ends.waiting

    def room_changed(self) -> None:
        """Nodes came or went, places were given back, or time ran out: `settle` looks at those who wait for a node."""
        self._ends.room_changed()

    # ---- arrival, queue, prefill ------------------------------------------------------------------------

    def arrived(self, now: float, event: events.Arrived) -> None:
        request = event.request
        if request.request_id in self._m.requests:
            raise ValueError(f"request {request.request_id} is already here")
        state = RequestState(request, arrived_at=now)
        self._m.requests[request.request_id] = state
        self._m.outcomes.arrived()
        self._m.fleet.load.arrived_one(now)
        self._m.tell_kv(now, kv_events.RequestSeen(request.request_id, request.branch, request.prompt))
        state.matches, state.matches_at = self._m.kv.held(request.prompt), now
        held_blocks = max(state.matches.values(), default=0)
        held_tokens = held_blocks * request.prompt.block_tokens
        state.uncached_estimate_tokens = max(1, request.prompt.tokens - held_tokens)
        state.in_flow = True
        self.prefetching.queued(state)
        self._report_prediction(now)
        self._m.tell_flow(
            now,
            flow_events.Enqueue(
                flow_events.FlowRequest(
                    request_id=request.request_id,
                    band=request.band,
                    flow_id=request.flow_id,
                    bytes=request.bytes,
                    prompt_tokens=request.prompt.tokens,
                    uncached_tokens=state.uncached_estimate_tokens,
                    output_tokens=request.output_tokens,
                    received_at=request.received_at,
                    ttl_s=request.ttl_s,
                    slo_ttft_s=request.slo_ttft_s,
                    starts_branch=state.branch_kind == "new",
                    program=request.branch.program,
                    tenant=request.tenant,
                    weight=self._weight_of(request.tenant),
                )
            ),
        )

    def _weight_of(self, tenant: str) -> float:
        known = self._m.config.tenants.get(tenant)
        return known.weight if known is not None else 1.0

    def settle(self, now: float) -> None:
        """Carries out what this step decided: drops end their request, dispatches are placed, then who waits for a node.

        Where the gate looks at predictions, each placement is followed by a new one, until it lets nobody through.
        """
        while True:
            if self._m.dropped:
                self._dropped(now, self._m.dropped.popleft())
            elif self._m.dispatched:
                self._dispatched(now, self._m.dispatched.popleft())
            elif self._ends.room_has_changed:
                self._ends.room_has_changed = False
                self.failures.try_waiting(now)
            else:
                if self._m.flow.wants_predictions:
                    self._report_prediction(now)
                if not (self._m.dropped or self._m.dispatched):
                    self.prefetching.look(now)
                    return

    def _dropped(self, now: float, drop: flow_commands.Drop) -> None:
        state = self._m.requests.get(drop.request_id)
        if state is None:
            return
        state.in_flow = False
        state.queue_s, state.flow_outcome = drop.waited_s, drop.outcome
        self._m.out.append(
            commands.Refuse(drop.request_id, drop.http_status, drop.reason_code, drop.message, drop.retry_after_s)
        )
        self._ends.finish(now, state, Stage.DROPPED, drop.message, drop_code=drop.reason_code)

    def _dispatched(self, now: float, dispatch: flow_commands.Dispatch) -> None:
        state = self._m.requests.get(dispatch.request_id)
        if state is None or state.stage is not Stage.QUEUED:
            return
        state.holds_prefill = True
        state.flow_outcome = flow_commands.Outcome.DISPATCHED
        if self._sending.announce_decode(now, state) and self._sending.start_prefill(now, state):
            state.queue_s = dispatch.waited_s
            self.prefetching.left(state, state.prefill_node)
            self._m.outcomes.dispatched(now, dispatch.waited_s)
        else:
            self._withdraw(now, state)

    def _withdraw(self, now: float, state: RequestState) -> None:
        """Nobody can take it after all: back to the head of its line, with nothing reserved."""
        if state.stage is Stage.QUEUED:
            self._m.placement.loads.finished(now, state.request_id)
            state.holds_prefill, state.decode_node, state.flow_outcome = False, None, None
            self._m.tell_flow(now, flow_events.Withdraw(state.request_id))

    def prefetch_ended(self, now: float, event: events.PrefetchEnded) -> None:
        self.prefetching.ended(event)

    def prefill_finished(self, now: float, event: events.PrefillFinished) -> None:
        state = self._ends.find(event.request_id, Stage.PREFILLING)
        if state is None or state.prefill_node is None:
            return
        result = event.result
        self._m.placement.loads.finished_prefill(now, state.request_id)
        self._m.fleet.served(state.prefill_node)
        if state.result is None and result is not None:
            self._account_prefill(now, state, result)
        first_finish = result.first_finish if result is not None else None
        self._ends.release_prefill(now, state)
        self._ends.release_handoff(state, unless_on=state.prefill_node)
        if first_finish in (None, "stop-string"):
            state.handed_over = HandedOver(state.prefill_node, now, state.context_tokens)
        if first_finish != "stop":
            state.sent_tokens += 1
            self._m.outcomes.output(now, 1)
        if first_finish is not None:
            self._ends.finish(now, state, Stage.DONE, state.reason, stored_chain=b"")
        else:
            self._sending.start_decode(now, state)

    def _account_prefill(self, now: float, state: RequestState, result: events.PrefillResult) -> None:
        state.result = result
        request = state.request
        wait_s = max(0.0, now - state.arrived_at - result.prefill_s)
        reused_tokens = result.cached_tokens + result.fetched_tokens
        work = pairs(result.computed_tokens, reused_tokens)
        self._m.fleet.load.prefill_done(result.computed_tokens, reused_tokens, work, wait_s)
        self._m.outcomes.prefilled(now, request.prompt.tokens, result.computed_tokens)
        self._m.tell_kv(
            now,
            kv_events.RequestServed(
                request_id=request.request_id,
                node=state.prefill_node or "",
                cached_tokens=result.cached_tokens,
                computed_tokens=result.computed_tokens,
                fetched_tokens=result.fetched_tokens,
                failed_fetch_tokens=result.failed_fetch_tokens,
                tenant=request.tenant,
                workload=request.objective,
            ),
        )

    @staticmethod
    def _as_predicted(state: RequestState) -> events.PrefillResult:
        """What the router expected of the prompt: an engine that tells nothing is taken to have done that."""
        prompt_tokens = state.request.prompt.tokens
        cached = min(state.expected_cached_tokens, prompt_tokens)
        return events.PrefillResult(cached, 0, prompt_tokens - cached)

    def prefill_failed(self, now: float, event: events.PrefillFailed) -> None:
        state = self._ends.find(event.request_id, Stage.PREFILLING)
        if state is None:
            return
        self._m.placement.loads.finished_prefill(now, state.request_id)
        self.failures.retry(now, state, state.prefill_node, event.retryable, event.reason, event.message)

    # ---- hand-over and decode ---------------------------------------------------------------------------

    def first_token(self, now: float, event: events.FirstToken) -> None:
        state = self._m.requests.get(event.request_id)
        if state is not None and state.first_token_at is None:
            state.first_token_at = state.last_token_at = now
            self._m.outcomes.first_token(now, state)

    def decode_progress(self, now: float, event: events.DecodeProgress) -> None:
        state = self._ends.find(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is None:
            return
        if state.stage is Stage.HANDING_OVER:
            self._m.placement.loads.started_decode(state.request_id)
            self._m.fleet.served(state.decode_node)
            self._ends.release_handoff(state)
            state.move(now, Stage.DECODING, "the first token came from the decode node")
        state.sent_tokens += event.tokens
        state.last_token_at = now
        self._m.outcomes.output(now, event.tokens)

    def decode_finished(self, now: float, event: events.DecodeFinished) -> None:
        state = self._ends.find(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is not None:
            state.sent_tokens = event.output_tokens
            self._m.fleet.served(state.decode_node)
            if state.result is None:
                self._account_prefill(now, state, event.result or self._as_predicted(state))
            self._ends.finish(now, state, Stage.DONE, state.reason, stored_chain=event.stored_chain)

    def decode_failed(self, now: float, event: events.DecodeFailed) -> None:
        state = self._ends.find(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is not None:
            self.failures.retry(now, state, state.decode_node, event.retryable, event.reason, event.message)

    def engine_refused(self, now: float, event: events.EngineRefused) -> None:
        state = self._ends.find(event.request_id, Stage.PREFILLING, Stage.HANDING_OVER, Stage.DECODING)
        if state is not None:
            self._m.fleet.served(state.prefill_node if state.stage is Stage.PREFILLING else state.decode_node)
            self._ends.finish(now, state, Stage.FAILED, event.message, drop_code=f"engine-{event.http_status}")

    def answer_ended(self, now: float, event: events.AnswerEnded) -> None:
        state = self._m.requests.get(event.request_id)
        if state is not None:
            self._ends.abort_on_nodes(state)
            state.sent_tokens = event.output_tokens
            self._ends.finish(now, state, Stage.DONE, state.reason, stored_chain=b"")

    def client_gone(self, now: float, event: events.ClientGone) -> None:
        state = self._m.requests.get(event.request_id)
        if state is not None:
            if state.stage is Stage.QUEUED:
                state.queue_s = now - state.arrived_at
                state.flow_outcome = flow_commands.Outcome.EVICTED_CONTEXT_CANCELLED
            self._ends.abort_on_nodes(state)
            why = event.why or "the client closed its connection"
            self._ends.finish(now, state, Stage.CANCELLED, why, drop_code="rejected-context-cancelled")

    def _report_prediction(self, now: float) -> None:
        self.predicted_at = now
        if not self._m.config.flow.gated_by_prediction:
            return
        predicted_s = self._m.placement.predicted_ttft_s(now)
        if predicted_s is not None:
            self._m.tell_flow(now, flow_events.PredictedTtft(predicted_s))
