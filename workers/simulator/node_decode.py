"""The decode side of a simulated node: contexts that arrive or are computed here, the batch, and what comes out of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from apps.kvcache.domain.hashing import HASH_BYTES
from workers.agent.engines.simulated_decode_loop import DecodeLoop, DecodeRun, Steps
from workers.agent.engines.simulated_network import earliest_end, occupy
from workers.agent.engines.simulated_prefill_loop import PrefillWork
from workers.simulator.node_core import Kept, NodeCore
from workers.simulator.node_parts import FETCH_DEADLINE_S, Job


@dataclass(slots=True, eq=False)
class Output:
    """A request whose output is made here."""

    job: Job
    run: DecodeRun
    device_tokens: int = 0
    recompute: PrefillWork | None = None
    joined: bool = False


class DecodeStage:
    """`outputs`: the requests here, by name; those of `waiting` have their context and no place in the batch yet."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self.loop = DecodeLoop(core.timing, self._on_steps, send_every_s=None)
        self.outputs: dict[str, Output] = {}
        self.waiting: deque[Output] = deque()

    def start(self, now: float, job: Job, source: str, moved: bool = False) -> None:
        """Take an output over from the node that computed its context, or, `moved`, from the pool of another decode node."""
        core = self._core
        peer = core.host.peer(source)
        generated = job.sent_tokens
        run = DecodeRun(job.request_id, job.prompt_tokens + generated, generated, max(job.output_tokens, generated + 1))
        output = self.outputs[job.request_id] = Output(job, run)
        if moved and peer is not None and peer is not core and peer.alive:
            self._move_here(now, output, peer)
            return
        kept = peer.kept.get(job.request_id) if peer is not None and peer.alive else None
        if peer is None or kept is None:
            self._compute_context(now, output)
        elif peer is core:
            core.release(job.request_id)
            self._ready(now, output)
        else:
            self._take_over(now, output, peer, kept)

    def tokens_sent(self, request_id: str) -> int:
        """Output tokens that exist of a request that decodes here."""
        output = self.outputs.get(request_id)
        return 0 if output is None else self.loop.tokens_of(output.run)

    def tokens_needed(self) -> int:
        """Context tokens of the requests that decode here or wait for room to."""
        return sum(output.job.prompt_tokens + self.loop.tokens_of(output.run) for output in self.outputs.values())

    def _take_over(self, now: float, output: Output, peer: NodeCore, kept: Kept) -> None:
        """Bring the context over. Its layers have travelled since the prompt started, so only what is left takes time."""
        core, request_id = self._core, output.job.request_id
        whole_s = core.timing.transfer_s(output.job.prompt_tokens)
        ends_at = max(now + core.timing.transfer_s(0), earliest_end(kept.started_at, peer.nic, core.nic, whole_s))
        occupy(peer.nic, core.nic, ends_at)
        boot = peer.boot

        def arrive(at: float) -> None:
            same = peer.alive and peer.boot == boot
            if same and peer.release(request_id) and peer.prefill_loop.queue:
                core.host.wake(peer, at)
            if self.outputs.get(request_id) is not output:
                return
            if same:
                self._ready(at, output)
            else:
                self._compute_context(at, output)

        core.agenda.at(ends_at, arrive)

    def _move_here(self, now: float, output: Output, peer: NodeCore) -> None:
        """Fetch the full blocks of prompt and output from the pool of the node that it leaves, which wrote them as they were
        filled, and compute the last block again. Of a prompt that the pool has in part, only that part comes."""
        core, job = self._core, output.job
        block_tokens = core.spec.block_tokens
        held = peer.pool.lookup(job.chain)
        tokens = held * block_tokens
        if held * HASH_BYTES == len(job.chain):
            tokens = output.run.context_tokens // block_tokens * block_tokens
        lacking = max(0, tokens - core.pool.lookup(job.chain) * block_tokens)
        ends_at = earliest_end(now, peer.nic, core.nic, core.timing.transfer_s(lacking))
        if not lacking or ends_at - now > FETCH_DEADLINE_S:
            self._compute_context(now, output)
            return
        occupy(peer.nic, core.nic, ends_at)
        boot, pinned = peer.boot, peer.pool.pin(job.chain)

        def arrive(at: float) -> None:
            same = peer.alive and peer.boot == boot
            if same:
                peer.pool.unpin(pinned)
            if self.outputs.get(job.request_id) is output:
                core.counters.fetched_tokens += lacking if same else 0
                self._compute_context(at, output, tokens if same else 0)

        core.agenda.at(ends_at, arrive)

    def _compute_context(self, now: float, output: Output, fetched_tokens: int = 0) -> None:
        """Compute the context here, from what the own pool has or what was fetched."""
        core, context_tokens = self._core, output.run.context_tokens

        def find_cached(_work: PrefillWork) -> int:
            held_tokens = core.pool.lookup(output.job.chain) * core.spec.block_tokens
            return min(max(held_tokens, fetched_tokens), context_tokens - 1)

        output.recompute = PrefillWork(output.job.request_id, context_tokens, now, lambda _work: True, find_cached)
        core.prefill_loop.add(output.recompute)

    def recomputed(self, now: float, work: PrefillWork) -> None:
        """A context has been computed here."""
        output = self.outputs.get(work.request_id)
        if output is not None and output.recompute is work:
            output.recompute = None
            self._core.counters.recomputed_tokens += work.computed_tokens
            self._ready(now, output)

    def _ready(self, now: float, output: Output) -> None:
        """The context is here: write it through to the host pool and wait for a place in the batch."""
        if self._core.plane.decode_stores:
            self._core.store(now, output.job.chain)
        self.waiting.append(output)
        self.admit(now)

    def admit(self, now: float) -> None:
        """Let in who waits, in order, as long as there is room."""
        core = self._core
        while self.waiting and len(self.loop) < core.spec.max_decode_batch:
            output = self.waiting[0]
            needed = output.job.prompt_tokens + output.run.max_tokens
            if not core.device.claim(needed):
                return
            self.waiting.popleft()
            output.device_tokens, output.joined = needed, True
            self.loop.join(now, output.run)
            core.host.joined(now, core, output.job)

    def deliver(self) -> None:
        """Pass on what ended in the batch."""
        core = self._core
        for run, _, finished_at in self.loop.take_progress():
            output = self.outputs.get(run.request_id)
            if output is None or output.run is not run or finished_at is None:
                continue
            job = output.job
            output.joined = False
            self.drop(finished_at, run.request_id)
            if core.plane.decode_stores and job.output_chain:
                core.store(finished_at, job.chain + job.output_chain)
            job.sent_tokens = run.max_tokens
            self.admit(finished_at)
            core.host.decoded(finished_at, core, job)

    def drop(self, now: float, request_id: str) -> None:
        """Free what the output holds, wherever it stands."""
        output = self.outputs.pop(request_id, None)
        if output is None:
            return
        core = self._core
        if output in self.waiting:
            self.waiting.remove(output)
        if output.recompute is not None:
            core.prefill_loop.remove(output.recompute)
        if output.joined:
            self.loop.leave(now, output.run)
        core.device.release(output.device_tokens)
        output.device_tokens = 0

    def _on_steps(self, steps: Steps) -> None:
        busy_s = steps.iterations * steps.iteration_s
        self._core.counters.decode_busy_s += busy_s
        self._core.count_row("decode", steps.batch, steps.iterations, 0, 0, 0, busy_s, steps.finished)
