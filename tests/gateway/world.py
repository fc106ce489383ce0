"""A gateway and the node agent behind it, in one process, over real sockets. No Redis unless a test names one."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from workers.agent.process import AgentProcess
from workers.agent.spec import parse_spec
from workers.gateway.gateway import Gateway
from workers.gateway.http_api import build_front
from workers.gateway.serving import Serving

AGENT_TOKEN = "agent-token"
KEY = "sk-acme"
UNTRUSTED_KEY = "sk-plain"
EXPIRED_KEY = "sk-old"
PAUSED_KEY = "sk-paused"
NOBODY_REDIS = "redis://127.0.0.1:1/0"
COEFFICIENTS = {
    "c0": 0.055, "c1": 44.0e-6, "c2": 1.9e-10, "c3": 0.6e-6, "d0": 2.5e-3, "d1": 18.0e-3, "d2": 0.382e-3,
    "experts": 256, "experts_per_token": 8, "t_fwd": 4, "t_acc": 2.2,
}  # fmt: skip
NETWORK = {
    "kv_bytes_per_token": 50_000,
    "peer_bandwidth_bytes_s": 40.0e9,
    "host_to_device_bytes_s": 200.0e9,
    "latency_s": 0.002,
}
SYMBOLIC = {
    "name": "glm", "served_names": ["glm-5.2"], "tokenizer": "symbolic", "tokenizer_path": None, "dtype": "fp8",
    "block_tokens": 64, "ids_per_block": 1, "tokens_per_id": 64, "context_tokens": 1_000_000,
}  # fmt: skip
PHASES = {"n1": "prefill", "n2": "decode", "n3": "decode"}


def key(secret: str, **fields: Any) -> dict[str, Any]:
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return {"id": secret, "sha256": digest, "tenant": "acme", "trusted": False, "objectives": ["*"]} | fields


def document(nodes: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A configuration of the partition `test` with bands premium (100) and standard (0)."""
    band = {"fairness": "round-robin", "ordering": "fcfs", "max_requests": 100, "max_bytes": 10**9, "ttl_s": 30}
    stage = {"detector": "concurrency", "mode": "requests", "limit_per_node": 8}
    tenant = {"sharing_domain": "acme", "weight": 1.0, "paused": False, "default_objective": "standard"}
    return copy.deepcopy(
        {
            "version": 1, "partition": "test", "published_at": 1.7e9, "model": SYMBOLIC, "network": NETWORK,
            "nodes": nodes,
            "tenants": [{"name": "acme"} | tenant, {"name": "idle"} | tenant | {"paused": True}],
            "keys": [
                key(KEY, trusted=True),
                key(UNTRUSTED_KEY, objectives=["standard"]),
                key(EXPIRED_KEY, expires_at=1.0),
                key(PAUSED_KEY, tenant="idle"),
            ],
            "objectives": [
                {"name": "premium", "band": "premium", "slo_ttft_s": None, "ttl_s": None},
                {"name": "standard", "band": "standard", "slo_ttft_s": None, "ttl_s": None},
            ],
            "bands": [{"name": "premium", "priority": 100} | band, {"name": "standard", "priority": 0} | band],
            "default_band": band,
            "flow": {
                "max_requests": 1000, "max_bytes": 10**10, "default_ttl_s": 30, "empty_pool_ttl_s": 3,
                "displacement": True, "prefill": stage, "decode": dict(stage),
            },
            "routing": {"policy": "ttft"},
            "lease": {"multiple": 4.0, "ceiling_s": 3600, "floor_s": 60},
        }
        | changes
    )  # fmt: skip


def node(name: str, order: int, phase: str, url: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "order": order, "url": f"{url}/nodes/{name}", "engine": "simulated", "phase": phase,
        "generation": 0, "draining": False, "enabled": True, "hardware_class": "gb300",
        "coefficients": COEFFICIENTS, "decode_limit": 64,
    } | changes  # fmt: skip


def agent_spec(folder: Path, phases: dict[str, str], speed: float = 8.0, **changes: Any) -> dict[str, Any]:
    wanted = ("name", "block_tokens", "ids_per_block", "tokens_per_id", "context_tokens", "dtype")
    common = {
        "engine": "simulated",
        "model": {name: SYMBOLIC[name] for name in wanted},
        "pool_blocks": 20_000,
        "limits": {"max_decode_batch": 64, "prefill_chunk_tokens": 8192, "kv_tokens": 5_000_000},
        "coefficients": COEFFICIENTS,
        "network": NETWORK,
    } | changes
    nodes = [{"name": name, "phase": phase, **common} for name, phase in phases.items()]
    return {"data_dir": str(folder), "speed": speed, "nodes": nodes}


@dataclass
class World:
    """`url` is the gateway's; `document` the configuration it started with."""

    gateway: Gateway
    agent: AgentProcess
    url: str
    http: aiohttp.ClientSession
    document: dict[str, Any]
    config_file: Path

    @property
    def serving(self) -> Serving:
        return self.gateway.ready()

    async def post(self, path: str, body: Any, secret: str | None = KEY, **headers: str) -> aiohttp.ClientResponse:
        """Posts and reads the answer completely. Header names may be written with underscores."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if secret is not None:
            sent["Authorization"] = f"Bearer {secret}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(self.url + path, data=data, headers=sent)
        await response.read()
        return response

    async def complete(self, body: Any = None, **kwargs: Any) -> aiohttp.ClientResponse:
        return await self.post("/v1/completions", prompt() if body is None else body, **kwargs)

    def status(self, name: str) -> dict[str, Any]:
        return self.agent.nodes[name].status()

    async def idle(self) -> None:
        """Waits until no node holds a request and the yard has none."""
        await until(lambda: not self.serving.yard.requests and not any(_held(self.status(n)) for n in self.agent.nodes))


def _held(status: dict[str, Any]) -> int:
    return sum(status["running"].values()) + sum(status["queued"].values())


def prompt(blocks: int = 4, max_tokens: int = 20, first_id: int = 1, **fields: Any) -> dict[str, Any]:
    """A symbolic completion body of `blocks` full blocks and seven more tokens."""
    ids = list(range(first_id, first_id + blocks))
    body = {"model": "glm", "prompt": ids, "max_tokens": max_tokens, "switchyard": {"prompt_tokens": 64 * blocks + 7}}
    return body | fields


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_agent(spec: dict[str, Any]) -> AsyncIterator[AgentProcess]:
    process = AgentProcess(parse_spec(spec), AGENT_TOKEN)
    await process.start()
    try:
        yield process
    finally:
        await process.close()


@asynccontextmanager
async def running_gateway(file: Path, redis_url: str = NOBODY_REDIS) -> AsyncIterator[tuple[Gateway, str]]:
    gateway = Gateway("test", file, redis_url, AGENT_TOKEN)
    await gateway.start()
    front = build_front(gateway)
    port = await front.listen("127.0.0.1", 0)
    try:
        yield gateway, f"http://127.0.0.1:{port}"
    finally:
        await gateway.close()
        await front.close()


@asynccontextmanager
async def world(
    folder: Path,
    phases: dict[str, str] | None = None,
    speed: float = 8.0,
    spec: dict[str, Any] | None = None,
    redis_url: str = NOBODY_REDIS,
    **changes: Any,
) -> AsyncIterator[World]:
    """Three simulated nodes and a gateway that knows them all and is ready for work."""
    phases = phases or PHASES
    file = folder / "config.json"
    async with running_agent(spec or agent_spec(folder / "agent", phases, speed)) as agent:
        nodes = [node(name, order, phase, agent.base_url) for order, (name, phase) in enumerate(phases.items())]
        configuration = document(nodes, **changes)
        file.write_text(json.dumps(configuration))
        async with running_gateway(file, redis_url) as (gateway, url), aiohttp.ClientSession() as http:
            await until(lambda: gateway.serving is not None, 30)
            await until(lambda: all(known.health == "ok" for known in gateway.ready().yard.fleet.nodes))
            yield World(gateway, agent, url, http, configuration, file)
            if gateway.ready().yard.requests:
                await asyncio.sleep(0.2)
            gateway.ready().yard.check_integrity()
