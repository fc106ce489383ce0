"""What the gateway tells the rest of the product through Redis: the live snapshot twice a second, and telemetry."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from channels_redis.pubsub import RedisPubSubChannelLayer

from workers.gateway.redis_link import RedisLink

PUBLISH_EVERY_S = 0.5
LIVE_EXPIRY_S = 10
SEND_TIMEOUT_S = 2.0
STREAM_MAXLEN = 20_000
MAX_BACKLOG = 20_000
BATCH = 500
logger = structlog.get_logger("switchyard.gateway")


class Publisher:
    """Sends `snapshot()` to the group of the partition's browsers, and queued telemetry records to its stream."""

    def __init__(self, partition: str, redis_url: str, link: RedisLink, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._partition = partition
        self._link = link
        self._snapshot = snapshot
        self._layer = RedisPubSubChannelLayer(
            hosts=[{"address": redis_url, "socket_timeout": None, "socket_connect_timeout": SEND_TIMEOUT_S}],
            prefix="switchyard.live",
        )
        self._records: deque[bytes] = deque(maxlen=MAX_BACKLOG)
        self.lost_records = 0

    def journal(self, record: dict[str, Any]) -> None:
        """Queues one telemetry record; when Redis is away for long the oldest are lost and counted."""
        self.lost_records += len(self._records) == MAX_BACKLOG
        self._records.append(msgspec.json.encode(record))

    async def run(self) -> None:
        """Runs for ever."""
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            try:
                await self._publish()
                await self._flush()
            except Exception:
                logger.exception("publishing failed")

    async def _publish(self) -> None:
        snapshot = self._snapshot()
        raw = msgspec.json.encode(snapshot)
        key = f"switchyard:{self._partition}:live"
        if await self._link.call(lambda client: client.set(key, raw, ex=LIVE_EXPIRY_S)) is None:
            return
        message = {"type": "live.snapshot", "data": snapshot}
        await self._link.call(lambda _: self._layer.group_send(f"live.{self._partition}", message))

    async def _flush(self) -> None:
        stream = f"switchyard:{self._partition}:telemetry"
        while self._records:
            batch = [self._records[index] for index in range(min(BATCH, len(self._records)))]

            async def send(client: Any, batch: list[bytes] = batch) -> bool:
                pipe = client.pipeline(transaction=False)
                for record in batch:
                    pipe.xadd(stream, {"d": record}, maxlen=STREAM_MAXLEN, approximate=True)
                await pipe.execute()
                return True

            if not await self._link.call(send):
                return
            for _ in range(min(len(batch), len(self._records))):
                self._records.popleft()

    async def close(self) -> None:
        await self._flush()
        await self._layer.flush()
