"""The gateway's parts put together: configuration, yard, nodes, publisher. `http_api.py` puts a front door on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from workers.agent.engines.reference.gguf_file import ModelFileError
from workers.gateway.config_source import ConfigSource
from workers.gateway.errors import ApiError
from workers.gateway.live import Publisher
from workers.gateway.redis_link import RedisLink
from workers.gateway.serving import Serving
from workers.gateway.text import TextCodec, load_codec
from workers.yard.config import ModelConfig

UPSTREAM_CONNECTIONS = 4096
KEEPALIVE_S = 60.0
CONNECT_TIMEOUT_S = 2.0
DRAIN_S = 5.0
RETRY_TOKENIZER_S = 5.0
logger = structlog.get_logger("switchyard.gateway")


class NotReady(ApiError):
    def __init__(self, partition: str, fault: str | None = None) -> None:
        text = f"The gateway of '{partition}' has no configuration yet; it is waiting for the control plane."
        if fault is not None:
            text = f"The gateway of '{partition}' cannot serve: {fault.partition(':')[0]}."
        super().__init__(503, text, code="not_ready", headers={"retry-after": "2"})


class Gateway:
    """One partition's gateway process. `serving` is None until the first configuration came."""

    def __init__(self, partition: str, config_file: Path, redis_url: str, agent_token: str) -> None:
        self.partition = partition
        self.started_at = time.time()
        self.serving: Serving | None = None
        self.fault: str | None = None
        self.link = RedisLink(redis_url)
        self.source = ConfigSource(partition, config_file, self.link)
        self.publisher = Publisher(partition, redis_url, self.link, self.snapshot)
        self.agent_token = agent_token
        self._http: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins; returns at once. Requests are answered with 503 until there is a configuration."""
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=UPSTREAM_CONNECTIONS, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            read_bufsize=2**18,
        )
        self._tasks = [self._task(self._run(), "gateway")]

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_report_death)
        return task

    async def _run(self) -> None:
        assert self._http is not None
        config = await self.source.first()
        codec = await self._codec(config.model)
        self.serving = Serving(config, codec, self.agent_token, self._http, self.publisher)
        self._tasks.append(self._task(self.publisher.run(), "publisher"))
        await self.source.watch(self.serving.apply)

    async def _codec(self, model: ModelConfig) -> TextCodec:
        """The model's tokenizer; without it no prompt can be read, so it is tried again and again, and said so."""
        while True:
            try:
                codec = await asyncio.to_thread(load_codec, model)
            except (OSError, ValueError, ModelFileError) as error:
                self.fault = f"tokenizer missing: {str(error)[:300]}"
                logger.error("the tokenizer cannot be loaded", problem=self.fault)
                await asyncio.sleep(RETRY_TOKENIZER_S)
            else:
                self.fault = None
                return codec

    def ready(self) -> Serving:
        """What serves. Raises NotReady (503) before the first configuration, or while its tokenizer is missing."""
        if self.serving is None:
            raise NotReady(self.partition, self.fault)
        return self.serving

    @property
    def degraded(self) -> list[str]:
        """What the gateway does without at the moment, in words."""
        missing = [] if self.fault is None else [self.fault]
        if self.serving is not None:
            missing += _blind(self.serving.yard.blind(self.serving.clock()))
        if self.link.down_since is not None:
            missing.append(
                f"Redis is away since {time.time() - self.link.down_since:.0f} s: live view and telemetry wait"
            )
        if self.source.from_file:
            missing.append("configuration from the last good file, not confirmed by the control plane")
        if self.source.file_error is not None:
            missing.append(f"the kept configuration cannot be used: {self.source.file_error}")
        if self.source.error is not None:
            missing.append(f"newest configuration refused: {self.source.error}")
        if self.publisher.lost_records:
            missing.append(f"{self.publisher.lost_records} telemetry records lost")
        return missing

    def snapshot(self) -> dict[str, Any]:
        """The live snapshot with what only the gateway knows."""
        serving = self.ready()
        snapshot = serving.yard.snapshot(serving.clock())
        snapshot["config_error"] = self.source.error
        snapshot["gateway"] = {"started_at": self.started_at, "degraded": self.degraded}
        return snapshot

    async def close(self) -> None:
        """Stops in order: no new work, requests end, last telemetry, connections."""
        if self.serving is not None:
            await self.serving.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(3):
                await self.publisher.close()
                await self.link.close()
        if self._http is not None:
            await self._http.close()


def _blind(unseen: Mapping[str, str]) -> list[str]:
    """What the router cannot see, in words."""
    by_cause: dict[str, list[str]] = {}
    for node, cause in unseen.items():
        by_cause.setdefault(cause, []).append(node)
    return [
        f"the router does not know what {', '.join(nodes)} holds ({cause}): only its load is weighed there"
        for cause, nodes in sorted(by_cause.items())
    ]


def _report_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a part of the gateway died", part=task.get_name(), exc_info=task.exception())
