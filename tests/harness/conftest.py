"""A tiny gateway that records what arrives and answers as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web


@dataclass
class Arrival:
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float
    answered_at_s: float = 0.0

    @property
    def branch(self) -> str:
        return self.headers["x-switchyard-branch"]


@dataclass
class FakeGateway:
    """`answer` decides each request's answer; `ended` are branches ended without a request."""

    arrivals: list[Arrival] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    announced: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    answer: Callable[[Arrival], web.Response | None] = lambda arrival: None
    answer_s: float = 0.0
    end_status: int = 200
    without_done: bool = False
    error_event: dict[str, Any] | None = None
    fewer_tokens: int = 0
    url: str = ""
    _runner: web.AppRunner | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, port: int = 0) -> None:
        self._runner = web.AppRunner(self.application(), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def arrived(self, count: int) -> None:
        while len(self.arrivals) < count:
            self._arrived.clear()
            await self._arrived.wait()

    def of(self, branch: str) -> list[Arrival]:
        return [arrival for arrival in self.arrivals if arrival.branch == branch]

    @property
    def branches(self) -> list[str]:
        return list(dict.fromkeys(arrival.branch for arrival in self.arrivals))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.authorizations.add(headers.get("authorization", ""))
        arrival = Arrival(headers, await request.json(), asyncio.get_running_loop().time())
        self.arrivals.append(arrival)
        self._arrived.set()
        refusal = self.answer(arrival)
        if refusal is not None:
            return refusal
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await self._event(stream, {"choices": [{"text": "0", "index": 0, "finish_reason": None}]})
        await asyncio.sleep(self.answer_s)
        if self.error_event is not None:
            await self._event(stream, {"error": self.error_event})
            return stream
        usage = {"completion_tokens": arrival.body["max_tokens"] - self.fewer_tokens}
        await self._event(stream, {"choices": [], "usage": usage})
        if not self.without_done:
            await stream.write(b"data: [DONE]\n\n")
        arrival.answered_at_s = asyncio.get_running_loop().time()
        return stream

    @staticmethod
    async def _event(stream: web.StreamResponse, document: dict[str, Any]) -> None:
        await stream.write(b"data: " + json.dumps(document).encode() + b"\n\n")

    async def end_branch(self, request: web.Request) -> web.Response:
        self.authorizations.add(request.headers.get("authorization", ""))
        self.ended.append(request.match_info["branch"])
        return web.json_response({"error": {"code": "x", "message": "told to"}}, status=self.end_status)

    async def announce_branch(self, request: web.Request) -> web.Response:
        self.announced.append((request.match_info["branch"], await request.json()))
        return web.json_response({"announced": True})

    async def messages(self, request: web.Request) -> web.Response:
        """Chat completions of OpenAI and messages of Anthropic: recorded, answered with one word."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        arrival = Arrival(headers, await request.json(), asyncio.get_running_loop().time())
        self.arrivals.append(arrival)
        refusal = self.answer(arrival)
        if refusal is not None:
            return refusal
        if request.path.endswith("/messages"):
            usage = {"input_tokens": 1, "output_tokens": 1}
            content = [{"type": "text", "text": "yes"}]
            return web.json_response(
                {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": content,
                 "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
            )  # fmt: skip
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    def application(self) -> web.Application:
        application = web.Application(client_max_size=16_000_000)
        application.router.add_post("/v1/completions", self.completions)
        application.router.add_post("/v1/branches/{branch}/end", self.end_branch)
        application.router.add_put("/v1/branches/{branch}", self.announce_branch)
        application.router.add_post("/v1/chat/completions", self.messages)
        application.router.add_post("/v1/messages", self.messages)
        return application


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    fake = FakeGateway()
    await fake.start()
    yield fake
    await fake.stop()
