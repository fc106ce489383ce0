"""What the gateway tells others through Redis: live snapshots for browsers, telemetry for the planner; and `/metrics`."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
from channels.layers import get_channel_layer

from tests.gateway.world import World, prompt, until, world


@pytest.fixture
async def yard(tmp_path: Path, redis_client: redis.Redis) -> AsyncIterator[World]:
    async with world(tmp_path, redis_url=os.environ["REDIS_URL"]) as running:
        yield running


def telemetry(client: Any) -> list[dict[str, Any]]:
    return [json.loads(fields["d"]) for _, fields in client.xrange("switchyard:test:telemetry")]


async def test_every_request_becomes_one_record_for_the_planner(yard: World, redis_client: redis.Redis) -> None:
    for n in range(3):
        await yard.complete(prompt(4 + n, 8))
    await until(lambda: len([r for r in telemetry(redis_client) if r["kind"] == "request"]) == 3)
    first, _, last = (record for record in telemetry(redis_client) if record["kind"] == "request")
    assert (first["outcome"], first["prompt_tokens"], first["output_tokens"]) == ("completed", 263, 8)
    assert (first["computed_tokens"], first["cached_tokens"]) == (263, 0)
    assert last["cached_tokens"] == 5 * 64 and last["computed_tokens"] == 7 + 64
    assert first["branch_kind"] == "new" and last["branch_kind"] in ("continuation", "fork", "version")
    assert {"node": "n1"}.items() <= first["router_terms"][0].items()


async def test_load_and_cost_windows_follow(yard: World, redis_client: redis.Redis) -> None:
    await yard.complete(prompt(100, 50))
    await until(lambda: {"load", "cost-window"} <= {r["kind"] for r in telemetry(redis_client)}, 9)
    records = telemetry(redis_client)
    loads = [record for record in records if record["kind"] == "load"]
    assert sum(record["arrived"] for record in loads) == 1
    assert sum(record["t_uc"] for record in loads) == 6407 and sum(record["t_out"] for record in loads) == 50
    costs = {record["node"]: record for record in records if record["kind"] == "cost-window"}
    assert costs["n1"]["t_uc"] == 6407 and costs["n1"]["requests_prefilled"] == 1
    assert costs["n1"]["boot_id"] and costs["n1"]["busy_prefill_s"] > 0
    decoding = next(record for name, record in costs.items() if name != "n1")
    assert decoding["decode_iterations"] > 0 and decoding["batch_max"] == 1


async def test_browsers_get_a_snapshot_twice_a_second(yard: World, redis_client: Any) -> None:
    await yard.complete()
    layer = get_channel_layer()
    assert layer is not None
    channel = await layer.new_channel()
    await layer.group_add("live.test", channel)
    messages = [await layer.receive(channel) for _ in range(2)]
    assert [message["type"] for message in messages] == ["live.snapshot"] * 2
    seqs = [message["data"]["seq"] for message in messages]
    assert seqs[0] < seqs[1]
    assert messages[1]["data"]["requests"]["completed"] == 1
    assert messages[1]["data"]["recent"][0]["outcome"] == "completed"
    assert 0.3 < messages[1]["data"]["t"] - messages[0]["data"]["t"] < 0.9
    kept = json.loads(redis_client.get("switchyard:test:live"))
    assert kept["partition"] == "test" and 0 < redis_client.ttl("switchyard:test:live") <= 10
    await layer.group_discard("live.test", channel)
    await layer.flush()


async def test_metrics_count_what_was_served(yard: World) -> None:
    await yard.complete()
    async with yard.http.get(yard.url + "/metrics") as response:
        text = await response.text()
    assert 'switchyard_requests_ended_total{band="standard",outcome="completed"} 1.0' in text
    assert 'switchyard_tokens_total{kind="output"} 20.0' in text
    assert 'llm_d_epp_flow_control_pool_saturation{inference_pool="test",stage="prefill"} 0.0' in text
    assert 'llm_d_epp_flow_control_requests_total{inference_pool="test",outcome="Dispatched",priority="0"} 1.0' in text


async def test_branches_are_known_by_header_and_can_be_ended(yard: World) -> None:
    headers = {"x_switchyard_branch": "main", "x_switchyard_program": "p1"}
    await yard.complete(prompt(4), **headers)
    await yard.complete(prompt(8), **headers)
    branch = yard.serving.yard.kv.branch("acme/main")
    assert branch is not None and branch.program == "p1" and branch.context_blocks >= 8
    await until(lambda: any(yard.status(n)["pool"]["referenced_blocks"] >= 8 for n in ("n1", "n2", "n3")))
    assert (await yard.post("/v1/branches/main/end", {})).status == 200
    await until(lambda: all(yard.status(n)["pool"]["referenced_blocks"] == 0 for n in ("n1", "n2", "n3")))
    assert (await yard.post("/v1/branches/main/end", {})).status == 404
