"""Slows down password guessing: after five wrong tries for a name from an address, that pair waits."""

from __future__ import annotations

import hashlib
import logging

import redis

from controlplane import redis_client

MAX_FAILURES = 5
MAX_FAILURES_PER_ADDRESS = 30
WINDOW_S = 300

log = logging.getLogger(__name__)


def _keys(address: str, username: str) -> tuple[str, str]:
    name = hashlib.sha256(username.strip().lower().encode()).hexdigest()[:32]
    return f"switchyard:login:{address}:{name}", f"switchyard:login:{address}"


def wait_s(address: str, username: str) -> int:
    """Seconds until this pair may try again; 0 when it may now, also when Redis is away (logged)."""
    try:
        pair, alone = _keys(address, username)
        pipeline = redis_client.client().pipeline()
        for name in (pair, alone):
            pipeline.get(name)
            pipeline.ttl(name)
        tries, left, all_tries, all_left = pipeline.execute()
    except (redis.RedisError, OSError) as error:
        log.warning("sign-in throttle is off: Redis is away (%s)", type(error).__name__)
        return 0
    waits = [0]
    if int(tries or 0) >= MAX_FAILURES:
        waits.append(int(left))
    if int(all_tries or 0) >= MAX_FAILURES_PER_ADDRESS:
        waits.append(int(all_left))
    return max(waits)


def failed(address: str, username: str) -> None:
    """Counts one wrong try."""
    try:
        pipeline = redis_client.client().pipeline()
        for name in _keys(address, username):
            pipeline.incr(name)
            pipeline.expire(name, WINDOW_S, nx=True)
        pipeline.execute()
    except (redis.RedisError, OSError) as error:
        log.warning("sign-in throttle is off: Redis is away (%s)", type(error).__name__)


def succeeded(address: str, username: str) -> None:
    """Forgets the wrong tries of a pair that then signed in."""
    try:
        redis_client.client().delete(_keys(address, username)[0])
    except (redis.RedisError, OSError) as error:
        log.warning("sign-in throttle is off: Redis is away (%s)", type(error).__name__)
