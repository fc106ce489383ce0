"""The gateway's connection to Redis. Serving never waits for it; when it is away, calls answer None until it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio
import structlog
from redis.exceptions import RedisError

CALL_TIMEOUT_S = 2.0
BACKOFF_FIRST_S = 0.25
BACKOFF_LONGEST_S = 5.0
logger = structlog.get_logger("switchyard.gateway")


class RedisLink:
    """`call` tries at most once a back-off; `down_since` is when Redis was last lost (unix seconds), None while it answers."""

    def __init__(self, url: str) -> None:
        self.client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
            url, socket_connect_timeout=CALL_TIMEOUT_S, socket_timeout=None, health_check_interval=0
        )
        self.down_since: float | None = None
        self._pause_s = BACKOFF_FIRST_S
        self._retry_at = 0.0

    async def call(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """What Redis answers; None while it is away."""
        if self.down_since is not None and time.monotonic() < self._retry_at:
            return None
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answer = await work(self.client)
        except (RedisError, OSError, TimeoutError) as error:
            self._lost(error)
            return None
        if self.down_since is not None:
            logger.info("redis is back")
            self.down_since, self._pause_s = None, BACKOFF_FIRST_S
        return answer

    def _lost(self, error: Exception) -> None:
        if self.down_since is None:
            self.down_since = time.time()
            logger.warning("redis is away", error=type(error).__name__)
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 2, BACKOFF_LONGEST_S)

    async def close(self) -> None:
        await self.client.aclose()
