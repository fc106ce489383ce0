"""Contexts brought ahead: while a request waits in the central queue, its KV goes to the node that routing would choose now.

At most `routing.prefetch_bytes` are on their way to one node; a fetch ends when the choice changes or the request leaves the
queue, and what has come stays. Off while `prefetch_bytes` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.yard import commands, events
from workers.yard.machines import Machines
from workers.yard.requests import RequestState, Stage

LOOK_EVERY_S = 0.25
LOOKED_AT = 32
"""How many of those that wait, the longest first, are looked at again each time."""


@dataclass(slots=True)
class Ahead:
    """What goes, or went, to `node` for a request that waits."""

    node: str
    moved_bytes: float
    under_way: bool = True


class Prefetching:
    """`waiting` are the requests in the central queue, `ahead` those for which something was fetched."""

    def __init__(self, machines: Machines) -> None:
        self._m = machines
        self.waiting: dict[str, RequestState] = {}
        self.ahead: dict[str, Ahead] = {}
        self._new: list[RequestState] = []
        self._under_way_bytes: dict[str, float] = {}
        self._look_at: float | None = None

    @property
    def budget_bytes(self) -> float:
        return self._m.config.routing.prefetch_bytes

    def queued(self, state: RequestState) -> None:
        """The request asks for its turn; it is looked at if this step does not give it."""
        if self.budget_bytes > 0:
            self.waiting[state.request_id] = state
            self._new.append(state)

    def left(self, state: RequestState, node: str | None) -> None:
        """The request waits no longer: it goes to `node`, or to none. What is under way to that node it takes over there."""
        if self.waiting.pop(state.request_id, None) is None:
            return
        ahead = self.ahead.get(state.request_id)
        if ahead is None:
            return
        if ahead.node == node:
            self._settled(ahead)
            del self.ahead[state.request_id]
        else:
            self._cancel(state.request_id)

    def ended(self, event: events.PrefetchEnded) -> None:
        """What was asked for has come, or will not."""
        ahead = self.ahead.get(event.request_id)
        if ahead is not None and ahead.node == event.node:
            self._settled(ahead)

    def next_deadline(self) -> float | None:
        return self._look_at

    def look(self, now: float) -> None:
        """Decide anew for those that have just queued, and from time to time for all."""
        if not self.waiting:
            self._new.clear()
            self._look_at = None
            return
        if self.budget_bytes <= 0:
            for request_id in list(self.ahead):
                self._cancel(request_id)
            self.waiting.clear()
        elif self._look_at is None or now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            for state in list(self.waiting.values())[:LOOKED_AT]:
                self._decide(now, state)
        else:
            for state in self._new:
                self._decide(now, state)
        self._new.clear()

    def _decide(self, now: float, state: RequestState) -> None:
        if state.stage is not Stage.QUEUED:
            return
        ahead = self.ahead.get(state.request_id)
        if ahead is not None and not ahead.under_way:
            return  # one copy is enough: routing will see it
        choice = self._m.placement.choose_prefill(
            now, state, self._m.kv.held(state.request.prompt), self._m.home(state, "prefill"), self._m.kv.unseen, False
        )
        if ahead is not None:
            if choice.node == ahead.node:
                return
            self._cancel(state.request_id)
        if choice.node is None or choice.fetch is None or choice.chosen is None:
            return
        moved_bytes = choice.chosen.fetch_tokens * self._m.config.network.kv_bytes_per_token
        under_way_bytes = self._under_way_bytes.get(choice.node, 0.0)
        if under_way_bytes + moved_bytes > self.budget_bytes:
            return
        self.ahead[state.request_id] = Ahead(choice.node, moved_bytes)
        self._under_way_bytes[choice.node] = under_way_bytes + moved_bytes
        fetch = commands.Fetch(choice.fetch.source_node, choice.fetch.from_block, choice.fetch.to_block)
        self._m.out.append(commands.Prefetch(state.request_id, choice.node, fetch))

    def _cancel(self, request_id: str) -> None:
        ahead = self.ahead.pop(request_id, None)
        if ahead is not None and ahead.under_way:
            self._settled(ahead)
            self._m.out.append(commands.CancelPrefetch(request_id, ahead.node))

    def _settled(self, ahead: Ahead) -> None:
        if ahead.under_way:
            ahead.under_way = False
            self._under_way_bytes[ahead.node] -= ahead.moved_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError where something is fetched for a request that does not wait, or bytes do not add up."""
        for request_id, state in self.waiting.items():
            assert state.stage is Stage.QUEUED, f"{request_id}: {state.stage}, and looked at as waiting"
        assert self.ahead.keys() <= self.waiting.keys(), "something is fetched ahead for requests that do not wait"
        for node, counted in self._under_way_bytes.items():
            due = sum(ahead.moved_bytes for ahead in self.ahead.values() if ahead.node == node and ahead.under_way)
            assert abs(counted - due) < 1.0, f"{node}: {counted} bytes under way, {due} due"
            assert counted <= max(self.budget_bytes, due), f"{node}: {counted} bytes under way"
