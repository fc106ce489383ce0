"""Drives a yard in real time: feeds it events, carries its commands out, wakes it at its next deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from workers.gateway.metrics import GatewayMetrics
from workers.yard import commands, events
from workers.yard.yard import Yard

ARM_EVERY_S = 0.004
logger = structlog.get_logger("switchyard.gateway")


class Clock:
    """Unix seconds that never step back: wall time at the start, then the monotonic clock."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._offset_s


class Node(Protocol):
    """A node as the yard's commands need it."""

    def push_refs(self, changes: tuple[commands.RefChange, ...], reset: bool) -> None: ...

    def release(self, request_id: str) -> None: ...

    def resync(self) -> None: ...


class Calls(Protocol):
    """Who carries requests to nodes."""

    def start_prefill(self, command: commands.StartPrefill) -> None: ...

    def start_decode(self, command: commands.StartDecode) -> None: ...

    def abort(self, command: commands.AbortOnNode) -> None: ...

    def drop_orphan(self, node: Any, request_id: str) -> None: ...

    def refuse(self, command: commands.Refuse) -> None: ...


class YardDriver:
    """Owns the yard. `feed` is the only way in; commands are carried out before it returns (calls as tasks)."""

    def __init__(
        self,
        yard: Yard,
        clock: Callable[[], float],
        journal: Callable[[dict[str, Any]], None],
        metrics: GatewayMetrics,
    ) -> None:
        self.yard = yard
        self.clock = clock
        self._upstream: Calls | None = None
        self._nodes: Mapping[str, Node] = {}
        self._journal = journal
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._arming: asyncio.TimerHandle | None = None

    def connect(self, upstream: Calls, nodes: Mapping[str, Node]) -> None:
        """Who makes the calls, and the nodes they go to. Before the first `feed`."""
        self._upstream, self._nodes = upstream, nodes

    def feed(self, event: events.Event) -> None:
        """Hands one event to the yard and does what it asks for. Raises ConfigError for a configuration it refuses."""
        self.feed_all([event])

    def feed_all(self, together: list[events.Event]) -> None:
        """As `feed`, of events that came in one moment."""
        now = self.clock()
        began = time.perf_counter()
        answer = self.yard.handle_all(now, together)
        took_s = time.perf_counter() - began
        dispatched = False
        for command in answer:
            dispatched = dispatched or isinstance(command, commands.StartPrefill)
            try:
                self._carry_out(command)
            except Exception:  # the commands after it hold other requests' places
                logger.exception("a command failed", command=type(command).__name__)
        if dispatched:
            self._metrics.cycled(self.yard, took_s)
        self._arm_soon()

    def close(self) -> None:
        for timer in (self._timer, self._arming):
            if timer is not None:
                timer.cancel()

    def _carry_out(self, command: commands.Command) -> None:
        upstream = self._upstream
        assert upstream is not None
        if isinstance(command, commands.StartPrefill):
            upstream.start_prefill(command)
            self._metrics.dispatched(self.yard, command)
        elif isinstance(command, commands.StartDecode):
            upstream.start_decode(command)
        elif isinstance(command, commands.AbortOnNode):
            upstream.abort(command)
        elif isinstance(command, commands.ReleaseHandoff | commands.DropOrphan):
            node = self._nodes.get(command.node)
            if node is not None and isinstance(command, commands.ReleaseHandoff):
                node.release(command.request_id)
            elif node is not None:
                logger.warning("a node holds a request in vain", node=command.node, request=command.request_id)
                upstream.drop_orphan(node, command.request_id)
        elif isinstance(command, commands.Refuse):
            upstream.refuse(command)
        elif isinstance(command, commands.PushRefs):
            node = self._nodes.get(command.node)
            if node is not None:
                node.push_refs(command.changes, command.reset)
        elif isinstance(command, commands.FetchSnapshot):
            node = self._nodes.get(command.node)
            if node is not None:
                node.resync()
        elif isinstance(command, commands.Journal):
            self._metrics.recorded(self.yard, command.record)
            self._journal(command.record)
        else:  # a gateway's configuration does not switch it on: docs/adr/0017
            raise TypeError(f"{type(command).__name__}: agents fetch nothing ahead of a prefill")

    def _arm_soon(self) -> None:
        """Deadlines are looked at once for all events of the next milliseconds: none is that exact."""
        if self._arming is None:
            self._arming = asyncio.get_running_loop().call_later(ARM_EVERY_S, self._arm)

    def _arm(self) -> None:
        self._arming = None
        deadline = self.yard.next_deadline()
        if deadline == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self.clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = self._timer_at = None
        try:
            self.feed(events.Tick())
        except Exception:
            logger.exception("the yard failed on a tick")
            self._arm_soon()
