"""How requests wait for a node, and how they end: each place that one holds is given back exactly once."""

from __future__ import annotations

from apps.flowcontrol.domain import events as flow_events
from apps.kvcache.domain import events as kv_events
from workers.yard import commands
from workers.yard.machines import Machines
from workers.yard.prefetch import Prefetching
from workers.yard.requests import RequestState, Stage


class Ends:
    """The end of requests. `waiting` holds admitted ones that no node can take at the moment; `room_has_changed` says that
    they are to be looked at."""

    def __init__(self, machines: Machines, prefetching: Prefetching) -> None:
        self._m = machines
        self._prefetching = prefetching
        self.waiting: dict[str, RequestState] = {}
        self.room_has_changed = False

    def find(self, request_id: str, *stages: Stage) -> RequestState | None:
        """The request, if it is in one of these stages; late reports find nothing."""
        state = self._m.requests.get(request_id)
        return state if state is not None and state.stage in stages else None

    def wait(self, now: float, state: RequestState, stage: str, why: str) -> None:
        if state.stage is not Stage.WAITING:
            state.move(now, Stage.WAITING, why)
            state.waiting_until = now + self._m.config.flow.empty_pool_ttl_s
            self.waiting[state.request_id] = state
        state.waiting_for = stage

    def room_changed(self) -> None:
        """Nodes came or went, places were given back, or time ran out: `settle` looks at those who wait for a node."""
        self.room_has_changed = True

    def refuse(
        self, now: float, state: RequestState, status: int, code: str, message: str, retry_after_s: float | None
    ) -> None:
        self._m.out.append(commands.Refuse(state.request_id, status, code, message, retry_after_s))
        self.finish(now, state, Stage.FAILED, message, drop_code=code)

    def abort_on_nodes(self, state: RequestState) -> None:
        if state.stage is Stage.PREFILLING and state.prefill_node is not None:
            self._m.out.append(commands.AbortOnNode(state.prefill_node, state.request_id, "prefill"))
        if state.stage in (Stage.HANDING_OVER, Stage.DECODING) and state.decode_node is not None:
            self._m.out.append(commands.AbortOnNode(state.decode_node, state.request_id, "decode"))

    def release_handoff(self, state: RequestState, unless_on: str | None = None) -> None:
        """The decode node has the context, or nobody wants it any more: its keeper may let go."""
        context = state.handed_over
        if context is not None and context.kept and context.node != unless_on:
            context.kept = False
            if self._m.fleet.alive(context.node):
                self._m.out.append(commands.ReleaseHandoff(context.node, state.request_id))

    def release_prefill(self, now: float, state: RequestState) -> None:
        if state.holds_prefill:
            state.holds_prefill = False
            computed_tokens = state.result.computed_tokens if state.result is not None else None
            self._m.tell_flow(now, flow_events.StageReleased(state.request_id, "prefill", computed_tokens))

    def finish(
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
        self._prefetching.left(state, None)
        self.release_handoff(state)
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
