"""Small reference nodes for tests: the random 4-layer model, in-process, on temporary folders."""

from __future__ import annotations

import contextlib
from array import array
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from apps.kvcache.domain.hashing import extend_chain, root_hash, tail_hash
from workers.agent.engines.base import (
    DecodeFinished,
    DecodeJob,
    EngineContext,
    FetchSource,
    Handoff,
    IterationSample,
    PrefillJob,
    PrefillResult,
    Sampling,
    TokenChunk,
)
from workers.agent.engines.reference.engine import ReferenceEngine, build
from workers.agent.engines.reference.kv import DeviceKv
from workers.agent.engines.reference.model import LlamaModel, Part
from workers.agent.engines.reference.weights import load_weights
from workers.agent.spec import LimitsSpec, ModelSpec, NodeSpec

BLOCK = 16
CONTEXT = 2048
ROOT = root_hash("tiny", "f32", "tests")
TOKEN = "agent-token-for-tests"


class RecordingSink:
    """Keeps what an engine reports."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bytes | None, bytes]] = []
        self.samples: list[IterationSample] = []

    def stored(self, parent: bytes | None, chain: bytes) -> None:
        self.events.append(("stored", parent, chain))

    def removed(self, hashes: bytes) -> None:
        self.events.append(("removed", None, hashes))

    def cleared(self) -> None:
        self.events.append(("cleared", None, b""))

    def iteration(self, sample: IterationSample) -> None:
        self.samples.append(sample)

    def held(self) -> set[bytes]:
        """Blocks that the events say are readable."""
        held: set[bytes] = set()
        for kind, _, hashes in self.events:
            blocks = {hashes[start : start + 16] for start in range(0, len(hashes), 16)}
            held = held | blocks if kind == "stored" else held - blocks
        return held


def tiny_spec(name: str, pool_blocks: int = 256, phase: str = "mixed", **limits: Any) -> NodeSpec:
    model = ModelSpec(name="tiny", weights="random", context_tokens=CONTEXT)
    sizes = LimitsSpec(**{"kv_tokens": 4096, "prefill_chunk_tokens": 64, **limits})
    return NodeSpec(name=name, engine="reference", model=model, phase=phase, pool_blocks=pool_blocks, limits=sizes)


def context(data_dir: Path, models_dir: Path, url: str = "http://127.0.0.1:9") -> EngineContext:
    return EngineContext(data_dir, models_dir, url, TOKEN, 1.0, {})


@contextlib.asynccontextmanager
async def tiny_engine(
    data_dir: Path, models_dir: Path, name: str = "n1", sink: RecordingSink | None = None, **spec: Any
) -> AsyncIterator[ReferenceEngine]:
    """A started engine; after the test nothing of it may be left."""
    engine = build(tiny_spec(name, **spec), context(data_dir, models_dir))
    await engine.start(sink or RecordingSink())
    try:
        yield engine
        await settled(engine)
        engine.check_integrity()
    finally:
        await engine.close()


async def settled(engine: ReferenceEngine) -> None:
    """Wait until the engine holds no task."""
    import asyncio

    for _ in range(400):
        status = engine.status()
        if not (status.running_prefill + status.running_decode + status.queued_prefill + status.queued_decode):
            return
        await asyncio.sleep(0.005)
    raise AssertionError("tasks are left")


def prompt(tokens: int, seed: int = 0) -> array[int]:
    return array("I", np.random.default_rng(seed).integers(100, 49000, tokens).tolist())


def chain_of(ids: array[int]) -> bytes:
    return extend_chain(ROOT, ids, BLOCK)


def prefill_job(
    ids: array[int], request_id: str = "r", fetch: FetchSource | None = None, **sampling: Any
) -> PrefillJob:
    chain = chain_of(ids)
    rest = ids[len(ids) // BLOCK * BLOCK :]
    return PrefillJob(
        request_id=request_id,
        token_ids=ids,
        prompt_tokens=len(ids),
        chain=chain,
        tail_hash=tail_hash(chain[-16:] or ROOT, rest) if rest else None,
        fetch=fetch,
        sampling=Sampling(**{"max_tokens": 8, "ignore_eos": True, **sampling}),
    )


def decode_job(job: PrefillJob, generated: list[int], handoff: Handoff | None) -> DecodeJob:
    return DecodeJob(
        request_id=job.request_id,
        token_ids=job.token_ids + array("I", generated),
        prompt_tokens=job.prompt_tokens,
        generated=len(generated),
        handoff=handoff,
        sampling=job.sampling,
        root=ROOT,
    )


async def collect(engine: ReferenceEngine, job: DecodeJob) -> tuple[list[int], DecodeFinished]:
    tokens: list[int] = []
    async for item in engine.decode(job):
        if isinstance(item, TokenChunk):
            tokens += item.ids
        else:
            return tokens, item
    raise AssertionError("the stream ended without an end")


async def generate(
    prefill_on: ReferenceEngine, decode_on: ReferenceEngine, job: PrefillJob
) -> tuple[list[int], PrefillResult, DecodeFinished]:
    """Prefill on one engine, decode on another (or the same) by hand-over."""
    result = await prefill_on.prefill(job)
    tokens, end = await collect(decode_on, decode_job(job, [result.first_token_id], result.handoff))
    return [result.first_token_id, *tokens], result, end


def fetch_from(engine: ReferenceEngine, name: str, blocks: int) -> FetchSource:
    return FetchSource(name, "http://127.0.0.1:9", engine.status().pool_name, 0, blocks)


def greedy(models_dir: Path, ids: array[int], tokens: int, source: str = "random") -> list[int]:
    """The tokens that the model alone gives: whole prompt at once, one sequence, no pool."""
    weights = load_weights(source, models_dir)
    model = LlamaModel(weights, CONTEXT)
    kv = DeviceKv(weights.config, BLOCK, CONTEXT)
    table = kv.allocate(len(ids) + tokens)
    assert table is not None
    output: list[int] = []
    start, current = 0, list(ids)
    while len(output) < tokens:
        logits = model.forward(kv, [Part(table, start, current, True)])
        start += len(current)
        output.append(int(np.argmax(logits[0])))
        current = output[-1:]
    return output


def b64(data: bytes) -> str:
    return b64encode(data).decode()


def with_sampling(job: PrefillJob, **changes: Any) -> PrefillJob:
    return replace(job, sampling=replace(job.sampling, **changes))
