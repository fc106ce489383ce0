"""What a client is told when a request cannot be served: OpenAI's error shape, and headers that say when to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import EXPIRED_KEY, PAUSED_KEY, UNTRUSTED_KEY, World, document, prompt, until, world

REASON = "x-llm-d-request-dropped-reason"


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as running:
        yield running


def narrow(**band: Any) -> dict[str, Any]:
    """Configuration parts: one request at a time, and bands as given."""
    parts = document([])
    one = {"detector": "concurrency", "mode": "requests", "limit_per_node": 1}
    flow = parts["flow"] | {"prefill": one, "decode": one}
    return {"flow": flow, "bands": [item | band for item in parts["bands"]]}


BAD_FIELDS = [
    ({"model": None}, "model"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [1, -2]}, "prompt[1]"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": "words"}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2_000_000}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": "high"}, "top_p"),
    ({"stop": ["a", ""]}, "stop"),
    ({"n": 2}, "n"),
    ({"logprobs": 5}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"switchyard": {"prompt_tokens": 3}}, "switchyard.prompt_tokens"),
]


@pytest.mark.parametrize(("change", "param"), BAD_FIELDS, ids=[param for _, param in BAD_FIELDS])
async def test_a_bad_field_is_named(yard: World, change: dict[str, Any], param: str) -> None:
    response = await yard.complete(prompt() | change)
    error = (await response.json())["error"]
    assert (response.status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["code"] and error["message"]
    assert response.headers["x-request-id"]
    assert not yard.serving.yard.requests


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"\xff\xfe", b""])
async def test_a_body_that_is_no_object_is_refused(yard: World, raw: bytes) -> None:
    response = await yard.post("/v1/completions", raw)
    assert response.status == 400
    assert (await response.json())["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("secret", [None, "sk-guess", EXPIRED_KEY])
async def test_a_caller_without_a_valid_key_is_not_served(yard: World, secret: str | None) -> None:
    response = await yard.complete(secret=secret)
    assert response.status == 401 and response.headers["www-authenticate"] == "Bearer"
    assert (await response.json())["error"]["code"] == "invalid_api_key"


async def test_a_paused_tenant_and_a_forbidden_objective_are_403(yard: World) -> None:
    assert (await yard.complete(secret=PAUSED_KEY)).status == 403
    ignored = await yard.complete(secret=UNTRUSTED_KEY, x_llm_d_inference_objective="premium")
    assert ignored.status == 200, "the header of an untrusted key does not count"


async def test_an_unknown_model_path_or_method_has_its_status(yard: World) -> None:
    unknown = await yard.complete(prompt(model="other"))
    assert unknown.status == 404 and (await unknown.json())["error"]["param"] == "model"
    assert (await yard.post("/v1/nothing", {})).status == 404
    async with yard.http.get(yard.url + "/v1/completions") as response:
        assert response.status == 405 and (await response.json())["error"]["code"] == "method_not_allowed"


async def test_too_large_a_body_is_413(yard: World) -> None:
    response = await yard.post("/v1/completions", b" " * (33 * 1024 * 1024))
    assert response.status == 413
    assert (await response.json())["error"]["code"] == "request_too_large"


async def test_a_bad_header_is_named(yard: World) -> None:
    response = await yard.complete(x_switchyard_relation="cousin")
    assert response.status == 400 and (await response.json())["error"]["param"] == "x-switchyard-relation"
    response = await yard.complete(x_llm_d_inference_ttl="soon")
    assert response.status == 400 and (await response.json())["error"]["param"] == "x-llm-d-inference-ttl"


async def test_a_full_band_is_429_with_a_reason_and_when_to_come_back(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0, **narrow(max_requests=1)) as yard:
        running = [asyncio.create_task(yard.complete(prompt(64, 400, n * 1000))) for n in range(3)]
        await until(lambda: yard.serving.yard.flow.totals.waiting == 1)
        response = await yard.complete(prompt(4, 4, 9000))
        assert response.status == 429
        assert response.headers[REASON] == "rejected-saturated"
        assert 1 <= int(response.headers["retry-after"]) <= 30
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rejected-saturated")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await yard.idle()


async def test_waiting_longer_than_the_time_to_live_is_refused_also_for_a_stream(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0, **narrow(max_requests=5)) as yard:
        blocker = asyncio.create_task(yard.complete(prompt(2000, 400)))
        await until(lambda: yard.serving.yard.outcomes.counters.dispatched == 1)
        response = await yard.complete(prompt(4, 4, 9000, stream=True), x_llm_d_inference_ttl="200ms")
        assert (response.status, response.headers[REASON]) == (429, "rejected-ttl-expired")
        blocker.cancel()
        await asyncio.gather(blocker, return_exceptions=True)


async def test_without_a_healthy_node_a_request_waits_a_moment_then_is_503(tmp_path: Path) -> None:
    parts = document([])
    async with world(tmp_path, flow=parts["flow"] | {"empty_pool_ttl_s": 0.3}) as yard:
        await yard.agent.close()
        await until(lambda: not yard.serving.yard.fleet.nodes.taking("prefill"), 10)
        response = await yard.complete()
        assert (response.status, response.headers[REASON]) == (503, "rejected-no-endpoints")
        assert int(response.headers["retry-after"]) >= 1
        assert yard.gateway.snapshot()["verdict"]["level"] == "down"


async def test_an_error_in_a_stream_is_its_last_event(tmp_path: Path) -> None:
    """The node is lost after the first tokens and nobody takes over: the stream says so instead of just ending."""
    parts = document([])
    async with world(tmp_path, speed=1.0, flow=parts["flow"] | {"empty_pool_ttl_s": 0.3}) as yard:
        headers = {"Authorization": "Bearer sk-acme"}
        body = prompt(4, 5000, stream=True)
        async with yard.http.post(yard.url + "/v1/completions", json=body, headers=headers) as response:
            await response.content.readuntil(b"\n\n")
            await yard.agent.close()
            events = [line for line in (await response.text()).split("\n\n") if line]
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["code"] in ("rejected-no-endpoints", "upstream-failed")
        assert error["message"]
