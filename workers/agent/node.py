"""One node: an engine, its phase, its event log and the reference counts pushed to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from workers.agent.custody import NOBODY, Custody, OrphanGauge
from workers.agent.engines.base import (
    DecodeFinished,
    DecodeJob,
    Engine,
    EngineError,
    EngineStatus,
    IterationSample,
    PrefillJob,
    PrefillResult,
    PushReceived,
    RefChange,
    TokenChunk,
)
from workers.agent.events import EventLog
from workers.agent.phase import (
    STAGES,
    PhaseMachine,
    PhaseName,
    PhaseRecord,
    PhaseRefused,
    StageName,
    load_record,
    save_record,
)
from workers.agent.push import ByteStream, PushHead
from workers.agent.spec import NodeSpec

ITERATIONS_EVERY_S = 0.5
CUSTODY_EVERY_S = 0.25
MAX_ITERATION_ROWS = 5000
logger = structlog.get_logger("switchyard.agent")


class NodeAgent:
    """Admission, phase and events of one node around its engine. Lives on one event loop."""

    def __init__(self, spec: NodeSpec, engine: Engine, data_dir: Path, now: Callable[[], float] = time.time) -> None:
        self.spec = spec
        self.name = spec.name
        self.engine = engine
        self.now = now
        self.boot_id = uuid.uuid4().hex
        self.started_at = now()
        self.events = EventLog(now)
        self.refs_seq: int | None = None
        self._record_path = data_dir / "nodes" / spec.name / "phase.json"
        record = _first_record(spec, load_record(self._record_path))
        self.phase = PhaseMachine(record.phase, record.generation)
        self.custody = Custody(spec.limits.lease_s)
        self._orphans = OrphanGauge()
        self._busy_since: float | None = None
        self._rows: list[list[Any]] = []
        self._phase_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Keep the phase on disk, start the engine in it, then publish iterations until `close`."""
        self.events.bind(asyncio.get_running_loop())
        save_record(self._record_path, self.phase.record)
        await self.engine.start(self)
        await self.engine.switch_phase(self.phase.phase)
        self._report_phase()
        self._spawn(self._publish_iterations())
        self._spawn(self._keep_custody())

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._phase_timer is not None:
            self._phase_timer.cancel()
        await self.engine.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- engine sink (any thread) -----------------------------------------------------------------------------

    def stored(self, parent: bytes | None, chain: bytes) -> None:
        self.events.append("stored", parent_b64=None if parent is None else _b64(parent), chain_b64=_b64(chain))

    def removed(self, hashes: bytes) -> None:
        self.events.append("removed", hashes_b64=_b64(hashes))

    def cleared(self) -> None:
        self.events.append("cleared")

    def iteration(self, sample: IterationSample) -> None:
        self._busy_since = None
        if len(self._rows) < MAX_ITERATION_ROWS:
            self._rows.append(list(sample))

    async def _publish_iterations(self) -> None:
        while True:
            await asyncio.sleep(ITERATIONS_EVERY_S)
            rows, self._rows = self._rows, []
            if rows:
                self.events.append("iterations", rows=rows)

    async def _keep_custody(self) -> None:
        """Gives up what nobody will come back for, and watches that the engine moves on."""
        while True:
            began = self.now()
            await asyncio.sleep(CUSTODY_EVERY_S)
            self.custody.overslept(max(0.0, self.now() - began - CUSTODY_EVERY_S))
            given_up = self.custody.give_up(self.now())
            for request_id in given_up.work:
                logger.warning("the gateway fell silent; its request is aborted", node=self.name, request_id=request_id)
                self.engine.abort(request_id)
            for request_id in given_up.handoffs:
                self.engine.release_handoff(request_id)
            engine = self.engine.status()
            running = engine.running_prefill + engine.running_decode
            if not running:
                self._busy_since = None
            elif self._busy_since is None:
                self._busy_since = self.now()
            self._orphans.observe(self.now(), self._surplus(engine))

    # --- work -------------------------------------------------------------------------------------------------

    async def prefill(self, job: PrefillJob, generation: int | None, owner: str = NOBODY) -> PrefillResult:
        """Run a prompt here. Raises EngineError: 409 by phase, 409 `duplicate-request`, 429 `queue-full`."""
        with self._admitted("prefill", job.request_id, generation, owner):
            try:
                result = await self.engine.prefill(job)
            except asyncio.CancelledError:
                self.engine.release_handoff(job.request_id)
                raise
            if result.first_finish is None:
                self.custody.keep_handoff(job.request_id, owner, result.handoff.expires_at)
            return result

    async def decode(
        self, job: DecodeJob, generation: int | None, owner: str = NOBODY
    ) -> AsyncIterator[TokenChunk | DecodeFinished]:
        """Stream an output from here. Raises as `prefill`, before the first item."""
        with self._admitted("decode", job.request_id, generation, owner):
            pushed_here = job.handoff is None or job.handoff.node != self.name
            if pushed_here:
                self.custody.drop_handoff(job.request_id)  # the decode itself keeps it from now on
            try:
                async with contextlib.aclosing(self.engine.decode(job)) as items:  # type: ignore[type-var]
                    async for item in items:
                        yield item
            finally:
                if pushed_here:
                    self.release_handoff(job.request_id)

    def held_for_push(self, chain: bytes) -> int:
        """Leading blocks of `chain` that a push need not bring. Raises EngineError where no decode may be handed over here."""
        self._admit_phase("decode", None)
        return self.engine.held_blocks(chain)

    async def receive_push(self, head: PushHead, stream: ByteStream) -> PushReceived:
        """Take in a context that its prefill node pushes here and keep it until its decode comes. Raises EngineError."""
        self._admit_phase("decode", None)
        received = await self.engine.receive_push(head, stream)
        if not self.custody.has("decode", head.request_id):
            self.custody.keep_handoff(head.request_id, head.owner, received.expires_at)
        return received

    @contextlib.contextmanager
    def _admitted(self, stage: StageName, request_id: str, generation: int | None, owner: str) -> Iterator[None]:
        self.admit(stage, request_id, generation)
        self.custody.begin(stage, request_id, owner)
        try:
            yield
        finally:
            self.custody.end(stage, request_id)
            self._advance_phase()

    def admit(self, stage: StageName, request_id: str, generation: int | None) -> None:
        """Raises EngineError where this work may not start now; changes nothing."""
        self._admit_phase(stage, generation)
        if self.custody.has(stage, request_id):
            raise EngineError(409, "duplicate-request", f"{stage} of this request is already here", "request_id")
        status = self.engine.status()
        queued = status.queued_prefill if stage == "prefill" else status.queued_decode
        if queued >= self.spec.limits.max_queue:
            raise EngineError(429, "queue-full", f"{queued} requests wait for {stage} on this node")

    def _admit_phase(self, stage: StageName, generation: int | None) -> None:
        try:
            self.phase.admit(stage, generation)
        except PhaseRefused as refused:
            raise EngineError(409, refused.code, refused.message) from None

    def abort(self, request_id: str) -> bool:
        """End the request's work and give up its hand-over. False where nothing of it was here."""
        handed_over = self.release_handoff(request_id)
        return self.engine.abort(request_id) or handed_over

    def release_handoff(self, request_id: str) -> bool:
        """Its context is fetched, or nobody will fetch it: nothing is kept for it any more."""
        known = self.custody.drop_handoff(request_id)
        return self.engine.release_handoff(request_id) or known

    # --- phase ------------------------------------------------------------------------------------------------

    def order_phase(self, phase: PhaseName, generation: int, drain_deadline_s: float) -> dict[str, Any]:
        """Take a phase order; answers what the node now is. Raises EngineError 409 `stale-generation`."""
        try:
            changed = self.phase.order(self.now(), phase, generation, drain_deadline_s)
        except PhaseRefused as refused:
            raise EngineError(409, refused.code, refused.message, "generation") from None
        if changed:
            save_record(self._record_path, self.phase.record)
            logger.info("phase ordered", node=self.name, phase=phase, generation=generation)
            self._report_phase()
            self._advance_phase()
        return self.phase_view()

    def phase_view(self) -> dict[str, Any]:
        machine = self.phase
        return {
            "phase": machine.phase,
            "target_phase": machine.target,
            "state": machine.state,
            "generation": machine.generation,
        }

    def _advance_phase(self) -> None:
        before = (self.phase.phase, self.phase.state)
        target = self.phase.advance(self.now(), {stage: self.custody.count(stage) for stage in STAGES})
        if (self.phase.phase, self.phase.state) != before:
            self._report_phase()
        if target is not None:
            self._spawn(self._switch(target))
        self._arm_phase_timer()

    async def _switch(self, target: PhaseName) -> None:
        await self.engine.switch_phase(target)
        self.phase.switched(self.now(), target)
        logger.info("phase switched", node=self.name, phase=target, generation=self.phase.generation)
        self._report_phase()
        self._advance_phase()

    def _arm_phase_timer(self) -> None:
        if self._phase_timer is not None:
            self._phase_timer.cancel()
            self._phase_timer = None
        deadline = self.phase.next_deadline()
        if deadline is not None:
            delay_s = max(0.0, deadline - self.now()) + 0.001
            self._phase_timer = asyncio.get_running_loop().call_later(delay_s, self._advance_phase)

    def _report_phase(self) -> None:
        self.events.append("phase", **self.phase_view())

    # --- views ------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        engine = self.engine.status()
        last = self.phase.last_switch
        now = self.now()
        return {
            "node": self.name,
            "engine": self.spec.engine,
            "model": engine.model,
            "boot_id": self.boot_id,
            "started_at": self.started_at,
            **self.phase_view(),
            "running": {"prefill": engine.running_prefill, "decode": engine.running_decode},
            "queued": {"prefill": engine.queued_prefill, "decode": engine.queued_decode},
            "queued_tokens": engine.queued_tokens,
            "pool": {
                "name": engine.pool_name,
                "capacity_blocks": engine.pool_capacity_blocks,
                "used_blocks": engine.pool_used_blocks,
                "referenced_blocks": engine.pool_referenced_blocks,
                "block_tokens": engine.block_tokens,
            },
            "limits": {
                "max_decode_batch": engine.max_decode_batch,
                "kv_tokens": engine.kv_tokens,
                "prefill_chunk_tokens": engine.prefill_chunk_tokens,
            },
            "kv_free_tokens": engine.kv_free_tokens,
            "event_seq": self.events.last_seq,
            "orphans": self._orphans.observe(now, self._surplus(engine)),
            "held": self.custody.listing(),
            "handoffs": self.custody.handoffs,
            "leases_ended": self.custody.leases_ended,
            "stalled_s": 0.0 if self._busy_since is None else round(max(0.0, now - self._busy_since), 3),
            "last_switch": None if last is None else asdict(last),
            "counters": engine.counters,
        }

    def _surplus(self, engine: EngineStatus) -> int:
        held = engine.running_prefill + engine.running_decode + engine.queued_prefill + engine.queued_decode
        return held - sum(self.custody.count(stage) for stage in STAGES)

    def snapshot(self) -> dict[str, Any]:
        """The pool's blocks and the newest event they surely include (events after it may be included too)."""
        seq = self.events.last_seq
        segments = [
            {"parent_b64": None if parent is None else _b64(parent), "chain_b64": _b64(chain)}
            for parent, chain in self.engine.snapshot()
        ]
        return {"seq": seq, "segments": segments}

    def apply_refs(self, seq: int, reset: bool, changes: Sequence[RefChange]) -> dict[str, Any]:
        """Change reference counts. A push that is not newer than the last one is a repeat and changes nothing."""
        if not reset and self.refs_seq is not None and seq <= self.refs_seq:
            return {"seq": self.refs_seq, "applied": False}
        self.engine.apply_refs(changes, reset)
        self.refs_seq = seq
        return {"seq": seq, "applied": True}


def _first_record(spec: NodeSpec, kept: PhaseRecord | None) -> PhaseRecord:
    """The kept phase, unless there is none or the start file knows a newer generation."""
    if kept is None or spec.generation > kept.generation:
        return PhaseRecord(spec.phase, spec.generation)  # type: ignore[arg-type]
    return kept


def _b64(data: bytes) -> str:
    return b64encode(data).decode()
