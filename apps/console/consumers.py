"""Live state over websockets.

A browser that reads slowly never builds up a queue: a newer snapshot replaces the one that was not sent yet, and events
(few and small) are kept in order up to a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.db import Error as DatabaseError

from apps.console import live
from apps.console.access import Watch, watchable_now

NOT_SIGNED_IN = 4401
NOT_ALLOWED = 4403
UNKNOWN_PARTITION = 4404
CLOSES = {"signed-out": NOT_SIGNED_IN, "forbidden": NOT_ALLOWED, "unknown": UNKNOWN_PARTITION}
MAX_EVENTS_KEPT = 100
LOOK_AGAIN_S = 30.0


class LiveConsumer(AsyncJsonWebsocketConsumer):
    """`/ws/live/<partition>/`: the last snapshot at once, then every newer one, and events as they happen.

    Frames: `{"type": "snapshot", "data": ...}` and `{"type": "event", "data": ...}` (docs/interfaces.md, section 9).
    Who signs out or loses the role meanwhile is cut off within `LOOK_AGAIN_S`. With `?form=view` snapshots come as `{"type": "snapshot", "view": ...}`, ready to show, after one
    `{"type": "history", "points": [...]}`. A tenant user's frames hold the own tenants alone. Closes with 4401 (not signed in), 4403 (may not watch), 4404 (no such partition).
    """

    # Messages come through the process' feed, not through a channel of each socket.
    channel_layer_alias = ""

    async def connect(self) -> None:
        self._sender: asyncio.Task[None] | None = None
        self._joined = False
        # Accepted first: a browser sees the code of a close only on an open socket.
        await self.accept()
        user = self.scope.get("user")
        if user is None or not user.is_authenticated:
            await self.close(code=NOT_SIGNED_IN)
            return
        name = self.scope["url_route"]["kwargs"]["partition"]
        access = await self._access(name)
        if access.refused:
            await self.close(code=CLOSES[access.refused])
            return
        self._form = (
            "view" if parse_qs(self.scope.get("query_string", b"").decode()).get("form") == ["view"] else "data"
        )
        self._scope = access.scope
        self._looked_at = time.monotonic()
        self._feed = live.feed(name)
        self._feed.slo_ttft_s = access.slo_ttft_s
        self._latest: dict[str, Any] | None = None
        self._events: deque[Any] = deque(maxlen=MAX_EVENTS_KEPT)
        self._wake = asyncio.Event()
        await self._feed.join(self)
        self._joined = True
        if self._form == "view" and self._scope is None:
            await self.send(text_data=self._feed.history_text())
        snapshot = await live.last_snapshot_async(name)
        if snapshot is not None and self._latest is None:
            self.offer(snapshot)
        self._sender = asyncio.create_task(self._send_newest())

    async def _access(self, name: str) -> Watch:
        """As the database has it now: who signed out, was closed out or lost a role meanwhile is refused."""
        session = self.scope.get("session")
        return await database_sync_to_async(watchable_now)(self.scope["user"], session, name)

    async def _still_allowed(self) -> bool:
        """Looks again every `LOOK_AGAIN_S` seconds; closes the socket of somebody who may not watch any more."""
        if time.monotonic() - self._looked_at < LOOK_AGAIN_S:
            return True
        self._looked_at = time.monotonic()
        try:
            access = await self._access(self.scope["url_route"]["kwargs"]["partition"])
        except DatabaseError:
            return True  # What is shown comes from elsewhere; it is looked at again soon.
        if access.refused:
            await self.close(code=CLOSES[access.refused])
            return False
        self._scope = access.scope
        return True

    async def disconnect(self, code: int) -> None:
        if self._joined:
            await self._feed.leave(self)
        if self._sender is not None:
            self._sender.cancel()
            with suppress(asyncio.CancelledError):
                await self._sender

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None, **kwargs: Any) -> None:
        """Nothing is expected from a browser on this socket; what comes is ignored."""

    def offer(self, snapshot: dict[str, Any]) -> None:
        """A newer snapshot takes the place of one that was not sent yet."""
        self._latest = snapshot
        self._wake.set()

    def tell(self, event: dict[str, Any]) -> None:
        """Events tell of decisions, alerts and edits: a tenant user hears none of them."""
        if self._scope is None:
            self._events.append(event)
            self._wake.set()

    async def _send_newest(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not await self._still_allowed():
                return
            while self._events:
                await self.send_json({"type": "event", "data": self._events.popleft()})
            snapshot, self._latest = self._latest, None
            if snapshot is not None:
                await self.send(text_data=self._feed.text(snapshot, time.time(), self._form, self._scope))


class Nowhere(AsyncJsonWebsocketConsumer):
    """An address that is not there: closed with 4404, like a partition that is not there."""

    channel_layer_alias = ""

    async def connect(self) -> None:
        await self.accept()
        await self.close(code=UNKNOWN_PARTITION)
