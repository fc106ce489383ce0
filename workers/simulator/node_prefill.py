"""The prefill side of a simulated node: prompts from the queue to a computed context, and the fetches on their way."""

from __future__ import annotations

from dataclasses import dataclass

from apps.kvcache.domain.hashing import HASH_BYTES
from workers.agent.engines.simulated_network import earliest_end, give_back, occupy
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


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks `[first, end of chain)` on their way from `peer` (None: nothing can come), for a call or ahead of it."""

    peer: NodeCore | None
    boot: int
    chain: bytes
    first: int
    starts_at: float
    ends_at: float
    missing_tokens: int
    pinned: bytes = b""
    call: PrefillCall | None = None
    request_id: str = ""
    over: bool = False


class PrefillStage:
    """`calls`: the prompts that wait or are computed, by request. `_ahead`: transfers for requests that are not here yet."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self.calls: dict[str, PrefillCall] = {}
        self._ahead: dict[str, Transfer] = {}

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
        """Pull blocks from the peer; the prompt may start when they are here. What the peer does not have is computed. Blocks
        that were already on their way for this request are waited for, and asked for no more."""
        transfer = self._ahead.pop(call.job.request_id, None)
        if transfer is None:
            transfer = self._book(now, call.job.chain, fetch)
            if transfer is None:
                return
            self._count_failed(call, transfer.missing_tokens)
            if transfer.peer is None:
                return
            self._under_way(transfer)
        call.work.resident = False
        transfer.call = call

    def _fetch_at_start(self, now: float, call: PrefillCall, fetch: Fetch) -> float:
        """Pull blocks now that the prompt starts; answers how long its iteration has to wait for them."""
        transfer = self._book(now, call.job.chain, fetch)
        if transfer is None:
            return 0.0
        self._count_failed(call, transfer.missing_tokens)
        if transfer.peer is None:
            return 0.0
        call.fetch_s = transfer.ends_at - now
        came = b"" if self._core.host.fetch_fails() else transfer.chain
        self._arrived(call, transfer, self._keep(now, came, transfer.first))
        return transfer.ends_at - now

    def fetch_ahead(self, now: float, request_id: str, chain: bytes, fetch: Fetch) -> None:
        """Pull blocks of a request that is not here yet. `Host.fetched_ahead` is told once they have come, or cannot."""
        transfer = self._book(now, chain, fetch)
        if transfer is None or transfer.peer is None:
            self._core.host.fetched_ahead(now, self._core, request_id)
            return
        transfer.request_id = request_id
        self._ahead[request_id] = transfer
        self._under_way(transfer)

    def cancel_ahead(self, now: float, request_id: str) -> None:
        """Pull no more for a request that is not here; what has come by now stays."""
        transfer = self._ahead.pop(request_id, None)
        if transfer is None or transfer.peer is None:
            return
        core, peer = self._core, transfer.peer
        transfer.over = True
        took_s = transfer.ends_at - transfer.starts_at
        share = min(1.0, max(0.0, (now - transfer.starts_at) / took_s)) if took_s > 0 else 1.0
        blocks = transfer.first + int(share * (len(transfer.chain) // HASH_BYTES - transfer.first))
        if blocks > transfer.first:
            self._keep(now, transfer.chain[: blocks * HASH_BYTES], transfer.first)
        if peer.alive and peer.boot == transfer.boot:
            peer.pool.unpin(transfer.pinned)
            give_back(peer.nic, core.nic, transfer.ends_at, max(now, transfer.starts_at))

    def _under_way(self, transfer: Transfer) -> None:
        peer = transfer.peer
        assert peer is not None
        transfer.pinned = peer.pool.pin(transfer.chain)
        self._core.agenda.at(transfer.ends_at, lambda at: self._ends(at, transfer))

    def _ends(self, at: float, transfer: Transfer) -> None:
        if transfer.over:
            return
        core, peer, call = self._core, transfer.peer, transfer.call
        assert peer is not None
        transfer.over = True
        same = peer.alive and peer.boot == transfer.boot
        if same:
            peer.pool.unpin(transfer.pinned)
        if call is not None:
            if self.calls.get(call.job.request_id) is call:
                call.fetch_s = at - call.work.queued_at
                call.work.resident = True
                came = transfer.chain if same and not core.host.fetch_fails() else b""
                self._arrived(call, transfer, self._keep(at, came, transfer.first))
        elif self._ahead.pop(transfer.request_id, None) is not None:
            came = transfer.chain if same and not core.host.fetch_fails() else b""
            self._keep(at, came, transfer.first)
            core.host.fetched_ahead(at, core, transfer.request_id)

    def _book(self, now: float, whole: bytes, fetch: Fetch) -> Transfer | None:
        """Occupy both links for what of `whole` the peer has and this node lacks. None where nothing is lacking; without a
        peer where nothing can come."""
        core, block_tokens = self._core, self._core.spec.block_tokens
        first = core.pool.lookup(whole)
        wanted_tokens = max(0, fetch.to_block - first) * block_tokens
        if not wanted_tokens:
            return None
        peer = core.host.peer(fetch.source_node)
        chain = whole[: fetch.to_block * HASH_BYTES]
        last = max(first, peer.pool.lookup(chain)) if peer is not None and peer.alive else first
        tokens = (last - first) * block_tokens
        if peer is None or not tokens:
            return Transfer(None, 0, b"", first, now, now, wanted_tokens)
        takes_s = core.timing.transfer_s(tokens)
        ends_at = earliest_end(now, peer.nic, core.nic, takes_s)
        if ends_at - now > FETCH_DEADLINE_S:
            return Transfer(None, 0, b"", first, now, now, wanted_tokens)
        occupy(peer.nic, core.nic, ends_at)
        chain = chain[: last * HASH_BYTES]
        return Transfer(peer, peer.boot, chain, first, ends_at - takes_s, ends_at, wanted_tokens - tokens)

    def _keep(self, now: float, came: bytes, first: int) -> int:
        """Store what came; answers how many blocks that are."""
        arrived = max(0, self._core.store(now, came) - first) if came else 0
        self._core.counters.fetched_tokens += arrived * self._core.spec.block_tokens
        return arrived

    def _arrived(self, call: PrefillCall, transfer: Transfer, blocks: int) -> None:
        core = self._core
        block_tokens = core.spec.block_tokens
        call.fetched_from_tokens = transfer.first * block_tokens
        call.fetched_until_tokens = call.fetched_from_tokens + blocks * block_tokens
        self._count_failed(call, (len(transfer.chain) // HASH_BYTES - transfer.first - blocks) * block_tokens)
        call.pinned = core.repin(call.pinned, call.job.chain)

    def _count_failed(self, call: PrefillCall, tokens: int) -> None:
        call.failed_fetch_tokens += tokens
        self._core.counters.failed_fetch_tokens += tokens
