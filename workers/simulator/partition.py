"""One partition in virtual time: a real `Yard`, simulated nodes, harnesses, and the wire between them.

It is a driver like the gateway's: events go into the yard, its commands are carried out. Nodes' words (statuses, KV events,
iterations) reach the yard `signal_delay_s` late; a request's own answers come at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from apps.kvcache.domain.hashing import HashedPrompt, root_hash
from workers.agent.phase import PhaseName, StageName
from workers.simulator.clients import Clients, Player, Turn
from workers.simulator.clock import ARRIVAL, COMPLETION, SIGNAL, TIMEOUT, Clock
from workers.simulator.node import SimNode
from workers.simulator.node_core import NodeCore
from workers.simulator.node_parts import Job, NodeSpec
from workers.simulator.recorder import Recorder
from workers.yard import commands, events
from workers.yard.config import PartitionConfig
from workers.yard.yard import Yard

STATUS_EVERY_S = 2.0
SAMPLE_EVERY_S = 10.0
RETRY_AFTER_S = 2.0
BYTES_A_TOKEN = 4

Trace = Callable[[float, events.Event, list[commands.Command]], None]


@dataclass(frozen=True, slots=True)
class Signals:
    """How the harness and the nodes are heard. `harness` False: no branch signal reaches the front door. `delay_s`: how old
    a node's word is; of its events `lost_ratio` vanish and `repeated_ratio` come twice."""

    harness: bool = True
    delay_s: float = 0.05
    lost_ratio: float = 0.0
    repeated_ratio: float = 0.0


@dataclass(slots=True)
class Living:
    """A request on its way. `queue_s`: what it waited before its prefill began, in flow control and in the engine. `at_node`: where the newest call went; answers to older ones are no longer wanted.
    `prefill_node`: who computed its prompt last."""

    player: Player
    turn: Turn
    request_id: str
    asked_at: float
    job: Job
    queue_s: float = 0.0
    first_at: float | None = None
    prefilled: bool = False
    cached_tokens: int = 0
    at_node: str = ""
    prefill_node: str = ""


@dataclass
class Partition:
    """Build it, start players on `clients`, then `clock.run_until`."""

    config: PartitionConfig
    specs: tuple[NodeSpec, ...]
    seed: int = 0
    signals: Signals = Signals()
    sharing_domain: str = "simulated"
    failed_fetch_ratio: float = 0.0
    check_every: int = 0
    trace: Trace | None = None
    admit: Callable[[float, Player], bool] | None = None
    recorder: Recorder = field(default_factory=Recorder)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.rng = random.Random(f"{self.seed}:partition")
        self.yard = Yard(self.config, 0.0)
        self.clients = Clients(self.clock, self.ask)
        self.nodes = {spec.name: SimNode(spec, self) for spec in self.specs}
        self.living: dict[str, Living] = {}
        self.on_record: list[Callable[[float, dict[str, Any]], None]] = []
        self.on_ended: list[Callable[[float, Player], None]] = []
        self.arrived = self.answered = self.rejected = self.cancelled = 0
        self._by_player: dict[int, Living] = {}
        self._root = root_hash(self.config.model.name, self.config.model.dtype, self.sharing_domain)
        self._block_tokens = self.config.model.block_tokens
        self._reports: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._carrying = False
        self._tick_at: float | None = None
        self._handled = 0
        self._carry: dict[type, Callable[[float, Any], None]] = {
            commands.StartPrefill: self._start_prefill,
            commands.Prefetch: self._prefetch,
            commands.CancelPrefetch: self._cancel_prefetch,
            commands.StartDecode: self._start_decode,
            commands.AbortOnNode: self._abort,
            commands.ReleaseHandoff: self._release_handoff,
            commands.DropOrphan: self._abort,
            commands.Refuse: self._refused,
            commands.PushRefs: self._push_refs,
            commands.FetchSnapshot: self._fetch_snapshot,
            commands.Journal: self._journal,
        }
        self._poll(0.0)
        self.clock.at(SAMPLE_EVERY_S, TIMEOUT, self._sample)

    # ---- the yard's driver ---------------------------------------------------------------------------------------

    def feed(self, now: float, event: events.Event) -> None:
        """Hand one event to the yard and carry out what it asks for."""
        answer = self.yard.handle(now, event)
        if self.trace is not None:
            self.trace(now, event, answer)
        for command in answer:
            self._carry[type(command)](now, command)
        deadline = self.yard.next_deadline()
        if deadline != self._tick_at:
            self._tick_at = deadline
            if deadline is not None:
                self.clock.at(deadline, TIMEOUT, self._tick, deadline)
        if self.check_every:
            self._handled += 1
            if self._handled % self.check_every == 0:
                self.check_integrity()

    def _tick(self, now: float, deadline: float) -> None:
        if deadline == self._tick_at:
            self._tick_at = None
            self.feed(now, events.Tick())

    def _later(self, act: Callable[..., None], *given: Any) -> None:
        """Do it once the node that speaks is done with what it does."""
        self._reports.append((act, given))

    def _settle(self, now: float) -> None:
        """Pass on what nodes reported; that may make other nodes report."""
        if self._carrying:
            return
        self._carrying = True
        reports = self._reports
        while reports:
            act, given = reports.popleft()
            act(now, *given)
        self._carrying = False

    # ---- commands ------------------------------------------------------------------------------------------------

    def _start_prefill(self, now: float, command: commands.StartPrefill) -> None:
        living = self.living[command.request_id]
        living.at_node = living.prefill_node = command.node
        if command.attempt == 1:
            living.queue_s = command.queue_s
        job = living.job
        job.sent_tokens = command.resumed_tokens
        if job.sent_tokens:
            job.prompt_tokens = living.turn.prompt_tokens + job.sent_tokens
        self.nodes[command.node].start_prefill(now, job, command.fetch, command.generation)

    def _prefetch(self, now: float, command: commands.Prefetch) -> None:
        self.recorder.prefetches += 1
        job = self.living[command.request_id].job
        self.nodes[command.node].prefetch(now, command.request_id, job.chain, command.fetch)

    def _cancel_prefetch(self, now: float, command: commands.CancelPrefetch) -> None:
        self.nodes[command.node].cancel_prefetch(now, command.request_id)

    def _start_decode(self, now: float, command: commands.StartDecode) -> None:
        living = self.living[command.request_id]
        living.at_node = command.node
        job = living.job
        job.prompt_tokens = living.turn.prompt_tokens
        moved = command.source != living.prefill_node
        self.nodes[command.node].start_decode(now, job, command.source, command.generation, moved)

    def _abort(self, now: float, command: commands.AbortOnNode | commands.DropOrphan) -> None:
        node = self.nodes.get(command.node)
        if node is not None:
            node.abort(now, command.request_id)

    def _release_handoff(self, now: float, command: commands.ReleaseHandoff) -> None:
        node = self.nodes.get(command.node)
        if node is not None:
            node.release_handoff(now, command.request_id)

    def _refused(self, now: float, command: commands.Refuse) -> None:
        living = self.living.pop(command.request_id)
        self.recorder.refused[command.code] = self.recorder.refused.get(command.code, 0) + 1
        self.rejected += 1
        player = living.player
        if command.http_status in (429, 503):
            self.recorder.retried += 1
            self._later(self.clients.retry, player, command.retry_after_s or RETRY_AFTER_S)
        else:
            self.recorder.failed += 1
            self._later(self.clients.answered, player)
        self._settle_soon()

    def _settle_soon(self) -> None:
        if not self._carrying:
            self.clock.at(self.clock.now, COMPLETION, lambda now, _: self._settle(now))

    def _push_refs(self, now: float, command: commands.PushRefs) -> None:
        self.clock.at(now + self.signals.delay_s, SIGNAL, self._refs_arrive, command)

    def _refs_arrive(self, now: float, command: commands.PushRefs) -> None:
        node = self.nodes.get(command.node)
        if node is not None and node.alive:
            node.apply_refs(command.changes, command.reset)

    def _fetch_snapshot(self, now: float, command: commands.FetchSnapshot) -> None:
        self.clock.at(now + self.signals.delay_s, SIGNAL, self._snapshot_taken, command.node)

    def _snapshot_taken(self, now: float, name: str) -> None:
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return
        node.outbox.clear()
        self.feed(now, events.NodeSnapshotTaken(name, node.seq, tuple(node.pool.segments())))
        self._settle(now)

    def _journal(self, now: float, command: commands.Journal) -> None:
        if not command.of_request:
            for listener in self.on_record:
                listener(now, command.record)

    # ---- harnesses -----------------------------------------------------------------------------------------------

    def ask(self, now: float, player: Player) -> None:
        if self.admit is not None and not self.admit(now, player):
            return
        turn = player.turn
        assert turn is not None
        self.arrived += 1
        request_id = f"r{self.arrived}"
        job = Job(request_id, turn.chain, turn.prompt_tokens, turn.output_tokens, turn.output_chain)
        self.living[request_id] = Living(player, turn, request_id, now, job)
        signal = turn.signal
        if not self.signals.harness:
            signal = replace(signal, branch_id=None, version=None, parent=None, relation=None, end=False, sequence=None)
        prompt = HashedPrompt(turn.prompt_tokens, self._block_tokens, self._root, turn.chain)
        request = events.YardRequest(
            request_id=request_id,
            tenant=player.tenant,
            band=self.config.objectives[player.objective].band,
            flow_id=player.tenant,
            bytes=turn.prompt_tokens * BYTES_A_TOKEN,
            prompt=prompt,
            output_tokens=turn.output_tokens,
            received_at=now,
            branch=signal,
            objective=player.objective,
        )
        self.feed(now, events.Arrived(request))
        self._settle(now)

    # ---- Host: what nodes report ---------------------------------------------------------------------------------

    def peer(self, name: str) -> SimNode | None:
        return self.nodes.get(name)

    def fetch_fails(self) -> bool:
        return self.failed_fetch_ratio > 0 and self.rng.random() < self.failed_fetch_ratio

    def draw(self, low: float, high: float) -> float:
        return low if low == high else self.rng.uniform(low, high)

    def prefilled(self, now: float, node: NodeCore, job: Job, result: events.PrefillResult) -> None:
        self._later(self._prefilled, job, node, result)

    def _prefilled(self, now: float, job: Job, node: NodeCore, result: events.PrefillResult) -> None:
        living = self.living.get(job.request_id)
        if living is None or living.job is not job or living.at_node != node.name:
            return
        if not living.prefilled:
            living.prefilled = True
            living.cached_tokens = result.cached_tokens + result.fetched_tokens
            living.queue_s += result.queued_s
        if result.first_finish is not None or node.plane.answers_from == "prefill":
            self._first_token(now, living)
        job.sent_tokens += 1
        self.feed(now, events.PrefillFinished(job.request_id, result))
        if job.request_id not in self.yard.requests and job.request_id in self.living:
            self._end(now, living, job.sent_tokens)

    def fetched_ahead(self, now: float, node: NodeCore, request_id: str) -> None:
        self._later(self._fetched_ahead, request_id, node.name)
        self._settle_soon()

    def _fetched_ahead(self, now: float, request_id: str, node: str) -> None:
        self.feed(now, events.PrefetchEnded(request_id, node))

    def joined(self, now: float, node: NodeCore, job: Job) -> None:
        if node.plane.answers_from == "decode":
            self._later(self._joined, job, node)

    def _joined(self, now: float, job: Job, node: NodeCore) -> None:
        living = self.living.get(job.request_id)
        if living is not None and living.job is job and living.at_node == node.name:
            self._first_token(now, living)

    def _first_token(self, now: float, living: Living) -> None:
        if living.first_at is None:
            living.first_at = now
            self.feed(now, events.FirstToken(living.request_id))

    def decoded(self, now: float, node: NodeCore, job: Job) -> None:
        self._later(self._decoded, job, node)

    def _decoded(self, now: float, job: Job, node: NodeCore) -> None:
        living = self.living.get(job.request_id)
        if living is None or living.job is not job or living.at_node != node.name:
            return
        # Produced, whether a pool keeps it or not: what is not kept counts as lost when it is asked for again.
        self.feed(now, events.DecodeFinished(job.request_id, "length", job.sent_tokens, job.output_chain))
        if job.request_id not in self.yard.requests:
            self._end(now, living, job.sent_tokens)

    def _end(self, now: float, living: Living, output_tokens: int) -> None:
        del self.living[living.request_id]
        self.answered += 1
        player, turn, asked_at = living.player, living.turn, living.player.asked_at
        self.recorder.finished(
            now,
            (living.first_at or now) - asked_at,
            now - asked_at,
            living.queue_s,
            turn.prompt_tokens,
            living.cached_tokens,
            output_tokens,
            (player.workload, player.tenant),
        )
        for listener in self.on_ended:
            listener(now, player)
        self.clients.answered(now, player)

    def refused(self, now: float, node: NodeCore, job: Job, stage: StageName, code: str) -> None:
        self._later(self._node_refused, job, stage, code)

    def _node_refused(self, now: float, job: Job, stage: StageName, code: str) -> None:
        if job.request_id not in self.living:
            return
        kind = events.PrefillFailed if stage == "prefill" else events.DecodeFailed
        self.feed(now, kind(job.request_id, True, code))

    def wake(self, node: NodeCore, at: float) -> None:
        self.clock.at(at, COMPLETION, self._woken, (self.nodes[node.name], at))

    def _woken(self, now: float, due: tuple[SimNode, float]) -> None:
        node, at = due
        if node.wake_at == at or node.prefill_loop.queue:
            if node.wake_at == at:
                node.wake_at = None
            node.advance(now)
            node.settle(now)
            self._settle(now)

    # ---- signals -------------------------------------------------------------------------------------------------

    def heard(self, now: float, node: NodeCore) -> None:
        self.clock.at(now + self.signals.delay_s, SIGNAL, self._deliver, (node, node.boot))

    def _deliver(self, now: float, sender: tuple[NodeCore, int]) -> None:
        node, boot = sender
        if not node.alive or node.boot != boot or not node.outbox:
            return
        batch, node.outbox = node.outbox, []
        signals = self.signals
        if signals.lost_ratio or signals.repeated_ratio:
            batch = self._damaged(batch)
        if batch:
            self.feed(now, events.NodeEvents(node.name, batch))
            self._settle(now)

    def _damaged(self, batch: list[Any]) -> list[Any]:
        came: list[Any] = []
        for event in batch:
            if self.rng.random() >= self.signals.lost_ratio:
                came.append(event)
                if self.rng.random() < self.signals.repeated_ratio:
                    came.append(event)
        return came

    def _poll(self, now: float, _: Any = None) -> None:
        """Take every node's status and iterations; they arrive later, together."""
        reports, worked = [], []
        for node in self.nodes.values():
            if not node.alive:
                continue
            node.advance(now)
            node.expire_handoffs(now)
            node.settle(now)
            reports.append(events.NodeStatus(node.name, node.status()))
            rows = node.take_rows()
            if rows:
                worked.append((node.name, rows))
        self.clock.at(now + self.signals.delay_s, SIGNAL, self._statuses_arrive, (reports, worked))
        self.clock.at(now + STATUS_EVERY_S, SIGNAL, self._poll)
        self._settle(now)

    def _statuses_arrive(self, now: float, news: tuple[list[events.NodeStatus], list[tuple[str, Any]]]) -> None:
        for node in self.nodes.values():
            if node.phase.state == "draining" and node.phase.target == "prefill":
                self._tell_progress(now, node)
        self.feed(now, events.NodeStatuses(*news))
        self._settle(now)

    def _sample(self, now: float, _: Any = None) -> None:
        """How evenly prefill nodes are loaded: the most loaded one's placed requests over their average."""
        placed = [
            len(node.prefill.calls) for node in self.nodes.values() if node.alive and node.phase.phase == "prefill"
        ]
        if placed and sum(placed):
            self.recorder.imbalance.append((now, max(placed) * len(placed) / sum(placed)))
        self.clock.at(now + SAMPLE_EVERY_S, TIMEOUT, self._sample)

    # ---- the control plane's hands -------------------------------------------------------------------------------

    def configure(self, now: float, config: PartitionConfig) -> None:
        """Publish a new configuration."""
        self.config = config
        for name, wanted in config.nodes.items():
            if wanted.draining or wanted.phase == "prefill":
                self._tell_progress(now, self.nodes[name])
        self.feed(now, events.Configured(config))
        self._settle_soon()

    def set_node(self, now: float, name: str, phase: PhaseName | None, generation: int | None, draining: bool) -> None:
        """What a node is wanted to be; publish with `configure`."""
        node = self.config.nodes[name]
        changed = replace(
            node,
            phase=phase if phase is not None else node.phase,
            generation=generation if generation is not None else node.generation,
            draining=draining,
        )
        self.config = replace(self.config, nodes={**self.config.nodes, name: changed})

    def _tell_progress(self, now: float, node: SimNode) -> None:
        """What the streams of a node's outputs have brought so far. It matters where an output may have to go on elsewhere;
        otherwise the yard hears of all tokens at its end, and of an empty node there is nothing to say."""
        if not node.alive or not node.decode.outputs:
            return
        node.advance(now)
        for request_id in list(node.decode.outputs):
            living, tokens = self.living.get(request_id), node.decode.tokens_sent(request_id)
            if living is not None and living.at_node == node.name and tokens > living.job.sent_tokens:
                new = tokens - living.job.sent_tokens
                living.job.sent_tokens = tokens
                self.feed(now, events.DecodeProgress(request_id, new))

    def crash(self, now: float, name: str) -> None:
        """The node's process is gone. Calls to it fail; what it was doing goes on elsewhere."""
        node = self.nodes[name]
        sent = {request_id: node.decode.tokens_sent(request_id) for request_id in node.decode.outputs}
        prefilling = list(node.prefill.calls)
        node.crash(now)
        for request_id in prefilling:
            if request_id in self.living:
                self.feed(now, events.PrefillFailed(request_id, True, "node-lost"))
        for request_id, tokens in sent.items():
            living = self.living.get(request_id)
            if living is not None:
                self.feed(now, events.DecodeProgress(request_id, max(0, tokens - living.job.sent_tokens)))
                self.feed(now, events.DecodeFailed(request_id, True, "node-lost"))
        self.feed(now, events.NodeUnreachable(name, refused=True))
        self.feed(now, events.NodeUnreachable(name, refused=True))
        self._settle(now)

    def restart(self, now: float, name: str) -> None:
        self.nodes[name].restart(now)

    # ---- proof ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError when the yard, its machines or the nodes disagree; nobody is lost between them."""
        counters = self.yard.outcomes.counters
        gone = counters.completed + counters.dropped + counters.failed + counters.cancelled
        in_flight = len(self.yard.requests)
        assert counters.arrived == gone + in_flight, f"arrived {counters.arrived}, ended {gone}, in flight {in_flight}"
        self.yard.check_integrity()
        for node in self.nodes.values():
            if node.alive:
                node.check_integrity()


def start_at(partition: Partition, at: float, act: Callable[[float], None]) -> None:
    """Have something done to the partition at a moment."""

    def do(now: float, _: Any) -> None:
        act(now)

    partition.clock.at(at, ARRIVAL, do)
