"""Signals on the requests of real client libraries."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web

from workers.harness.client import BranchError, HarnessClient
from workers.harness.hooks import in_branch, signalling_async_http_client, signalling_http_client

UNUSED = "http://127.0.0.1:9"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def signals(gateway) -> list[tuple[str, str, str]]:
    names = ("x-switchyard-branch", "x-switchyard-branch-version", "x-switchyard-branch-sequence")
    return [tuple(arrival.headers.get(name, "") for name in names) for arrival in gateway.arrivals]


async def test_openai_requests_carry_the_current_branch(gateway) -> None:
    client = openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="k", http_client=signalling_http_client(openai.DefaultHttpxClient)
    )

    def work() -> None:
        branch = HarnessClient(UNUSED, "k").branch("main")
        client.chat.completions.create(model="m", messages=MESSAGES)
        with in_branch(branch):
            client.chat.completions.create(model="m", messages=MESSAGES)
            with in_branch(branch.subagent("helper")):
                client.chat.completions.create(model="m", messages=MESSAGES)
            branch.version()
            client.chat.completions.create(model="m", messages=MESSAGES)

    await asyncio.to_thread(work)
    assert signals(gateway) == [("", "", ""), ("main", "0", "1"), ("helper", "0", "1"), ("main", "1", "2")]
    assert gateway.arrivals[2].headers["x-switchyard-parent"] == "main"


async def test_parallel_tasks_keep_their_own_branch(gateway) -> None:
    http_client = signalling_async_http_client(openai.DefaultAsyncHttpxClient)
    client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", http_client=http_client)
    harness = HarnessClient(UNUSED, "k")

    async def agent(name: str) -> None:
        with in_branch(harness.branch(name)):
            for _ in range(3):
                await client.chat.completions.create(model="m", messages=MESSAGES)

    async with client:
        await asyncio.gather(*(agent(f"a{number}") for number in range(4)))
    assert sorted(signals(gateway)) == sorted((f"a{a}", "0", str(n)) for a in range(4) for n in (1, 2, 3))


async def test_a_repeat_by_the_library_is_a_new_number(gateway) -> None:
    refusals = [web.json_response({"error": {"message": "later"}}, status=503)]
    gateway.answer = lambda arrival: refusals.pop() if refusals else None
    http_client = signalling_async_http_client(openai.DefaultAsyncHttpxClient)
    client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", http_client=http_client, max_retries=1)
    async with client:
        with in_branch(HarnessClient(UNUSED, "k").branch("main")):
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert signals(gateway) == [("main", "0", "1"), ("main", "0", "2")]


async def test_headers_given_by_hand_win(gateway) -> None:
    async with signalling_async_http_client(httpx.AsyncClient, base_url=gateway.url) as client:
        with in_branch(HarnessClient(UNUSED, "k").branch("main")):
            await client.post("/v1/chat/completions", json={}, headers={"x-switchyard-branch": "mine"})
    assert signals(gateway) == [("mine", "", "")]


async def test_an_ended_branch_is_not_used_by_mistake(gateway) -> None:
    branch = HarnessClient(UNUSED, "k").branch("main")
    branch.headers(end=True)
    async with signalling_async_http_client(httpx.AsyncClient, base_url=gateway.url) as client:
        with in_branch(branch), pytest.raises(BranchError, match="main has ended"):
            await client.post("/v1/chat/completions", json={})
    assert gateway.arrivals == []


async def test_the_hook_keeps_hooks_that_were_there(gateway) -> None:
    seen = []

    async def look(request: httpx.Request) -> None:
        seen.append(request.url.path)

    async with signalling_async_http_client(
        httpx.AsyncClient, base_url=gateway.url, event_hooks={"request": [look]}
    ) as client:
        with in_branch(HarnessClient(UNUSED, "k").branch("main")):
            await client.post("/v1/chat/completions", json={})
    assert seen == ["/v1/chat/completions"] and signals(gateway) == [("main", "0", "1")]


async def test_anthropic_requests_carry_the_current_branch(gateway) -> None:
    http_client = signalling_http_client(anthropic.DefaultHttpxClient)
    blocking = anthropic.Anthropic(base_url=gateway.url, api_key="k", http_client=http_client)
    async_http_client = signalling_async_http_client(anthropic.DefaultAsyncHttpxClient)
    client = anthropic.AsyncAnthropic(base_url=gateway.url, api_key="k", http_client=async_http_client)
    branch = HarnessClient(UNUSED, "k").branch("main")

    def work() -> None:
        with in_branch(branch):
            blocking.messages.create(model="m", max_tokens=5, messages=MESSAGES)

    await asyncio.to_thread(work)
    async with client:
        with in_branch(branch):
            await client.messages.create(model="m", max_tokens=5, messages=MESSAGES)
    assert signals(gateway) == [("main", "0", "1"), ("main", "0", "2")]
