"""Fixtures for the whole test run. PostgreSQL and Valkey start only when a test needs them."""

import gc
import os
from collections.abc import Iterator

import pytest
import redis

# Playwright's synchronous API runs an event loop in the test's thread; Django would refuse its own queries there.
os.environ.setdefault("DJANGO_ALLOW_ASYNC_UNSAFE", "true")


@pytest.fixture(scope="module", autouse=True)
def short_garbage_collections() -> None:
    """What earlier modules left alive is not looked through again: with half a gigabyte of it, a collection took over a
    second in the middle of a test that measures time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def embedded_services() -> Iterator[object]:
    """PostgreSQL and Valkey on a throw-away folder, for the whole run."""
    from tests.settings import services

    services.start()
    yield services
    services.stop()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(embedded_services: object) -> None:
    """Makes every database test start the embedded servers first."""


@pytest.fixture
def redis_client(embedded_services: object) -> Iterator[redis.Redis]:
    """A client of an emptied Valkey."""
    client = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
    client.flushall()
    yield client
    client.close()
