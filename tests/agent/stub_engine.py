"""An engine that a test holds in its hand: work ends when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from workers.agent.engines.base import (
    DecodeFinished,
    DecodeJob,
    DecodeTimings,
    EngineError,
    EngineSink,
    EngineStatus,
    Handoff,
    Phase,
    PrefillJob,
    PrefillResult,
    PrefillTimings,
    RefChange,
    Segment,
    TokenChunk,
)


class StubEngine:
    """`release` lets all work end; `ended` lists (stage, how) of what ended."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.may_switch = asyncio.Event()
        self.may_switch.set()
        self.ended: list[tuple[str, str]] = []
        self.refs: list[tuple[list[RefChange], bool]] = []
        self.phases: list[Phase] = []
        self.queued_prefill = 0
        self.sink: EngineSink

    async def start(self, sink: EngineSink) -> None:
        self.sink = sink

    async def close(self) -> None:
        self.release.set()

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.ended.append(("prefill", "cancelled"))
            raise
        self.ended.append(("prefill", "done"))
        handoff = Handoff("n1", "http://127.0.0.1:9", "pool", job.chain, None, 0, 16, 0.0)
        return PrefillResult(job.request_id, 7, None, 0, 0, job.prompt_tokens, 0, PrefillTimings(0, 0, 0), handoff)

    async def decode(self, job: DecodeJob) -> AsyncIterator[TokenChunk | DecodeFinished]:
        try:
            yield TokenChunk([8], 1)
            await self.release.wait()
            if job.sampling.max_tokens == 99:
                raise EngineError(500, "engine-failed", "the engine failed")
            yield DecodeFinished("length", job.generated + 1, b"", DecodeTimings(0, 0, 0))
            self.ended.append(("decode", "done"))
        except (GeneratorExit, asyncio.CancelledError):
            self.ended.append(("decode", "closed"))
            raise

    def abort(self, request_id: str) -> bool:
        return request_id == "known"

    def release_handoff(self, request_id: str) -> bool:
        return False

    async def switch_phase(self, phase: Phase) -> None:
        self.phases.append(phase)
        await self.may_switch.wait()

    def status(self) -> EngineStatus:
        return EngineStatus(
            "m", 0, 0, self.queued_prefill, 0, 0, "pool", 10, 3, 1, 16, 8, 1000, 128, 500, {"fetches": 2}
        )

    def snapshot(self) -> Sequence[Segment]:
        return [Segment(None, b"a" * 16 + b"b" * 16), Segment(b"a" * 16, b"c" * 16)]

    def apply_refs(self, changes: Sequence[RefChange], reset: bool) -> None:
        self.refs.append((list(changes), reset))

    async def read_blocks(self, hashes: bytes) -> AsyncIterator[bytes]:
        raise EngineError(400, "no-kv-bytes", "this engine keeps no KV bytes")
        yield hashes
