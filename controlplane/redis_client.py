"""The control plane's own Redis connection, and the names of the keys it shares with gateways and planner."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import redis
from django.conf import settings

PREFIX = "switchyard"


@cache
def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=2)


def client() -> redis.Redis:
    """A pooled synchronous client of `settings.REDIS_URL`; calls raise `redis.RedisError` when Redis is away."""
    return _client(settings.REDIS_URL)


def config_key(partition_name: str) -> str:
    return f"{PREFIX}:{partition_name}:config"


def config_channel(partition_name: str) -> str:
    return f"{PREFIX}:{partition_name}:config-changed"


def live_key(partition_name: str) -> str:
    return f"{PREFIX}:{partition_name}:live"


def telemetry_stream(partition_name: str) -> str:
    return f"{PREFIX}:{partition_name}:telemetry"


def live_group(partition_name: str) -> str:
    """The Channels group of a partition's browsers."""
    return f"live.{partition_name}"


def read_json(key: str) -> dict[str, Any] | None:
    """The JSON object under `key`, None when there is none. Raises `redis.RedisError` when Redis is away."""
    raw: Any = client().get(key)
    return json.loads(raw) if raw else None
