"""Virtual time and simulated nodes for the tests of the simulated engine."""

from __future__ import annotations

import asyncio
import selectors
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from apps.kvcache.domain.hashing import extend_chain, root_hash
from workers.agent.engines.base import (
    DecodeFinished,
    DecodeJob,
    EngineContext,
    FetchSource,
    Handoff,
    IterationSample,
    PrefillJob,
    Sampling,
    TokenChunk,
)
from workers.agent.engines.simulated import SimulatedEngine, build
from workers.agent.spec import LimitsSpec, ModelSpec, NodeSpec

Result = TypeVar("Result")
BLOCK_TOKENS = 64
ROOT = root_hash("m", "fp8", "tests")

GB300 = {
    "c0": 0.055, "c1": 44.0e-6, "c2": 1.9e-10, "c3": 0.6e-6, "d0": 2.5e-3, "d1": 18.0e-3, "d2": 0.382e-3,
    "experts": 256, "experts_per_token": 8, "t_fwd": 4, "t_acc": 2.2,
}  # fmt: skip
NETWORK = {
    "kv_bytes_per_token": 50_000,
    "peer_bandwidth_bytes_s": 40.0e9,
    "host_to_device_bytes_s": 200.0e9,
    "latency_s": 0.002,
}


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it; `late_s` fires every timer late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.clock_s = 1000.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> list[Any]:
                assert timeout is not None, "everybody waits and no timer is set"
                if timeout > 0:
                    loop.clock_s += timeout + late_s
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.clock_s


def in_virtual_time(work: Callable[[], Awaitable[Result]], late_s: float = 0.0) -> Result:
    loop = VirtualTimeLoop(late_s)
    try:
        return loop.run_until_complete(work())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@dataclass
class RecordingSink:
    samples: list[IterationSample] = field(default_factory=list)
    events: list[tuple[str, bytes | None, bytes]] = field(default_factory=list)

    def stored(self, parent: bytes | None, chain: bytes) -> None:
        self.events.append(("stored", parent, chain))

    def removed(self, hashes: bytes) -> None:
        self.events.append(("removed", None, hashes))

    def cleared(self) -> None:
        self.events.append(("cleared", None, b""))

    def iteration(self, sample: IterationSample) -> None:
        self.samples.append(sample)

    def of(self, phase: str) -> list[IterationSample]:
        return [sample for sample in self.samples if sample.phase == phase]


@dataclass
class Nodes:
    """Simulated nodes of one process. Use under `async with`: leaving checks that nothing was leaked."""

    names: tuple[str, ...] = ("n1",)
    speed: float = 1.0
    pool_blocks: int = 20_000
    limits: dict[str, Any] = field(default_factory=dict)
    coefficients: dict[str, float] = field(default_factory=dict)
    network: dict[str, float] = field(default_factory=dict)
    engines: dict[str, Any] = field(default_factory=dict)
    sinks: dict[str, RecordingSink] = field(default_factory=dict)

    async def __aenter__(self) -> Nodes:
        context = EngineContext(Path("unused"), Path("unused"), "http://agent", "token", self.speed, self.engines)
        for name in self.names:
            self.engines[name] = build(self.spec(name), context)
            self.sinks[name] = RecordingSink()
            await self.engines[name].start(self.sinks[name])
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.check_integrity()
        for engine in self.engines.values():
            await engine.close()
            engine.check_integrity()
            assert engine.node.device.used_tokens == 0

    def spec(self, name: str) -> NodeSpec:
        limits = {"max_decode_batch": 128, "prefill_chunk_tokens": 8192, "kv_tokens": 5_000_000, **self.limits}
        return NodeSpec(
            name=name,
            engine="simulated",
            model=ModelSpec("m", BLOCK_TOKENS, 1, BLOCK_TOKENS, 1_000_000),
            pool_blocks=self.pool_blocks,
            limits=LimitsSpec(**limits),
            coefficients={**GB300, **self.coefficients},
            network={**NETWORK, **self.network},
        )

    def __getitem__(self, name: str) -> SimulatedEngine:
        return self.engines[name]

    @property
    def one(self) -> SimulatedEngine:
        return self.engines[self.names[0]]

    @property
    def sink(self) -> RecordingSink:
        return self.sinks[self.names[0]]


def chain_of(first_id: int, blocks: int) -> bytes:
    return extend_chain(ROOT, array("I", range(first_id, first_id + blocks)), 1)


def prompt(
    request_id: str, tokens: int, first_id: int = 1, max_tokens: int = 100, fetch: FetchSource | None = None
) -> PrefillJob:
    """A prompt of `tokens` tokens whose blocks are numbered from `first_id`."""
    blocks = tokens // BLOCK_TOKENS
    ids = array("I", range(first_id, first_id + blocks))
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return PrefillJob(request_id, ids, tokens, extend_chain(ROOT, ids, 1), None, fetch, sampling)


def output(
    request_id: str, context_tokens: int, max_tokens: int, handoff: Handoff | None = None, first_id: int = 1
) -> DecodeJob:
    """The output of a prompt of `context_tokens` tokens; its first token exists already."""
    ids = array("I", range(first_id, first_id + context_tokens // BLOCK_TOKENS))
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return DecodeJob(request_id, ids, context_tokens, 1, handoff, sampling, ROOT)


def elsewhere(tokens: int) -> Handoff:
    """A context that waits on a node of another process."""
    return Handoff("far", "http://far", "pool", chain_of(1, tokens // 64), None, tokens % 64, tokens, 4e9)


@dataclass
class Stream:
    """What one decode call gave, with the time of each item."""

    chunks: list[tuple[float, int]]
    finished: DecodeFinished
    started_at: float
    finished_at: float

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.chunks)


async def read(engine: SimulatedEngine, job: DecodeJob) -> Stream:
    loop = asyncio.get_running_loop()
    chunks, started_at = [], loop.time()
    async for item in engine.decode(job):
        if isinstance(item, TokenChunk):
            assert item.ids == [0] * item.count
            chunks.append((loop.time(), item.count))
        else:
            return Stream(chunks, item, started_at, loop.time())
    raise AssertionError("the stream has no end")
