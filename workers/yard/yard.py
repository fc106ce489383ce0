"""One partition's machines composed: flow control -> routing -> KV ledger and directory -> load book.

The yard owns the life of every request (`requests.py`). Drivers report facts (`events.py`) and carry out what it asks
for (`commands.py`); it does no I/O and reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from apps.flowcontrol.domain import commands as flow_commands
from apps.flowcontrol.domain import events as flow_events
from apps.flowcontrol.domain.controller import FlowController
from apps.kvcache.domain import events as kv_events
from apps.kvcache.domain.machine import KvMachine
from apps.planning.domain.cost_model import pairs
from workers.yard import commands, events
from workers.yard.config import ConfigError, PartitionConfig
from workers.yard.fleet import Fleet, kv_config
from workers.yard.nodes import STAGES, KnownNode
from workers.yard.outcomes import Outcomes
from workers.yard.placement import Placement
from workers.yard.requests import MAX_FAILURES, RequestState, Stage
from workers.yard.snapshot import take_snapshot

RETRY_AFTER_S = 2.0
REFUSALS = frozenset(
    ("unreachable", "node-lost", "wrong-phase", "draining", "stale-generation", "queue-full", "duplicate-request")
)


class Yard:
    """`handle` takes one event and answers what to do; `next_deadline` says when to come back with a `Tick`."""

    def __init__(self, config: PartitionConfig, now: float = 0.0) -> None:
        self.config = config
        self.started_at = now
        self.requests: dict[str, RequestState] = {}
        self.kv = KvMachine(kv_config(config))
        self.flow = FlowController(config.flow)
        self.fleet = Fleet(config, now)
        self.placement = Placement(config, self.fleet.nodes)
        self.outcomes = Outcomes(now)
        self._waiting: dict[str, RequestState] = {}
        self._dispatched: deque[flow_commands.Dispatch] = deque()
        self._out: list[commands.Command] = []
        self._snapshot_seq = 0
        self._handlers: dict[type, Callable[[float, Any], None]] = {
            events.Arrived: self._arrived,
            events.ClientGone: self._client_gone,
            events.AnswerEnded: self._answer_ended,
            events.PrefillAccepted: self._prefill_accepted,
            events.PrefillFinished: self._prefill_finished,
            events.PrefillFailed: self._prefill_failed,
            events.FirstToken: self._first_token,
            events.DecodeProgress: self._decode_progress,
            events.DecodeFinished: self._decode_finished,
            events.DecodeFailed: self._decode_failed,
            events.NodeStatus: self._node_status,
            events.NodeEvents: self._node_events,
            events.NodeSnapshotTaken: self._node_snapshot,
            events.NodeUnreachable: self._node_unreachable,
            events.BranchEnd: self._branch_end,
            events.Configured: self._configured,
            events.ShutDown: self._shut_down,
            events.Tick: self._tick,
        }
        self._pools_changed(now)

    # ---- the machine's surface ------------------------------------------------------------------------------------

    def handle(self, now: float, event: events.Event) -> list[commands.Command]:
        """Takes one event at `now` (seconds); answers what the driver must do, in order.

        Late or repeated reports about requests that have ended change nothing.
        """
        self._watch_time(now)
        self._handlers[type(event)](now, event)
        self._place_dispatched(now)
        answer, self._out = self._out, []
        return answer

    def next_deadline(self) -> float | None:
        """When the next `Tick` is due (seconds of the driver's clock)."""
        deadlines = [self.flow.next_deadline(), self.kv.next_deadline(), self.fleet.next_deadline()]
        deadlines += [state.waiting_until for state in self._waiting.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def snapshot(self, now: float) -> dict[str, Any]:
        """The live snapshot (docs/interfaces.md, section 9). The driver adds what it alone knows under `gateway`."""
        self._snapshot_seq += 1
        return take_snapshot(now, self, self._snapshot_seq)

    def check_integrity(self) -> None:
        """Raises AssertionError when the machines disagree about who is where."""
        self.kv.check_integrity()
        self.flow.check_integrity()
        self.placement.loads.check_integrity()
        for request_id, state in self.requests.items():
            assert not state.stage.ended, f"{request_id} has ended ({state.stage}) and is still here"
            assert (state.stage is Stage.WAITING) == (request_id in self._waiting), f"{request_id}: waiting list"
            placed = self.placement.loads.prefill_node(request_id)
            assert (placed is not None) == (state.stage is Stage.PREFILLING), f"{request_id}: {state.stage} on {placed}"

    @property
    def waiting_for_nodes(self) -> int:
        """Admitted requests that no node can take at the moment."""
        return len(self._waiting)

    # ---- requests: arrival, queue, prefill ------------------------------------------------------------------------

    def _arrived(self, now: float, event: events.Arrived) -> None:
        request = event.request
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id} is already here")
        state = RequestState(request, arrived_at=now)
        self.requests[request.request_id] = state
        self.outcomes.arrived()
        self.fleet.load.arrived_one(now)
        self._kv(now, kv_events.RequestSeen(request.request_id, request.branch, request.prompt))
        held_blocks = max((match.blocks for match in self.kv.match(request.prompt)), default=0)
        held_tokens = held_blocks * request.prompt.block_tokens
        state.uncached_estimate_tokens = max(1, request.prompt.tokens - held_tokens)
        state.in_flow = True
        self._report_prediction(now)
        self._flow(
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
                )
            ),
        )

    def _place_dispatched(self, now: float) -> None:
        while self._dispatched:
            dispatch = self._dispatched.popleft()
            state = self.requests.get(dispatch.request_id)
            if state is None or state.stage is not Stage.QUEUED:
                continue
            state.holds_prefill = True
            if not self._announce_decode(now, state):
                self._withdraw(now, state)
            elif self._start_prefill(now, state):
                state.queue_s = dispatch.waited_s
                self.outcomes.dispatched(now, dispatch.waited_s)
            else:
                self._withdraw(now, state)

    def _withdraw(self, now: float, state: RequestState) -> None:
        """Nobody can take it after all: back to the head of its line, with nothing reserved."""
        if state.stage is Stage.QUEUED:
            self.placement.loads.finished(now, state.request_id)
            state.holds_prefill, state.decode_node = False, None
            self._flow(now, flow_events.Withdraw(state.request_id))

    def _announce_decode(self, now: float, state: RequestState) -> bool:
        """Keeps a place on a decode node. Refuses a request that fits on none of them, ever."""
        self.placement.loads.finished(now, state.request_id)
        choice = self.placement.choose_decode(now, state, self._home(state, "decode"))
        state.decode_node = choice.node
        if choice.node is not None:
            self.placement.announce_decode(state, choice.node)
            return True
        causes = {row.why_not for row in choice.terms if self.fleet.takes(row.node, "decode")}
        if causes == {"kv-too-small"}:
            message = f"The prompt and max_tokens together ({state.context_tokens + state.remaining_tokens} tokens) fit on no node."
            self._refuse(now, state, 400, "request-too-large", message, None)
        return False

    def _start_prefill(self, now: float, state: RequestState) -> bool:
        """Sends the prompt (and what was already answered) to the best node; False when there is none."""
        matches = {match.node: match.blocks for match in self.kv.match(state.request.prompt)}
        choice = self.placement.choose_prefill(now, state, matches, self._home(state, "prefill"))
        if choice.node is None or choice.predicted_ttft_s is None:
            state.reason = choice.reason
            return False
        node = self.fleet.nodes.by_name[choice.node]
        self.placement.place_prefill(now, state, choice)
        state.attempts += 1
        state.move(now, Stage.PREFILLING, choice.reason)
        state.prefill_node, state.placed_at = choice.node, now
        if state.first_token_at is None:
            state.predicted_ttft_s, state.terms, state.reason = choice.predicted_ttft_s, choice.terms, choice.reason
        if state.branch_id is not None:
            self._kv(now, kv_events.Homed(state.branch_id, "prefill", choice.node))
        fetch = None
        if choice.fetch is not None:
            fetch = commands.Fetch(choice.fetch.source_node, choice.fetch.from_block, choice.fetch.to_block)
        self._out.append(
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

    def _prefill_accepted(self, now: float, event: events.PrefillAccepted) -> None:
        """Nothing changes: the load book counts a request from the decision."""

    def _prefill_finished(self, now: float, event: events.PrefillFinished) -> None:
        state = self._in(event.request_id, Stage.PREFILLING)
        if state is None or state.prefill_node is None:
            return
        result = event.result
        self.placement.loads.finished_prefill(now, state.request_id)
        if state.result is None:
            self._account_prefill(now, state, result)
        self._release_prefill(now, state)
        if result.first_finish != "stop":
            state.sent_tokens += 1
            self.outcomes.output(now, 1)
        if result.first_finish is not None:
            self._finish(now, state, Stage.DONE, state.reason, stored_chain=b"")
        else:
            self._start_decode(now, state)

    def _account_prefill(self, now: float, state: RequestState, result: events.PrefillResult) -> None:
        state.result = result
        request = state.request
        wait_s = max(0.0, now - state.arrived_at - result.prefill_s)
        reused_tokens = result.cached_tokens + result.fetched_tokens
        work = pairs(result.computed_tokens, reused_tokens)
        self.fleet.load.prefill_done(result.computed_tokens, reused_tokens, work, wait_s)
        self.outcomes.prefilled(now, request.prompt.tokens, result.computed_tokens)
        self._kv(
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

    def _prefill_failed(self, now: float, event: events.PrefillFailed) -> None:
        state = self._in(event.request_id, Stage.PREFILLING)
        if state is None:
            return
        self.placement.loads.finished_prefill(now, state.request_id)
        self._retry(now, state, state.prefill_node, event.retryable, event.reason, event.message)

    # ---- requests: hand-over and decode ---------------------------------------------------------------------------

    def _start_decode(self, now: float, state: RequestState) -> None:
        """Hands the computed context to the announced node, or to another one when that cannot take it any more."""
        announced = state.decode_node
        reason = f"{announced}: announced when the prefill was placed"
        if announced is None or announced in state.avoid or not self.fleet.takes(announced, "decode"):
            self.placement.loads.finished(now, state.request_id)
            choice = self.placement.choose_decode(now, state, self._home(state, "decode"))
            state.decode_node, reason = choice.node, choice.reason
            if choice.node is None:
                self._wait(now, state, "decode", choice.reason)
                return
            self.placement.announce_decode(state, choice.node)
        assert state.decode_node is not None and state.prefill_node is not None
        node = self.fleet.nodes.by_name[state.decode_node]
        state.move(now, Stage.HANDING_OVER, reason)
        if state.branch_id is not None:
            self._kv(now, kv_events.Homed(state.branch_id, "decode", node.name))
        self._out.append(
            commands.StartDecode(
                request_id=state.request_id,
                node=node.name,
                url=node.config.url,
                generation=node.generation,
                source=state.prefill_node,
                reason=reason,
            )
        )

    def _first_token(self, now: float, event: events.FirstToken) -> None:
        state = self.requests.get(event.request_id)
        if state is not None and state.first_token_at is None:
            state.first_token_at = state.last_token_at = now
            self.outcomes.first_token(now, state)

    def _decode_progress(self, now: float, event: events.DecodeProgress) -> None:
        state = self._in(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is None:
            return
        if state.stage is Stage.HANDING_OVER:
            self.placement.loads.started_decode(state.request_id)
            state.move(now, Stage.DECODING, "the first token came from the decode node")
        state.sent_tokens += event.tokens
        state.last_token_at = now
        self.outcomes.output(now, event.tokens)

    def _decode_finished(self, now: float, event: events.DecodeFinished) -> None:
        state = self._in(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is not None:
            state.sent_tokens = event.output_tokens
            self._finish(now, state, Stage.DONE, state.reason, stored_chain=event.stored_chain)

    def _decode_failed(self, now: float, event: events.DecodeFailed) -> None:
        state = self._in(event.request_id, Stage.HANDING_OVER, Stage.DECODING)
        if state is not None:
            self._retry(now, state, state.decode_node, event.retryable, event.reason, event.message)

    def _answer_ended(self, now: float, event: events.AnswerEnded) -> None:
        state = self.requests.get(event.request_id)
        if state is not None:
            self._abort_on_nodes(state)
            state.sent_tokens = event.output_tokens
            self._finish(now, state, Stage.DONE, state.reason, stored_chain=b"")

    # ---- requests: failure and recovery ---------------------------------------------------------------------------

    def _retry(
        self, now: float, state: RequestState, node: str | None, retryable: bool, reason: str, message: str
    ) -> None:
        """Another attempt elsewhere, or the end with 502 when there were too many or a retry cannot help."""
        state.failures += 1
        if node is not None:
            state.avoid.add(node)
        told = f"{node} failed ({reason})"
        if not retryable:
            self._refuse(
                now, state, 502, reason, message or f"The node {node} could not serve the request: {reason}.", None
            )
        elif state.failures > MAX_FAILURES:
            text = f"The request failed on {state.failures} nodes in a row, at last because of: {message or reason}."
            self._refuse(now, state, 502, "upstream-failed", text, RETRY_AFTER_S)
        elif state.stage is Stage.HANDING_OVER and reason in REFUSALS and self.fleet.alive(state.prefill_node):
            self._start_decode(now, state)
        else:
            self._resume(now, state, told)

    def _resume(self, now: float, state: RequestState, why: str) -> None:
        """Computes the prompt and the output so far on another node; waits when no node can."""
        self.placement.loads.finished(now, state.request_id)
        if not self._announce_decode(now, state) and state.stage.ended:
            return
        if not self._start_prefill(now, state):
            self._wait(now, state, "prefill", why)

    def _wait(self, now: float, state: RequestState, stage: str, why: str) -> None:
        if state.stage is not Stage.WAITING:
            state.move(now, Stage.WAITING, why)
            state.waiting_until = now + self.config.flow.empty_pool_ttl_s
            self._waiting[state.request_id] = state
        state.waiting_for = stage

    def _try_waiting(self, now: float) -> None:
        """Nodes or room came back, perhaps: places who waits for them, or ends who waited too long."""
        for state in list(self._waiting.values()):
            del self._waiting[state.request_id]
            if now >= state.waiting_until:
                text = f"No node could take over the request within {self.config.flow.empty_pool_ttl_s:g} s."
                self._refuse(now, state, 503, "rejected-no-endpoints", text, RETRY_AFTER_S)
                continue
            if state.waiting_for == "decode" and self.fleet.alive(state.prefill_node):
                self._start_decode(now, state)
            else:
                self._resume(now, state, "still no node")
            if state.stage is Stage.WAITING:
                self._waiting[state.request_id] = state

    def _client_gone(self, now: float, event: events.ClientGone) -> None:
        state = self.requests.get(event.request_id)
        if state is not None:
            self._abort_on_nodes(state)
            self._finish(
                now, state, Stage.CANCELLED, "the client closed its connection", drop_code="rejected-context-cancelled"
            )

    def _refuse(
        self, now: float, state: RequestState, status: int, code: str, message: str, retry_after_s: float | None
    ) -> None:
        self._out.append(commands.Refuse(state.request_id, status, code, message, retry_after_s))
        self._finish(now, state, Stage.FAILED, message, drop_code=code)

    def _abort_on_nodes(self, state: RequestState) -> None:
        if state.stage is Stage.PREFILLING and state.prefill_node is not None:
            self._out.append(commands.AbortOnNode(state.prefill_node, state.request_id, "prefill"))
        if state.stage in (Stage.HANDING_OVER, Stage.DECODING) and state.decode_node is not None:
            self._out.append(commands.AbortOnNode(state.decode_node, state.request_id, "decode"))

    def _release_prefill(self, now: float, state: RequestState) -> None:
        if state.holds_prefill:
            state.holds_prefill = False
            self._flow(now, flow_events.StageReleased(state.request_id, "prefill"))

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
        del self.requests[state.request_id]
        self._waiting.pop(state.request_id, None)
        self.placement.loads.finished(now, state.request_id)
        self.fleet.load.in_flight(now, -1)
        if stored_chain is None:
            self._kv(now, kv_events.RequestAborted(state.request_id))
        else:
            self._kv(now, kv_events.OutputStored(state.request_id, stored_chain))
        t_acc = self.fleet.t_acc(state.decode_node)
        if stage is Stage.DONE:
            self.fleet.load.finished_one(state.sent_tokens, t_acc)
        self._out.append(commands.Journal(self.outcomes.ended(now, state, drop_code, t_acc)))
        if state.in_flow:
            state.in_flow = state.holds_prefill = False
            gone = (
                flow_events.Cancel(state.request_id)
                if queued
                else flow_events.StageReleased(state.request_id, "decode")
            )
            self._flow(now, gone)
        if self._waiting:
            self._try_waiting(now)

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _node_status(self, now: float, event: events.NodeStatus) -> None:
        node = self.fleet.nodes.get(event.node)
        if node is None:
            return
        if self.fleet.heard(now, node, event.status):
            self._kv(now, kv_events.NodeLost(node.name))
            self._out.append(commands.FetchSnapshot(node.name))
        self._flow(now, self.fleet.report(now, node, "prefill", event.status.queued_prefill))
        self._flow(now, self.fleet.report(now, node, "decode", event.status.queued_decode))
        self._nodes_changed(now)

    def _node_unreachable(self, now: float, event: events.NodeUnreachable) -> None:
        node = self.fleet.nodes.get(event.node)
        if node is not None:
            node.refusals = node.refusals + 1 if event.refused else node.refusals
            self._nodes_changed(now)

    def _node_events(self, now: float, event: events.NodeEvents) -> None:
        node = self.fleet.nodes.get(event.node)
        if node is None:
            return
        before = node.status
        for kv_event in self.fleet.kv_events(now, node, event.events):
            if isinstance(kv_event, commands.FetchSnapshot):
                self._out.append(kv_event)
            else:
                self._kv(now, kv_event)
        if node.status is not before:
            self._nodes_changed(now)

    def _node_snapshot(self, now: float, event: events.NodeSnapshotTaken) -> None:
        if self.fleet.nodes.get(event.node) is not None:
            self._kv(now, kv_events.NodeSnapshot(event.node, event.seq, list(event.segments)))

    def _nodes_changed(self, now: float) -> None:
        """Health, phases or wishes may have changed: move work away from where it cannot stay, open or close the gates."""
        changed = self.fleet.refresh(now)
        for node in changed.lost:
            self._node_lost(now, node)
        for node in changed.draining:
            self._move_queued(now, node)
        if changed.any:
            self._pools_changed(now)
        if self._waiting:
            self._try_waiting(now)

    def _node_lost(self, now: float, node: KnownNode) -> None:
        """Every request there goes on elsewhere: prefills begin again, decodes continue from the tokens already sent."""
        self._kv(now, kv_events.NodeLost(node.name))
        for request_id in self.placement.loads.node_lost(now, node.name):
            state = self.requests.get(request_id)
            if state is None:
                continue
            if state.stage is Stage.PREFILLING and state.prefill_node == node.name:
                self._out.append(commands.AbortOnNode(node.name, request_id, "prefill"))
                self._retry(now, state, node.name, True, "node-lost", f"The node {node.name} was lost.")
            elif state.stage in (Stage.HANDING_OVER, Stage.DECODING):
                self._out.append(commands.AbortOnNode(node.name, request_id, "decode"))
                self._retry(now, state, node.name, True, "node-lost", f"The node {node.name} was lost.")
            else:
                state.decode_node = None

    def _move_queued(self, now: float, node: KnownNode) -> None:
        """A node that takes no more prefills keeps what it computes; what only queues there moves to another one."""
        placed = [s for s in self.requests.values() if s.stage is Stage.PREFILLING and s.prefill_node == node.name]
        placed.sort(key=lambda state: state.placed_at)
        running = node.status.running_prefill if node.status is not None else 0
        if not self.fleet.nodes.taking("prefill"):
            return
        for state in placed[running:]:
            self._out.append(commands.AbortOnNode(node.name, state.request_id, "prefill"))
            self.placement.loads.finished_prefill(now, state.request_id)
            if not self._start_prefill(now, state):
                self._wait(now, state, "prefill", f"{node.name} is draining")

    def _pools_changed(self, now: float) -> None:
        for stage in STAGES:
            self._flow(now, self.fleet.pool(stage))

    # ---- the rest -------------------------------------------------------------------------------------------------

    def _branch_end(self, now: float, event: events.BranchEnd) -> None:
        self._kv(now, kv_events.BranchEnded(event.branch_id))

    def _configured(self, now: float, event: events.Configured) -> None:
        """A new configuration, in force from the next decision on. Raises ConfigError where it cannot change while running."""
        config = event.config
        if config.partition != self.config.partition:
            raise ConfigError("partition", f"{self.config.partition!r}, which this process serves")
        if config.model != self.config.model:
            raise ConfigError("model", "the model this process was started with (restart it to change the model)")
        self.config = config
        for node in self.fleet.configure(now, config):
            self._node_lost(now, node)
        self.placement.configure(config)
        self.kv.reconfigure(kv_config(config))
        self._flow(now, flow_events.Reconfigure(config.flow))
        self._nodes_changed(now)

    def _shut_down(self, now: float, event: events.ShutDown) -> None:
        self._flow(now, flow_events.Drain())

    def _tick(self, now: float, event: events.Tick) -> None:
        self._flow(now, flow_events.Tick())

    def _watch_time(self, now: float) -> None:
        """What time alone brings, before anything else happens at `now`."""
        kv_deadline = self.kv.next_deadline()
        if kv_deadline is not None and now >= kv_deadline:
            self._kv(now, kv_events.Tick())
        for record in self.fleet.due_records(now):
            self._out.append(commands.Journal(record))
        health_change = self.fleet.nodes.next_change()
        waited_out = any(now >= state.waiting_until for state in self._waiting.values())
        if waited_out or (health_change is not None and now >= health_change):
            self._nodes_changed(now)

    def _report_prediction(self, now: float) -> None:
        predicted_s = self.placement.predicted_ttft_s(now)
        if predicted_s is not None:
            self._flow(now, flow_events.PredictedTtft(predicted_s))

    def _home(self, state: RequestState, phase: str) -> str | None:
        return None if state.branch_id is None else self.kv.home(state.branch_id, phase)

    def _in(self, request_id: str, *stages: Stage) -> RequestState | None:
        """The request, if it is in one of these stages; late reports find nothing."""
        state = self.requests.get(request_id)
        return state if state is not None and state.stage in stages else None

    def _flow(self, now: float, event: flow_events.Event) -> None:
        """Tells flow control; dispatches are placed at the end of the step, drops end their request at once."""
        for command in self.flow.handle(now, event):
            if isinstance(command, flow_commands.Dispatch):
                self._dispatched.append(command)
                continue
            state = self.requests.get(command.request_id)
            if state is None:
                continue
            state.in_flow = False
            state.queue_s = command.waited_s
            self._out.append(
                commands.Refuse(
                    command.request_id, command.http_status, command.reason_code, command.message, command.retry_after_s
                )
            )
            self._finish(now, state, Stage.DROPPED, command.message, drop_code=command.reason_code)

    def _kv(self, now: float, event: kv_events.Event) -> None:
        """Tells the KV machine; reference changes for the same node go out together."""
        for command in self.kv.handle(now, event):
            if isinstance(command, kv_events.RefsChanged):
                self._push_refs(command)
            elif isinstance(command, kv_events.RefsReset):
                self._out.append(commands.PushRefs(command.node, (), reset=True))
            elif isinstance(command, kv_events.SnapshotNeeded):
                self._out.append(commands.FetchSnapshot(command.node))
            elif isinstance(command, kv_events.BranchResolved):
                state = self.requests.get(command.request_id)
                if state is not None:
                    state.branch_id, state.branch_kind = command.branch_id, command.kind
            elif isinstance(command, kv_events.ReuseCounted):
                state = self.requests.get(command.request_id)
                if state is not None:
                    state.lost_tokens = {cause: tokens for cause, tokens in command.lost.items() if tokens}

    def _push_refs(self, command: kv_events.RefsChanged) -> None:
        change = commands.RefChange(command.last, command.blocks, command.delta)
        last = self._out[-1] if self._out else None
        if isinstance(last, commands.PushRefs) and last.node == command.node:
            self._out[-1] = commands.PushRefs(last.node, (*last.changes, change), last.reset)
        else:
            self._out.append(commands.PushRefs(command.node, (change,)))
