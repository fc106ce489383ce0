"""One simulated node: the agent's own phase machine and iteration loops, a pool without bytes, and links that take time.

The same engine as `workers/agent/engines/simulated`, without processes or sockets: it is told what to do, moves when the
clock says so, and reports through `Host`. Contexts are chains of block ids; nothing has tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from apps.kvcache.domain import events as kv
from apps.kvcache.domain.eviction import EvictionPolicy
from apps.kvcache.domain.hashing import HASH_BYTES
from apps.kvcache.domain.run_index import RunIndex
from workers.agent.engines.simulated_decode_loop import DecodeLoop, DecodeRun, Steps
from workers.agent.engines.simulated_network import Nic, earliest_end, occupy
from workers.agent.engines.simulated_node import Agenda, DeviceMemory
from workers.agent.engines.simulated_prefill_loop import PrefillLoop, PrefillWork
from workers.agent.engines.simulated_timing import Timing
from workers.agent.phase import PhaseMachine, PhaseName, PhaseRefused, StageName
from workers.yard.commands import Fetch, RefChange
from workers.yard.events import NodeState, PrefillResult

HANDOFF_PIN_S = 30.0
FETCH_DEADLINE_S = 10.0

FetchBegins = Literal["queued", "at-start"]


@dataclass(frozen=True, slots=True)
class SwitchStyle:
    """How an engine changes phase once it is drained. `keeps_kv` False empties its pool; `seconds` (low, high) it serves
    nothing; `drains_s` it may take to end its old work."""

    keeps_kv: bool = True
    seconds: tuple[float, float] = (0.5, 0.5)
    drain_deadline_s: float = 60.0


@dataclass(frozen=True, slots=True)
class DataPlane:
    """How KV moves. `host_pool`: nodes keep their KV in host memory; without, a prefix is cached on the device alone, as
    far as it fits there. `fetch_begins`: peers' blocks are pulled while a prompt waits, or only when it starts, so that its
    iteration stalls. `decode_stores`: decode nodes write their KV to the pool. `eviction`: what goes first."""

    host_pool: bool = True
    fetch_begins: FetchBegins = "queued"
    decode_stores: bool = True
    eviction: EvictionPolicy = "referenced"
    switch: SwitchStyle = SwitchStyle()


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node's hardware. Blocks are the partition's."""

    name: str
    order: int
    phase: PhaseName
    timing: Timing
    block_tokens: int
    pool_blocks: int
    device_tokens: int
    max_decode_batch: int
    prefill_chunk_tokens: int
    plane: DataPlane = DataPlane()


@dataclass(slots=True)
class Job:
    """A request as a node sees it. `output_chain`: the blocks that its output adds, once it is decoded."""

    request_id: str
    chain: bytes
    prompt_tokens: int
    output_tokens: int
    output_chain: bytes = b""
    sent_tokens: int = 0


class Host(Protocol):
    """Where a node's reports go, and its peers."""

    def peer(self, name: str) -> SimNode | None: ...

    def prefilled(self, now: float, node: SimNode, job: Job, result: PrefillResult) -> None: ...

    def decoded(self, now: float, node: SimNode, job: Job) -> None: ...

    def refused(self, now: float, node: SimNode, job: Job, stage: StageName, code: str) -> None: ...

    def wake(self, node: SimNode, at: float) -> None: ...

    def heard(self, now: float, node: SimNode) -> None:
        """The node has something new in its outbox."""

    def fetch_fails(self) -> bool: ...

    def draw(self, low: float, high: float) -> float: ...


@dataclass(slots=True, eq=False)
class _Prefill:
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
class _Output:
    job: Job
    run: DecodeRun
    device_tokens: int = 0
    recompute: PrefillWork | None = None
    joined: bool = False


@dataclass(slots=True)
class _Kept:
    pinned: bytes
    device_tokens: int
    started_at: float
    expires_at: float


@dataclass(slots=True)
class Counters:
    fetched_tokens: int = 0
    failed_fetch_tokens: int = 0
    recomputed_tokens: int = 0
    evicted_blocks: int = 0
    prefill_busy_s: float = 0.0
    stalled_s: float = 0.0
    decode_busy_s: float = 0.0
    computed_tokens: int = 0


@dataclass(slots=True)
class WorkRow:
    """Sums over the iterations of one phase (and, where it is decode, of one batch size)."""

    t_uc: int = 0
    pairs: float = 0.0
    t_rst: int = 0
    busy_s: float = 0.0
    requests: int = 0
    iterations: int = 0


@dataclass(eq=False)
class SimNode:
    """See the module. Call `advance(now)` first; every public call leaves the next wake-up arranged."""

    spec: NodeSpec
    host: Host
    alive: bool = True
    boot: int = 1
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.name = self.spec.name
        self.plane = self.spec.plane
        self.timing = self.spec.timing
        self.phase = PhaseMachine(self.spec.phase, 0)
        self.wake_at: float | None = None
        self.seq = 0
        self.switches: list[tuple[float, float]] = []
        self._start_empty()

    def _start_empty(self) -> None:
        spec = self.spec
        self.pool = RunIndex(spec.pool_blocks, self.plane.eviction)
        self.device = DeviceMemory(spec.device_tokens)
        self.nic = Nic()
        self.agenda = Agenda()
        self.prefill_loop = PrefillLoop(self.timing, spec.prefill_chunk_tokens)
        self.decode_loop = DecodeLoop(self.timing, self._on_steps, send_every_s=None)
        self.prefills: dict[str, _Prefill] = {}
        self.outputs: dict[str, _Output] = {}
        self.waiting: deque[_Output] = deque()
        self.kept: dict[str, _Kept] = {}
        self.outbox: list[Any] = []
        self.rows: dict[tuple[str, int], WorkRow] = {}

    # ---- work ----------------------------------------------------------------------------------------------------

    def start_prefill(self, now: float, job: Job, fetch: Fetch | None, generation: int) -> None:
        """Queue a prompt; its fetch begins now where the data plane says so."""
        if not self._takes(now, job, "prefill", generation):
            return
        self.advance(now)
        work = PrefillWork(job.request_id, job.prompt_tokens, now, self._claim, self._find_cached)
        work.on_device = not self.plane.host_pool
        call = self.prefills[job.request_id] = _Prefill(job, work, fetch)
        call.pinned = self.pool.pin(job.chain)
        if fetch is not None and self.plane.fetch_begins == "queued":
            self._fetch_while_queued(now, call, fetch)
        self.prefill_loop.add(work)
        self.settle(now)

    def start_decode(self, now: float, job: Job, source: str, generation: int) -> None:
        """Take an output over from the node that computed its context."""
        peer = self.host.peer(source)
        if not self._takes(now, job, "decode", generation):
            return
        self.advance(now)
        generated = job.sent_tokens
        run = DecodeRun(job.request_id, job.prompt_tokens + generated, generated, max(job.output_tokens, generated + 1))
        output = self.outputs[job.request_id] = _Output(job, run)
        kept = peer.kept.get(job.request_id) if peer is not None and peer.alive else None
        if peer is None or kept is None:
            self._compute_context(now, output)
        elif peer is self:
            self._release(job.request_id)
            self._ready(now, output)
        else:
            self._take_over(now, output, peer, kept)
        self.settle(now)

    def abort(self, now: float, request_id: str) -> None:
        """Free what the node holds for the request, wherever it stands."""
        if not self.alive:
            return
        self.advance(now)
        call = self.prefills.get(request_id)
        if call is not None:
            self._drop_prefill(call)
        output = self.outputs.get(request_id)
        if output is not None:
            self._drop_output(now, output)
        self._release(request_id)
        self.settle(now)

    def release_handoff(self, now: float, request_id: str) -> None:
        """Nobody will fetch the context that is kept for the request."""
        if self.alive and request_id in self.kept:
            self.advance(now)
            self._release(request_id)
            self.settle(now)

    def apply_refs(self, changes: tuple[RefChange, ...], reset: bool) -> None:
        if reset:
            self.pool.reset_refs()
        for change in changes:
            self.pool.apply_refs(change.last, change.blocks, change.delta)

    def tokens_sent(self, request_id: str) -> int:
        """Output tokens that exist of a request that decodes here."""
        output = self.outputs.get(request_id)
        return 0 if output is None else self.decode_loop.tokens_of(output.run)

    def _takes(self, now: float, job: Job, stage: StageName, generation: int) -> bool:
        code = "unreachable"
        if self.alive:
            try:
                self.phase.admit(stage, generation)
                return True
            except PhaseRefused as refused:
                code = refused.code
        self.host.refused(now, self, job, stage, code)
        return False

    # ---- phase ---------------------------------------------------------------------------------------------------

    def order_phase(self, now: float, phase: PhaseName, generation: int, drain_deadline_s: float) -> str | None:
        """Take an order; the agent's error code where it refuses."""
        if not self.alive:
            return "unreachable"
        self.advance(now)
        try:
            self.phase.order(now, phase, generation, drain_deadline_s)
        except PhaseRefused as refused:
            return refused.code
        self._report_phase(now)
        self.settle(now)
        return None

    def _advance_phase(self, now: float) -> None:
        if self.phase.state == "ready":
            return
        before = (self.phase.phase, self.phase.state)
        target = self.phase.advance(now, {"prefill": len(self.prefills), "decode": len(self.outputs)})
        if (self.phase.phase, self.phase.state) != before:
            self._report_phase(now)
        if target is not None:
            low, high = self.plane.switch.seconds
            self.agenda.at(now + self.host.draw(low, high), lambda at: self._switched(at, target))

    def _switched(self, now: float, target: PhaseName) -> None:
        if not self.plane.switch.keeps_kv:
            self.pool.clear()
            self._say(now, kv.NodeCleared(self.name, self._next_seq()))
        self.phase.switched(now, target)
        if self.phase.last_switch is not None:
            self.switches.append((now, self.phase.last_switch.duration_s))
        self._report_phase(now)

    def _report_phase(self, now: float) -> None:
        machine = self.phase
        event = {"type": "phase", "seq": self._next_seq(), "phase": machine.phase, "target_phase": machine.target,
                 "state": machine.state, "generation": machine.generation}  # fmt: skip
        self._say(now, event)

    # ---- failure -------------------------------------------------------------------------------------------------

    def crash(self, now: float) -> None:
        """The process and its memory are gone; nobody is told."""
        self.advance(now)
        self.alive = False
        self.agenda.clear()
        self.wake_at = None

    def restart(self, now: float) -> None:
        """Comes back empty, as another process, in the phase it was last ordered to."""
        self.alive, self.boot = True, self.boot + 1
        self.phase = PhaseMachine(self.phase.target, self.phase.generation)
        self.seq = 0
        self._start_empty()
        self.decode_loop.advance(now)

    def slow_down(self, now: float, timing: Timing) -> None:
        """From the next iteration on, work takes as long as `timing` says."""
        self.advance(now)
        self.timing = self.prefill_loop.timing = timing
        self.decode_loop.retime(timing)
        self.settle(now)

    # ---- time ----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Let everything happen that is due, in order."""
        if not self.alive:
            return
        due_at = now + 1e-7
        while True:
            iteration, act_at = self.prefill_loop.iteration, self.agenda.next_at()
            if iteration is not None and iteration.ends_at <= min(due_at, act_at if act_at is not None else due_at):
                self._end_prefill_iteration(iteration.ends_at)
            elif act_at is not None and act_at <= due_at:
                self._start_prefill_iteration(self.agenda.run_next())
            else:
                break
        self.decode_loop.advance(now)
        self._deliver()

    def settle(self, now: float) -> None:
        """Start what can start, then arrange to be woken at the next moment at which anything changes."""
        if not self.alive:
            return
        self._start_prefill_iteration(now)
        if self.waiting:
            self._admit(now)
        self._advance_phase(now)
        wake_at = self.agenda.next_at()
        iteration = self.prefill_loop.iteration
        if iteration is not None and (wake_at is None or iteration.ends_at < wake_at):
            wake_at = iteration.ends_at
        decode_at = self.decode_loop.next_deadline()
        if decode_at is not None and (wake_at is None or decode_at < wake_at):
            wake_at = decode_at
        phase_at = self.phase.next_deadline()
        if phase_at is not None and (wake_at is None or phase_at < wake_at):
            wake_at = phase_at
        if wake_at != self.wake_at:
            self.wake_at = wake_at
            if wake_at is not None:
                self.host.wake(self, wake_at)

    def _end_prefill_iteration(self, at: float) -> None:
        iteration = self.prefill_loop.iteration
        assert iteration is not None
        complete, sample = self.prefill_loop.finish()
        self.counters.prefill_busy_s += sample.busy_s
        self.counters.stalled_s += iteration.seconds - self.timing.prefill_s(
            iteration.t_uc, iteration.pairs, iteration.t_rst
        )
        self._count_row("prefill", 0, 1, sample.t_uc, sample.pairs, sample.t_rst, sample.busy_s, sample.requests)
        for work in complete:
            self._finish_prefill(at, work)
        self._start_prefill_iteration(at)

    def _start_prefill_iteration(self, at: float) -> None:
        loop = self.prefill_loop
        if loop.iteration is not None or not (loop.queue or loop.under_way):
            return
        planned = loop.plan(at)
        if planned is not None:
            loop.start(planned, self.decode_loop.reserve_gap(at, planned.seconds))

    # ---- prefill -------------------------------------------------------------------------------------------------

    def _claim(self, work: PrefillWork) -> bool:
        if not self.device.claim(work.prompt_tokens):
            return False
        self.prefills[work.request_id].device_tokens = work.prompt_tokens
        return True

    def _find_cached(self, work: PrefillWork) -> int:
        """Tokens in the host pool when the prompt starts, of which at least one is left to compute."""
        call = self.prefills[work.request_id]
        assert work.started_at is not None
        if call.fetch is not None and self.plane.fetch_begins == "at-start":
            work.stall_s = self._fetch_at_start(work.started_at, call, call.fetch)
        pinned = self.pool.pin(call.job.chain)
        self.pool.unpin(call.pinned)
        call.pinned = pinned
        return min(self.pool.lookup(call.job.chain) * self.spec.block_tokens, work.prompt_tokens - 1)

    def _finish_prefill(self, now: float, work: PrefillWork) -> None:
        call = self.prefills.get(work.request_id)
        if call is None or call.work is not work:
            self._finish_recompute(now, work)
            return
        job = call.job
        assert work.started_at is not None
        self._store(now, job.chain)
        only_one = job.output_tokens - job.sent_tokens <= 1
        if not only_one:
            kept = _Kept(self.pool.pin(job.chain), call.device_tokens, work.started_at, now + HANDOFF_PIN_S)
            self._release(job.request_id)
            self.kept[job.request_id] = kept
            call.device_tokens = 0
        self.counters.computed_tokens += work.computed_tokens
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
        self._drop_prefill(call)
        self.host.prefilled(now, self, job, result)

    def _drop_prefill(self, call: _Prefill) -> None:
        if self.prefills.get(call.job.request_id) is not call:
            return
        del self.prefills[call.job.request_id]
        self.prefill_loop.remove(call.work)
        self.pool.unpin(call.pinned)
        self.device.release(call.device_tokens)
        call.pinned, call.device_tokens = b"", 0

    # ---- fetching ------------------------------------------------------------------------------------------------

    def _fetch_while_queued(self, now: float, call: _Prefill, fetch: Fetch) -> None:
        """Pull blocks from the peer; the prompt may start when they are here. What the peer does not have is computed."""
        booked = self._book_transfer(now, call, fetch)
        if booked is None:
            return
        peer, first, chain, ends_at = booked
        call.work.resident = False
        pinned, boot = peer.pool.pin(chain), peer.boot

        def arrive(at: float) -> None:
            same = peer.alive and peer.boot == boot
            if same:
                peer.pool.unpin(pinned)
            if self.prefills.get(call.job.request_id) is call:
                call.fetch_s = at - call.work.queued_at
                call.work.resident = True
                self._arrived(at, call, chain if same and not self.host.fetch_fails() else b"", first, chain)

        self.agenda.at(ends_at, arrive)

    def _fetch_at_start(self, now: float, call: _Prefill, fetch: Fetch) -> float:
        """Pull blocks now that the prompt starts; answers how long its iteration has to wait for them."""
        booked = self._book_transfer(now, call, fetch)
        if booked is None:
            return 0.0
        _, first, chain, ends_at = booked
        call.fetch_s = ends_at - now
        self._arrived(now, call, b"" if self.host.fetch_fails() else chain, first, chain)
        return ends_at - now

    def _book_transfer(self, now: float, call: _Prefill, fetch: Fetch) -> tuple[SimNode, int, bytes, float] | None:
        """Occupy both links; answers (peer, first block fetched, chain it has, end), or None where nothing can come."""
        job, block_tokens = call.job, self.spec.block_tokens
        first = self.pool.lookup(job.chain)
        wanted_tokens = max(0, fetch.to_block - first) * block_tokens
        if not wanted_tokens:
            return None
        peer = self.host.peer(fetch.source_node)
        chain = job.chain[: fetch.to_block * HASH_BYTES]
        last = max(first, peer.pool.lookup(chain)) if peer is not None and peer.alive else first
        tokens = (last - first) * block_tokens
        if peer is None or not tokens:
            self._count_failed(call, wanted_tokens)
            return None
        ends_at = earliest_end(now, peer.nic, self.nic, self.timing.transfer_s(tokens))
        if ends_at - now > FETCH_DEADLINE_S:
            self._count_failed(call, wanted_tokens)
            return None
        self._count_failed(call, wanted_tokens - tokens)
        occupy(peer.nic, self.nic, ends_at)
        return peer, first, chain[: last * HASH_BYTES], ends_at

    def _arrived(self, now: float, call: _Prefill, came: bytes, first: int, asked: bytes) -> None:
        block_tokens = self.spec.block_tokens
        held = self._store(now, came) if came else first
        arrived = max(0, held - first)
        call.fetched_from_tokens = first * block_tokens
        call.fetched_until_tokens = call.fetched_from_tokens + arrived * block_tokens
        self.counters.fetched_tokens += arrived * block_tokens
        self._count_failed(call, (len(asked) // HASH_BYTES - first - arrived) * block_tokens)
        pinned = self.pool.pin(call.job.chain)
        self.pool.unpin(call.pinned)
        call.pinned = pinned

    def _count_failed(self, call: _Prefill, tokens: int) -> None:
        call.failed_fetch_tokens += tokens
        self.counters.failed_fetch_tokens += tokens

    # ---- decode --------------------------------------------------------------------------------------------------

    def _take_over(self, now: float, output: _Output, peer: SimNode, kept: _Kept) -> None:
        """Bring the context over. Its layers have travelled since the prompt started, so only what is left takes time."""
        whole_s = self.timing.transfer_s(output.job.prompt_tokens)
        ends_at = max(now + self.timing.transfer_s(0), earliest_end(kept.started_at, peer.nic, self.nic, whole_s))
        occupy(peer.nic, self.nic, ends_at)
        boot = peer.boot

        def arrive(at: float) -> None:
            same = peer.alive and peer.boot == boot
            if same and peer._release(output.job.request_id) and peer.prefill_loop.queue:
                self.host.wake(peer, at)
            if self.outputs.get(output.job.request_id) is not output:
                return
            if same:
                self._ready(at, output)
            else:
                self._compute_context(at, output)

        self.agenda.at(ends_at, arrive)

    def _compute_context(self, now: float, output: _Output) -> None:
        """Compute the context here, from what the own pool has."""
        context_tokens = output.run.context_tokens

        def find_cached(_work: PrefillWork) -> int:
            return min(self.pool.lookup(output.job.chain) * self.spec.block_tokens, context_tokens - 1)

        output.recompute = PrefillWork(output.job.request_id, context_tokens, now, lambda _work: True, find_cached)
        self.prefill_loop.add(output.recompute)

    def _finish_recompute(self, now: float, work: PrefillWork) -> None:
        output = self.outputs.get(work.request_id)
        if output is not None and output.recompute is work:
            output.recompute = None
            self.counters.recomputed_tokens += work.computed_tokens
            self._ready(now, output)

    def _ready(self, now: float, output: _Output) -> None:
        """The context is here: write it through to the host pool and wait for a place in the batch."""
        if self.plane.decode_stores:
            self._store(now, output.job.chain)
        self.waiting.append(output)
        self._admit(now)

    def _admit(self, now: float) -> None:
        while self.waiting and len(self.decode_loop) < self.spec.max_decode_batch:
            output = self.waiting[0]
            needed = output.job.prompt_tokens + output.run.max_tokens
            if not self.device.claim(needed):
                return
            self.waiting.popleft()
            output.device_tokens, output.joined = needed, True
            self.decode_loop.join(now, output.run)

    def _deliver(self) -> None:
        progress = self.decode_loop.take_progress()
        for run, _, finished_at in progress:
            output = self.outputs.get(run.request_id)
            if output is None or output.run is not run or finished_at is None:
                continue
            job = output.job
            output.joined = False
            self._drop_output(finished_at, output)
            if self.plane.decode_stores and job.output_chain:
                self._store(finished_at, job.chain + job.output_chain)
            job.sent_tokens = run.max_tokens
            self._admit(finished_at)
            self.host.decoded(finished_at, self, job)

    def _drop_output(self, now: float, output: _Output) -> None:
        del self.outputs[output.job.request_id]
        if output in self.waiting:
            self.waiting.remove(output)
        if output.recompute is not None:
            self.prefill_loop.remove(output.recompute)
        if output.joined:
            self.decode_loop.leave(now, output.run)
        self.device.release(output.device_tokens)
        output.device_tokens = 0

    def _release(self, request_id: str) -> bool:
        """The decode node has the context, or nobody will fetch it."""
        kept = self.kept.pop(request_id, None)
        if kept is None:
            return False
        self.pool.unpin(kept.pinned)
        self.device.release(kept.device_tokens)
        return True

    # ---- what the node says --------------------------------------------------------------------------------------

    def _store(self, now: float, chain: bytes) -> int:
        change = self.pool.store(now, chain)
        if change.evicted:
            self.counters.evicted_blocks += len(change.evicted) // HASH_BYTES
            self._say(now, kv.BlocksRemoved(self.name, self._next_seq(), change.evicted))
        if change.stored is not None:
            parent, run = change.stored
            self._say(now, kv.BlocksStored(self.name, self._next_seq(), parent, run))
        return change.held

    def _on_steps(self, steps: Steps) -> None:
        busy_s = steps.iterations * steps.iteration_s
        self.counters.decode_busy_s += busy_s
        self._count_row("decode", steps.batch, steps.iterations, 0, 0, 0, busy_s, steps.finished)

    def _count_row(
        self, stage: str, batch: int, iterations: int, t_uc: int, pairs: float, t_rst: int, busy_s: float, done: int
    ) -> None:
        row = self.rows.get((stage, batch))
        if row is None:
            row = self.rows[stage, batch] = WorkRow()
        row.t_uc += t_uc
        row.pairs += pairs
        row.t_rst += t_rst
        row.busy_s += busy_s
        row.requests += done
        row.iterations += iterations

    def take_rows(self) -> list[tuple[Any, ...]]:
        """Iterations since the last call, `(stage, t_uc, pairs, t_rst, batch, busy_s, requests, iterations)`."""
        rows: list[tuple[Any, ...]] = [
            (stage, row.t_uc, row.pairs, row.t_rst, batch, row.busy_s, row.requests, row.iterations)
            for (stage, batch), row in self.rows.items()
        ]
        self.rows.clear()
        return rows

    def _next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def _say(self, now: float, event: Any) -> None:
        self.outbox.append(event)
        if len(self.outbox) == 1:
            self.host.heard(now, self)

    def status(self) -> NodeState:
        """As `GET /v1/status`."""
        spec, machine = self.spec, self.phase
        running_prefill = len(self.prefill_loop.under_way)
        return NodeState(
            phase=machine.phase,
            target_phase=machine.target,
            state=machine.state,
            generation=machine.generation,
            boot_id=f"{self.name}-{self.boot}",
            running_prefill=running_prefill,
            queued_prefill=len(self.prefills) - running_prefill,
            running_decode=len(self.decode_loop),
            queued_decode=len(self.outputs) - len(self.decode_loop),
            queued_tokens=self.prefill_loop.waiting_tokens,
            pool_used_blocks=self.pool.used_blocks,
            pool_capacity_blocks=self.pool.capacity_blocks,
            pool_referenced_blocks=self.pool.referenced_blocks,
            kv_free_tokens=self.device.free_tokens,
            max_decode_batch=spec.max_decode_batch,
            event_seq=self.seq,
            kv_tokens=spec.device_tokens,
            prefill_chunk_tokens=spec.prefill_chunk_tokens,
        )

    def expire_handoffs(self, now: float) -> None:
        """Give up contexts that nobody fetched in time."""
        for request_id in [name for name, kept in self.kept.items() if kept.expires_at <= now]:
            self._release(request_id)

    def check_integrity(self) -> None:
        """Raises AssertionError where device memory, queues or the pool do not add up."""
        held = sum(kept.device_tokens for kept in self.kept.values())
        held += sum(call.device_tokens for call in self.prefills.values())
        held += sum(output.device_tokens for output in self.outputs.values())
        assert held == self.device.used_tokens, f"{self.name}: device {self.device.used_tokens} booked, {held} held"
        known = {id(call.work) for call in self.prefills.values()}
        known |= {id(output.recompute) for output in self.outputs.values() if output.recompute is not None}
        works = {id(work) for work in (*self.prefill_loop.queue, *self.prefill_loop.under_way)}
        assert works == known, f"{self.name}: {len(works)} prompts queued, {len(known)} waited for"
        self.pool.check_integrity()
