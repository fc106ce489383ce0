"""Follows one engine's KV events over ZMQ: in order, each once, through lost messages and restarts.

The engine's publisher connects to us unless its endpoint has a wildcard, so an endpoint with a wildcard is bound here and any
other is connected to. A gap in the numbers is asked for at the replay endpoint (`[b"", first number]` to a ROUTER that
answers `[b"", number, payload]...` and ends with the number -1); a number that goes back is another process of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import structlog
import zmq
import zmq.asyncio

from workers.direct.kv_events import SEQUENCE_BYTES, BadEvent, Event, decode_message, decode_payload
from workers.yard.config import KvEventsConfig

REPLAY_S = 5.0
PAUSE_S = 1.0
RECEIVE_HIGH_WATER = 100_000
_WILDCARDS = ("//*:", "//0.0.0.0:", "//[::]:")
_END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
logger = structlog.get_logger("switchyard.direct")


def binds(endpoint: str) -> bool:
    """The endpoint is ours to listen at."""
    return any(mark in endpoint for mark in _WILDCARDS)


class KvLink:
    """`on_events(events)` gets what happened, in order; `on_lost(reason)` says that what was known counts no more: the engine
    is another process, or messages are lost for good. Events that follow build it up again."""

    def __init__(
        self,
        name: str,
        config: KvEventsConfig,
        on_events: Callable[[Sequence[Event]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.heard = 0  # messages taken
        self.lost = 0  # messages that nobody can give us again
        self.error: str | None = None
        self._name = name
        self._config = config
        self._on_events = on_events
        self._on_lost = on_lost
        self._next: int | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"kv events of {self._name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            context = zmq.asyncio.Context()
            try:
                await self._follow(context)
            except (zmq.ZMQError, OSError) as error:
                self.error = f"{self._config.endpoint}: {error}"
                logger.warning("no KV events", node=self._name, error=self.error)
            finally:
                context.destroy(linger=0)
            await asyncio.sleep(PAUSE_S)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        socket.setsockopt(zmq.IPV6, 1)
        socket.subscribe(self._config.topic.encode())
        if binds(self._config.endpoint):
            socket.bind(self._config.endpoint)
        else:
            socket.connect(self._config.endpoint)
        self.error = None
        while True:
            frames = await socket.recv_multipart()
            try:
                number, events = decode_message(frames)
            except BadEvent as error:
                self.error = str(error)
                logger.warning("KV events not understood", node=self._name, error=self.error)
                self._forget("a message was not understood")
                continue
            await self._take(context, number, events)

    async def _take(self, context: zmq.asyncio.Context, number: int, events: Sequence[Event]) -> None:
        if self._next is not None and number < self._next:
            self._forget("the engine's numbers began again: it is another process")
            self._next = 0
        expected = self._next or 0
        if number > expected:
            await self._fill(context, expected, number)
        self._deliver(number, events)

    async def _fill(self, context: zmq.asyncio.Context, first: int, end: int) -> None:
        """Asks for the messages `[first, end)` again. What cannot be had makes everything known before it void."""
        missed = await self._replayed(context, first, end)
        expected = first
        for number, events in missed:
            if number > expected:
                self._give_up(number - expected)
            self._deliver(number, events)
            expected = number + 1
        if expected < end:
            self._give_up(end - expected)

    async def _replayed(self, context: zmq.asyncio.Context, first: int, end: int) -> list[tuple[int, list[Event]]]:
        if self._config.replay is None:
            return []
        socket = context.socket(zmq.DEALER)
        found: list[tuple[int, list[Event]]] = []
        try:
            socket.connect(self._config.replay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_S):
                    await socket.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")])
                    while True:
                        frames = await socket.recv_multipart()
                        if len(frames) < 2 or frames[-2] == _END:
                            break
                        number = int.from_bytes(frames[-2], "big")
                        if first <= number < end:
                            found.append((number, decode_payload(frames[-1])))
        except (zmq.ZMQError, BadEvent) as error:
            logger.warning("KV events not replayed", node=self._name, error=str(error))
        finally:
            socket.close(linger=0)
        return sorted(found, key=lambda item: item[0])

    def _deliver(self, number: int, events: Sequence[Event]) -> None:
        self._next = number + 1
        self.heard += 1
        if events:
            self._on_events(events)

    def _give_up(self, count: int) -> None:
        """Messages before the first one heard are no loss to anybody who knew nothing yet, but blocks stay unknown."""
        self.lost += count
        self._forget(f"{count} messages are lost")

    def _forget(self, why: str) -> None:
        if self._next is not None:
            self._on_lost(why)
