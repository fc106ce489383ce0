"""Where the gateway's configuration comes from: Redis, else the last good document in a file. A bad one changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from workers.gateway.redis_link import RedisLink
from workers.yard.config import ConfigError, PartitionConfig

REREAD_EVERY_S = 1.0
logger = structlog.get_logger("switchyard.gateway")


class ConfigSource:
    """Watches the partition's document; hands each new good one to `apply`, which may refuse it with ConfigError.

    `error` is what is wrong with the newest document, None while it is in force; `file_error` the same for the kept file,
    while there is nothing else. `from_file` says that Redis has not yet
    confirmed what came from the file.
    """

    def __init__(self, partition: str, file: Path, link: RedisLink) -> None:
        self._key = f"switchyard:{partition}:config"
        self._channel = f"switchyard:{partition}:config-changed"
        self._partition = partition
        self._file = file
        self._link = link
        self._seen: bytes | None = None
        self._changed = asyncio.Event()
        self.error: str | None = None
        self.file_error: str | None = None
        self.from_file = False

    async def first(self) -> PartitionConfig:
        """The configuration to start with: from Redis, else from the file; waits until there is one."""
        while True:
            config = await self._read_redis()
            if config is None:
                config = self._read_file()
            if config is not None:
                return config
            await asyncio.sleep(REREAD_EVERY_S / 2)

    async def watch(self, apply: Callable[[PartitionConfig], None]) -> None:
        """Runs for ever: applies each new document within a second, at once when Redis announces it."""
        listener = asyncio.create_task(self._listen())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), REREAD_EVERY_S)
                self._changed.clear()
                await self._read_redis(apply)
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            try:
                async with self._link.client.pubsub() as channel:
                    await channel.subscribe(self._channel)
                    async for message in channel.listen():
                        if message["type"] == "message":
                            self._changed.set()
            except (RedisError, OSError):
                await asyncio.sleep(REREAD_EVERY_S)

    async def _read_redis(self, apply: Callable[[PartitionConfig], None] | None = None) -> PartitionConfig | None:
        raw = await self._link.call(lambda client: client.get(self._key))
        if raw is None or raw == self._seen:
            return None
        self._seen = raw
        try:
            config = self._parse(raw)
            if apply is not None:
                apply(config)
        except ConfigError as error:
            self.error = str(error)
            logger.warning("configuration refused", partition=self._partition, error=self.error)
            return None
        self.error, self.file_error, self.from_file = None, None, False
        self._keep(raw)
        logger.info("configuration in force", partition=self._partition, version=config.version)
        return config

    def _read_file(self) -> PartitionConfig | None:
        try:
            config = self._parse(self._file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ConfigError) as error:
            if self.file_error != str(error):
                logger.warning("kept configuration not usable", file=str(self._file), error=str(error))
            self.file_error = str(error)
            return None
        self.from_file, self.file_error = True, None
        logger.info("configuration from file", partition=self._partition, version=config.version)
        return config

    def _parse(self, raw: bytes) -> PartitionConfig:
        try:
            document: Any = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise ConfigError("document", f"JSON ({error})") from None
        config = PartitionConfig.parse(document)
        if config.partition != self._partition:
            raise ConfigError("partition", repr(self._partition))
        return config

    def _keep(self, raw: bytes) -> None:
        """Replaces the file in one step; it holds key digests, so only its owner may read it."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._file.with_suffix(".new")
            with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as handle:
                handle.write(raw)
            scratch.replace(self._file)
        except OSError as error:
            logger.warning("configuration not kept in the file", file=str(self._file), error=str(error))
