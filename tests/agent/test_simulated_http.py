"""Simulated nodes behind the real agent: HTTP, events, phases."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.agent.simulated_support import GB300, NETWORK, ROOT, chain_of
from workers.agent.process import AgentProcess
from workers.agent.spec import parse_spec

TOKEN = "agent-token"


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[AgentProcess]:
    model = {"name": "m", "block_tokens": 64, "ids_per_block": 1, "tokens_per_id": 64, "context_tokens": 1_000_000}
    limits = {"max_decode_batch": 128, "prefill_chunk_tokens": 8192, "kv_tokens": 5_000_000}
    common = {"engine": "simulated", "model": model, "pool_blocks": 20_000, "limits": limits}
    common |= {"coefficients": GB300, "network": NETWORK}
    nodes = [{"name": "p", "phase": "prefill", **common}, {"name": "d", "phase": "decode", **common}]
    process = AgentProcess(parse_spec({"data_dir": str(tmp_path), "speed": 4.0, "nodes": nodes}), TOKEN)
    await process.start()
    yield process
    await process.close()


@pytest.fixture
async def http(agent: AgentProcess) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(f"{agent.base_url}/nodes/", headers=headers) as session:
        yield session


def sampling(max_tokens: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "ignore_eos": True}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def prefill(http: aiohttp.ClientSession, name: str, blocks: int, max_tokens: int) -> dict[str, Any]:
    body = {
        "request_id": name,
        "token_ids": list(range(1, blocks + 1)),
        "prompt_tokens": blocks * 64 + 7,
        "chain_b64": b64encode(chain_of(1, blocks)).decode(),
        "sampling": sampling(max_tokens),
    }
    async with http.post("p/v1/prefill", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def decode(http: aiohttp.ClientSession, result: dict[str, Any], blocks: int, max_tokens: int) -> list[dict]:
    body = {
        "request_id": result["request_id"],
        "token_ids": list(range(1, blocks + 1)),
        "prompt_tokens": blocks * 64 + 7,
        "generated": 1,
        "handoff": result["handoff"],
        "sampling": sampling(max_tokens),
        "root_b64": b64encode(ROOT).decode(),
    }
    async with http.post("d/v1/decode", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return [json.loads(line[5:]) async for line in answer.content if line.startswith(b"data:")]


async def test_a_request_goes_from_prefill_to_decode_over_http(http: aiohttp.ClientSession) -> None:
    result = await prefill(http, "r", 100, 300)
    assert (result["computed_tokens"], result["first_finish"]) == (6_407, None)
    items = await decode(http, result, 100, 300)
    assert sum(item["n"] for item in items[:-1]) == 299
    assert (items[-1]["type"], items[-1]["finish_reason"], items[-1]["output_tokens"]) == ("done", "length", 300)
    async with http.get("d/v1/status") as answer:
        status = await answer.json()
    assert (status["engine"], status["orphans"], status["running"]) == ("simulated", 0, {"prefill": 0, "decode": 0})
    assert status["pool"]["used_blocks"] == 100


async def test_events_tell_what_was_stored_and_every_iteration(
    agent: AgentProcess, http: aiohttp.ClientSession
) -> None:
    first = agent.nodes["p"].events.last_seq + 1
    await prefill(http, "r", 300, 10)
    stored, rows = b"", []
    async with http.get("p/v1/events", params={"from": str(first)}) as answer:
        async for line in answer.content:
            event = json.loads(line)
            if event["type"] == "stored":
                assert event["parent_b64"] is None
                stored += b64decode(event["chain_b64"])
            if event["type"] == "iterations":
                rows += event["rows"]
            if stored and sum(row[1] for row in rows) == 300 * 64 + 7:
                break
    assert stored == chain_of(1, 300)
    assert [row[0] for row in rows] == ["prefill"] * 3
    assert [row[6] for row in rows] == [0, 0, 1]


async def test_a_node_drains_and_changes_phase_without_losing_its_pool(
    agent: AgentProcess, http: aiohttp.ClientSession
) -> None:
    result = await prefill(http, "r", 50, 1_000)
    running = asyncio.create_task(decode(http, result, 50, 1_000))
    await until(lambda: agent.nodes["d"].status()["running"]["decode"] == 1)
    order = {"phase": "prefill", "generation": 1, "drain_deadline_s": 30}
    async with http.put("d/v1/phase", json=order) as answer:
        assert (await answer.json())["state"] == "draining"
    items = await running
    assert items[-1]["output_tokens"] == 1_000
    await until(lambda: agent.nodes["d"].phase.state == "ready")
    assert agent.nodes["d"].phase_view() == {
        "phase": "prefill",
        "target_phase": "prefill",
        "state": "ready",
        "generation": 1,
    }
    assert agent.nodes["d"].status()["pool"]["used_blocks"] == 50


async def test_closing_the_connection_frees_the_node(agent: AgentProcess, http: aiohttp.ClientSession) -> None:
    running = asyncio.create_task(prefill(http, "r", 15_000, 10))
    await until(lambda: agent.nodes["p"].status()["running"]["prefill"] == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: agent.nodes["p"].status()["kv_free_tokens"] == 5_000_000)
    status = agent.nodes["p"].status()
    assert (status["running"]["prefill"], status["kv_free_tokens"], status["orphans"]) == (0, 5_000_000, 0)
