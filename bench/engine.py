"""The reference engine on one core: `make bench-engine`, or `python -m bench.engine [--tiny] [--peer PYTHON]`.

Prefill and decode of SmolLM2 for one and for eight requests, through the engine as agents run it, and 1,000 tokens' KV fetched
from a peer's pool against computing them again. Seconds are CPU seconds of the process, for the machine may be shared; one BLAS
thread. `--peer` names a Python with `llama-cpp-python` or with `transformers`, `torch` and `gguf`, which then does the same with
the same model file on one thread (CPU seconds too); without one the baselines are null.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

from workers.agent.blas import choose_kernels

choose_kernels(os.environ)

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from apps.kvcache.domain.hashing import extend_chain, root_hash
from bench.report import report
from workers.agent.blas import kernel_name
from workers.agent.engines.base import (
    DecodeFinished,
    DecodeJob,
    EngineContext,
    FetchSource,
    IterationSample,
    PrefillJob,
    Sampling,
)
from workers.agent.engines.reference.engine import ReferenceEngine, build
from workers.agent.engines.reference.gguf_file import default_model_path
from workers.agent.spec import LimitsSpec, ModelSpec, NodeSpec

ROOT = root_hash("bench", "f32", "bench")
BLOCK = 16
PREFILL_ONE_TOKENS = 512
PREFILL_EACH_TOKENS = 96
CONTEXT_TOKENS = 96
DECODED_TOKENS = 24
FETCHED_TOKENS = 1008
BATCH = 8
DECODE_TARGET_RATIO = 4.0
FETCH_TARGET_RATIO = 50.0
PEER_TIMEOUT_S = 900


class Samples:
    """Takes the engine's reports; keeps its iterations."""

    def __init__(self) -> None:
        self.iterations: list[IterationSample] = []

    def stored(self, parent: bytes | None, chain: bytes) -> None: ...

    def removed(self, hashes: bytes) -> None: ...

    def cleared(self) -> None: ...

    def iteration(self, sample: IterationSample) -> None:
        self.iterations.append(sample)


class Bench:
    """One started engine and seeded prompts for it."""

    def __init__(self, engine: ReferenceEngine, samples: Samples) -> None:
        self.engine = engine
        self.samples = samples
        self._number = 0

    def job(self, tokens: int, seed: int, fetch: FetchSource | None = None, max_tokens: int = 1) -> PrefillJob:
        ids = prompt(tokens, seed)
        self._number += 1
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        chain = extend_chain(ROOT, ids, BLOCK)
        return PrefillJob(f"r{self._number}", ids, tokens, chain, None, fetch, sampling)

    async def prefill_s(self, lengths: list[int], seed: int) -> float:
        """CPU seconds to compute prompts that nobody has seen, all asked for at once."""
        began = time.process_time()
        await asyncio.gather(*(self.engine.prefill(self.job(n, seed + i)) for i, n in enumerate(lengths)))
        return time.process_time() - began

    async def decode_s(self, count: int, seed: int) -> float:
        """CPU seconds of DECODED_TOKENS steps of `count` requests together, their contexts being there."""
        jobs = [self.job(CONTEXT_TOKENS, seed + index, max_tokens=DECODED_TOKENS + 2) for index in range(count)]
        results = await asyncio.gather(*(self.engine.prefill(job) for job in jobs))
        streams = [
            self.engine.decode(
                DecodeJob(
                    job.request_id,
                    job.token_ids + array("I", [result.first_token_id]),
                    job.prompt_tokens,
                    1,
                    result.handoff,
                    job.sampling,
                    ROOT,
                )
            )
            for job, result in zip(jobs, results, strict=True)
        ]
        # The first step of each restores its context: it is not part of the time.
        await asyncio.gather(*(anext(stream) for stream in streams))
        began = time.process_time()

        async def finish(stream: AsyncIterator[Any]) -> None:
            async for item in stream:
                if isinstance(item, DecodeFinished):
                    return

        await asyncio.gather(*(finish(stream) for stream in streams))
        return time.process_time() - began


def prompt(tokens: int, seed: int) -> array[int]:
    return array("I", np.random.default_rng(seed).integers(100, 49000, tokens).tolist())


@contextlib.asynccontextmanager
async def engine(folder: Path, models: Path, name: str, tiny: bool) -> AsyncIterator[Bench]:
    model = ModelSpec(name="bench", weights="random" if tiny else None, context_tokens=4096)
    limits = LimitsSpec(kv_tokens=8192, prefill_chunk_tokens=128)
    spec = NodeSpec(name=name, engine="reference", model=model, pool_blocks=700, limits=limits)
    samples = Samples()
    built = build(spec, EngineContext(folder, models, "http://127.0.0.1:9", "unused", 1.0, {}))
    await built.start(samples)
    try:
        yield Bench(built, samples)
    finally:
        await built.close()


async def fetch_s(reader: Bench, source: Bench, seed: int) -> tuple[float, float]:
    """CPU seconds until 1,000 tokens' KV of a peer's pool is, checked, in the node's own; and until it is on the device."""
    pool = source.engine.status().pool_name
    fetch = FetchSource("first", "http://127.0.0.1:9", pool, 0, FETCHED_TOKENS // BLOCK)
    began = time.process_time()
    fetched = await reader.engine.fetch_ahead(reader.job(FETCHED_TOKENS + 1, seed), fetch)
    fetch_s = time.process_time() - began
    assert fetched == FETCHED_TOKENS // BLOCK, "the peer has all of it"
    began = time.process_time()
    result = await reader.engine.prefill(reader.job(FETCHED_TOKENS + 1, seed))
    restored_s = time.process_time() - began
    assert result.cached_tokens == FETCHED_TOKENS, "all of it was fetched"
    began = time.process_time()
    await reader.engine.prefill(reader.job(1, seed + 1))
    return fetch_s, fetch_s + restored_s - (time.process_time() - began)


async def measure(folder: Path, tiny: bool) -> dict[str, float]:
    """Tokens a CPU second, and seconds of fetching and computing."""
    found: dict[str, float] = {}
    async with engine(folder, folder, "first", tiny) as first:
        await first.prefill_s([32], 1)
        found["prefill 1"] = PREFILL_ONE_TOKENS / await first.prefill_s([PREFILL_ONE_TOKENS], 10)
        found["prefill 8"] = BATCH * PREFILL_EACH_TOKENS / await first.prefill_s([PREFILL_EACH_TOKENS] * BATCH, 20)
        found["decode 1"] = DECODED_TOKENS / min([await first.decode_s(1, 40 + seed) for seed in range(3)])
        found["decode 8"] = BATCH * DECODED_TOKENS / min([await first.decode_s(BATCH, 60 + 9 * n) for n in range(3)])
        found["compute"] = await first.prefill_s([FETCHED_TOKENS + 1], 100)
        async with engine(folder, folder, "second", tiny) as second:
            await second.prefill_s([32], 1)
            found["fetch"], found["fetch and restore"] = await fetch_s(second, first, 100)
    return found


def ask_peer(python: str) -> dict[str, Any]:
    """What the peer's engine does with the same model and sizes."""
    sizes = [PREFILL_ONE_TOKENS, CONTEXT_TOKENS, DECODED_TOKENS]
    command = [python, str(Path(__file__).with_name("engine_peer.py")), str(default_model_path()), *map(str, sizes)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PEER_TIMEOUT_S)
    if run.returncode:
        raise SystemExit(f"bench: the peer failed: {run.stderr.strip().splitlines()[-1:]}")
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the small seeded model instead of SmolLM2")
    parser.add_argument("--peer", help="a Python with llama-cpp-python or transformers")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as folder:
        found = asyncio.run(measure(Path(folder), options.tiny))
    peer: dict[str, Any] = {} if options.peer is None or options.tiny else ask_peer(options.peer)
    print(f"kernels {kernel_name()}; peer {peer.get('name', 'none')}", file=sys.stderr)
    for name in ("prefill 1", "prefill 8", "decode 1", "decode 8"):
        report(f"engine: {name} running", found[name], "tokens/CPU-s", baseline=peer.get(name))
    batching = found["decode 8"] / found["decode 1"]
    met = [
        report(
            "engine: decode of 8 over decode of 1",
            batching,
            "ratio",
            target=DECODE_TARGET_RATIO,
            baseline=peer["decode 8"] / peer["decode 1"] if peer.get("decode 8") else None,
        ),
        report(
            "engine: computing over fetching 1,000 tokens' KV",
            found["compute"] / found["fetch"],
            "ratio",
            target=FETCH_TARGET_RATIO,
        ),
    ]
    report("engine: fetching 1,000 tokens' KV", found["fetch"], "CPU-s", baseline=found["compute"])
    report("engine: the same, on to the device", found["fetch and restore"], "CPU-s", baseline=found["compute"])
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
