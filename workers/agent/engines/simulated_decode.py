"""Decode of a simulated node: outputs from the call to their end, and how their context gets onto the device."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from apps.kvcache.domain.hashing import extend_chain
from workers.agent.engines.base import DecodeFinished, DecodeJob, DecodeTimings, FinishReason, TokenChunk
from workers.agent.engines.simulated_decode_loop import DecodeLoop, DecodeRun
from workers.agent.engines.simulated_network import earliest_end, occupy
from workers.agent.engines.simulated_node import SimulatedNode
from workers.agent.engines.simulated_prefill_loop import PrefillLoop, PrefillWork


@dataclass(slots=True, eq=False)
class DecodeCall:
    """An output in the engine. `items` is what the caller reads; `recompute` computes a context that could not be had."""

    job: DecodeJob
    chain: bytes
    run: DecodeRun
    asked_at: float
    items: asyncio.Queue[TokenChunk | DecodeFinished] = field(default_factory=asyncio.Queue)
    device_tokens: int = 0
    recompute: PrefillWork | None = None
    recomputed_tokens: int = 0
    joined_at: float | None = None
    fetch_s: float = 0.0
    ended: bool = False


class DecodeStage:
    """All outputs of a node. They run in `loop`; contexts are recomputed in `prefill_loop`."""

    def __init__(self, node: SimulatedNode, loop: DecodeLoop, prefill_loop: PrefillLoop) -> None:
        self._node = node
        self._loop = loop
        self._prefill_loop = prefill_loop
        self._waiting: deque[DecodeCall] = deque()
        self.calls: dict[str, DecodeCall] = {}

    def begin(self, now: float, job: DecodeJob) -> DecodeCall:
        """Take an output and start getting its context. Raises EngineError where it can never fit."""
        limit = self._node.output_limit(job.prompt_tokens, job.sampling.max_tokens)
        self._node.device.check_fits(job.prompt_tokens + limit, "sampling.max_tokens")
        run = DecodeRun(job.request_id, job.prompt_tokens + job.generated, job.generated, limit)
        chain = job.handoff.chain if job.handoff is not None else self._prompt_chain(job)
        call = self.calls[job.request_id] = DecodeCall(job, chain, run, now)
        if job.generated >= limit:
            self._end(now, call, "length")
        else:
            self._get_context(now, call)
        return call

    def admit(self, now: float) -> None:
        """Let those whose context is here join the batch, in order, as far as batch and device memory allow."""
        while self._waiting and len(self._loop) < self._node.spec.limits.max_decode_batch:
            call = self._waiting[0]
            needed = call.job.prompt_tokens + call.run.max_tokens
            if not self._node.device.claim(needed):
                return
            self._waiting.popleft()
            call.device_tokens = needed
            call.joined_at = now
            self._loop.join(now, call.run)

    def deliver(self) -> None:
        """Hand due tokens to their callers; an output that ended makes room for the next."""
        for run, tokens, finished_at in self._loop.take_progress():
            call = self.calls.get(run.request_id)
            if call is None or call.run is not run:
                continue
            if tokens:
                call.items.put_nowait(TokenChunk([0] * tokens, tokens))
            if finished_at is not None:
                self._end(finished_at, call, "length")
                self.admit(finished_at)

    def finish_recompute(self, now: float, work: PrefillWork) -> None:
        """The context is computed; nothing happens where nobody waits for it any more."""
        call = self.calls.get(work.request_id)
        if call is None or call.recompute is not work:
            return
        call.recompute = None
        call.recomputed_tokens = work.computed_tokens
        self._node.counters["recomputed_tokens"] += work.computed_tokens
        self._became_resident(now, call)

    def abort(self, now: float, request_id: str) -> bool:
        """End an output with reason `abort`; False for an unknown one."""
        call = self.calls.get(request_id)
        if call is None:
            return False
        self._end(now, call, "abort")
        return True

    def drop(self, now: float, call: DecodeCall) -> None:
        """Free what an output holds, wherever it stands. Again does nothing."""
        if call.ended:
            return
        call.ended = True
        if self.calls.get(call.job.request_id) is call:
            del self.calls[call.job.request_id]
        if call in self._waiting:
            self._waiting.remove(call)
        if call.recompute is not None:
            self._prefill_loop.remove(call.recompute)
            call.recompute = None
        if call.joined_at is not None:
            self._loop.leave(now, call.run)
        self._node.device.release(call.device_tokens)
        call.device_tokens = 0

    def _end(self, now: float, call: DecodeCall, reason: FinishReason) -> None:
        output_tokens = call.run.max_tokens if reason == "length" else max(call.run.sent, call.run.generated)
        started_at = call.joined_at if call.joined_at is not None else now
        timings = DecodeTimings(started_at - call.asked_at, call.fetch_s, now - started_at)
        self.drop(now, call)
        call.items.put_nowait(DecodeFinished(reason, output_tokens, b"", timings, call.recomputed_tokens))

    # --- context ----------------------------------------------------------------------------------------------

    def _get_context(self, now: float, call: DecodeCall) -> None:
        """From the prefill node where it waits, else from the own pool and by computing what is missing there."""
        node, handoff, request_id = self._node, call.job.handoff, call.job.request_id
        if handoff is None:
            self._compute(now, call)
            return
        peer = node.peer(handoff.node)
        if peer is not None:
            waits_there = peer.keeps_handoff(request_id)
        else:
            waits_there = not node.is_local(handoff.node) and time.time() < handoff.expires_at
        if not waits_there:
            self._compute(now, call)
        elif peer is node:
            node.release_handoff(request_id)
            self._became_resident(now, call)
        else:
            self._transfer(now, call, peer, handoff.context_tokens)

    def _transfer(self, now: float, call: DecodeCall, peer: SimulatedNode | None, context_tokens: int) -> None:
        """Bring the whole context over; `peer` is None where it waits in another process."""
        node = self._node
        source = peer.nic if peer is not None else None
        ends_at = earliest_end(now, source, node.nic, node.timing.transfer_s(context_tokens))
        occupy(source, node.nic, ends_at)

        def arrive(at: float) -> None:
            lost = peer is not None and peer.closed
            if peer is not None:
                peer.release_handoff(call.job.request_id)
                peer.nudge()
            if call.ended:
                return
            call.fetch_s = at - call.asked_at
            if lost:
                self._compute(at, call)
            else:
                self._became_resident(at, call)

        node.agenda.at(ends_at, arrive)

    def _compute(self, now: float, call: DecodeCall) -> None:
        context_tokens = call.run.context_tokens

        def find_cached(_work: PrefillWork) -> int:
            return min(self._node.pool.held_tokens(call.chain), context_tokens - 1)

        call.recompute = PrefillWork(call.job.request_id, context_tokens, now, lambda _work: True, find_cached)
        self._prefill_loop.add(call.recompute)

    def _became_resident(self, now: float, call: DecodeCall) -> None:
        """The context is here: write it through to the host pool and wait for a place in the batch."""
        self._node.pool.store(now, call.chain)
        self._waiting.append(call)
        self.admit(now)

    def _prompt_chain(self, job: DecodeJob) -> bytes:
        model = self._node.spec.model
        ids = job.token_ids[: job.prompt_tokens] if model.tokens_per_id == 1 else job.token_ids
        return extend_chain(job.root, ids, model.ids_per_block)
