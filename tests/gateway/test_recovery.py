"""Nodes that answer wrongly, over real sockets: what the gateway does then, what clients see, and what /metrics tells."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.gateway.world import KEY, NOBODY_REDIS, document, node, prompt, running_gateway, until
from workers.agent.server import serve
from workers.gateway.gateway import Gateway

HEADERS = {"Authorization": f"Bearer {KEY}"}
HANDOFF = {
    "node": "p", "url": "http://127.0.0.1:9", "pool": "x", "chain_b64": "", "tail_hash_b64": None, "tail_tokens": 0,
    "context_tokens": 0, "expires_at": 0.0,
}  # fmt: skip
PREFILLED = {
    "first_token_id": 0, "first_finish": None, "cached_tokens": 0, "fetched_tokens": 0, "computed_tokens": 263,
    "failed_fetch_tokens": 0, "timings": {"queued_s": 0.0, "fetch_s": 0.0, "prefill_s": 0.0}, "handoff": HANDOFF,
}  # fmt: skip
Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WrongNode:
    """A node's API with a prefill and a decode of the test's choice; `calls` lists what was asked of it."""

    def __init__(self, phase: str, prefill: Respond, decode: Respond) -> None:
        self.phase = phase
        self.calls: list[tuple[str, Any]] = []
        self.held: dict[str, dict[str, list[str]]] = {}
        self.owner = ""
        self._answers = {"prefill": prefill, "decode": decode}

    def app(self, name: str) -> web.Application:
        app = web.Application()
        base = f"/nodes/{name}/v1"
        app.router.add_get(f"{base}/status", self._status)
        app.router.add_get(f"{base}/kv/snapshot", self._snapshot)
        app.router.add_get(f"{base}/events", self._events)
        app.router.add_post(f"{base}/{{call:.*}}", self._call)
        return app

    async def _status(self, request: web.Request) -> web.Response:
        self.owner = request.headers["x-switchyard-gateway"]
        pool = {"name": "x", "capacity_blocks": 100, "used_blocks": 0, "referenced_blocks": 0}
        limits = {"max_decode_batch": 8, "kv_tokens": 100_000, "prefill_chunk_tokens": 1024}
        none = {"prefill": 0, "decode": 0}
        return web.json_response(
            {"phase": self.phase, "target_phase": self.phase, "state": "ready", "generation": 0, "boot_id": "b",
             "running": none, "queued": none, "queued_tokens": 0, "pool": pool, "limits": limits, "event_seq": 0,
             "kv_free_tokens": 100_000, "orphans": 0, "held": self.held, "stalled_s": 0.0}
        )  # fmt: skip

    async def _snapshot(self, request: web.Request) -> web.Response:
        return web.json_response({"seq": 0, "segments": []})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b'{"seq": 0, "t": 0.0, "type": "heartbeat"}\n')
            await asyncio.sleep(0.5)

    async def _call(self, request: web.Request) -> web.StreamResponse:
        call = request.match_info["call"]
        self.calls.append((call, await request.json()))
        return await self._answers[call](request) if call in self._answers else web.json_response({})

    def count(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)


def refusing(status: int, code: str) -> Respond:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": code, "message": "no"}}, status=status)

    return respond


async def prefilled(request: web.Request) -> web.Response:
    return web.json_response(PREFILLED)


async def dies_in_the_middle(request: web.Request) -> web.StreamResponse:
    """Three tokens, then the connection breaks."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"type": "tokens", "ids": [0, 0, 0], "n": 3}\n\n')
    assert request.transport is not None
    request.transport.abort()
    return response


async def ends_well(request: web.Request) -> web.StreamResponse:
    """All tokens that are still wanted."""
    body = await request.json()
    left = body["sampling"]["max_tokens"] - body["generated"]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    done = {"type": "done", "finish_reason": "length", "output_tokens": body["sampling"]["max_tokens"]}
    for event in ({"type": "tokens", "ids": [0] * left, "n": left}, done):
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write_eof()
    return response


@asynccontextmanager
async def wrong_yard(folder: Path, nodes: dict[str, WrongNode]) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway over such nodes, ready for work."""
    runners, entries = [], []
    for order, (name, wrong) in enumerate(nodes.items()):
        runner, port = await serve(wrong.app(name), "127.0.0.1", 0)
        runners.append(runner)
        entries.append(node(name, order, wrong.phase, f"http://127.0.0.1:{port}"))
    file = folder / "config.json"
    file.write_text(json.dumps(document(entries)))
    try:
        async with running_gateway(file, NOBODY_REDIS) as (gateway, url):
            await until(lambda: gateway.serving is not None, 30)
            await until(lambda: all(known.health == "ok" for known in gateway.ready().yard.fleet.nodes))
            yield gateway, url
            gateway.ready().yard.check_integrity()
            assert not gateway.ready().yard.requests
    finally:
        await asyncio.gather(*(runner.cleanup() for runner in runners))


async def ask(url: str, stream: bool = False, max_tokens: int = 20) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json=prompt(4, max_tokens, stream=stream), headers=HEADERS) as response,
    ):
        return response.status, await response.text()


async def metrics(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        return await response.text()


async def test_a_prefill_that_failed_never_starts_a_decode_and_opens_the_circuit(tmp_path: Path) -> None:
    bad = WrongNode("prefill", refusing(500, "engine-failed"), refusing(500, "x"))
    decode = WrongNode("decode", prefilled, ends_well)
    async with wrong_yard(tmp_path, {"p": bad, "d": decode}) as (_, url):
        status, text = await ask(url)
        assert status in (502, 503), text
        assert decode.count("decode") == bad.count("decode") == 0
        assert bad.count("prefill") == 3, "the third fault in a row keeps work away"
        told = await metrics(url)
        assert 'switchyard_circuit_open{node="p"} 1.0' in told and 'switchyard_circuit_open{node="d"} 0.0' in told
        assert 'switchyard_recoveries_total{reason="engine-failed"} 3.0' in told


async def test_one_bad_prefill_node_among_good_ones_costs_no_request(tmp_path: Path) -> None:
    nodes = {
        "p1": WrongNode("prefill", refusing(500, "internal"), ends_well),
        "p2": WrongNode("prefill", prefilled, ends_well),
        "d": WrongNode("decode", prefilled, ends_well),
    }
    async with wrong_yard(tmp_path, nodes) as (_, url):
        for _ in range(12):
            status, text = await ask(url)
            assert status == 200, text
        assert nodes["p1"].count("prefill") == 3 and nodes["p2"].count("prefill") == 12


async def test_ten_client_errors_from_a_node_do_not_keep_work_from_it(tmp_path: Path) -> None:
    refuse = True

    async def sometimes(request: web.Request) -> web.StreamResponse:
        return await (refusing(400, "bad-field") if refuse else prefilled)(request)

    nodes = {"p": WrongNode("prefill", sometimes, ends_well), "d": WrongNode("decode", prefilled, ends_well)}
    async with wrong_yard(tmp_path, nodes) as (_, url):
        for _ in range(10):
            assert (await ask(url))[0] == 502
        assert nodes["p"].count("prefill") == 10, "each was tried once, for nobody else could do better"
        refuse = False
        assert (await ask(url))[0] == 200
        assert 'switchyard_circuit_open{node="p"} 0.0' in await metrics(url)


async def test_an_engine_that_dies_in_the_middle_is_continued_by_another(tmp_path: Path) -> None:
    nodes = {
        "p": WrongNode("prefill", prefilled, ends_well),
        "d1": WrongNode("decode", prefilled, dies_in_the_middle),
        "d2": WrongNode("decode", prefilled, ends_well),
    }
    async with wrong_yard(tmp_path, nodes) as (_, url):
        for stream in (True, False, True, False):
            status, text = await ask(url, stream)
            assert status == 200
            dots = sum(part.split('"', 1)[0].count(".") for part in text.replace('": "', '":"').split('"text":"')[1:])
            assert dots == 20, text
        resumed = [body for call, body in nodes["d2"].calls if call == "decode" and body["generated"] == 4]
        assert resumed, "it went on after the first token and the three that came"
        assert nodes["p"].count("prefill") == 4, "nothing was prefilled twice"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_always_dies_ends_the_answer_with_an_error(tmp_path: Path, stream: bool) -> None:
    nodes = {
        "p": WrongNode("prefill", prefilled, ends_well),
        "d": WrongNode("decode", prefilled, dies_in_the_middle),
    }
    async with wrong_yard(tmp_path, nodes) as (gateway, url):
        status, text = await ask(url, stream, 500)
        if stream:
            assert status == 200
            last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
            assert last["error"]["code"] in ("upstream-failed", "rejected-no-endpoints")
            assert "[DONE]" not in text
        else:
            assert status in (502, 503) and json.loads(text)["error"]["message"]
        assert gateway.ready().yard.outcomes.counters.failed == 1


async def test_a_request_that_a_node_holds_in_vain_is_freed_there_and_seen_in_the_gauge(tmp_path: Path) -> None:
    nodes = {"p": WrongNode("prefill", prefilled, ends_well), "d": WrongNode("decode", prefilled, ends_well)}
    async with wrong_yard(tmp_path, nodes) as (_, url):
        nodes["d"].held = {"decode": {nodes["d"].owner: ["forgotten"], "another-gateway": ["not-ours"]}}
        await until(lambda: nodes["d"].count("abort") > 0, 10)
        assert 'switchyard_orphans{node="d"} 1.0' in await metrics(url)
        assert {body["request_id"] for call, body in nodes["d"].calls if call == "abort"} == {"forgotten"}
        nodes["d"].held = {}
        await asyncio.sleep(1.2)
        assert 'switchyard_orphans{node="d"} 0.0' in await metrics(url)


async def test_a_fetched_context_is_released_at_its_prefill_node(tmp_path: Path) -> None:
    nodes = {"p": WrongNode("prefill", prefilled, ends_well), "d": WrongNode("decode", prefilled, ends_well)}
    async with wrong_yard(tmp_path, nodes) as (_, url):
        assert (await ask(url))[0] == 200
        await until(lambda: nodes["p"].count("release") == 1)
        (released,) = [body for call, body in nodes["p"].calls if call == "release"]
        assert len(released["request_ids"]) == 1
