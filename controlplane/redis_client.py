"""The control plane's own Redis connection, and the names of the keys it shares with gateways and planner."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import Any

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

PREFIX = "switchyard"
# A Redis that accepts and does not answer costs a request this long, once, and those that follow nothing for a while.
ANSWER_WITHIN_S = 3.0
CONNECT_WITHIN_S = 2.0
PAUSE_S = 2.0


def patience() -> dict[str, Any]:
    """Options of a client that gives up after `ANSWER_WITHIN_S`; redis-py itself tries again and again, for half a minute.

    A connection that was closed meanwhile (Redis was restarted) is replaced by one further try, as that costs no time.
    """
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    return {"socket_timeout": ANSWER_WITHIN_S, "socket_connect_timeout": CONNECT_WITHIN_S, "retry": retry}


class Answers:
    """Whether Redis has lately left a call of this process without an answer."""

    def __init__(self) -> None:
        self._trust_again_at = 0.0

    def missed(self) -> None:
        self._trust_again_at = time.monotonic() + PAUSE_S

    def expected(self) -> None:
        """Raises `redis.TimeoutError` for `PAUSE_S` after a missed one: whoever asks next need not wait it out again."""
        if time.monotonic() < self._trust_again_at:
            raise redis.TimeoutError("Redis did not answer a moment ago")


@cache
def _answers(url: str) -> Answers:
    return Answers()


def answers() -> Answers:
    """Of the Redis that `settings.REDIS_URL` names."""
    return _answers(settings.REDIS_URL)


class _Pool(redis.ConnectionPool):
    """Connections that tell `noted` of answers which did not come, and are not tried while none is expected."""

    noted: Answers

    def get_connection(self, *arguments: Any, **more: Any) -> Any:
        self.noted.expected()
        try:
            return super().get_connection(*arguments, **more)
        except redis.TimeoutError:
            self.noted.missed()
            raise

    def make_connection(self) -> Any:
        connection = super().make_connection()
        read = connection.read_response

        def read_response(*arguments: Any, **more: Any) -> Any:
            try:
                return read(*arguments, **more)
            except redis.TimeoutError:
                self.noted.missed()
                raise

        connection.read_response = read_response  # type: ignore[method-assign]
        return connection


@cache
def _client(url: str) -> redis.Redis:
    pool = _Pool.from_url(url, **patience())
    pool.noted = _answers(url)
    return redis.Redis(connection_pool=pool)


def client() -> redis.Redis:
    """A pooled synchronous client of `settings.REDIS_URL`; calls raise `redis.RedisError` when Redis is away.

    One that does not answer is away too: after `ANSWER_WITHIN_S`, and at once for `PAUSE_S` more.
    """
    return _client(settings.REDIS_URL)


def config_key(partition_name: str) -> str:
    return f"{PREFIX}:{partition_name}:config"


def config_channel(partition_name: str) -> str:
    return f"{PREFIX}:{partition_name}:config-changed"


def live_key(partition_name: str) -> str:
    return f"{PREFIX}:{partition_name}:live"


def watched_key(partition_name: str) -> str:
    """When the alert rules were last looked at, unix seconds."""
    return f"switchyard:{partition_name}:watched"


def telemetry_stream(partition_name: str) -> str:
    return f"{PREFIX}:{partition_name}:telemetry"


def live_group(partition_name: str) -> str:
    """The Channels group of a partition's browsers."""
    return f"live.{partition_name}"


def read_json(key: str) -> dict[str, Any] | None:
    """The JSON object under `key`, None when there is none. Raises `redis.RedisError` when Redis is away."""
    raw: Any = client().get(key)
    return json.loads(raw) if raw else None
