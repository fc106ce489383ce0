"""Two reference agents, `p` (prefill) and `d` (decode), each behind its own port, and calls to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.agent.reference_support import ROOT, b64
from workers.agent.engines.base import PrefillJob
from workers.agent.engines.reference.engine import ReferenceEngine
from workers.agent.process import AgentProcess


@dataclass
class Agents:
    """Two agents, `p` (prefill) and `d` (decode), each behind its own port."""

    processes: dict[str, AgentProcess]
    session: aiohttp.ClientSession

    def engine(self, node: str) -> ReferenceEngine:
        engine = self.processes[node].nodes[node].engine
        assert isinstance(engine, ReferenceEngine)
        return engine

    def url(self, node: str, path: str) -> str:
        return f"{self.processes[node].base_url}/nodes/{node}/v1/{path}"

    async def target(self, node: str) -> dict[str, Any]:
        """Where a context is pushed to."""
        pool = (await self.status(node))["pool"]["name"]
        return {"node": node, "url": self.processes[node].base_url, "pool": pool}

    async def prefill(
        self, node: str, job: PrefillJob, fetch: dict[str, Any] | None = None, push: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        body = {
            "request_id": job.request_id,
            "token_ids": job.token_ids.tolist(),
            "prompt_tokens": job.prompt_tokens,
            "chain_b64": b64(job.chain),
            "tail_hash_b64": None if job.tail_hash is None else b64(job.tail_hash),
            "fetch": fetch,
            "push": push,
            "sampling": {"max_tokens": job.sampling.max_tokens, "ignore_eos": True},
            "generation": None,
        }
        async with self.session.post(self.url(node, "prefill"), json=body) as answer:
            document = await answer.json()
            assert answer.status == 200, document
            return document

    async def decode(
        self, node: str, job: PrefillJob, tokens: list[int], handoff: dict[str, Any] | None
    ) -> AsyncIterator[dict[str, Any]]:
        body = {
            "request_id": job.request_id,
            "token_ids": [*job.token_ids, *tokens],
            "prompt_tokens": job.prompt_tokens,
            "generated": len(tokens),
            "handoff": handoff,
            "sampling": {"max_tokens": job.sampling.max_tokens, "ignore_eos": True},
            "root_b64": b64(ROOT),
        }
        async with self.session.post(self.url(node, "decode"), json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    async def run(
        self, job: PrefillJob, prefill: str = "p", decode: str = "d", push: dict[str, Any] | None = None
    ) -> tuple[list[int], dict[str, Any]]:
        """Prefill on one node, decode on the other; the tokens and the stream's last event."""
        result = await self.prefill(prefill, job, push=push)
        tokens = [result["first_token_id"]]
        async for event in self.decode(decode, job, tokens[:1], result["handoff"]):
            assert event["type"] != "error", event
            tokens += event.get("ids", [])
        return tokens, event

    async def status(self, node: str) -> dict[str, Any]:
        async with self.session.get(self.url(node, "status")) as answer:
            document: dict[str, Any] = await answer.json()
            return document

    async def order(self, node: str, phase: str, generation: int) -> None:
        body = {"phase": phase, "generation": generation, "drain_deadline_s": 30}
        async with self.session.put(self.url(node, "phase"), json=body) as answer:
            assert answer.status == 200
        for _ in range(500):
            status = await self.status(node)
            if (status["phase"], status["state"]) == (phase, "ready"):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("no switch")

    async def idle(self) -> None:
        for node in self.processes:
            for _ in range(500):
                status = await self.status(node)
                if not (sum(status["running"].values()) + sum(status["queued"].values())):
                    break
                await asyncio.sleep(0.01)
            assert status["orphans"] == 0
            self.engine(node).check_integrity()
