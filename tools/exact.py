"""The same greedy tokens on every path: `make exact`, or `python -m tools.exact [--tiny] [--prompts N]`.

Runs real agent processes and sends each of 50 prompts (one token, one block and its edges, forks, thousands of tokens) on
twelve paths: computed whole, in small chunks beside others, from the node's own pool, from a peer's pool by shared memory, by
HTTP, prefilled on one node and decoded on another, the same with the context pushed while it is computed, after both nodes changed phase, continued after a kill -9 of the decoding
node's process, from the pool that the killed node left, and from the pool that a killed node found again when it came back. Prints a matrix of prompts and paths, how many tokens each path did not compute, and exits with 0 only
if every path gave every prompt the tokens of the first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from apps.kvcache.domain.hashing import extend_chain, root_hash, tail_hash
from workers.agent.shared_memory import SHARED_MEMORY_DIR

BLOCK = 16
ROOT = root_hash("exact", "f32", "exact")
OUTPUT_TOKENS = 12
AT_ONCE = 8
KILLED_AFTER_TOKENS = 5
EDGES = (1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 130, 143, 144, 145)
LONG = {"tiny": (400, 700), "default": (600, 2100)}
START_TIMEOUT_S = 120.0
PUSH_WAYS = {"shared-memory": "pushed", "http": "pushed, http"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids and the hashes of its blocks."""

    name: str
    ids: array[int]

    @property
    def chain(self) -> bytes:
        return extend_chain(ROOT, self.ids, BLOCK)

    @property
    def blocks(self) -> int:
        return len(self.ids) // BLOCK

    def body(self, request_id: str) -> dict[str, Any]:
        rest = self.ids[self.blocks * BLOCK :]
        tail = tail_hash(self.chain[-16:] or ROOT, rest) if rest else None
        return {
            "request_id": request_id,
            "token_ids": self.ids.tolist(),
            "prompt_tokens": len(self.ids),
            "chain_b64": _b64(self.chain),
            "tail_hash_b64": None if tail is None else _b64(tail),
            "sampling": {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True},
        }


@dataclass(slots=True)
class Answer:
    """What a path gave for one prompt. `spared_tokens`: prompt tokens that were not computed for it."""

    tokens: list[int]
    spared_tokens: int = 0


@dataclass(slots=True)
class Column:
    """One column of the matrix."""

    name: str
    answers: list[Answer] = field(default_factory=list)


class Refused(Exception):
    """A node's call that failed."""


class Agent:
    """One agent process and its nodes."""

    def __init__(self, spec_file: Path, nodes: Sequence[str], token: str) -> None:
        self.nodes = tuple(nodes)
        self._spec_file = spec_file
        self.log = spec_file.with_suffix(".log")
        self._token = token
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        environment = {**os.environ, "SWITCHYARD_AGENT_TOKEN": self._token}
        command = [sys.executable, "-m", "workers.agent", "--spec", str(self._spec_file)]
        log = self.log.open("ab")
        self._process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        log.close()

    async def stop(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)
            await self._process.wait()

    @property
    def dead(self) -> bool:
        return self._process is not None and self._process.returncode is not None


class Fleet:
    """All agents, and calls to their nodes."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        self._folder = folder
        self._tiny = tiny
        self._token = secrets.token_hex(16)
        self._urls: dict[str, str] = {}
        self.agents: list[Agent] = []
        self.http = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"}, timeout=aiohttp.ClientTimeout(total=600)
        )

    async def add(self, port: int, nodes: dict[str, dict[str, Any]], pool_blocks: int) -> Agent:
        """Start an agent with these nodes (name -> fields that differ) and wait until it serves."""
        model: dict[str, Any] = {"name": "exact", "context_tokens": 4096}
        if self._tiny:
            model["weights"] = "random"
        limits = {"kv_tokens": 4096 + AT_ONCE * 512, "prefill_chunk_tokens": 128, "fetch_deadline_s": 120}
        specs = []
        for name, fields in nodes.items():
            own = {**limits, **fields.get("limits", {})}
            common = {"name": name, "engine": "reference", "model": model, "pool_blocks": pool_blocks}
            specs.append({**common, "phase": "mixed", **fields, "limits": own})
        file = self._folder / f"agent-{port}.json"
        document = {"data_dir": str(self._folder / "data"), "port": port, "nodes": specs}
        file.write_text(json.dumps(document))
        agent = Agent(file, list(nodes), self._token)
        self.agents.append(agent)
        self._urls |= {name: f"http://127.0.0.1:{port}/nodes/{name}" for name in nodes}
        await self.started(agent)
        return agent

    async def started(self, agent: Agent) -> None:
        await agent.start()
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                if agent.dead:
                    raise SystemExit(f"exact: an agent ended at its start; its log: {agent.log}")
                with contextlib.suppress(aiohttp.ClientError):
                    await self.status(agent.nodes[0])
                    return
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        for agent in self.agents:
            await agent.stop(signal.SIGTERM)
        await self.http.close()

    async def status(self, node: str) -> dict[str, Any]:
        async with self.http.get(f"{self._urls[node]}/v1/status") as answer:
            document: dict[str, Any] = await answer.json()
            return document

    async def prefill(self, node: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post(f"{self._urls[node]}/v1/prefill", json=body) as answer:
            document: dict[str, Any] = await answer.json()
            if answer.status != 200:
                raise Refused(f"{node}: {document}")
            return document

    async def decode(self, node: str, prompt: Prompt, body: dict[str, Any]) -> AsyncIterator[int]:
        """Tokens as they come. `body` has `request_id`, `handoff` and `tokens` (those so far)."""
        async for event in self.decode_events(node, prompt, body):
            for token in event.get("ids", []):
                yield token

    async def decode_events(self, node: str, prompt: Prompt, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """As `decode`, whole events."""
        tokens = body.pop("tokens")
        job = prompt.body(body["request_id"]) | body
        job |= {"token_ids": [*job["token_ids"], *tokens], "generated": len(tokens), "root_b64": _b64(ROOT)}
        async with self.http.post(f"{self._urls[node]}/v1/decode", json=job) as answer:
            if answer.status != 200:
                raise Refused(f"{node}: {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                if event["type"] == "error":
                    raise Refused(f"{node}: {event}")
                yield event

    async def switch(self, node: str, phase: str, generation: int) -> None:
        body = {"phase": phase, "generation": generation, "drain_deadline_s": 60}
        async with self.http.put(f"{self._urls[node]}/v1/phase", json=body) as answer:
            if answer.status != 200:
                raise Refused(await answer.text())
        while (status := await self.status(node))["state"] != "ready" or status["phase"] != phase:
            await asyncio.sleep(0.02)

    async def source(self, node: str) -> dict[str, Any]:
        """Where a node's blocks are, as in a fetch."""
        pool = (await self.status(node))["pool"]["name"]
        return {"node": node, "url": self._urls[node], "pool": pool, "from_block": 0}


class Proof:
    """The paths, over one fleet."""

    def __init__(self, fleet: Fleet, prompts: Sequence[Prompt]) -> None:
        self._fleet = fleet
        self._prompts = prompts

    async def run(self, name: str, ask: Callable[[int, Prompt], Awaitable[Answer]], at_once: int = AT_ONCE) -> Column:
        """One path for all prompts, `at_once` of them at a time."""
        room = asyncio.Semaphore(at_once)
        began = time.monotonic()

        async def one(number: int, prompt: Prompt) -> Answer:
            async with room:
                return await ask(number, prompt)

        answers = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(self._prompts)))
        print(f"  {name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        return Column(name, list(answers))

    async def on(
        self,
        prefill: str,
        decode: str,
        prompt: Prompt,
        request_id: str,
        peer: dict[str, Any] | None = None,
        push: dict[str, Any] | None = None,
    ) -> Answer:
        """Prefill on one node, with blocks from `peer` where one is named, and decode on another (or the same); `push`:
        where the context is sent meanwhile."""
        body = prompt.body(request_id) | {"push": push}
        if peer is not None and prompt.blocks:
            body["fetch"] = peer | {"to_block": prompt.blocks}
        result = await self._fleet.prefill(prefill, body)
        tokens = [result["first_token_id"]]
        rest = {"request_id": request_id, "tokens": tokens, "handoff": result["handoff"]}
        tokens = [*tokens, *[token async for token in self._fleet.decode(decode, prompt, rest)]]
        return Answer(tokens, len(prompt.ids) - result["computed_tokens"])

    def from_peer(self, node: str, peer: dict[str, Any]) -> Callable[[int, Prompt], Awaitable[Answer]]:
        """Everything on `node`, with the blocks that `peer` has."""
        return lambda number, prompt: self.on(node, node, prompt, f"{node}{number}", peer)

    async def killed(self, node: str, other: str, agent: Agent) -> Column:
        """Decode on `node`; when every answer is under way its process is killed; each goes on elsewhere from what was sent."""
        sent: list[list[int]] = [[] for _ in self._prompts]
        results: list[dict[str, Any]] = []
        for number, prompt in enumerate(self._prompts):
            result = await self._fleet.prefill(other, prompt.body(f"k{number}"))
            sent[number].append(result["first_token_id"])
            results.append(result)
        under_way = asyncio.Event()

        async def until_killed(number: int, prompt: Prompt) -> None:
            body = {"request_id": f"k{number}", "tokens": list(sent[number]), "handoff": results[number]["handoff"]}
            with contextlib.suppress(aiohttp.ClientError, Refused):
                async for token in self._fleet.decode(node, prompt, body):
                    sent[number].append(token)
                    if sum(len(tokens) >= KILLED_AFTER_TOKENS for tokens in sent) >= len(sent) // 2:
                        under_way.set()

        began = time.monotonic()
        streams = [asyncio.create_task(until_killed(*entry)) for entry in enumerate(self._prompts)]
        await asyncio.wait_for(under_way.wait(), 600)
        await agent.stop(signal.SIGKILL)
        await asyncio.gather(*streams)
        cut = sum(len(tokens) < OUTPUT_TOKENS for tokens in sent)
        print(f"  killed: {cut} of {len(sent)} answers were cut, {time.monotonic() - began:.1f} s", file=sys.stderr)

        async def resume(number: int, prompt: Prompt) -> Answer:
            body = {"request_id": f"r{number}", "tokens": list(sent[number]), "handoff": results[number]["handoff"]}
            tokens = list(sent[number])
            if len(tokens) < OUTPUT_TOKENS:
                tokens += [token async for token in self._fleet.decode(other, prompt, body)]
            return Answer(tokens, len(prompt.ids) // BLOCK * BLOCK)

        return await self.run("kill -9", resume)


def make_prompts(count: int, tiny: bool) -> list[Prompt]:
    """Seeded prompts: the edges of blocks, forks of two trunks, some long ones, and lengths between."""
    generator = np.random.default_rng(11)

    def ids(tokens: int) -> array[int]:
        return array("I", generator.integers(100, 49000, tokens).tolist())

    prompts = [Prompt(f"{length} tokens", ids(length)) for length in EDGES]
    for trunk_tokens in (96, 150):
        trunk = ids(trunk_tokens)
        prompts += [Prompt(f"fork {trunk_tokens}+{rest}", trunk + ids(rest)) for rest in (1, 9, 16, 40, 70)]
    prompts += [Prompt(f"{length} tokens", ids(length)) for length in LONG["tiny" if tiny else "default"]]
    between = [int(length) for length in np.linspace(20, 240, max(0, count - len(prompts)))]
    prompts += [Prompt(f"{length} tokens", ids(length)) for length in between]
    return prompts[:count]


async def prove(folder: Path, tiny: bool, prompts: Sequence[Prompt], port: int) -> list[Column]:
    """All paths in order; the first is the reference."""
    blocks = sum(len(prompt.ids) + OUTPUT_TOKENS for prompt in prompts) // BLOCK + len(prompts) + 8
    fleet = Fleet(folder, tiny)
    paths: list[Column] = []
    killed_pools: list[str] = []
    try:
        nodes: dict[str, dict[str, Any]] = {
            "whole": {"limits": {"prefill_chunk_tokens": 4096}},
            "chunked": {"limits": {"prefill_chunk_tokens": 24}},
            "by-memory": {"transports": ["shared-memory"]},
            "by-http": {"transports": ["http"]},
        }
        senders = {f"sender-{way}": {"phase": "prefill", "transports": [way]} for way in PUSH_WAYS}
        others = {f"receiver-{way}": {"phase": "decode"} for way in PUSH_WAYS} | {
            "three": {"transports": ["shared-memory"]}
        }
        readers, first, second = await asyncio.gather(
            fleet.add(port, nodes, blocks),
            fleet.add(port + 1, {"one": {"phase": "prefill"}, **senders}, blocks),
            fleet.add(port + 2, {"two": {"phase": "decode"}, **others}, blocks),
        )
        proof = Proof(fleet, prompts)
        paths.append(await proof.run("whole", lambda n, p: proof.on("whole", "whole", p, f"w{n}"), at_once=1))
        paths.append(await proof.run("chunked", lambda n, p: proof.on("chunked", "chunked", p, f"c{n}")))
        paths.append(await proof.run("own pool", lambda n, p: proof.on("whole", "whole", p, f"o{n}")))
        for node, name in (("by-memory", "peer, memory"), ("by-http", "peer, http")):
            paths.append(await proof.run(name, proof.from_peer(node, await fleet.source("whole"))))
        await readers.stop(signal.SIGTERM)
        paths.append(await proof.run("P -> D", lambda n, p: proof.on("one", "two", p, f"pd{n}")))
        paths += [await pushed(fleet, proof, way) for way in PUSH_WAYS]
        await fleet.switch("one", "decode", 1)
        await fleet.switch("two", "prefill", 1)
        paths.append(await proof.run("switched", lambda n, p: proof.on("two", "one", p, f"s{n}")))
        await fleet.switch("two", "mixed", 2)
        await fleet.switch("one", "mixed", 2)
        left_by_one = await fleet.source("one")
        killed_pools += [(await fleet.source(node))["pool"] for node in first.nodes]
        paths.append(await proof.killed("one", "two", first))
        paths.append(await proof.run("dead peer", proof.from_peer("three", left_by_one)))
        await second.stop(signal.SIGKILL)
        held = blocks - 8
        await fleet.started(second)
        adopted = (await fleet.status("two"))["counters"]["adopted_blocks"]
        print(f"  restarted: {adopted:.0f} of at most {held} blocks adopted", file=sys.stderr)
        paths.append(await proof.run("adopted pool", lambda n, p: proof.on("two", "two", p, f"a{n}")))
    finally:
        await fleet.close()
        for pool in killed_pools:
            (SHARED_MEMORY_DIR / pool).unlink(missing_ok=True)
    return paths


async def pushed(fleet: Fleet, proof: Proof, way: str) -> Column:
    """Contexts sent to the decode node while they are computed, by `way`. Raises AssertionError where most blocks were fetched
    after all: then it was not the push that was proved."""
    sender, receiver = f"sender-{way}", f"receiver-{way}"
    target = {key: value for key, value in (await fleet.source(receiver)).items() if key != "from_block"}
    column = await proof.run(
        PUSH_WAYS[way], lambda n, prompt: proof.on(sender, receiver, prompt, f"{sender}{n}", push=target)
    )
    counters = (await fleet.status(receiver))["counters"]
    fetched = counters["fetched_blocks_shared_memory"] + counters["fetched_blocks_http"]
    received = counters["received_blocks"]
    print(
        f"  {column.name}: {received:.0f} blocks pushed, {fetched:.0f} fetched after all", file=sys.stderr, flush=True
    )
    assert received > fetched, "most blocks were fetched"
    return column


def matrix(prompts: Sequence[Prompt], paths: Sequence[Column]) -> tuple[str, int]:
    """The printed matrix (`=` same tokens as the first path, `X` others) and how many cells differ."""
    width = max(len(prompt.name) for prompt in prompts)
    lines = [" " * width + "  " + "  ".join(path.name for path in paths)]
    different = 0
    for number, prompt in enumerate(prompts):
        cells = []
        for path in paths:
            same = path.answers[number].tokens == paths[0].answers[number].tokens
            same = same and len(path.answers[number].tokens) == OUTPUT_TOKENS
            different += not same
            cells.append(("=" if same else "X").center(len(path.name)))
        lines.append(prompt.name.ljust(width) + "  " + "  ".join(cells))
    spared = [sum(answer.spared_tokens for answer in path.answers) for path in paths]
    row = "  ".join(str(count).center(len(path.name)) for count, path in zip(spared, paths, strict=True))
    lines.append("not computed".ljust(width) + "  " + row)
    return "\n".join(lines), different


def _b64(data: bytes) -> str:
    return b64encode(data).decode()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.exact", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the small seeded model instead of SmolLM2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--port", type=int, default=18_760, help="the first of three free ports")
    options = parser.parse_args()
    prompts = make_prompts(options.prompts, options.tiny)
    with tempfile.TemporaryDirectory(prefix="switchyard-exact-") as folder:
        paths = asyncio.run(prove(Path(folder), options.tiny, prompts, options.port))
    text, different = matrix(prompts, paths)
    print(text)
    distinct = len({tuple(answer.tokens) for answer in paths[0].answers})
    verdict = "identical on every path" if not different else f"{different} cells differ"
    print(f"{len(prompts)} prompts, {distinct} different answers, {len(paths)} paths: {verdict}")
    return 1 if different or distinct < len(prompts) // 2 else 0


if __name__ == "__main__":
    sys.exit(main())
