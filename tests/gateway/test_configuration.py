"""Where the configuration comes from: Redis when it is there, the kept file when it is not; a bad document changes nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from tests.gateway.world import NOBODY_REDIS, World, document, prompt, running_gateway, until, world

KEY = "switchyard:test:config"
CHANNEL = "switchyard:test:config-changed"


@pytest.fixture
async def yard(tmp_path: Path, redis_client: redis.Redis) -> AsyncIterator[World]:
    async with world(tmp_path, redis_url=os.environ["REDIS_URL"]) as running:
        publish(redis_client, running.document)
        await until(lambda: not running.gateway.source.from_file)
        yield running


def publish(client: redis.Redis, configuration: Any, announce: bool = True) -> None:
    client.set(KEY, configuration if isinstance(configuration, str) else json.dumps(configuration))
    if announce:
        client.publish(CHANNEL, "2")


@pytest.mark.parametrize("announce", [True, False], ids=["announced", "announcement lost"])
async def test_a_change_is_in_force_within_a_second(yard: World, redis_client: redis.Redis, announce: bool) -> None:
    changed = yard.document | {"version": 2}
    changed["bands"][1]["priority"] = 500
    published_at = time.monotonic()
    publish(redis_client, changed, announce)
    await until(lambda: yard.serving.config.version == 2)
    assert time.monotonic() - published_at < (0.5 if announce else 1.3)
    bands = {band["name"]: band["priority"] for band in yard.gateway.snapshot()["bands"]}
    assert bands["standard"] == 500
    assert json.loads(yard.config_file.read_text())["version"] == 2


async def test_a_key_that_is_revoked_is_refused_at_once(yard: World, redis_client: redis.Redis) -> None:
    assert (await yard.complete()).status == 200
    publish(redis_client, yard.document | {"version": 2, "keys": []})
    await until(lambda: yard.serving.config.version == 2)
    assert (await yard.complete()).status == 401


BAD = [
    ("{", "document: expected JSON"),
    ({"version": 3}, "expected"),
    ("bands", "bands[0].priority: expected a whole number"),
    ("model", "model: expected the model this process was started with"),
    ("partition", "partition: expected 'test'"),
]


@pytest.mark.parametrize(("change", "error"), BAD, ids=["no JSON", "fields missing", "field", "model", "partition"])
async def test_a_bad_document_is_refused_and_shown_while_the_old_one_serves(
    yard: World, redis_client: redis.Redis, change: Any, error: str
) -> None:
    bad = change
    if change == "bands":
        bad = yard.document | {"bands": [yard.document["bands"][0] | {"priority": "high"}]}
    elif change == "model":
        bad = yard.document | {"model": yard.document["model"] | {"block_tokens": 32}}
    elif change == "partition":
        bad = yard.document | {"partition": "other"}
    publish(redis_client, bad)
    await until(lambda: yard.gateway.source.error is not None)
    snapshot = yard.gateway.snapshot()
    assert error in snapshot["config_error"] and snapshot["config_version"] == 1
    assert any(error in text for text in snapshot["gateway"]["degraded"])
    assert (await yard.complete()).status == 200
    assert json.loads(yard.config_file.read_text()) == yard.document, "the file keeps the last good one"

    publish(redis_client, yard.document | {"version": 4})
    await until(lambda: yard.gateway.source.error is None)
    assert yard.gateway.snapshot()["config_version"] == 4


async def test_a_new_node_serves_and_a_removed_one_is_left(yard: World, redis_client: redis.Redis) -> None:
    nodes = yard.document["nodes"]
    publish(redis_client, yard.document | {"version": 2, "nodes": nodes[:2]})
    await until(lambda: yard.serving.config.version == 2)
    for n in range(3):
        assert (await yard.complete(prompt(2, 4, n * 50))).headers["x-switchyard-decode-node"] == "n2"
    publish(redis_client, yard.document | {"version": 3, "nodes": [nodes[0], nodes[2]]})
    await until(lambda: len(yard.serving.yard.fleet.nodes.taking("decode")) == 1 and "n3" in yard.serving.nodes)
    assert (await yard.complete()).headers["x-switchyard-decode-node"] == "n3"


async def test_the_gateway_starts_from_the_kept_file_and_serves_without_redis(tmp_path: Path) -> None:
    async with world(tmp_path, redis_url=NOBODY_REDIS) as yard:
        assert (await yard.complete()).status == 200
        degraded = " ".join(yard.gateway.snapshot()["gateway"]["degraded"])
        assert "Redis is away" in degraded and "not confirmed" in degraded


async def test_redis_is_taken_up_again_when_it_comes(yard: World, redis_client: redis.Redis) -> None:
    """The connections are cut; requests go on, and a change published afterwards arrives."""
    redis_client.client_kill_filter(_type="normal", skipme=True)
    redis_client.client_kill_filter(_type="pubsub", skipme=True)
    assert (await yard.complete()).status == 200
    publish(redis_client, yard.document | {"version": 2})
    await until(lambda: yard.serving.config.version == 2)
    await until(lambda: not yard.gateway.degraded)


async def test_without_any_configuration_requests_are_503_until_one_comes(
    tmp_path: Path, redis_client: redis.Redis
) -> None:
    file = tmp_path / "none.json"
    async with running_gateway(file, os.environ["REDIS_URL"]) as (gateway, url), aiohttp.ClientSession() as http:
        async with http.post(url + "/v1/completions", json=prompt()) as response:
            assert response.status == 503 and response.headers["retry-after"] == "2"
            assert (await response.json())["error"]["code"] == "not_ready"
        async with http.get(url + "/healthz") as response:
            assert (await response.json())["status"] == "waiting for a configuration"
        publish(redis_client, document([]))
        await until(lambda: gateway.serving is not None)
        assert json.loads(file.read_text())["version"] == 1
        assert file.stat().st_mode & 0o077 == 0, "it holds key digests"


async def test_a_kept_file_that_cannot_be_used_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document([]) | {"version": "one"}))
    async with running_gateway(file) as (gateway, url), aiohttp.ClientSession() as http:
        await until(lambda: gateway.source.file_error is not None)
        async with http.get(url + "/healthz") as response:
            assert "version: expected a whole number" in " ".join((await response.json())["degraded"])
        file.write_text(json.dumps(document([])))
        await until(lambda: gateway.serving is not None)
