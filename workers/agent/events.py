"""The node's event log: sequence-numbered, bounded, replayable.

Sequence numbers start at the process's start time in millionths of a second, so they never repeat or fall after a
restart: a reader that asks for an event from before it gets a `gap` and takes a snapshot.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Append from any thread; read on the event loop. Keeps the newest `capacity` events."""

    def __init__(self, now: Callable[[], float], capacity: int = 20_000) -> None:
        self._now = now
        self._events: deque[Event] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._last = int(now() * 1_000_000)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    @property
    def last_seq(self) -> int:
        """Number of the newest event (of the start, while there is none)."""
        return self._last

    @property
    def oldest_seq(self) -> int:
        """Number of the oldest event that can be replayed (of the next one, while there is none)."""
        with self._lock:
            return self._events[0]["seq"] if self._events else self._last + 1

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the loop whose readers are woken. Until then events are only kept."""
        self._loop = loop

    def append(self, kind: str, **fields: Any) -> int:
        """Add one event and wake the readers; returns its number."""
        with self._lock:
            self._last += 1
            seq = self._last
            self._events.append({"seq": seq, "t": self._now(), "type": kind, **fields})
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake)
        return seq

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def since(self, seq: int) -> list[Event] | None:
        """Events numbered `seq` and later, or None where some of them are gone or were never written."""
        with self._lock:
            oldest = self._events[0]["seq"] if self._events else self._last + 1
            if seq < oldest or seq > self._last + 1:
                return None
            skip = seq - oldest
            return [event for index, event in enumerate(self._events) if index >= skip]

    async def follow(self, seq: int | None, heartbeat_s: float = 1.0) -> AsyncIterator[Event]:
        """Events from `seq` on (None: from now), a heartbeat each `heartbeat_s`, and a `gap` where events are missing;
        after a gap the stream goes on with what is newer than the gap."""
        following = self._last + 1 if seq is None else seq
        loop = asyncio.get_running_loop()
        beat_at = loop.time() + heartbeat_s
        while True:
            changed = self._changed
            events = self.since(following)
            if events is None:
                following = self._last + 1
                yield {"seq": following - 1, "t": self._now(), "type": "gap", "oldest": self.oldest_seq}
                continue
            for event in events:
                yield event
            if events:
                following = events[-1]["seq"] + 1
            if loop.time() >= beat_at:
                beat_at = loop.time() + heartbeat_s
                yield {"seq": following - 1, "t": self._now(), "type": "heartbeat"}
            if following <= self._last:
                continue
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, beat_at - loop.time()))
            except TimeoutError:
                continue
