"""The agent's HTTP API over a stub engine: authentication, clear errors, phases, events, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.agent.reference_support import TOKEN, b64, tiny_spec
from tests.agent.stub_engine import StubEngine
from workers.agent.node import NodeAgent
from workers.agent.server import build_app, serve

CHAIN = b64(b"h" * 16)
PREFILL = {"request_id": "r1", "token_ids": list(range(20)), "prompt_tokens": 20, "chain_b64": CHAIN}
DECODE = {
    "request_id": "r1",
    "token_ids": list(range(21)),
    "prompt_tokens": 20,
    "generated": 1,
    "root_b64": CHAIN,
    "handoff": None,
}


@dataclass
class Yard:
    engine: StubEngine
    node: NodeAgent
    session: aiohttp.ClientSession
    url: str

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def order(self, phase: str, generation: int, deadline_s: float = 60.0) -> tuple[int, Any]:
        body = {"phase": phase, "generation": generation, "drain_deadline_s": deadline_s}
        return await self.call("PUT", "/v1/phase", body)


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    engine = StubEngine()
    node = NodeAgent(tiny_spec("n1", phase="prefill"), engine, tmp_path)
    await node.start()
    runner, port = await serve(build_app({"n1": node}, TOKEN, max_body_bytes=4096), "127.0.0.1", 0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield Yard(engine, node, session, f"http://127.0.0.1:{port}/nodes/n1")
    await node.close()
    await runner.cleanup()


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not come to hold")


@pytest.mark.parametrize("header", ["", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x"])
async def test_without_the_token_nothing_is_answered_but_health(yard: Yard, header: str) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": header}) as stranger:
        async with stranger.get(yard.url + "/v1/status") as answer:
            assert answer.status == 401
            assert (await answer.json())["error"]["code"] == "unauthenticated"
        async with stranger.get(yard.url + "/healthz") as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("prefill", {**PREFILL, "prompt_tokens": 21}, "token_ids"),
        ("prefill", {**PREFILL, "chain_b64": ""}, "chain_b64"),
        ("prefill", {**PREFILL, "chain_b64": "!!"}, "chain_b64"),
        ("prefill", {**PREFILL, "token_ids": [-1]}, "token_ids[0]"),
        ("prefill", {**PREFILL, "sampling": {"temperature": -1}}, "sampling.temperature"),
        ("prefill", {**PREFILL, "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        (
            "prefill",
            {**PREFILL, "fetch": {"node": "x", "url": "http://h", "pool": "../../etc", "from_block": 0, "to_block": 1}},
            "fetch.pool",
        ),
        (
            "prefill",
            {**PREFILL, "fetch": {"node": "x", "url": "http://h", "pool": "p", "from_block": 0, "to_block": 9}},
            "fetch.to_block",
        ),
        ("decode", {**DECODE, "generated": 2}, "token_ids"),
        ("decode", {**DECODE, "root_b64": ""}, "root_b64"),
        ("kv/refs", {"seq": 1, "changes": [{"last_b64": "AAAA", "blocks": 1, "delta": 1}]}, "changes[0].last_b64"),
    ],
)
async def test_a_bad_field_is_a_400_that_names_it(yard: Yard, path: str, body: Any, field: str) -> None:
    status, answer = await yard.call("POST", f"/v1/{path}", body)
    assert (status, answer["error"]["field"]) == (400, field)


async def test_other_mistakes_are_clear_too(yard: Yard) -> None:
    async with yard.session.post(yard.url + "/v1/abort", data=b"{") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "bad-json")
    async with yard.session.post(yard.url + "/v1/abort", data=b"\xff\xfe") as answer:
        assert answer.status == 400
    assert (await yard.call("POST", "/v1/abort", []))[0] == 400
    too_long = {**PREFILL, "token_ids": list(range(2048)), "prompt_tokens": 2048}
    assert (await yard.call("POST", "/v1/prefill", too_long))[1]["error"]["code"] == "body-too-large"
    assert (await yard.call("GET", "/v1/nothing"))[1]["error"]["code"] == "not-found"
    assert (await yard.call("GET", "/v1/abort"))[0] == 405
    assert (await yard.call("GET", "/v1/events?from=-1"))[1]["error"]["field"] == "from"
    async with yard.session.get(yard.url.replace("n1", "n2") + "/v1/status") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unknown-node")
    async with yard.session.post(yard.url + "/v1/kv/blocks", data=b"short") as answer:
        assert answer.status == 400
    async with yard.session.post(yard.url + "/v1/kv/blocks", data=b"h" * 16) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "no-kv-bytes")


async def test_work_of_the_wrong_phase_or_generation_is_a_409(yard: Yard) -> None:
    assert (await yard.call("POST", "/v1/decode", DECODE))[1]["error"]["code"] == "wrong-phase"
    await yard.order("mixed", 3)
    await eventually(lambda: yard.node.phase.state == "ready")
    status, answer = await yard.call("POST", "/v1/prefill", {**PREFILL, "generation": 2})
    assert (status, answer["error"]["code"]) == (409, "stale-generation")


async def test_a_full_queue_is_a_429(yard: Yard) -> None:
    yard.engine.queued_prefill = 256
    status, answer = await yard.call("POST", "/v1/prefill", PREFILL)
    assert (status, answer["error"]["code"]) == (429, "queue-full")


async def test_a_prefill_answers_its_result_and_a_second_one_of_the_same_request_is_refused(yard: Yard) -> None:
    first = asyncio.create_task(yard.call("POST", "/v1/prefill", {**PREFILL, "generation": 0}))
    await eventually(lambda: bool(yard.node.custody.count("prefill")))
    status, answer = await yard.call("POST", "/v1/prefill", PREFILL)
    assert (status, answer["error"]["code"]) == (409, "duplicate-request")
    yard.engine.release.set()
    status, answer = await first
    assert (status, answer["first_token_id"], answer["handoff"]["chain_b64"]) == (200, 7, CHAIN)


async def test_closing_the_connection_ends_the_work(yard: Yard) -> None:
    call = asyncio.create_task(yard.call("POST", "/v1/prefill", PREFILL))
    await eventually(lambda: bool(yard.node.custody.count("prefill")))
    call.cancel()
    await eventually(lambda: yard.engine.ended == [("prefill", "cancelled")])
    await yard.order("decode", 1)
    await eventually(lambda: yard.node.phase.phase == "decode")
    async with yard.session.post(yard.url + "/v1/decode", json=DECODE) as answer:
        await answer.content.readline()
    await eventually(lambda: yard.engine.ended[1:] == [("decode", "closed")])
    assert (yard.node.custody.count("prefill"), yard.node.custody.count("decode")) == (0, 0)


async def test_a_decode_streams_events_and_says_why_it_failed(yard: Yard) -> None:
    await yard.order("decode", 1)
    await eventually(lambda: yard.node.phase.phase == "decode")
    yard.engine.release.set()
    async with yard.session.post(yard.url + "/v1/decode", json=DECODE) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        lines = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: ")]
    assert lines[0] == {"type": "tokens", "ids": [8], "n": 1}
    assert (lines[1]["type"], lines[1]["finish_reason"], lines[1]["output_tokens"]) == ("done", "length", 2)
    async with yard.session.post(yard.url + "/v1/decode", json={**DECODE, "sampling": {"max_tokens": 99}}) as answer:
        lines = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: ")]
    assert lines[-1] == {"type": "error", "code": "engine-failed", "message": "the engine failed"}


async def test_a_switch_drains_reports_each_step_and_survives_a_restart(yard: Yard, tmp_path: Path) -> None:
    work = asyncio.create_task(yard.call("POST", "/v1/prefill", PREFILL))
    await eventually(lambda: bool(yard.node.custody.count("prefill")))
    status, answer = await yard.order("decode", 1)
    assert status == 200
    assert answer == {"phase": "prefill", "target_phase": "decode", "state": "draining", "generation": 1}
    assert (await yard.order("decode", 1))[0] == 200
    assert (await yard.order("prefill", 0))[1]["error"]["code"] == "stale-generation"
    yard.engine.release.set()
    await work
    await eventually(lambda: yard.node.phase.phase == "decode")
    phases = [event for event in yard.node.events.since(yard.node.events.oldest_seq) or [] if event["type"] == "phase"]
    assert [(event["phase"], event["state"]) for event in phases] == [
        ("prefill", "ready"),
        ("prefill", "draining"),
        ("prefill", "switching"),
        ("decode", "ready"),
    ]
    assert yard.engine.phases == ["prefill", "decode"]
    again = NodeAgent(tiny_spec("n1", phase="prefill"), StubEngine(), tmp_path)
    assert (again.phase.phase, again.phase.generation) == ("decode", 1)


async def test_the_drain_deadline_makes_the_node_mixed(yard: Yard) -> None:
    work = asyncio.create_task(yard.call("POST", "/v1/prefill", PREFILL))
    await eventually(lambda: bool(yard.node.custody.count("prefill")))
    await yard.order("decode", 1, deadline_s=0.05)
    await eventually(lambda: yard.node.phase.phase == "mixed")
    async with yard.session.post(yard.url + "/v1/decode", json={**DECODE, "request_id": "r2"}) as answer:
        assert answer.status == 200
        await answer.content.readline()
    yard.engine.release.set()
    await work
    await eventually(lambda: yard.node.phase_view()["state"] == "ready")
    assert yard.node.phase.phase == "decode"


async def test_events_stream_as_lines_and_iterations_come_batched(yard: Yard) -> None:
    from workers.agent.engines.base import IterationSample

    yard.engine.sink.stored(None, b"a" * 16)
    yard.engine.sink.iteration(IterationSample("prefill", 10, 55.0, 0, 1, 0.1, 1))
    yard.engine.sink.removed(b"a" * 16)
    start = yard.node.events.oldest_seq
    lines = []
    async with yard.session.get(yard.url + f"/v1/events?from={start}") as answer:
        async for line in answer.content:
            lines.append(json.loads(line))
            if lines[-1]["type"] == "iterations":
                break
    assert [line["type"] for line in lines if line["type"] != "heartbeat"] == [
        "phase",
        "stored",
        "removed",
        "iterations",
    ]
    assert lines[-1]["rows"] == [["prefill", 10, 55.0, 0, 1, 0.1, 1]]


async def test_status_snapshot_and_metrics_describe_the_node(yard: Yard) -> None:
    _, status = await yard.call("GET", "/v1/status")
    assert (status["node"], status["engine"], status["phase"], status["orphans"]) == ("n1", "reference", "prefill", 0)
    assert status["pool"] == {
        "name": "pool",
        "capacity_blocks": 10,
        "used_blocks": 3,
        "referenced_blocks": 1,
        "block_tokens": 16,
    }
    _, snapshot = await yard.call("GET", "/v1/kv/snapshot")
    assert snapshot["seq"] == status["event_seq"]
    assert snapshot["segments"][1] == {"parent_b64": b64(b"a" * 16), "chain_b64": b64(b"c" * 16)}
    async with yard.session.get(yard.url + "/metrics") as answer:
        text = await answer.text()
    assert 'switchyard_node_pool_used_blocks{node="n1"} 3' in text
    assert 'switchyard_node_fetches_total{node="n1"} 2' in text


async def test_a_repeated_push_of_references_is_applied_once(yard: Yard) -> None:
    change = {"last_b64": CHAIN, "blocks": 2, "delta": 1}
    push = {"seq": 5, "changes": [change]}
    assert await yard.call("POST", "/v1/kv/refs", push) == (200, {"seq": 5, "applied": True})
    assert await yard.call("POST", "/v1/kv/refs", push) == (200, {"seq": 5, "applied": False})
    reset = {"seq": 1, "reset": True, "changes": [change]}
    assert await yard.call("POST", "/v1/kv/refs", reset) == (200, {"seq": 1, "applied": True})
    assert [reset for _, reset in yard.engine.refs] == [False, True]
    assert yard.engine.refs[0][0][0].blocks == 2
