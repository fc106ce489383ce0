"""The gateway's parts put together: configuration, yard, nodes, publisher. `http_api.py` puts a front door on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from array import array
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from apps.kvcache.domain.hashing import PromptHasher
from workers.agent.engines.reference.gguf_file import ModelFileError
from workers.gateway.config_source import ConfigSource
from workers.gateway.driver import Clock, YardDriver
from workers.gateway.errors import ApiError
from workers.gateway.live import Publisher
from workers.gateway.metrics import GatewayMetrics
from workers.gateway.nodes import NodeClient
from workers.gateway.redis_link import RedisLink
from workers.gateway.session import Session
from workers.gateway.text import TextCodec, load_codec
from workers.gateway.upstream import Upstream
from workers.yard import events
from workers.yard.config import ModelConfig, PartitionConfig
from workers.yard.yard import Yard

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


class Serving:
    """Everything that exists once there is a configuration. Made on the event loop by `Gateway`."""

    def __init__(
        self, config: PartitionConfig, codec: TextCodec, token: str, http: aiohttp.ClientSession, publisher: Publisher
    ) -> None:
        self.config = config
        self.codec = codec
        self.clock = Clock()
        self.process_id = uuid.uuid4().hex
        self.metrics = GatewayMetrics()
        self.sessions: dict[str, Session] = {}
        self.nodes: dict[str, NodeClient] = {}
        model = config.model
        self.hasher = PromptHasher(model.name, model.dtype, model.block_tokens, model.ids_per_block)
        self.yard = Yard(config, self.clock())
        self.driver = YardDriver(self.yard, self.clock, self.nodes, publisher.journal, self.metrics)
        self.upstream = Upstream(model, self.sessions, self.nodes, self.driver.feed)
        self.driver.upstream = self.upstream
        self.upstream_http = http
        self._token = token
        self._closing: set[asyncio.Task[None]] = set()
        self._sync_nodes(config)
        self.driver.feed(events.Tick())

    def apply(self, config: PartitionConfig) -> None:
        """Puts a new configuration in force. Raises ConfigError where the running process cannot take it."""
        self.driver.feed(events.Configured(config))
        self.config = config
        self._sync_nodes(config)

    def _sync_nodes(self, config: PartitionConfig) -> None:
        for name, client in list(self.nodes.items()):
            wanted = config.nodes.get(name)
            if wanted is None or wanted.url != client.url:
                del self.nodes[name]
                task = asyncio.create_task(client.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for name, node in config.nodes.items():
            if name not in self.nodes:
                self.nodes[name] = NodeClient(
                    name, node.url, self.upstream_http, self._token, self.driver.feed, self.process_id
                )
                self.nodes[name].start()

    def check_vocabulary(self, ids: array[int]) -> None:
        """Raises ApiError 400 when an id lies outside the model's vocabulary."""
        vocabulary = self.codec.vocabulary
        if vocabulary is not None and max(ids, default=0) >= vocabulary:
            text = f"'prompt' holds a token id that the model does not have (it has {vocabulary})."
            raise ApiError(400, text, code="invalid_value", param="prompt")

    async def close(self) -> None:
        """Refuses what waits, gives what runs a moment, then closes."""
        self.driver.feed(events.ShutDown())
        deadline = time.monotonic() + DRAIN_S
        while self.yard.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.driver.close()
        await self.upstream.close()
        await asyncio.gather(*(client.close() for client in self.nodes.values()))


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
