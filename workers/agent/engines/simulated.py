"""Simulated engine: a node that takes as long as the cost model says and keeps account of KV without having any.

Everything around it is real: the agent, its phases, its events, the pool's index and eviction, cancellation. Modelled are
iterations (`simulated_prefill_loop`, `simulated_decode_loop`), transfers (`simulated_network`) and memory. Output tokens have
id 0, so decoded KV has no hashes of its own and is not stored; prompts are, on the prefill and on the decode node.

Nodes of one process know each other and fetch from each other's pools; a fetch from a node of another process fails and is
computed instead. The engine wakes by one timer, at the next moment at which anything changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import get_args

from apps.kvcache.domain.eviction import EvictionPolicy
from workers.agent.engines.base import (
    BlockLocations,
    DecodeFinished,
    DecodeJob,
    EngineContext,
    EngineError,
    EngineSink,
    EngineStatus,
    IterationSample,
    Phase,
    PrefillJob,
    PrefillResult,
    PushReceived,
    RefChange,
    Segment,
    TokenChunk,
)
from workers.agent.engines.simulated_decode import DecodeStage
from workers.agent.engines.simulated_decode_loop import SEND_EVERY_S, DecodeLoop, Steps
from workers.agent.engines.simulated_node import DeviceMemory, SimulatedNode
from workers.agent.engines.simulated_pool import SimulatedPool
from workers.agent.engines.simulated_prefill import PrefillStage
from workers.agent.engines.simulated_prefill_loop import PrefillLoop
from workers.agent.engines.simulated_timing import timing_of
from workers.agent.push import ByteStream, PushHead
from workers.agent.spec import NodeSpec, SpecError

GRID_PLACES = 8
"""Nodes of a process send on grids that are this many parts of the interval apart, so that they do not wake together."""

EARLY_TIMER_S = 1e-6
"""Event loops may fire a timer this much too early; what is due so soon is due."""


def build(spec: NodeSpec, context: EngineContext) -> SimulatedEngine:
    """The engine of a start file's node. Raises SpecError naming the field."""
    return SimulatedEngine(spec, context)


class SimulatedEngine:
    """One simulated node behind the engine interface (`base.Engine`, which documents the public methods)."""

    def __init__(self, spec: NodeSpec, context: EngineContext) -> None:
        if spec.pool_policy not in get_args(EvictionPolicy):
            expected = f"expected one of {', '.join(get_args(EvictionPolicy))}, got {spec.pool_policy!r}"
            raise SpecError(f"nodes.{spec.name}.pool_policy", expected)
        timing = timing_of(spec, context.speed)
        pool = SimulatedPool(spec.pool_blocks, spec.model.block_tokens, spec.pool_policy)  # type: ignore[arg-type]
        device = DeviceMemory(spec.limits.kv_tokens)
        self.node = SimulatedNode(spec, timing, pool, device, context.base_url, context.engines)
        send_offset_s = len(context.engines) % GRID_PLACES * SEND_EVERY_S / GRID_PLACES
        self._prefill_loop = PrefillLoop(timing, spec.limits.prefill_chunk_tokens)
        self._decode_loop = DecodeLoop(timing, self._report_steps, send_offset_s)
        self._prefills = PrefillStage(self.node, self._prefill_loop)
        self._decodes = DecodeStage(self.node, self._decode_loop, self._prefill_loop)
        self._timer: asyncio.TimerHandle | None = None
        self._sink: EngineSink | None = None

    # --- life -------------------------------------------------------------------------------------------------

    async def start(self, sink: EngineSink) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = self.node.pool.sink = sink
        self.node.nudge = self._nudge

    async def close(self) -> None:
        if self.node.closed:
            return
        for request_id in {*self._prefills.calls, *self._decodes.calls}:
            self.abort(request_id)
        self.node.release_all_handoffs()
        self.node.closed = True
        self.node.agenda.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def switch_phase(self, phase: Phase) -> None:
        """A symmetric engine is switched by routing alone: nothing to do here, and the pool stays."""

    # --- work -------------------------------------------------------------------------------------------------

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        self._check_running()
        now = self._catch_up()
        call = self._prefills.begin(now, job, self._loop.create_future())
        self._go_on(now)
        try:
            return await call.future
        finally:
            self._prefills.drop(call)
            self._go_on(self._catch_up())

    async def decode(self, job: DecodeJob) -> AsyncIterator[TokenChunk | DecodeFinished]:
        self._check_running()
        now = self._catch_up()
        call = self._decodes.begin(now, job)
        self._go_on(now)
        try:
            while True:
                item = await call.items.get()
                yield item
                if isinstance(item, DecodeFinished):
                    return
        finally:
            now = self._catch_up()
            self._decodes.drop(now, call)
            self._go_on(now)

    def abort(self, request_id: str) -> bool:
        now = self._catch_up()
        known = self._prefills.abort(request_id)
        known = self._decodes.abort(now, request_id) or known
        known = self.node.release_handoff(request_id) or known
        self.node.counters["aborted_requests"] += known
        self._go_on(now)
        return known

    def release_handoff(self, request_id: str) -> bool:
        now = self._catch_up()
        released = self.node.release_handoff(request_id)
        if released:
            self._go_on(now)
        return released

    # --- views ------------------------------------------------------------------------------------------------

    def status(self) -> EngineStatus:
        node, limits = self.node, self.node.spec.limits
        return EngineStatus(
            model=node.spec.model.name,
            running_prefill=self._prefills.running,
            running_decode=len(self._decode_loop),
            queued_prefill=len(self._prefills.calls) - self._prefills.running,
            queued_decode=len(self._decodes.calls) - len(self._decode_loop),
            queued_tokens=self._prefill_loop.waiting_tokens,
            pool_name=node.pool_name,
            pool_capacity_blocks=node.pool.index.capacity_blocks,
            pool_used_blocks=node.pool.index.used_blocks,
            pool_referenced_blocks=node.pool.index.referenced_blocks,
            block_tokens=node.pool.block_tokens,
            max_decode_batch=limits.max_decode_batch,
            kv_tokens=limits.kv_tokens,
            prefill_chunk_tokens=limits.prefill_chunk_tokens,
            kv_free_tokens=node.device.free_tokens,
            counters={**node.counters, "evicted_blocks": node.pool.evicted_blocks},
        )

    def snapshot(self) -> Sequence[Segment]:
        return self.node.pool.segments()

    def apply_refs(self, changes: Sequence[RefChange], reset: bool) -> None:
        self.node.pool.apply_refs(changes, reset)

    async def read_blocks(self, hashes: bytes) -> AsyncIterator[bytes]:
        raise _no_bytes()
        yield hashes  # makes this a generator, as the interface asks

    def locate_blocks(self, hashes: bytes) -> BlockLocations:
        raise _no_bytes()

    def held_blocks(self, chain: bytes) -> int:
        raise _no_bytes()

    async def receive_push(self, head: PushHead, stream: ByteStream) -> PushReceived:
        raise _no_bytes()

    def check_integrity(self) -> None:
        """Raises AssertionError where device memory, queues or the pool do not add up."""
        held = self.node.kept_device_tokens()
        held += sum(call.device_tokens for call in self._prefills.calls.values())
        held += sum(call.device_tokens for call in self._decodes.calls.values())
        used = self.node.device.used_tokens
        assert held == used, f"device tokens: {used} booked, {held} held"
        known = {call.work for call in self._prefills.calls.values()}
        known |= {call.recompute for call in self._decodes.calls.values() if call.recompute is not None}
        works = {*self._prefill_loop.queue, *self._prefill_loop.under_way}
        assert works == known, f"prefill queue: {len(works)} prompts, {len(known)} of them waited for"
        self.node.pool.index.check_integrity()

    def _check_running(self) -> None:
        if self._sink is None or self.node.closed:
            raise EngineError(503, "not-running", "the engine is not running")

    def _report(self, sample: IterationSample) -> None:
        if self._sink is not None:
            self._sink.iteration(sample)

    def _report_steps(self, steps: Steps) -> None:
        for sample in steps.samples():
            self._report(sample)

    # --- time -------------------------------------------------------------------------------------------------

    def _catch_up(self) -> float:
        """Let everything happen that is due, in order; answers the time now."""
        now, agenda = self._loop.time(), self.node.agenda
        due_at = now + EARLY_TIMER_S
        while True:
            iteration, act_at = self._prefill_loop.iteration, agenda.next_at()
            if iteration is not None and iteration.ends_at <= min(due_at, act_at if act_at is not None else due_at):
                self._end_prefill_iteration(iteration.ends_at)
            elif act_at is not None and act_at <= due_at:
                self._start_prefill(agenda.run_next())
            else:
                break
        self._decode_loop.advance(now)
        self._decodes.deliver()
        return now

    def _end_prefill_iteration(self, at: float) -> None:
        complete, sample = self._prefill_loop.finish()
        self._report(sample)
        for work in complete:
            if not self._prefills.finish(at, work):
                self._decodes.finish_recompute(at, work)
        self._start_prefill(at)

    def _start_prefill(self, at: float) -> None:
        planned = self._prefill_loop.plan(at)
        if planned is not None:
            self._prefill_loop.start(planned, self._decode_loop.reserve_gap(at, planned.seconds))

    def _go_on(self, now: float) -> None:
        """Start what can start, then sleep until the next moment at which anything changes."""
        if self.node.closed:
            return
        self._start_prefill(now)
        self._decodes.admit(now)
        self._decodes.deliver()
        iteration = self._prefill_loop.iteration
        moments = (
            self.node.agenda.next_at(),
            iteration.ends_at if iteration is not None else None,
            self._decode_loop.next_deadline(),
        )
        wake_at = min((moment for moment in moments if moment is not None), default=None)
        if self._timer is not None:
            if self._timer.when() == wake_at:
                return
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            self._timer = self._loop.call_at(wake_at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._go_on(self._catch_up())

    def _nudge(self) -> None:
        """Another node freed memory here: see, once it is done, whether that lets a prompt start."""
        if self._prefill_loop.queue and not self.node.closed:
            self._loop.call_soon(lambda: self._go_on(self._catch_up()))


def _no_bytes() -> EngineError:
    return EngineError(400, "no-kv-bytes", "a simulated node keeps account of KV without having any")
