"""The reference engine behind `engines/base.py`: event loop on one side, the engine's thread on the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TextIO
from urllib.parse import urlsplit

import aiohttp

from apps.kvcache.domain.hashing import extend_chain
from workers.agent.engines.base import (
    BlockLocations,
    DecodeFinished,
    DecodeJob,
    EngineContext,
    EngineError,
    EngineSink,
    EngineStatus,
    FetchSource,
    Handoff,
    Phase,
    PrefillJob,
    PrefillResult,
    PushReceived,
    RefChange,
    Segment,
    TokenChunk,
)
from workers.agent.engines.reference.fetcher import Fetcher
from workers.agent.engines.reference.gguf_file import ModelFileError
from workers.agent.engines.reference.kv import DeviceKv
from workers.agent.engines.reference.loop import EngineLoop
from workers.agent.engines.reference.model import LlamaModel
from workers.agent.engines.reference.pusher import Push, Pusher
from workers.agent.engines.reference.receiver import PushReceiver
from workers.agent.engines.reference.scheduler import Scheduler
from workers.agent.engines.reference.tasks import Emission, Task, decode_task, prefill_task, usable_handoff
from workers.agent.engines.reference.weights import Weights, load_weights
from workers.agent.mooncake import MooncakeEngine, MooncakeMissing, MooncakeTransport
from workers.agent.pool import KvPool, open_pool
from workers.agent.push import ByteStream, PushHead
from workers.agent.shared_memory import HASH_BYTES, PoolError, PoolGeometry
from workers.agent.spec import NodeSpec, SpecError
from workers.agent.transport import (
    AgentCalls,
    BlockSource,
    HttpTransport,
    SharedMemoryTransport,
    Transport,
    Transports,
)

FRAMES_AT_ONCE = 4


def build(spec: NodeSpec, context: EngineContext) -> ReferenceEngine:
    """The engine of one node; loads nothing yet. Raises SpecError for a model it cannot serve."""
    model = spec.model
    if model.tokens_per_id != 1 or model.ids_per_block != model.block_tokens:
        raise SpecError("nodes.model", "expected tokens_per_id 1 and ids_per_block = block_tokens")
    if model.dtype != "f32":
        raise SpecError("nodes.model.dtype", f"expected f32, got {model.dtype!r}")
    return ReferenceEngine(spec, context)


class ReferenceEngine:
    """One node's engine. `start` before anything else."""

    def __init__(self, spec: NodeSpec, context: EngineContext) -> None:
        self._spec = spec
        self._context = context
        self._tasks: set[Task] = set()
        self._fetches: dict[Task, asyncio.Task[None]] = {}
        self._closed = False
        self._mooncake: MooncakeTransport | None = None
        self._pool: KvPool
        self._loop: EngineLoop
        self._fetcher: Fetcher
        self._pusher: Pusher
        self._receiver: PushReceiver
        self._lock: TextIO
        self._session: aiohttp.ClientSession

    # --- life -------------------------------------------------------------------------------------------------

    async def start(self, sink: EngineSink) -> None:
        spec, context = self._spec, self._context
        try:
            weights: Weights = await asyncio.to_thread(
                load_weights, spec.model.weights or spec.model.tokenizer_path, context.models_dir, spec.model.seed
            )
        except ModelFileError as error:
            raise SpecError("nodes.model", str(error)) from None
        config = weights.config
        if spec.model.context_tokens > config.context_tokens:
            raise SpecError("nodes.model.context_tokens", f"expected at most {config.context_tokens}")
        block_tokens = spec.model.block_tokens
        geometry = PoolGeometry(config.layers, config.kv_heads, config.head_dim, block_tokens, weights.fingerprint)
        folder = context.data_dir / "nodes" / spec.name
        try:
            self._pool, self._lock = open_pool(
                folder, spec.name, geometry, spec.pool_blocks, spec.pool_policy, time.time, sink
            )
        except PoolError as error:
            raise SpecError("nodes", str(error)) from None
        self._session = aiohttp.ClientSession()
        calls = AgentCalls(context.token, self._session)
        try:
            transports = Transports(self._ways(geometry, calls), calls)
        except MooncakeMissing as error:
            await self._session.close()
            self._pool.close(unlink=True)
            self._lock.close()
            raise SpecError("nodes.transports", str(error)) from None
        limits = spec.limits
        self._transports = transports
        self._pusher = Pusher(self._pool, transports, spec.name, limits.fetch_deadline_s)
        self._receiver = PushReceiver(self._pool, limits.fetch_deadline_s, limits.fetch_bytes)
        self._fetcher = Fetcher(self._pool, transports, spec.name, limits.fetch_deadline_s, limits.fetch_bytes)
        self._kv = DeviceKv(config, block_tokens, limits.kv_tokens)
        self._loop = EngineLoop(
            LlamaModel(weights, spec.model.context_tokens),
            self._kv,
            self._pool,
            Scheduler(self._kv, limits.max_decode_batch, limits.prefill_chunk_tokens),
            sink,
            BlockSource(spec.name, context.base_url, self._pool.file.name),
            spec.model.context_tokens,
        )
        self._vocabulary = config.vocabulary
        self._loop.start()

    def _ways(self, geometry: PoolGeometry, calls: AgentCalls) -> list[Transport]:
        """The ways to read peers' pools that the node's start file names, in its order."""
        ways: dict[str, Callable[[], Transport]] = {
            "shared-memory": lambda: SharedMemoryTransport(geometry, calls),
            "http": lambda: HttpTransport(geometry, calls),
            "mooncake": lambda: self._start_mooncake(calls),
        }
        return [ways[name]() for name in self._spec.transports]

    def _start_mooncake(self, calls: AgentCalls) -> MooncakeTransport:
        host = urlsplit(self._context.base_url).hostname or "127.0.0.1"
        self._mooncake = MooncakeTransport(MooncakeEngine.of_process(host), self._pool.file, calls)
        return self._mooncake

    async def close(self) -> None:
        """End all work. The pool's file is deleted: only a crash leaves it behind, for peers and for the next start."""
        if self._closed or not hasattr(self, "_loop"):
            return
        self._closed = True
        for fetch in list(self._fetches.values()):
            fetch.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        await self._pusher.close()
        await asyncio.to_thread(self._loop.stop)
        await self._session.close()
        if self._mooncake is not None:
            self._mooncake.close()
        self._pool.close(unlink=True)
        self._lock.close()

    async def switch_phase(self, phase: Phase) -> None:
        """Nothing to do: one loop serves both phases, and the pool stays."""

    # --- work -------------------------------------------------------------------------------------------------

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        self._check(job.token_ids, job.prompt_tokens)
        future: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()

        def settle(item: Emission) -> None:
            if future.done():
                return
            if isinstance(item, PrefillResult):
                future.set_result(item)
            elif isinstance(item, EngineError):
                future.set_exception(item)

        task = prefill_task(job, self._emitter(settle), time.monotonic(), self._spec.model.block_tokens)
        fetch = None if job.fetch is None else self._fetcher.for_prefill(task, job.fetch)
        if job.push is not None:
            self._pusher.start(task, job.push, job.owner)
        self._submit(task, fetch)
        try:
            result = await future
        except BaseException:
            self._end_push(task, wanted=False)
            raise
        finally:
            self._forget(task)
        self._end_push(task, wanted=result.first_finish is None)
        return result

    def _end_push(self, task: Task, wanted: bool) -> None:
        if isinstance(task.push, Push):
            end = self._pusher.done if wanted else self._pusher.cancel
            end(task.push)

    async def fetch_ahead(self, job: PrefillJob, source: FetchSource) -> int:
        """Bring a prompt's blocks from a peer to the own pool without computing anything; answers how many came."""
        task = prefill_task(job, lambda _: None, time.monotonic(), self._spec.model.block_tokens)
        await self._fetcher.for_prefill(task, source)
        return task.fetched_blocks

    async def decode(self, job: DecodeJob) -> AsyncIterator[TokenChunk | DecodeFinished]:
        model = self._spec.model
        task_room = min(job.prompt_tokens + job.sampling.max_tokens, model.context_tokens)
        self._check(job.token_ids, max(len(job.token_ids), task_room))
        if len(job.token_ids) > model.context_tokens:
            raise EngineError(400, "context-length", f"expected at most {model.context_tokens} tokens", "token_ids")
        items: asyncio.Queue[Emission] = asyncio.Queue()
        chain = extend_chain(job.root, job.token_ids[:-1], model.ids_per_block)
        task = decode_task(
            job, chain, self._emitter(items.put_nowait), time.monotonic(), model.block_tokens, model.context_tokens
        )
        if job.generated >= job.sampling.max_tokens or len(job.token_ids) >= model.context_tokens:
            yield self._loop.finished_before_start(task)
            return
        handoff = usable_handoff(job.handoff, chain, model.block_tokens, len(job.token_ids) - 1)
        comes = handoff is not None or self._receiver.is_coming(job.request_id)
        self._submit(task, self._take_over(task, handoff) if comes else None)
        try:
            while True:
                item = await items.get()
                if isinstance(item, EngineError):
                    raise item
                if isinstance(item, TokenChunk | DecodeFinished):
                    yield item
                if isinstance(item, DecodeFinished):
                    return
        finally:
            self._forget(task)

    async def _take_over(self, task: Task, handoff: Handoff | None) -> None:
        """Bring a handed-over context here: what its prefill node is still pushing is waited for, the rest fetched."""
        began = time.monotonic()
        await self._receiver.settled(task.request_id)
        waited_s = time.monotonic() - began
        if handoff is not None:
            await self._fetcher.for_decode(task, handoff)
        task.fetch_s += waited_s
        former, task.pinned = task.pinned, self._pool.acquire(task.chain)
        self._pool.release(former)
        if handoff is None or handoff.node != self._spec.name:
            self._pool.release_handoff(task.request_id)

    def abort(self, request_id: str) -> bool:
        dropped = self._receiver.drop(request_id)
        found = [task for task in self._tasks if task.request_id == request_id and not task.ended]
        for task in found:
            self._drop(task)
        return bool(found) or dropped

    def release_handoff(self, request_id: str) -> bool:
        dropped = self._receiver.drop(request_id)
        return self._pool.release_handoff(request_id) or dropped

    def _check(self, ids: Sequence[int], device_tokens: int) -> None:
        if self._closed:
            raise EngineError(503, "shutting-down", "the node is stopping")
        if self._loop.failed:
            raise EngineError(503, "engine-failed", "the engine's loop ended; its log says why")
        if max(ids) >= self._vocabulary:
            raise EngineError(400, "bad-field", f"expected ids below {self._vocabulary}", "token_ids")
        if self._kv.blocks_for(device_tokens) > self._kv.capacity_blocks:
            most = self._kv.capacity_blocks * self._kv.block_tokens
            raise EngineError(400, "context-length", f"expected at most {most} tokens, prompt and output", "token_ids")

    def _emitter(self, take: Callable[[Emission], None]) -> Callable[[Emission], None]:
        """Bring emissions of the engine's thread to the event loop."""
        loop = asyncio.get_running_loop()

        def emit(item: Emission) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(take, item)

        return emit

    def _submit(self, task: Task, fetch: Coroutine[Any, Any, None] | None) -> None:
        """Queue a task. Blocks it will use are pinned from now on; it is ready once its fetch, if any, is over."""
        self._tasks.add(task)
        task.pinned = self._pool.acquire(task.chain)
        if fetch is None:
            task.ready = True
        else:
            self._fetches[task] = asyncio.get_running_loop().create_task(self._fetch(task, fetch))
        self._loop.submit(task)

    async def _fetch(self, task: Task, fetch: Coroutine[Any, Any, None]) -> None:
        try:
            await fetch
        finally:
            self._fetches.pop(task, None)
            task.ready = True
            self._loop.wake()

    def _drop(self, task: Task) -> None:
        fetch = self._fetches.get(task)
        if fetch is not None:
            fetch.cancel()
        self._loop.abort(task)

    def _forget(self, task: Task) -> None:
        """The caller has left, at the end or before."""
        self._tasks.discard(task)
        if not task.ended:
            self._drop(task)

    # --- views ------------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        scheduler, spec, pool = self._loop.scheduler, self._spec, self._pool
        counters: dict[str, float] = {
            "checksum_failures": pool.checksum_failures,
            "failed_fetches": self._fetcher.failed_fetches,
            "refused_pool_writes": pool.refused_writes,
            "adopted_blocks": pool.adopted_blocks,
            "engine_failures": self._loop.failures,
            "failed_pushes": self._pusher.failed_pushes,
            "broken_pushes": self._receiver.broken_pushes,
            "received_blocks": self._receiver.received_blocks,
        }
        for name, blocks in self._transports.fetched.items():
            counters[f"fetched_blocks_{name.replace('-', '_')}"] = blocks
        for name, blocks in self._transports.pushed.items():
            counters[f"pushed_blocks_{name.replace('-', '_')}"] = blocks
        return EngineStatus(
            model=spec.model.name,
            running_prefill=len(scheduler.running["prefill"]),
            running_decode=len(scheduler.running["decode"]),
            queued_prefill=len(scheduler.waiting["prefill"]),
            queued_decode=len(scheduler.waiting["decode"]),
            queued_tokens=scheduler.queued_tokens(),
            pool_name=pool.file.name,
            pool_capacity_blocks=pool.capacity_blocks,
            pool_used_blocks=pool.used_blocks,
            pool_referenced_blocks=pool.referenced_blocks,
            block_tokens=spec.model.block_tokens,
            max_decode_batch=spec.limits.max_decode_batch,
            kv_tokens=self._kv.capacity_blocks * self._kv.block_tokens,
            prefill_chunk_tokens=spec.limits.prefill_chunk_tokens,
            kv_free_tokens=self._kv.free_blocks * self._kv.block_tokens,
            counters=counters,
        )

    def snapshot(self) -> Sequence[Segment]:
        return self._pool.segments()

    def apply_refs(self, changes: Sequence[RefChange], reset: bool) -> None:
        self._pool.apply_refs(changes, reset)

    async def read_blocks(self, hashes: bytes) -> AsyncIterator[bytes]:
        blocks = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
        for start in range(0, len(blocks), FRAMES_AT_ONCE):
            for frame in await asyncio.to_thread(self._frames, blocks[start : start + FRAMES_AT_ONCE]):
                yield frame

    def locate_blocks(self, hashes: bytes) -> BlockLocations:
        mooncake = self._mooncake
        if mooncake is None:
            raise EngineError(400, "no-mooncake", "this node does not run Mooncake's transfer engine")
        blocks = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
        found = [(block, place) for block in blocks if (place := self._pool.locate(block)) is not None]
        located = [(block, mooncake.location(slot), value) for block, (slot, value) in found]
        return BlockLocations(int(mooncake.endpoint.rsplit(":", 1)[1]), located)

    def held_blocks(self, chain: bytes) -> int:
        return self._pool.lookup(chain)

    async def receive_push(self, head: PushHead, stream: ByteStream) -> PushReceived:
        if self._closed:
            raise EngineError(503, "shutting-down", "the node is stopping")
        return await self._receiver.receive(head, stream)

    def _frames(self, blocks: Sequence[bytes]) -> list[bytes]:
        return [frame for frame in map(self._pool.frame, blocks) if frame is not None]

    def check_integrity(self, idle: bool = True) -> None:
        """Raises AssertionError where device blocks or pool slots are lost; `idle`: no work may be under way."""
        if idle:
            assert not self._loop.scheduler.tasks(), "tasks are left"
            assert not self._fetches, "fetches are left"
            assert not self._receiver.under_way, "pushes are left"
        self._loop.scheduler.check_integrity()
        self._pool.check_integrity(idle)
