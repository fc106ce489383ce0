"""The engine's one loop, in its own thread: admit, one chunk of prompts, one step of outputs, again.

It serves both phases alike. Aborts take effect between two iterations (between two layers, where nobody waits for any request
of the iteration any more) and free everything at once. Full blocks are written
through to the host pool as soon as they are computed, in both stages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from apps.planning.domain.cost_model import pairs
from workers.agent.engines.base import (
    HANDOFF_PIN_S,
    DecodeFinished,
    DecodeTimings,
    EngineError,
    EngineSink,
    FinishReason,
    Handoff,
    IterationSample,
    PrefillResult,
    PrefillTimings,
    Stage,
    TokenChunk,
    TokenLogprob,
)
from workers.agent.engines.reference.kv import DeviceKv
from workers.agent.engines.reference.model import LlamaModel, Part
from workers.agent.engines.reference.sampler import sample
from workers.agent.engines.reference.scheduler import Scheduler
from workers.agent.engines.reference.tasks import Task
from workers.agent.engines.reference.weights import Floats
from workers.agent.engines.reference.write_through import WriteThrough
from workers.agent.pool import KvPool
from workers.agent.shared_memory import HASH_BYTES
from workers.agent.transport import BlockSource

HOUSEKEEPING_S = 1.0
logger = structlog.get_logger("switchyard.agent")


class _Abandoned(Exception):
    """Nobody waits for any request of the iteration any more."""


class EngineLoop:
    """Runs the tasks given to `submit`. Methods are safe from any thread; a task's `emit` is called from the loop's."""

    def __init__(
        self,
        model: LlamaModel,
        kv: DeviceKv,
        pool: KvPool,
        scheduler: Scheduler,
        sink: EngineSink,
        here: BlockSource,
        context_tokens: int,
    ) -> None:
        self.scheduler = scheduler
        self.failures = 0
        self.failed = False
        self._model = model
        self._kv = kv
        self._pool = pool
        self._through = WriteThrough(pool, kv)
        self._sink = sink
        self._here = here
        self._context_tokens = context_tokens
        self._block_tokens = kv.block_tokens
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._restored: dict[Stage, int] = {"prefill": 0, "decode": 0}
        self._restore_s: dict[Stage, float] = {"prefill": 0.0, "decode": 0.0}
        self._thread = threading.Thread(target=self._run, name=f"engine-{here.node}", daemon=True)

    # --- from other threads -----------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, task: Task) -> None:
        self._call(lambda: self.scheduler.add(task))

    def wake(self) -> None:
        """A waiting task became ready."""
        self._call(lambda: None)

    def abort(self, task: Task) -> None:
        """End a task: it emits its abort, if it has not ended, once nothing of it is held any more."""
        task.aborted = True
        self._call(lambda: self._end_aborted(task))

    def stop(self) -> None:
        """End all tasks with an error and the thread with them. Blocks for at most one iteration."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def finished_before_start(self, task: Task) -> DecodeFinished:
        """The end of an output that has no token left to give."""
        return self._decode_finished(task, "length")

    def _call(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    # --- the loop ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("the engine's loop ended", node=self._here.node)
            self.failures += 1
            self.failed = True
        code, message = ("engine-failed", "the engine failed") if self.failed else ("shutting-down", "the node stopped")
        for task in self.scheduler.tasks():
            self._end(task, EngineError(503, code, message))

    def _serve(self) -> None:
        housekeeping_at = time.monotonic() + HOUSEKEEPING_S
        idle = True
        while not self._stopping:
            with self._wake:
                if idle and not self._inbox and not self._stopping:
                    self._wake.wait(max(0.0, housekeeping_at - time.monotonic()))
                actions = list(self._inbox)
                self._inbox.clear()
            for action in actions:
                action()
            if time.monotonic() >= housekeeping_at:
                housekeeping_at = time.monotonic() + HOUSEKEEPING_S
                self._pool.expire()
            self._admit()
            prefilled = self._guarded(self._prefill_iteration)
            decoded = self._guarded(self._decode_iteration)
            idle = not prefilled and not decoded

    def _guarded(self, iteration: Callable[[], list[Task]]) -> bool:
        """Run one iteration; a failure ends the tasks in it, not the loop."""
        batch: list[Task] = []
        try:
            batch = iteration()
        except Exception:
            logger.exception("engine iteration failed", node=self._here.node)
            self.failures += 1
            for running in list(self.scheduler.running.values()):
                for task in list(running):
                    self._end(task, EngineError(500, "engine-failed", "the engine failed on this batch"))
            return True
        return bool(batch)

    def _end(self, task: Task, last: PrefillResult | DecodeFinished | EngineError) -> None:
        """Free what a task holds, then emit its last item."""
        if task.ended:
            return
        task.ended = True
        self.scheduler.remove(task)
        pinned, task.pinned = task.pinned, b""
        self._pool.release(pinned)
        task.emit(last)

    def _end_aborted(self, task: Task) -> None:
        if task.stage == "prefill":
            self._pool.release_handoff(task.request_id)
        if task.stage == "prefill":
            self._end(task, EngineError(409, "aborted", "the request was aborted"))
        else:
            self._end(task, self._decode_finished(task, "abort"))

    # --- admission --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while (task := self.scheduler.admit()) is not None:
            began = time.monotonic()
            task.started_at = began
            try:
                self._restore(task)
            except Exception:
                logger.exception("restoring a context failed", node=self._here.node, request_id=task.request_id)
                self.failures += 1
                self._end(task, EngineError(500, "engine-failed", "the engine failed to restore the context"))
                continue
            self._restored[task.stage] += task.restored_tokens
            self._restore_s[task.stage] += time.monotonic() - began

    def _restore(self, task: Task) -> None:
        """Copy the longest prefix that the pool holds to the device; a hand-over's tail after it, if it fits."""
        table = task.table
        assert table is not None, "admitted without blocks"
        pinned = self._pool.acquire(task.chain)
        try:

            def read(index: int, block: Floats) -> None:
                self._kv.block(table, index)[...] = block

            loaded = self._pool.load(pinned, read)
        finally:
            self._pool.release(pinned)
            former, task.pinned = task.pinned, b""
            self._pool.release(former)
        tokens = loaded * self._block_tokens
        tail, task.tail = task.tail, None
        if tail is not None and loaded == tail.after_block:
            self._kv.block(table, loaded)[:, :, :, : tail.tokens] = tail.block[:, :, :, : tail.tokens]
            tokens += tail.tokens
        task.stored_blocks = loaded
        if task.push is not None:
            task.push.stored(loaded)
        # Even a wholly known prompt computes its last token: its logits are what is asked for.
        task.computed = task.restored_tokens = min(tokens, len(task.ids) - 1)
        task.recomputed_tokens = task.left_tokens

    # --- prefill ----------------------------------------------------------------------------------------------

    def _prefill_iteration(self) -> list[Task]:
        chunks = self.scheduler.next_chunks()
        if not chunks:
            return []
        began = time.monotonic()
        parts = []
        for task, start, end in chunks:
            assert task.table is not None, "running without blocks"
            parts.append(Part(task.table, start, task.ids[start:end], task.stage == "prefill" and end == task.wanted))
        writes = [write for task, _, end in chunks if (write := self._through.layered(task, end)) is not None]

        def layer_done(layer: int) -> None:
            if all(task.aborted for task, _, _ in chunks):
                raise _Abandoned
            for write in writes:
                write.layer(layer)

        try:
            logits = self._model.forward(self._kv, parts, layer_done)
            for write in writes:
                write.finish()
        except _Abandoned:
            return [chunk.task for chunk in chunks]
        finally:
            for write in writes:
                write.give_up()
        finished = [chunk.task for chunk, part in zip(chunks, parts, strict=True) if part.logits]
        for task, _, end in chunks:
            task.computed = end
            self._through.store(task)
        sampled = [
            sample(row, task.sampling, task.request_id, task.ids, task.prompt_tokens)
            for task, row in zip(finished, logits, strict=True)
        ]
        self._report("prefill", began, chunks_tokens=[(start, end) for _, start, end in chunks], requests=len(finished))
        for task, (token, logprob) in zip(finished, sampled, strict=True):
            if not task.aborted:
                self._finish_prefill(task, token, logprob)
        return [chunk.task for chunk in chunks]

    def _finish_prefill(self, task: Task, token: int, logprob: TokenLogprob | None) -> None:
        now = time.monotonic()
        if self._stops(task, token):
            finish = "stop"
        elif task.sampling.max_tokens == 1 or len(task.ids) + 1 >= self._context_tokens:
            finish = "length"
        else:
            finish = None
        fetched = min(task.fetched_blocks * self._block_tokens, task.restored_tokens)
        failed = (task.fetch_wanted_blocks - task.fetched_blocks) * self._block_tokens
        result = PrefillResult(
            request_id=task.request_id,
            first_token_id=token,
            first_finish=finish,  # type: ignore[arg-type]
            cached_tokens=task.restored_tokens - fetched,
            fetched_tokens=fetched,
            computed_tokens=len(task.ids) - task.restored_tokens,
            failed_fetch_tokens=max(0, min(failed, len(task.ids) - task.restored_tokens)),
            timings=PrefillTimings(task.started_at - task.enqueued_at, task.fetch_s, now - task.started_at),
            handoff=self._hand_over(task, wanted=finish is None),
            first_logprob=logprob,
        )
        self._end(task, result)

    def _hand_over(self, task: Task, wanted: bool) -> Handoff:
        """Pin the prompt's blocks and keep its tail for the decode node. What the pool could not keep is left out."""
        expires_at = time.time() + (HANDOFF_PIN_S if wanted else 0.0)
        blocks = (
            self._pool.hold_until(task.chain, expires_at, task.request_id) if wanted else self._pool.lookup(task.chain)
        )
        chain = task.chain[: blocks * HASH_BYTES]
        tail_tokens = len(task.ids) - blocks * self._block_tokens
        tail_hash = task.tail_hash if blocks == task.prompt_blocks and tail_tokens else None
        if tail_hash is not None:
            table = task.table
            assert table is not None, "finished without blocks"

            def write(block: Floats) -> None:
                block[...] = 0.0
                block[:, :, :, :tail_tokens] = self._kv.block(table, blocks)[:, :, :, :tail_tokens]

            parent = chain[-HASH_BYTES:] or bytes(HASH_BYTES)
            if not wanted or not self._pool.put_tail(
                tail_hash, parent, tail_tokens, write, expires_at, task.request_id
            ):
                tail_hash = None
        tokens_in_tail = tail_tokens if tail_hash is not None else 0
        if task.push is not None and wanted:
            task.push.finish(tail_hash, tokens_in_tail)
        return Handoff(
            node=self._here.node,
            url=self._here.url,
            pool=self._here.pool,
            chain=chain,
            tail_hash=tail_hash,
            tail_tokens=tokens_in_tail,
            context_tokens=blocks * self._block_tokens + tokens_in_tail,
            expires_at=expires_at,
        )

    # --- decode -----------------------------------------------------------------------------------------------

    def _decode_iteration(self) -> list[Task]:
        batch = self.scheduler.decoding()
        if not batch:
            return []
        began = time.monotonic()
        parts = []
        for task in batch:
            assert task.table is not None, "running without blocks"
            parts.append(Part(task.table, task.computed, task.ids[task.computed :], True))
        logits = self._model.forward(self._kv, parts)
        finished: list[tuple[Task, FinishReason]] = []
        chunks: list[tuple[Task, TokenChunk]] = []
        for task, row in zip(batch, logits, strict=True):
            task.computed = task.wanted = len(task.ids)
            self._through.store(task)
            token, logprob = sample(row, task.sampling, task.request_id, task.ids, task.prompt_tokens)
            if self._stops(task, token):
                finished.append((task, "stop"))
                continue
            task.ids.append(token)
            task.generated += 1
            chunks.append((task, TokenChunk([token], 1, None if logprob is None else [logprob])))
            if task.generated >= task.sampling.max_tokens or len(task.ids) >= self._context_tokens:
                finished.append((task, "length"))
        self._report(
            "decode", began, chunks_tokens=[(part.start, part.start + 1) for part in parts], requests=len(finished)
        )
        for task, chunk in chunks:
            if not task.aborted:
                task.emit(chunk)
        for task, reason in finished:
            if not task.aborted:
                self._end(task, self._decode_finished(task, reason))
        return batch

    def _decode_finished(self, task: Task, reason: FinishReason) -> DecodeFinished:
        now = time.monotonic()
        started = task.started_at or now
        stored = self._pool.lookup(task.chain) * HASH_BYTES
        return DecodeFinished(
            finish_reason=reason,
            output_tokens=task.generated,
            stored_chain=task.chain[task.prompt_blocks * HASH_BYTES : stored],
            timings=DecodeTimings(started - task.enqueued_at, task.fetch_s, now - started),
            recomputed_tokens=task.recomputed_tokens,
        )

    # --- both -------------------------------------------------------------------------------------------------

    def _stops(self, task: Task, token: int) -> bool:
        sampling = task.sampling
        ends = token in self._model.config.end_token_ids and not sampling.ignore_eos
        return ends or token in sampling.stop_token_ids

    def _report(self, stage: Stage, began: float, chunks_tokens: list[tuple[int, int]], requests: int) -> None:
        """One sample: `chunks_tokens` are the computed ranges of each request."""
        busy_s = time.monotonic() - began + self._restore_s[stage]
        restored = self._restored[stage]
        self._restored[stage], self._restore_s[stage] = 0, 0.0
        self._sink.iteration(
            IterationSample(
                phase=stage,
                t_uc=sum(end - start for start, end in chunks_tokens),
                pairs=float(sum(pairs(end - start, start) for start, end in chunks_tokens)),
                t_rst=restored,
                batch=len(chunks_tokens),
                busy_s=busy_s,
                requests=requests,
            )
        )
