"""A cluster to break: each reference node is a process of its own, the gateway runs in the test or as a process too.

The model is the small seeded one, so every answer is known beforehand: `Cluster.expected` computes it without a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.agent.reference_support import greedy
from tests.gateway.world import AGENT_TOKEN, KEY, NOBODY_REDIS, document, node, running_gateway
from tools.ports import free_port
from workers.gateway.gateway import Gateway
from workers.gateway.serving import Serving
from workers.gateway.text import GgufCodec
from workers.yard.requests import RequestState, Stage

ROOT = Path(__file__).parents[2]
HEADERS = {"Authorization": f"Bearer {KEY}"}
BLOCK = 16
CONTEXT = 2048
MODEL: dict[str, Any] = {
    "name": "tiny", "served_names": [], "tokenizer": "gguf", "tokenizer_path": None, "dtype": "f32", "block_tokens": BLOCK,
    "ids_per_block": BLOCK, "tokens_per_id": 1, "context_tokens": CONTEXT,
}  # fmt: skip
COEFFICIENTS = {"c0": 1e-3, "c1": 2e-4, "c2": 1e-9, "c3": 1e-7, "d0": 2e-3, "d1": 0.0, "d2": 5e-4}
NETWORK = {
    "kv_bytes_per_token": 8192, "peer_bandwidth_bytes_s": 2e9, "host_to_device_bytes_s": 4e9, "latency_s": 1e-3,
}  # fmt: skip
CALLS_S = 0.2  # three rounds of status calls on a machine that is not overloaded
PHASES = {"n1": "prefill", "n2": "prefill", "n3": "decode", "n4": "decode"}


def prompt_ids(tokens: int, seed: int) -> array[int]:
    return array("I", np.random.default_rng(seed).integers(100, 49000, tokens).tolist())


def start_process(arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


@dataclass
class Node:
    """One agent process. `url` is the node's own address."""

    name: str
    spec_file: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/nodes/{self.name}"

    def start(self, log: Path) -> None:
        environment = os.environ | {"SWITCHYARD_AGENT_TOKEN": AGENT_TOKEN}
        self.process = start_process(["-m", "workers.agent", "--spec", str(self.spec_file)], environment, log)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass
class Answer:
    """What a client saw. `events` are the stream's data lines but `[DONE]`; `done` whether that came."""

    status: int
    headers: dict[str, str]
    text: str = ""
    finish: str | None = None
    output_tokens: int = 0
    error: dict[str, Any] | None = None
    done: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def longest_silence_s(self) -> float:
        """The longest time between two events of the stream."""
        return max((later - earlier for earlier, later in itertools.pairwise(self.times)), default=0.0)


class Cluster:
    """Nodes as processes, a gateway in the test's process that knows them. Made by `cluster`."""

    def __init__(
        self, folder: Path, models_dir: Path, phases: dict[str, str], limits: dict[str, Any], pool_blocks: int
    ):
        self.folder = folder
        self.models_dir = models_dir
        self.phases = phases
        self.nodes: dict[str, Node] = {}
        self.url = ""
        self.gateway: Gateway
        self.http: aiohttp.ClientSession
        for name, phase in phases.items():
            self.nodes[name] = self._node(name, phase, limits, pool_blocks)
        self.document = document(
            [
                node(name, order, phase, "", engine="reference", coefficients=COEFFICIENTS, decode_limit=8)
                | {"url": self.nodes[name].url}
                for order, (name, phase) in enumerate(phases.items())
            ],
            model=MODEL,
            network=NETWORK,
        )
        self.document["flow"]["empty_pool_ttl_s"] = 20

    def _node(self, name: str, phase: str, limits: dict[str, Any], pool_blocks: int) -> Node:
        wanted = ("name", "block_tokens", "ids_per_block", "tokens_per_id", "context_tokens", "dtype")
        model = {key: MODEL[key] for key in wanted} | {"weights": "random"}
        sizes = {
            "max_decode_batch": 8,
            "prefill_chunk_tokens": 32,
            "kv_tokens": 16384,
            "fetch_deadline_s": 2.0,
        } | limits
        port = free_port()
        spec = {
            "data_dir": str(self.folder / name), "models_dir": str(self.models_dir), "port": port,
            "nodes": [
                {"name": name, "engine": "reference", "phase": phase, "model": model, "limits": sizes,
                 "pool_blocks": pool_blocks, "coefficients": COEFFICIENTS, "network": NETWORK}
            ],
        }  # fmt: skip
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(spec))
        return Node(name, file, port)

    # ---- nodes ------------------------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        for name in names or self.nodes:
            self.nodes[name].start(self.folder / f"{name}.log")

    async def heal(self) -> None:
        """Every node runs and takes work again."""
        for name, one in self.nodes.items():
            if one.alive:
                one.signal(signal.SIGCONT)
            else:
                self.start(name)
        await self.ready()

    async def ready(self, limit_s: float = 60.0) -> None:
        known = self.serving.yard.fleet.nodes

        async def boot_id(name: str) -> str:
            try:
                return str((await self.status(name))["boot_id"])
            except aiohttp.ClientError:
                return "away"

        async def well() -> bool:
            now = {name: await boot_id(name) for name in self.nodes}
            return all(
                entry.health == "ok" and entry.status is not None and entry.status.boot_id == now[entry.name]
                for entry in known
            )

        await until_true(well, limit_s)
        for entry in known:
            entry.breaker.succeeded()

    async def call(self, name: str, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """One call of a node's API; JSON, or text for /metrics."""
        headers = {"Authorization": f"Bearer {AGENT_TOKEN}"}
        method = method or ("GET" if body is None else "POST")
        async with self.http.request(method, self.nodes[name].url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await (answer.text() if path == "/metrics" else answer.json())

    async def status(self, name: str) -> dict[str, Any]:
        return dict(await self.call(name, "/v1/status"))

    def pool_file(self, status: dict[str, Any]) -> Path:
        return Path("/dev/shm") / status["pool"]["name"]

    @contextlib.contextmanager
    def by_tcp(self, name: str) -> Iterator[None]:
        """Peers cannot map the node's pool meanwhile, as if it ran on another host: they read it by its HTTP API."""
        kept = json.loads((self.folder / name / "nodes" / name / "pool.json").read_text())["name"]
        file, aside = Path("/dev/shm") / kept, Path("/dev/shm") / f"aside-{kept}"
        file.rename(aside)
        try:
            yield
        finally:
            aside.rename(file)

    # ---- the gateway ------------------------------------------------------------------------------------------

    @property
    def serving(self) -> Serving:
        return self.gateway.ready()

    def state(self, request_id: str) -> RequestState | None:
        return self.serving.yard.requests.get(request_id)

    def before(self, kind: str, request_id: str, act: Callable[[Any], None]) -> None:
        """Runs `act(command)` once, right before the gateway sends this request's `start_prefill` or `start_decode`."""
        upstream = self.serving.upstream
        send = getattr(upstream, kind)

        def intercepted(command: Any) -> None:
            if command.request_id == request_id:
                setattr(upstream, kind, send)
                act(command)
            send(command)

        setattr(upstream, kind, intercepted)

    # ---- requests ---------------------------------------------------------------------------------------------

    def body(self, ids: array[int], max_tokens: int, stream: bool = True, **fields: Any) -> dict[str, Any]:
        body = {
            "model": "tiny", "prompt": ids.tolist(), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": stream,
        }  # fmt: skip
        return body | ({"stream_options": {"include_usage": True}} if stream else {}) | fields

    async def ask(
        self, request_id: str, ids: array[int], max_tokens: int, stream: bool = True, url: str = "", **fields: Any
    ) -> Answer:
        """One completion, read to its end."""
        headers = HEADERS | {"x-request-id": request_id}
        target = (url or self.url) + "/v1/completions"
        async with self.http.post(target, json=self.body(ids, max_tokens, stream, **fields), headers=headers) as got:
            answer = Answer(got.status, dict(got.headers))
            if not stream or got.status != 200:
                return _whole(answer, await got.json())
            async for raw in got.content:
                _take_line(answer, raw)
            return answer

    def expected(self, ids: array[int], tokens: int) -> str:
        """The text of the model's own greedy answer."""
        decoder = _codec().decoder()
        output = greedy(self.models_dir, ids, tokens)
        return decoder.push(output, tokens) + decoder.flush()

    async def nothing_is_held(self, limit_s: float = 1.0, names: tuple[str, ...] = ()) -> float:
        """Waits until neither gateway nor nodes hold anything of any request; answers how long that took.

        On an overloaded machine the limit stretches as far as a few status calls do.
        """
        began = time.monotonic()
        for _ in range(3):
            await asyncio.gather(*(self.status(name) for name in names or self.nodes if self.nodes[name].alive))
        limit_s *= max(1.0, (time.monotonic() - began) / CALLS_S)
        async with asyncio.timeout(limit_s + 5):
            while True:
                left = [await self._held(name) for name in names or self.nodes if self.nodes[name].alive]
                if not any(left) and not self.serving.yard.requests and not self.serving.sessions:
                    break
                await asyncio.sleep(0.02)
        took_s = time.monotonic() - began
        assert took_s < limit_s, f"it took {took_s:.2f} s to free everything"
        return took_s

    async def _held(self, name: str) -> int:
        status = await self.status(name)
        tokens = status["limits"]["kv_tokens"] - status["kv_free_tokens"]
        return sum(status["running"].values()) + sum(status["queued"].values()) + status["handoffs"] + tokens

    async def orphans(self) -> float:
        """The orphan gauges of gateway and nodes, as /metrics tells them, added up."""
        async with self.http.get(self.url + "/metrics") as answer:
            texts = [await answer.text()]
        texts += [await self.call(name, "/metrics") for name, one in self.nodes.items() if one.alive]
        values = [
            float(line.rsplit(" ", 1)[1])
            for text in texts
            for line in text.splitlines()
            if line.startswith(("switchyard_orphans{", "switchyard_node_orphans{"))
        ]
        assert len(values) >= 2 * sum(one.alive for one in self.nodes.values())
        return sum(values)

    async def decoding(self, request_id: str, tokens: int) -> str:
        """Waits until the request decodes and has sent `tokens`; answers its decode node."""

        def far() -> bool:
            state = self.state(request_id)
            return state is not None and state.stage is Stage.DECODING and state.sent_tokens >= tokens

        await until(far)
        state = self.state(request_id)
        assert state is not None and state.decode_node is not None
        return state.decode_node

    @property
    def recoveries(self) -> int:
        """Broken attempts so far that were followed by another."""
        return sum(self.serving.yard.outcomes.recoveries.values())

    def assert_whole(self, answer: Answer, ids: array[int], tokens: int) -> None:
        """Exactly the model's own answer, once: nothing doubled, nothing missing."""
        assert (answer.status, answer.error, answer.done, answer.finish) == (200, None, True, "length")
        assert answer.output_tokens == tokens
        assert answer.text == self.expected(ids, tokens)


def _whole(answer: Answer, document: dict[str, Any]) -> Answer:
    answer.error = document.get("error")
    if answer.error is None:
        choice = document["choices"][0]
        answer.text, answer.finish = choice["text"], choice["finish_reason"]
        answer.output_tokens = document["usage"]["completion_tokens"]
    return answer


def _take_line(answer: Answer, raw: bytes) -> None:
    line = raw.strip()
    if not line.startswith(b"data: "):
        return
    if line == b"data: [DONE]":
        answer.done = True
        return
    event = json.loads(line[6:])
    answer.events.append(event)
    answer.times.append(time.monotonic())
    answer.error = event.get("error") or answer.error
    if event.get("usage"):
        answer.output_tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices") or ():
        answer.text += choice.get("text") or ""
        answer.finish = choice.get("finish_reason") or answer.finish


def _codec() -> GgufCodec:
    if not _codecs:
        _codecs.append(GgufCodec(None))
    return _codecs[0]


_codecs: list[GgufCodec] = []


async def until(condition: Callable[[], bool], limit_s: float = 40.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def until_true(condition: Callable[[], Any], limit_s: float = 40.0) -> None:
    """As `until`, for a condition that must be awaited."""
    async with asyncio.timeout(limit_s):
        while not await condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def cluster(
    folder: Path,
    models_dir: Path,
    phases: dict[str, str] | None = None,
    pool_blocks: int = 2048,
    limits: dict[str, Any] | None = None,
) -> AsyncIterator[Cluster]:
    """A running cluster. Afterwards nothing may be left: no request, no orphan, no process, no pool."""
    made = Cluster(folder, models_dir, phases or PHASES, limits or {}, pool_blocks)
    made.start()
    file = folder / "config.json"
    file.write_text(json.dumps(made.document))
    try:
        async with running_gateway(file, NOBODY_REDIS) as (gateway, url), aiohttp.ClientSession() as http:
            made.gateway, made.url, made.http = gateway, url, http
            await until(lambda: gateway.serving is not None, 30)
            await made.ready()
            yield made
            made.serving.yard.check_integrity()
    finally:
        for one in made.nodes.values():
            if one.alive:
                one.signal(signal.SIGCONT)
                one.signal(signal.SIGTERM)
        for one in made.nodes.values():
            if one.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.process.wait(10)
                if one.alive:
                    one.kill()
        for left in Path("/dev/shm").glob("switchyard-n[0-9]-*"):
            if _named_by(made, left.name):
                left.unlink()


def _named_by(made: Cluster, pool: str) -> bool:
    for name in made.nodes:
        kept = made.folder / name / "nodes" / name / "pool.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(kept.read_text())["name"] == pool:
                return True
    return False
