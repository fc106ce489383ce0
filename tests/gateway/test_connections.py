"""Connections: clients that go away free their places, connections to nodes are kept, stop strings cut the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import KEY, World, agent_spec, prompt, running_agent, until, world
from workers.yard.config import PartitionConfig

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, speed=1.0) as running:
        yield running


def places(yard: World) -> int:
    return sum(
        sum(yard.status(n)["running"].values()) + sum(yard.status(n)["queued"].values()) for n in ("n1", "n2", "n3")
    )


async def test_a_client_that_leaves_during_prefill_frees_the_node_within_a_second(yard: World) -> None:
    task = asyncio.create_task(yard.complete(prompt(10_000)))
    await until(lambda: yard.status("n1")["running"]["prefill"] == 1)
    left_at = time.monotonic()
    task.cancel()
    await until(lambda: places(yard) == 0)
    assert time.monotonic() - left_at < 1.0
    assert not yard.serving.yard.requests
    assert yard.serving.yard.outcomes.counters.cancelled == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_during_decode_frees_the_node_within_a_second(yard: World, stream: bool) -> None:
    request = yard.http.post(yard.url + "/v1/completions", json=prompt(2, 50_000, stream=stream), headers=HEADERS)
    task = asyncio.create_task(request.__aenter__())
    await until(lambda: yard.status("n2")["running"]["decode"] + yard.status("n3")["running"]["decode"] == 1)
    left_at = time.monotonic()
    if stream:
        (await task).close()
    task.cancel()
    await until(lambda: places(yard) == 0)
    assert time.monotonic() - left_at < 1.0
    assert not yard.serving.sessions and not yard.serving.yard.requests
    assert yard.serving.yard.outcomes.counters.cancelled == 1


async def test_a_client_that_leaves_the_queue_is_forgotten(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0) as yard:
        tasks = [asyncio.create_task(yard.complete(prompt(10_000, first_id=n * 20_000))) for n in range(9)]
        await until(lambda: yard.serving.yard.flow.totals.waiting == 1)
        for task in tasks:
            task.cancel()
        await until(lambda: places(yard) == 0 and not yard.serving.yard.requests)
        snapshot = yard.gateway.snapshot()
        assert snapshot["requests"]["cancelled"] == 9 and snapshot["stages"]["prefill"]["in_flight"] == 0


async def test_a_stop_string_across_chunks_ends_the_answer_and_frees_the_node(yard: World) -> None:
    """Simulated tokens come in chunks of dots, so the ten dots of the stop string lie across chunks."""
    response = await yard.complete(prompt(2, 50_000, stop=["." * 10]))
    answer = await response.json()
    assert answer["choices"][0] | {"index": 0} == {"index": 0, "logprobs": None, "finish_reason": "stop", "text": ""}
    await until(lambda: places(yard) == 0, 1.0)
    assert yard.serving.yard.outcomes.counters.completed == 1


async def test_connections_to_nodes_are_kept_between_requests(yard: World, monkeypatch: pytest.MonkeyPatch) -> None:
    protocols: set[int] = set()
    connector = yard.serving.upstream_http.connector
    assert connector is not None
    connect = connector.connect

    async def counting(*args: Any, **kwargs: Any) -> Any:
        connection = await connect(*args, **kwargs)
        protocols.add(id(connection.protocol))
        return connection

    await yard.complete()
    monkeypatch.setattr(connector, "connect", counting)
    for n in range(10):
        assert (await yard.complete(prompt(2, 4, n * 100))).status == 200
    assert 1 <= len(protocols) <= 8, "twenty calls and the polls between them share a few connections"


async def test_a_node_that_restarted_is_called_again_on_a_new_connection(tmp_path: Path) -> None:
    """Kept connections are dead after the restart; the first requests after it are served all the same."""
    async with world(tmp_path) as yard:
        assert (await yard.complete()).status == 200
        port = yard.agent.port
        await yard.agent.close()
        spec = agent_spec(tmp_path / "agent", {"n1": "prefill", "n2": "decode", "n3": "decode"}) | {"port": port}
        async with running_agent(spec) as again:
            yard.agent = again
            responses = await asyncio.gather(*(yard.complete(prompt(3, 8, n * 50)) for n in range(4)))
            assert [response.status for response in responses] == [200] * 4
            await yard.idle()
            await until(lambda: len(yard.serving.yard.fleet.nodes.taking("decode")) == 2)


async def test_a_request_id_in_use_is_replaced(yard: World) -> None:
    first = asyncio.create_task(yard.complete(prompt(500), x_request_id="same"))
    await until(lambda: "same" in yard.serving.sessions)
    second = await yard.complete(prompt(2, 4, 9000), x_request_id="same")
    assert second.status == 200 and second.headers["x-request-id"] != "same"
    assert (await first).headers["x-request-id"] == "same"


async def test_a_lost_decode_node_is_not_noticed_by_the_client(tmp_path: Path) -> None:
    """One agent a node: the decoding one dies in the middle of a stream; another computes the rest."""
    phases = {"n1": "prefill", "n2": "decode"}
    async with world(tmp_path, phases, speed=1.0) as yard:
        async with running_agent(agent_spec(tmp_path / "spare", {"n3": "decode"}, 1.0)) as spare:
            nodes = [*yard.document["nodes"], yard.document["nodes"][1] | _address("n3", spare.base_url)]
            yard.serving.apply(PartitionConfig.parse(yard.document | {"nodes": nodes}))
            await until(lambda: len(yard.serving.yard.fleet.nodes.taking("decode")) == 2)
            yard.serving.apply(PartitionConfig.parse(yard.document | {"nodes": [nodes[0], nodes[2]]}))
            body = prompt(4, 300, stream=True, stream_options={"include_usage": True})
            async with yard.http.post(yard.url + "/v1/completions", json=body, headers=HEADERS) as response:
                assert response.headers["x-switchyard-decode-node"] == "n3"
                start = await response.content.readuntil(b"\n\n")
                yard.serving.apply(PartitionConfig.parse(yard.document | {"nodes": nodes}))
                await until(lambda: len(yard.serving.yard.fleet.nodes.taking("decode")) == 2)
                await spare.close()
                text = (start + await response.read()).decode()
        assert '"finish_reason":"length"' in text and "[DONE]" in text
        assert '"completion_tokens":300' in text
        dots = sum(part.split('"', 1)[0].count(".") for part in text.split('"text":"')[1:])
        assert dots == 300
        assert yard.serving.yard.outcomes.recent[0]["decode_node"] == "n2"
        yard.serving.apply(PartitionConfig.parse(yard.document))


def _address(name: str, url: str) -> dict[str, object]:
    return {"name": name, "order": 2, "url": f"{url}/nodes/{name}"}
