"""One simulated node: the agent's own phase machine and iteration loops, a pool without bytes, and links that take time.

The same engine as `workers/agent/engines/simulated`, without processes or sockets: it is told what to do, moves when the
clock says so, and reports through `Host`. Contexts are chains of block ids; nothing has tokens.
"""

from __future__ import annotations

from apps.kvcache.domain import events as kv
from workers.agent.engines.simulated_timing import Timing
from workers.agent.phase import PhaseMachine, PhaseName, PhaseRefused, StageName
from workers.simulator.node_core import NodeCore
from workers.simulator.node_decode import DecodeStage
from workers.simulator.node_parts import Host, Job, NodeSpec
from workers.simulator.node_prefill import PrefillStage
from workers.yard.commands import Fetch, RefChange
from workers.yard.events import NodeState


class SimNode(NodeCore):
    """See the module. Call `advance(now)` first; every public call leaves the next wake-up arranged."""

    def __init__(self, spec: NodeSpec, host: Host) -> None:
        super().__init__(spec, host)
        self.phase = PhaseMachine(spec.phase, 0)
        self.wake_at: float | None = None
        self.switches: list[tuple[float, float]] = []
        self.prefill = PrefillStage(self)
        self.decode = DecodeStage(self)

    # ---- work ----------------------------------------------------------------------------------------------------

    def start_prefill(self, now: float, job: Job, fetch: Fetch | None, generation: int) -> None:
        """Queue a prompt; its fetch begins now where the data plane says so."""
        if self._takes(now, job, "prefill", generation):
            self.advance(now)
            self.prefill.start(now, job, fetch)
            self.settle(now)

    def prefetch(self, now: float, request_id: str, chain: bytes, fetch: Fetch) -> None:
        """Bring blocks of a request that is not here yet."""
        if self.alive:
            self.advance(now)
            self.prefill.fetch_ahead(now, request_id, chain, fetch)
            self.settle(now)
        else:
            self.host.fetched_ahead(now, self, request_id)

    def cancel_prefetch(self, now: float, request_id: str) -> None:
        if self.alive:
            self.advance(now)
            self.prefill.cancel_ahead(now, request_id)
            self.settle(now)

    def start_decode(self, now: float, job: Job, source: str, generation: int, moved: bool = False) -> None:
        """Take an output over from the node that computed its context, or, `moved`, from a decode node that it leaves."""
        if self._takes(now, job, "decode", generation):
            self.advance(now)
            self.decode.start(now, job, source, moved)
            self.settle(now)

    def abort(self, now: float, request_id: str) -> None:
        """Free what the node holds for the request, wherever it stands."""
        if not self.alive:
            return
        self.advance(now)
        self.prefill.drop(request_id)
        self.decode.drop(now, request_id)
        self.release(request_id)
        self.settle(now)

    def release_handoff(self, now: float, request_id: str) -> None:
        """Nobody will fetch the context that is kept for the request."""
        if self.alive and request_id in self.kept:
            self.advance(now)
            self.release(request_id)
            self.settle(now)

    def apply_refs(self, changes: tuple[RefChange, ...], reset: bool) -> None:
        if reset:
            self.pool.reset_refs()
        for change in changes:
            self.pool.apply_refs(change.last, change.blocks, change.delta)

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
        target = self.phase.advance(now, {"prefill": len(self.prefill.calls), "decode": len(self.decode.outputs)})
        if (self.phase.phase, self.phase.state) != before:
            self._report_phase(now)
        if target is not None:
            low, high = self.plane.switch.seconds
            self.agenda.at(now + self.host.draw(low, high), lambda at: self._switched(at, target))

    def _switched(self, now: float, target: PhaseName) -> None:
        if not self.plane.switch.keeps_kv:
            self.pool.clear()
            self.say(now, kv.NodeCleared(self.name, self.next_seq()))
        self.phase.switched(now, target)
        if self.phase.last_switch is not None:
            self.switches.append((now, self.phase.last_switch.duration_s))
        self._report_phase(now)

    def _report_phase(self, now: float) -> None:
        machine = self.phase
        event = {"type": "phase", "seq": self.next_seq(), "phase": machine.phase, "target_phase": machine.target,
                 "state": machine.state, "generation": machine.generation}  # fmt: skip
        self.say(now, event)

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
        self.start_empty()
        self.prefill, self.decode = PrefillStage(self), DecodeStage(self)
        self.decode.loop.advance(now)

    def slow_down(self, now: float, timing: Timing) -> None:
        """From the next iteration on, work takes as long as `timing` says."""
        self.advance(now)
        self.timing = self.prefill_loop.timing = timing
        self.decode.loop.retime(timing)
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
        self.decode.loop.advance(now)
        self.decode.deliver()

    def settle(self, now: float) -> None:
        """Start what can start, then arrange to be woken at the next moment at which anything changes."""
        if not self.alive:
            return
        self._start_prefill_iteration(now)
        if self.decode.waiting:
            self.decode.admit(now)
        self._advance_phase(now)
        wake_at = self.agenda.next_at()
        iteration = self.prefill_loop.iteration
        if iteration is not None and (wake_at is None or iteration.ends_at < wake_at):
            wake_at = iteration.ends_at
        decode_at = self.decode.loop.next_deadline()
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
        self.count_row("prefill", 0, 1, sample.t_uc, sample.pairs, sample.t_rst, sample.busy_s, sample.requests)
        for work in complete:
            if not self.prefill.finish(at, work):
                self.decode.recomputed(at, work)
        self._start_prefill_iteration(at)

    def _start_prefill_iteration(self, at: float) -> None:
        loop = self.prefill_loop
        if loop.iteration is not None or not (loop.queue or loop.under_way):
            return
        planned = loop.plan(at)
        if planned is not None:
            loop.start(planned, self.decode.loop.reserve_gap(at, planned.seconds))

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
            queued_prefill=len(self.prefill.calls) - running_prefill,
            running_decode=len(self.decode.loop),
            queued_decode=len(self.decode.outputs) - len(self.decode.loop),
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
            self.release(request_id)

    def check_integrity(self) -> None:
        """Raises AssertionError where device memory, queues or the pool do not add up."""
        held = sum(kept.device_tokens for kept in self.kept.values())
        held += sum(call.device_tokens for call in self.prefill.calls.values())
        held += sum(output.device_tokens for output in self.decode.outputs.values())
        assert held == self.device.used_tokens, f"{self.name}: device {self.device.used_tokens} booked, {held} held"
        known = {id(call.work) for call in self.prefill.calls.values()}
        known |= {id(output.recompute) for output in self.decode.outputs.values() if output.recompute is not None}
        works = {id(work) for work in (*self.prefill_loop.queue, *self.prefill_loop.under_way)}
        assert works == known, f"{self.name}: {len(works)} prompts queued, {len(known)} waited for"
        self.pool.check_integrity()
