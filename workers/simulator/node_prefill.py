"""The prefill side of a simulated node: prompts from the queue to a computed context, and the fetches on their way."""

from __future__ import annotations

from dataclasses import dataclass

from apps.kvcache.domain.hashing import HASH_BYTES
from workers.agent.engines.simulated_network import earliest_end, occupy
from workers.agent.engines.simulated_prefill_loop import PrefillWork
from workers.simulator.node_core import Kept, NodeCore
from workers.simulator.node_parts import FETCH_DEADLINE_S, HANDOFF_PIN_S, Job
from workers.yard.commands import Fetch
from workers.yard.events import PrefillResult


@dataclass(slots=True, eq=False)
class PrefillCall:
    """A prompt on its way through the node."""

    job: Job
    work: PrefillWork
    fetch: Fetch | None
    pinned: bytes = b""
    device_tokens: int = 0
    fetched_from_tokens: int = 0
    fetched_until_tokens: int = 0
    failed_fetch_tokens: int = 0
    fetch_s: float = 0.0


class PrefillStage:
    """`calls`: the prompts that wait or are computed, by request."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self.calls: dict[str, PrefillCall] = {}

    def start(self, now: float, job: Job, fetch: Fetch | None) -> None:
        """Queue a prompt; its fetch begins now where the data plane says so."""
        core = self._core
        work = PrefillWork(job.request_id, job.prompt_tokens, now, self._claim, self._find_cached)
        work.on_device = not core.plane.host_pool
        call = self.calls[job.request_id] = PrefillCall(job, work, fetch)
        call.pinned = core.pool.pin(job.chain)
        if fetch is not None and core.plane.fetch_begins == "queued":
            self._fetch_while_queued(now, call, fetch)
        core.prefill_loop.add(work)

    def finish(self, now: float, work: PrefillWork) -> bool:
        """A prompt is computed; False where it is none of these."""
        core, call = self._core, self.calls.get(work.request_id)
        if call is None or call.work is not work:
            return False
        job = call.job
        assert work.started_at is not None
        core.store(now, job.chain)
        only_one = job.output_tokens - job.sent_tokens <= 1
        if not only_one:
            kept = Kept(core.pool.pin(job.chain), call.device_tokens, work.started_at, now + HANDOFF_PIN_S)
            core.release(job.request_id)
            core.kept[job.request_id] = kept
            call.device_tokens = 0
        core.counters.computed_tokens += work.computed_tokens
        fetched = max(0, min(call.fetched_until_tokens, work.cached_tokens) - call.fetched_from_tokens)
        result = PrefillResult(
            cached_tokens=work.cached_tokens - fetched,
            fetched_tokens=fetched,
            computed_tokens=work.computed_tokens,
            failed_fetch_tokens=min(call.failed_fetch_tokens, work.computed_tokens),
            first_finish="length" if only_one else None,
            queued_s=work.started_at - work.queued_at,
            fetch_s=call.fetch_s,
            prefill_s=now - work.started_at,
        )
        self.drop(job.request_id)
        core.host.prefilled(now, core, job, result)
        return True

    def drop(self, request_id: str) -> None:
        """Free what the prompt holds, wherever it stands."""
        call = self.calls.pop(request_id, None)
        if call is None:
            return
        core = self._core
        core.prefill_loop.remove(call.work)
        core.pool.unpin(call.pinned)
        core.device.release(call.device_tokens)
        call.pinned, call.device_tokens = b"", 0

    def _claim(self, work: PrefillWork) -> bool:
        if not self._core.device.claim(work.prompt_tokens):
            return False
        self.calls[work.request_id].device_tokens = work.prompt_tokens
        return True

    def _find_cached(self, work: PrefillWork) -> int:
        """Tokens in the host pool when the prompt starts, of which at least one is left to compute."""
        core, call = self._core, self.calls[work.request_id]
        assert work.started_at is not None
        if call.fetch is not None and core.plane.fetch_begins == "at-start":
            work.stall_s = self._fetch_at_start(work.started_at, call, call.fetch)
        call.pinned = core.repin(call.pinned, call.job.chain)
        return min(core.pool.lookup(call.job.chain) * core.spec.block_tokens, work.prompt_tokens - 1)

    # ---- fetching ------------------------------------------------------------------------------------------------

    def _fetch_while_queued(self, now: float, call: PrefillCall, fetch: Fetch) -> None:
        """Pull blocks from the peer; the prompt may start when they are here. What the peer does not have is computed."""
        booked = self._book_transfer(now, call, fetch)
        if booked is None:
            return
        core = self._core
        peer, first, chain, ends_at = booked
        call.work.resident = False
        pinned, boot = peer.pool.pin(chain), peer.boot

        def arrive(at: float) -> None:
            same = peer.alive and peer.boot == boot
            if same:
                peer.pool.unpin(pinned)
            if self.calls.get(call.job.request_id) is call:
                call.fetch_s = at - call.work.queued_at
                call.work.resident = True
                self._arrived(at, call, chain if same and not core.host.fetch_fails() else b"", first, chain)

        core.agenda.at(ends_at, arrive)

    def _fetch_at_start(self, now: float, call: PrefillCall, fetch: Fetch) -> float:
        """Pull blocks now that the prompt starts; answers how long its iteration has to wait for them."""
        booked = self._book_transfer(now, call, fetch)
        if booked is None:
            return 0.0
        _, first, chain, ends_at = booked
        call.fetch_s = ends_at - now
        self._arrived(now, call, b"" if self._core.host.fetch_fails() else chain, first, chain)
        return ends_at - now

    def _book_transfer(self, now: float, call: PrefillCall, fetch: Fetch) -> tuple[NodeCore, int, bytes, float] | None:
        """Occupy both links; answers (peer, first block fetched, chain it has, end), or None where nothing can come."""
        core, job = self._core, call.job
        block_tokens = core.spec.block_tokens
        first = core.pool.lookup(job.chain)
        wanted_tokens = max(0, fetch.to_block - first) * block_tokens
        if not wanted_tokens:
            return None
        peer = core.host.peer(fetch.source_node)
        chain = job.chain[: fetch.to_block * HASH_BYTES]
        last = max(first, peer.pool.lookup(chain)) if peer is not None and peer.alive else first
        tokens = (last - first) * block_tokens
        if peer is None or not tokens:
            self._count_failed(call, wanted_tokens)
            return None
        ends_at = earliest_end(now, peer.nic, core.nic, core.timing.transfer_s(tokens))
        if ends_at - now > FETCH_DEADLINE_S:
            self._count_failed(call, wanted_tokens)
            return None
        self._count_failed(call, wanted_tokens - tokens)
        occupy(peer.nic, core.nic, ends_at)
        return peer, first, chain[: last * HASH_BYTES], ends_at

    def _arrived(self, now: float, call: PrefillCall, came: bytes, first: int, asked: bytes) -> None:
        core = self._core
        block_tokens = core.spec.block_tokens
        held = core.store(now, came) if came else first
        arrived = max(0, held - first)
        call.fetched_from_tokens = first * block_tokens
        call.fetched_until_tokens = call.fetched_from_tokens + arrived * block_tokens
        core.counters.fetched_tokens += arrived * block_tokens
        self._count_failed(call, (len(asked) // HASH_BYTES - first - arrived) * block_tokens)
        call.pinned = core.repin(call.pinned, call.job.chain)

    def _count_failed(self, call: PrefillCall, tokens: int) -> None:
        call.failed_fetch_tokens += tokens
        self._core.counters.failed_fetch_tokens += tokens
