"""What happens to requests between their arrival and their one end: queue, placement, hand-over, failure, recovery.

`requests.py` says which moves exist; here is why they are made. Late or repeated reports about a request find nothing.
"""

from __future__ import annotations

from apps.flowcontrol.domain import commands as flow_commands
from apps.flowcontrol.domain import events as flow_events
from apps.kvcache.domain import events as kv_events
from apps.planning.domain.cost_model import pairs
from workers.yard import commands, events
from workers.yard.machines import Machines
from workers.yard.nodes import KnownNode
from workers.yard.nodes import Stage as NodeStage
from workers.yard.recovery import MOMENTARY, PAUSE_S, REFUSALS, HandedOver
from workers.yard.requests import RequestState, Stage

RETRY_AFTER_S = 2.0


class RequestLife:
    """Moves requests from stage to stage. `waiting` holds admitted ones that no node can take at the moment."""

    def __init__(self, machines: Machines) -> None:
        self._m = machines
        self.waiting: dict[str, RequestState] = {}
        self._room_changed = False
        self.predicted_at = 0.0

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
            elif self._room_changed:
                self._room_changed = False
                self._try_waiting(now)
            else:
                if self._m.flow.wants_predictions:
                    self._report_prediction(now)
                if not (self._m.dropped or self._m.dispatched):
                    return

    def room_changed(self) -> None:
        """Nodes came or went, places were given back, or time ran out: `settle` looks at those who wait for a node."""
        self._room_changed = True

    def _dropped(self, now: float, drop: flow_commands.Drop) -> None:
        state = self._m.requests.get(drop.request_id)
        if state is None:
            return
        state.in_flow = False
        state.queue_s, state.flow_outcome = drop.waited_s, drop.outcome
        self._m.out.append(
            commands.Refuse(drop.request_id, drop.http_status, drop.reason_code, drop.message, drop.retry_after_s)
        )
        self._finish(now, state, Stage.DROPPED, drop.message, drop_code=drop.reason_code)

    def _dispatched(self, now: float, dispatch: flow_commands.Dispatch) -> None:
        state = self._m.requests.get(dispatch.request_id)
        if state is None or state.stage is not Stage.QUEUED:
            return
        state.holds_prefill = True
        state.flow_outcome = flow_commands.Outcome.DISPATCHED
        if self._announce_decode(now, state) and self._start_prefill(now, state):
            state.queue_s = dispatch.waited_s
            self._m.outcomes.dispatched(now, dispatch.waited_s)
        else:
            self._withdraw(now, state)

    def _withdraw(self, now: float, state: RequestState) -> None:
        """Nobody can take it after all: back to the head of its line, with nothing reserved."""
        if state.stage is Stage.QUEUED:
            self._m.placement.loads.finished(now, state.request_id)
            state.holds_prefill, state.decode_node, state.flow_outcome = False, None, None
            self._m.tell_flow(now, flow_events.Withdraw(state.request_id))

    def _announce_decode(self, now: float, state: RequestState) -> bool:
        """Keeps a place on a decode node. Refuses a request that fits on none of them, ever.

        Where every node serves requests whole, the place is that of the prefill, which is chosen after this.
        """
        self._m.placement.loads.finished(now, state.request_id)
        if self._m.config.whole_only:
            return True
        choice = self._m.placement.choose_decode(now, state, self._m.home(state, "decode"))
        state.decode_node = choice.node
        if choice.node is not None:
            self._m.placement.announce_decode(state, choice.node)
            return True
        causes = {row.why_not for row in choice.terms if self._m.fleet.takes(row.node, "decode")}
        if causes == {"kv-too-small"}:
            message = f"The prompt and max_tokens together ({state.context_tokens + state.remaining_tokens} tokens) fit on no node."
            self._refuse(now, state, 400, "request-too-large", message, None)
        return False

    def _start_prefill(self, now: float, state: RequestState) -> bool:
        """Sends the prompt (and what was already answered) to the best node; False when there is none."""
        matches = state.matches if state.matches_at == now else self._m.kv.held(state.request.prompt)
        choice = self._m.placement.choose_prefill(
            now, state, matches, self._m.home(state, "prefill"), self._m.kv.unseen
        )
        if choice.node is None or choice.predicted_ttft_s is None:
            state.reason = choice.reason
            return False
        node = self._m.fleet.nodes.by_name[choice.node]
        state.whole = node.config.serves_whole
        if state.whole:
            self._m.placement.loads.finished(now, state.request_id)
            self._m.placement.announce_decode(state, choice.node)
            state.decode_node = choice.node
        self._m.placement.place_prefill(now, state, choice)
        state.expected_cached_tokens = choice.chosen.cached_tokens if choice.chosen is not None else 0
        state.attempts += 1
        state.move(now, Stage.PREFILLING, choice.reason)
        state.prefill_node, state.placed_at = choice.node, now
        if state.first_token_at is None:
            state.predicted_ttft_s, state.terms, state.reason = choice.predicted_ttft_s, choice.terms, choice.reason
            state.blind = tuple(lack.code for lack in choice.blind)
            self._m.outcomes.foresight.decided(state.blind)
        if state.branch_id is not None:
            self._m.tell_kv(now, kv_events.Homed(state.branch_id, "prefill", choice.node))
        fetch = None
        if choice.fetch is not None:
            fetch = commands.Fetch(choice.fetch.source_node, choice.fetch.from_block, choice.fetch.to_block)
        self._m.out.append(
            commands.StartPrefill(
                request_id=state.request_id,
                node=choice.node,
                url=node.config.url,
                generation=node.generation,
                fetch=fetch,
                decode_node=state.decode_node,
                attempt=state.attempts,
                resumed_tokens=state.sent_tokens,
                predicted_ttft_s=choice.predicted_ttft_s,
                queue_s=now - state.arrived_at,
                reason=choice.reason,
            )
        )
        return True

    def prefill_accepted(self, now: float, event: events.PrefillAccepted) -> None:
        """Nothing changes: the load book counts a request from the decision."""

    def prefill_finished(self, now: float, event: events.PrefillFinished) -> None:
        state = self._in(event.request_id, Stage.PREFILLING)
        if state is None or state.prefill_node is None:
            return
        result = event.result
        self._m.placement.loads.finished_prefill(now, state.request_id)
        self._m.fleet.served(state.prefill_node)
        if state.result is None and result is not None:
            self._account_prefill(now, state, result)
        first_finish = result.first_finish if result is not None else None
        self._release_prefill(now, state)
        self._release_handoff(state, unless_on=state.prefill_node)
        if first_finish in (None, "stop-string"):
            state.handed_over = HandedOver(state.prefill_node, now, state.context_tokens)
        if first_finish != "stop":
            state.sent_tokens += 1
            self._m.outcomes.output(now, 1)
        if first_finish is not None:
            self._finish(now, state, Stage.DONE, state.reason, stored_chain=b"")
        else:
            self._start_decode(now, state)

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
        state = self._in(event.request_id, Stage.PREFILLING)
        if state is None:
            return
        self._m.placement.loads.finished_prefill(now, state.request_id)
        self._retry(now, state, state.prefill_node, event.retryable, event.reason, event.message)

    # ---- hand-over and decode ---------------------------------------------------------------------------

    def _start_decode(self, now: float, state: RequestState) -> None:
        """Hands the computed context to the announced node, or to another one when that cannot take it any more."""
        announced = state.decode_node
        reason = f"{announced}: announced when the prefill was placed"
        if not self._can_take_decode(state, announced) and not (state.whole and announced == state.prefill_node):
            self._m.placement.loads.finished(now, state.request_id)
            choice = self._m.placement.choose_decode(now, state, self._m.home(state, "decode"))
            state.decode_node, reason = choice.node, choice.reason
            if choice.node is None:
                self._wait(now, state, "decode", choice.reason)
                return
            self._m.placement.announce_decode(state, choice.node)
        assert state.decode_node is not None and state.prefill_node is not None
        node = self._m.fleet.nodes.by_name[state.decode_node]
        state.move(now, Stage.HANDING_OVER, reason)
        if state.branch_id is not None:
            self._m.tell_kv(now, kv_events.Homed(state.branch_id, "decode", node.name))
        self._m.out.append(
            commands.StartDecode(
                request_id=state.request_id,
                node=node.name,
                url=node.config.url,
                generation=node.generation,
                source=state.handed_over.node if state.handed_over is not None else state.prefill_node,
                reason=reason,
            )
        )

    def _can_take_decode(self, state: RequestState, node: str | None) -> bool:
        return node is not None and node not in state.avoid and self._m.fleet.takes(node, "decode")

    def first_token(self, now: float, event: events.FirstToken) -> None:
        state = self._m.requests.get(event.request_id)
        if state is not None and state.first_token_at is None:
            state.first_token_at = state.last_token_at = now
            self._m.outcomes.first_token(now, state)

    def decode_progress(self, now: float, event: events.DecodeProgress) -> None:
        state = self._in(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is None:
            return
        if state.stage is Stage.HANDING_OVER:
            self._m.placement.loads.started_decode(state.request_id)
            self._m.fleet.served(state.decode_node)
            self._release_handoff(state)
            state.move(now, Stage.DECODING, "the first token came from the decode node")
        state.sent_tokens += event.tokens
        state.last_token_at = now
        self._m.outcomes.output(now, event.tokens)

    def decode_finished(self, now: float, event: events.DecodeFinished) -> None:
        state = self._in(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is not None:
            state.sent_tokens = event.output_tokens
            self._m.fleet.served(state.decode_node)
            if state.result is None:
                self._account_prefill(now, state, event.result or self._as_predicted(state))
            self._finish(now, state, Stage.DONE, state.reason, stored_chain=event.stored_chain)

    def decode_failed(self, now: float, event: events.DecodeFailed) -> None:
        state = self._in(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is not None:
            self._retry(now, state, state.decode_node, event.retryable, event.reason, event.message)

    def engine_refused(self, now: float, event: events.EngineRefused) -> None:
        state = self._in(event.request_id, Stage.PREFILLING, Stage.HANDING_OVER, Stage.DECODING)
        if state is not None:
            self._m.fleet.served(state.prefill_node if state.stage is Stage.PREFILLING else state.decode_node)
            self._finish(now, state, Stage.FAILED, event.message, drop_code=f"engine-{event.http_status}")

    def answer_ended(self, now: float, event: events.AnswerEnded) -> None:
        state = self._m.requests.get(event.request_id)
        if state is not None:
            self._abort_on_nodes(state)
            state.sent_tokens = event.output_tokens
            self._finish(now, state, Stage.DONE, state.reason, stored_chain=b"")

    # ---- failure and recovery ---------------------------------------------------------------------------

    def _retry(
        self, now: float, state: RequestState, node: str | None, retryable: bool, reason: str, message: str
    ) -> None:
        """Another attempt elsewhere, or the end with 502 when there were too many or a retry cannot help."""
        exhausted = state.broken.failed(state.sent_tokens, reason)
        self._m.fleet.failed(now, node, reason, retryable)
        if node is not None:
            state.avoid.add(node)
        told = f"{node} failed ({reason})"
        if not retryable:
            self._refuse(
                now, state, 502, reason, message or f"The node {node} could not serve the request: {reason}.", None
            )
        elif exhausted:
            text = (
                f"The request failed {state.broken.in_a_row} times in a row, at last because of: {message or reason}."
            )
            self._refuse(now, state, 502, "upstream-failed", text, RETRY_AFTER_S)
        else:
            self._m.outcomes.recovered(reason)
            if reason in MOMENTARY and not self._others_can(state):
                self._pause(now, state, told)
            else:
                self._go_on(now, state, told, refused=reason in REFUSALS)

    def _others_can(self, state: RequestState) -> bool:
        """A node that has not failed this request yet takes work of its stage."""
        stage: NodeStage = "prefill" if state.stage is Stage.PREFILLING else "decode"
        return any(node.name not in state.avoid for node in self._m.fleet.nodes.taking(stage))

    def _pause(self, now: float, state: RequestState, why: str) -> None:
        """Everyone refused it, perhaps for a moment only: tried again a little later."""
        stage = "prefill" if state.stage is Stage.PREFILLING else "decode"
        self._m.placement.loads.finished(now, state.request_id)
        self._wait(now, state, stage, why)
        state.not_before = now + PAUSE_S

    def _go_on(self, now: float, state: RequestState, why: str, refused: bool = False) -> None:
        """From the computed context on another decode node where that is near at hand, else by computing it again."""
        context = state.handed_over
        waits_there = state.stage is not Stage.PREFILLING and context is not None and self._m.fleet.alive(context.node)
        in_time = refused and state.stage is Stage.HANDING_OVER
        if context is not None and waits_there and (in_time or context.serves(now, state.context_tokens)):
            self._start_decode(now, state)
        else:
            self._resume(now, state, why)

    def _resume(self, now: float, state: RequestState, why: str) -> None:
        """Computes the prompt and the output so far on another node; waits when no node can.

        A request that has begun to answer needs no prefill node: where none is left, a decode node computes its context.
        """
        self._m.placement.loads.finished(now, state.request_id)
        if not self._announce_decode(now, state) and state.stage.ended:
            return
        if self._start_prefill(now, state):
            return
        if state.handed_over is not None and self._m.fleet.nodes.taking("decode"):
            self._start_decode(now, state)
        else:
            self._wait(now, state, "prefill", why)

    def _wait(self, now: float, state: RequestState, stage: str, why: str) -> None:
        if state.stage is not Stage.WAITING:
            state.move(now, Stage.WAITING, why)
            state.waiting_until = now + self._m.config.flow.empty_pool_ttl_s
            self.waiting[state.request_id] = state
        state.waiting_for = stage

    def _try_waiting(self, now: float) -> None:
        """Nodes or room came back, perhaps: places who waits for them, or ends who waited too long."""
        for state in list(self.waiting.values()):
            if now < state.not_before:
                continue
            state.not_before = 0.0
            del self.waiting[state.request_id]
            if now >= state.waiting_until:
                text = f"No node could take over the request within {self._m.config.flow.empty_pool_ttl_s:g} s."
                self._refuse(now, state, 503, "rejected-no-endpoints", text, RETRY_AFTER_S)
                continue
            self._go_on(now, state, "still no node", refused=state.waiting_for == "decode")
            if state.stage is Stage.WAITING:
                self.waiting[state.request_id] = state

    def client_gone(self, now: float, event: events.ClientGone) -> None:
        state = self._m.requests.get(event.request_id)
        if state is not None:
            if state.stage is Stage.QUEUED:
                state.queue_s = now - state.arrived_at
                state.flow_outcome = flow_commands.Outcome.EVICTED_CONTEXT_CANCELLED
            self._abort_on_nodes(state)
            why = event.why or "the client closed its connection"
            self._finish(now, state, Stage.CANCELLED, why, drop_code="rejected-context-cancelled")

    def _refuse(
        self, now: float, state: RequestState, status: int, code: str, message: str, retry_after_s: float | None
    ) -> None:
        self._m.out.append(commands.Refuse(state.request_id, status, code, message, retry_after_s))
        self._finish(now, state, Stage.FAILED, message, drop_code=code)

    def _abort_on_nodes(self, state: RequestState) -> None:
        if state.stage is Stage.PREFILLING and state.prefill_node is not None:
            self._m.out.append(commands.AbortOnNode(state.prefill_node, state.request_id, "prefill"))
        if state.stage in (Stage.HANDING_OVER, Stage.DECODING) and state.decode_node is not None:
            self._m.out.append(commands.AbortOnNode(state.decode_node, state.request_id, "decode"))

    def _release_handoff(self, state: RequestState, unless_on: str | None = None) -> None:
        """The decode node has the context, or nobody wants it any more: its keeper may let go."""
        context = state.handed_over
        if context is not None and context.kept and context.node != unless_on:
            context.kept = False
            if self._m.fleet.alive(context.node):
                self._m.out.append(commands.ReleaseHandoff(context.node, state.request_id))

    def _release_prefill(self, now: float, state: RequestState) -> None:
        if state.holds_prefill:
            state.holds_prefill = False
            computed_tokens = state.result.computed_tokens if state.result is not None else None
            self._m.tell_flow(now, flow_events.StageReleased(state.request_id, "prefill", computed_tokens))

    def _finish(
        self,
        now: float,
        state: RequestState,
        stage: Stage,
        reason: str,
        drop_code: str | None = None,
        stored_chain: bytes | None = None,
    ) -> None:
        """The one end of every request: gives back every place exactly once and writes the record."""
        queued = state.stage is Stage.QUEUED
        state.move(now, stage, reason)
        state.reason = reason
        del self._m.requests[state.request_id]
        self.waiting.pop(state.request_id, None)
        self._release_handoff(state)
        self._m.placement.loads.finished(now, state.request_id)
        self._m.fleet.load.in_flight(now, -1)
        if stored_chain is None:
            self._m.tell_kv(now, kv_events.RequestAborted(state.request_id))
        else:
            self._m.tell_kv(now, kv_events.OutputStored(state.request_id, stored_chain))
        t_acc = self._m.fleet.t_acc(state.decode_node)
        if stage is Stage.DONE:
            self._m.fleet.load.finished_one(state.sent_tokens, t_acc)
        self._m.out.append(commands.Journal(self._m.outcomes.ended(now, state, drop_code, t_acc)))
        if state.in_flow:
            state.in_flow = state.holds_prefill = False
            produced_tokens = state.sent_tokens if stage is Stage.DONE else None
            gone = (
                flow_events.Cancel(state.request_id)
                if queued
                else flow_events.StageReleased(state.request_id, "decode", produced_tokens)
            )
            self._m.tell_flow(now, gone)
        self.room_changed()

    # ---- nodes that go ------------------------------------------------------------------------------------

    def node_lost(self, now: float, node: KnownNode) -> None:
        """Every request there goes on elsewhere: prefills begin again, decodes continue from the tokens already sent."""
        self._m.tell_kv(now, kv_events.NodeLost(node.name))
        for request_id in self._m.placement.loads.node_lost(now, node.name):
            state = self._m.requests.get(request_id)
            if state is None:
                continue
            if state.stage is Stage.PREFILLING and state.prefill_node == node.name:
                self._m.out.append(commands.AbortOnNode(node.name, request_id, "prefill"))
                self._retry(now, state, node.name, True, "node-lost", f"The node {node.name} was lost.")
            elif state.stage in (Stage.HANDING_OVER, Stage.DECODING):
                self._m.out.append(commands.AbortOnNode(node.name, request_id, "decode"))
                self._retry(now, state, node.name, True, "node-lost", f"The node {node.name} was lost.")
            else:
                state.decode_node = None

    def node_restarted(self, node: KnownNode) -> None:
        """It is another process now: what broke on the former one may be tried there again."""
        for state in self._m.requests.values():
            state.avoid.discard(node.name)
            state.not_before = 0.0

    def drop_orphans(self, node: KnownNode) -> None:
        """Frees requests of ours that the node still holds and that are elsewhere or over."""
        assert node.status is not None
        listed = node.status.own_requests
        wanted = [name for name in listed if self._belongs(name, node.name)]
        for request_id in sorted(node.orphans.report(listed, wanted)):
            self._m.out.append(commands.DropOrphan(node.name, request_id))

    def _belongs(self, request_id: str, node: str) -> bool:
        state = self._m.requests.get(request_id)
        if state is None:
            return False
        context = state.handed_over
        keeps = context is not None and context.kept and context.node == node
        return keeps or node in (state.prefill_node, state.decode_node)

    def move_queued(self, now: float, node: KnownNode) -> None:
        """A node that takes no more prefills keeps what it computes; what only queues there moves to another one."""
        placed = [s for s in self._m.requests.values() if s.stage is Stage.PREFILLING and s.prefill_node == node.name]
        placed.sort(key=lambda state: state.placed_at)
        running = node.status.running_prefill if node.status is not None else 0
        if not self._m.fleet.nodes.taking("prefill") or node.config.direct is not None:
            return  # of an existing engine nobody knows which requests it has begun
        for state in placed[running:]:
            self._m.out.append(commands.AbortOnNode(node.name, state.request_id, "prefill"))
            self._m.placement.loads.finished_prefill(now, state.request_id)
            if not self._start_prefill(now, state):
                self._wait(now, state, "prefill", f"{node.name} is draining")

    def _in(self, request_id: str, *stages: Stage) -> RequestState | None:
        """The request, if it is in one of these stages; late reports find nothing."""
        state = self._m.requests.get(request_id)
        return state if state is not None and state.stage in stages else None

    def _report_prediction(self, now: float) -> None:
        self.predicted_at = now
        if not self._m.config.flow.gated_by_prediction:
            return
        predicted_s = self._m.placement.predicted_ttft_s(now)
        if predicted_s is not None:
            self._m.tell_flow(now, flow_events.PredictedTtft(predicted_s))
