"""The newest snapshot of each partition, as this web process has seen it.

Many browsers watch one partition. `feed(partition)` presents and encodes each snapshot once for all of them, and keeps
the last five minutes of chart points so that a freshly opened page starts with its lines drawn.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import redis
import redis.asyncio
from channels.layers import get_channel_layer
from django.conf import settings
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from apps.console.access import Scope
from apps.console.present import present
from apps.console.scoping import scoped
from controlplane import redis_client

HISTORY_S = 300.0
POINT_EVERY_S = 1.0
STALE_AFTER_S = 3.0
LISTEN_AGAIN_S = 1.0
NO_RETRY = Retry(NoBackoff(), 0)
logger = logging.getLogger(__name__)


class Watcher(Protocol):
    """A browser's end in this process; both calls only take note and return at once."""

    def offer(self, snapshot: dict[str, Any]) -> None: ...
    def tell(self, event: dict[str, Any]) -> None: ...


async def last_snapshot_async(partition: str) -> dict[str, Any] | None:
    """The last published snapshot, or None when the gateway has been silent for ten seconds or Redis is away.

    For a websocket consumer; opens and closes its own connection, once a connected browser.
    """
    try:
        options = redis_client.patience() | {"retry": NO_RETRY}
        async with redis.asyncio.Redis.from_url(settings.REDIS_URL, **options) as client:
            raw = await client.get(redis_client.live_key(partition))
    except (redis.RedisError, OSError):
        return None
    return json.loads(raw) if raw else None


@dataclass
class Feed:
    """What one web process knows of one partition's live state.

    One subscription of the process to the partition's group serves all its browsers: a message is read and decoded once,
    and each watcher is handed the same object.
    """

    partition: str
    slo_ttft_s: float | None = None
    history: deque[dict[str, Any]] = field(default_factory=deque)
    _watchers: set[Watcher] = field(default_factory=set)
    _listener: asyncio.Task[None] | None = None
    _listening: asyncio.Event | None = None
    _encoded_for: tuple[Any, Any] | None = None
    _texts: dict[tuple[str, Scope], str] = field(default_factory=dict)

    async def join(self, watcher: Watcher) -> None:
        """From the return of this on, the watcher misses nothing."""
        self._watchers.add(watcher)
        loop = asyncio.get_running_loop()
        if self._listener is None or self._listener.done() or self._listener.get_loop() is not loop:
            self._listening = asyncio.Event()
            self._listener = loop.create_task(self._listen(self._listening), name=f"live-{self.partition}")
        assert self._listening is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._listening.wait(), 5)

    async def leave(self, watcher: Watcher) -> None:
        """The last one to leave ends the subscription."""
        self._watchers.discard(watcher)
        if not self._watchers and self._listener is not None:
            listener, self._listener = self._listener, None
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener

    async def _listen(self, listening: asyncio.Event) -> None:
        layer: Any = get_channel_layer()
        group = redis_client.live_group(self.partition)
        while True:
            try:
                channel = await layer.new_channel()
                await layer.group_add(group, channel)
                listening.set()
                while True:
                    self._hand_on(await layer.receive(channel))
            except (redis.RedisError, OSError) as error:
                logger.warning("%s: live updates wait, Redis is away (%s)", self.partition, type(error).__name__)
                await asyncio.sleep(LISTEN_AGAIN_S)

    def _hand_on(self, message: dict[str, Any]) -> None:
        for watcher in list(self._watchers):
            if message["type"] == "live.snapshot":
                watcher.offer(message["data"])
            elif message["type"] == "live.event":
                watcher.tell(message["data"])

    def text(self, snapshot: dict[str, Any], now: float, form: str, scope: Scope = None) -> str:
        """The frame to send for a snapshot, encoded once per snapshot, form and scope.

        `form` is "view" (texts and tones ready to show, what the pages ask for) or "data" (the snapshot as published);
        `scope` the tenants it may tell of (None: all).
        """
        identity = (snapshot.get("t"), snapshot.get("seq"))
        if identity != self._encoded_for:
            self._encoded_for, self._texts = identity, {}
        key = (form, scope)
        if key not in self._texts:
            seen = snapshot if scope is None else scoped(snapshot, scope)
            if form == "view":
                view = present(seen, now, self.slo_ttft_s)
                if scope is None:
                    self.remember(view["point"])
                frame = {"type": "snapshot", "view": view}
            else:
                frame = {"type": "snapshot", "data": seen}
            self._texts[key] = json.dumps(frame, separators=(",", ":"))
        return self._texts[key]

    def remember(self, point: dict[str, Any]) -> None:
        """Keeps a chart point, at most one a second and five minutes of them; older than the last one is ignored."""
        if self.history and point["t"] < self.history[-1]["t"] + POINT_EVERY_S:
            return
        self.history.append(point)
        while self.history and self.history[0]["t"] < point["t"] - HISTORY_S:
            self.history.popleft()

    def history_text(self) -> str:
        return json.dumps({"type": "history", "points": list(self.history)}, separators=(",", ":"))


_feeds: dict[str, Feed] = {}


def feed(partition: str) -> Feed:
    """This process' feed of a partition that is known to exist."""
    return _feeds.setdefault(partition, Feed(partition))
