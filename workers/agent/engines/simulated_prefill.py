"""Prefill of a simulated node: calls, fetches from peers while they wait, results and hand-over."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from apps.kvcache.domain.hashing import HASH_BYTES
from workers.agent.engines.base import (
    HANDOFF_PIN_S,
    EngineError,
    FetchSource,
    Handoff,
    PrefillJob,
    PrefillResult,
    PrefillTimings,
)
from workers.agent.engines.simulated_network import earliest_end, occupy
from workers.agent.engines.simulated_node import SimulatedNode
from workers.agent.engines.simulated_prefill_loop import PrefillLoop, PrefillWork


@dataclass(slots=True, eq=False)
class PrefillCall:
    """A prompt in the engine. Tokens `[fetched_from, fetched_until)` came from a peer."""

    job: PrefillJob
    future: asyncio.Future[PrefillResult]
    work: PrefillWork
    pinned: bytes = b""
    device_tokens: int = 0
    fetched_from_tokens: int = 0
    fetched_until_tokens: int = 0
    failed_fetch_tokens: int = 0
    fetch_s: float = 0.0


class PrefillStage:
    """All prompts of a node, from the call to its result. They wait and run in `loop`."""

    def __init__(self, node: SimulatedNode, loop: PrefillLoop) -> None:
        self._node = node
        self._loop = loop
        self.calls: dict[str, PrefillCall] = {}

    def begin(self, now: float, job: PrefillJob, future: asyncio.Future[PrefillResult]) -> PrefillCall:
        """Queue a prompt and start its fetch. `future` gets its result. Raises EngineError where it can never fit."""
        self._node.device.check_fits(job.prompt_tokens, "prompt_tokens")
        work = PrefillWork(job.request_id, job.prompt_tokens, now, self._claim, self._find_cached)
        call = self.calls[job.request_id] = PrefillCall(job, future, work)
        call.pinned = self._node.pool.pin(job.chain)
        if job.fetch is not None:
            self._fetch(now, call, job.fetch)
        self._loop.add(work)
        return call

    def finish(self, now: float, work: PrefillWork) -> bool:
        """The prompt is computed: store it, keep it for hand-over, answer. False where `work` is no prompt of this stage."""
        call = self.calls.get(work.request_id)
        if call is None or call.work is not work:
            return False
        assert work.started_at is not None, "a prompt that never started is complete"
        node, job = self._node, call.job
        node.pool.store(now, job.chain)
        only_one = node.output_limit(job.prompt_tokens, job.sampling.max_tokens) <= 1
        if not only_one:
            node.keep_handoff(now, job.request_id, job.chain, call.device_tokens)
            call.device_tokens = 0
        fetched = max(0, min(call.fetched_until_tokens, work.cached_tokens) - call.fetched_from_tokens)
        result = PrefillResult(
            request_id=job.request_id,
            first_token_id=0,
            first_finish="length" if only_one else None,
            cached_tokens=work.cached_tokens - fetched,
            fetched_tokens=fetched,
            computed_tokens=work.computed_tokens,
            failed_fetch_tokens=min(call.failed_fetch_tokens, work.computed_tokens),
            timings=PrefillTimings(work.started_at - work.queued_at, call.fetch_s, now - work.started_at),
            handoff=self._handoff(job),
        )
        self.drop(call)
        if not call.future.done():
            call.future.set_result(result)
        return True

    def abort(self, request_id: str) -> bool:
        """End a prompt with EngineError 409 `aborted`; False for an unknown one."""
        call = self.calls.get(request_id)
        if call is None:
            return False
        self.drop(call)
        if not call.future.done():
            call.future.set_exception(EngineError(409, "aborted", "the request was aborted"))
        return True

    def drop(self, call: PrefillCall) -> None:
        """Free what a prompt holds, wherever it stands. Again does nothing."""
        if self.calls.get(call.job.request_id) is not call:
            return
        del self.calls[call.job.request_id]
        self._loop.remove(call.work)
        self._node.pool.unpin(call.pinned)
        self._node.device.release(call.device_tokens)
        call.pinned, call.device_tokens = b"", 0

    @property
    def running(self) -> int:
        return sum(call.work.started_at is not None for call in self.calls.values())

    # --- starting ---------------------------------------------------------------------------------------------

    def _claim(self, work: PrefillWork) -> bool:
        if not self._node.device.claim(work.prompt_tokens):
            return False
        self.calls[work.request_id].device_tokens = work.prompt_tokens
        return True

    def _find_cached(self, work: PrefillWork) -> int:
        """Tokens that are in the host pool now, of which at least one is left to compute."""
        call = self.calls[work.request_id]
        self._repin(call)
        return min(self._node.pool.held_tokens(call.job.chain), work.prompt_tokens - 1)

    def _repin(self, call: PrefillCall) -> None:
        pinned = self._node.pool.pin(call.job.chain)
        self._node.pool.unpin(call.pinned)
        call.pinned = pinned

    # --- fetching ---------------------------------------------------------------------------------------------

    def _fetch(self, now: float, call: PrefillCall, fetch: FetchSource) -> None:
        """Pull blocks `[held here, fetch.to_block)` from the peer. What it does not hold, or not in time, is computed."""
        node = self._node
        first = node.pool.held_blocks(call.job.chain)
        wanted_tokens = max(0, fetch.to_block - first) * node.pool.block_tokens
        if not wanted_tokens:
            return
        peer = node.peer(fetch.node)
        chain = call.job.chain[: fetch.to_block * HASH_BYTES]
        last = max(first, peer.pool.held_blocks(chain)) if peer is not None else first
        tokens = (last - first) * node.pool.block_tokens
        ends_at = earliest_end(now, peer.nic if peer is not None else None, node.nic, node.timing.transfer_s(tokens))
        if peer is None or not tokens or ends_at - now > node.spec.limits.fetch_deadline_s:
            self._count_failed(call, wanted_tokens)
            return
        self._count_failed(call, wanted_tokens - tokens)
        occupy(peer.nic, node.nic, ends_at)
        call.work.resident = False
        fetched = chain[: last * HASH_BYTES]
        pinned = peer.pool.pin(fetched)

        def arrive(at: float) -> None:
            peer.pool.unpin(pinned)
            if self.calls.get(call.job.request_id) is call:
                self._arrived(at, call, b"" if peer.closed else fetched, first, tokens)

        node.agenda.at(ends_at, arrive)

    def _arrived(self, now: float, call: PrefillCall, fetched: bytes, first: int, tokens: int) -> None:
        pool = self._node.pool
        arrived = max(0, pool.store(now, fetched) - first) * pool.block_tokens
        call.fetched_from_tokens = first * pool.block_tokens
        call.fetched_until_tokens = call.fetched_from_tokens + arrived
        call.fetch_s = now - call.work.queued_at
        call.work.resident = True
        self._node.counters["fetched_tokens"] += arrived
        self._count_failed(call, tokens - arrived)
        self._repin(call)

    def _count_failed(self, call: PrefillCall, tokens: int) -> None:
        call.failed_fetch_tokens += tokens
        self._node.counters["failed_fetch_tokens"] += tokens

    def _handoff(self, job: PrefillJob) -> Handoff:
        node = self._node
        return Handoff(
            node=node.name,
            url=f"{node.base_url}/nodes/{node.name}",
            pool=node.pool_name,
            chain=job.chain,
            tail_hash=job.tail_hash,
            tail_tokens=job.prompt_tokens - len(job.chain) // HASH_BYTES * node.pool.block_tokens,
            context_tokens=job.prompt_tokens,
            expires_at=time.time() + HANDOFF_PIN_S,
        )
