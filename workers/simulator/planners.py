"""Who decides about the split of a simulated partition, and how its orders reach the nodes.

`OwnPlanner` is ours: the gateway's load records become slices, `apps.planning.domain` decides at each window's end, and its
phase machine carries the order out, exactly as the planner process does with rows instead of memory. `BaselineDriver` runs a
published planner of `apps.planning.domain.baselines`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from apps.planning.domain import loop, watch
from apps.planning.domain import phase_machine as orders
from apps.planning.domain.baselines import BaselinePlanner, Demand, NodeReport
from apps.planning.domain.capacity import NodeCapacity
from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients
from apps.planning.domain.plan_types import Decision, LastSwitch, PlannerNode, PlannerPolicy, PlannerState
from apps.planning.domain.slices import LoadPiece
from workers.agent.phase import PhaseName
from workers.simulator.clients import Player
from workers.simulator.clock import TIMEOUT
from workers.simulator.partition import Partition

WATCH_EVERY_S = 10.0


@dataclass
class OrderDriver:
    """Carries switch orders out, one at a time: commands of the phase machine become the partition's configuration, pushes
    and polls. `finished` remembers every switch: (when it was over, mean seconds a node took, nodes gained by prefill);
    `moved` what each node did."""

    partition: Partition
    drain_deadline_s: float = 60.0
    cooldown_s: float = 120.0
    machine: orders.PhaseMachine | None = None
    finished: list[tuple[float, float, int]] = field(default_factory=list)
    moved: list[orders.MovePlan] = field(default_factory=list)
    down: bool = False
    _generation: int = 0

    @property
    def running(self) -> bool:
        return self.machine is not None and self.machine.plan.state in orders.ACTIVE

    @property
    def cooling(self) -> bool:
        return self.machine is not None and self.machine.plan.state == "cooling"

    def order(self, now: float, moves: list[tuple[str, str]]) -> None:
        """Begin to change these nodes, `(node, phase)`."""
        config = self.partition.config
        plans = [orders.MovePlan(node, config.nodes[node].phase, phase) for node, phase in moves]
        facts = {
            name: orders.NodeFacts(node.phase, node.generation, self.partition.nodes[name].alive)
            for name, node in config.nodes.items()
        }
        plan = orders.OrderPlan("ordered", plans, self.drain_deadline_s, self.cooldown_s, now)
        self.machine = orders.PhaseMachine(plan, facts)
        self._handle(now, orders.Tick())
        self._arm(now)

    def roll_back(self, now: float, reason: str) -> None:
        """Undo the order that runs, or the last one that finished."""
        machine = self.machine
        if machine is None:
            return
        if machine.plan.state in orders.ACTIVE:
            self._handle(now, orders.RollBackAsked(reason))
            return
        moves = [(move.node, move.from_phase) for move in machine.plan.moves if move.state == "switched"]
        if moves:
            self.order(now, moves)

    def _arm(self, now: float) -> None:
        assert self.machine is not None
        deadline = self.machine.next_deadline()
        if deadline is not None:
            self.partition.clock.at(max(deadline, now + orders.POLL_EVERY_S), TIMEOUT, self._tick, self.machine)

    def _tick(self, now: float, machine: orders.PhaseMachine) -> None:
        if machine is not self.machine:
            return
        if not self.down:
            self._handle(now, orders.Tick())
        if machine is self.machine:
            self._arm(now)

    def _handle(self, now: float, event: orders.Event) -> None:
        machine = self.machine
        assert machine is not None
        before = machine.plan.state
        for command in machine.handle(now, event):
            self._carry_out(now, command)
        after = machine.plan.state
        if before in orders.ACTIVE and after not in orders.ACTIVE:
            self._over(now, machine)

    def _over(self, now: float, machine: orders.PhaseMachine) -> None:
        moved = [m for m in machine.plan.moves if m.state == "switched" and m.began_at is not None]
        taken = [(m.finished_at or now) - (m.began_at or now) for m in moved]
        delta = sum((m.to_phase == "prefill") - (m.from_phase == "prefill") for m in moved)
        self.moved += moved
        if moved:
            mean_s = sum(taken) / len(taken)
            self.finished.append((now, mean_s, delta))
            self.partition.recorder.switch_s += [(now, seconds) for seconds in taken]
        split = self.partition.yard.fleet.nodes.split()
        self.partition.recorder.splits.append((now, split["prefill"], split["decode"]))

    def _carry_out(self, now: float, command: orders.Command) -> None:
        partition = self.partition
        match command:
            case orders.TakeNode(node, phase, generation):
                partition.set_node(now, node, _phase(phase), generation, True)
            case orders.ReleaseNode(node):
                partition.set_node(now, node, None, None, False)
            case orders.Publish():
                partition.configure(now, partition.config)
            case orders.PushPhase(node, phase, generation, deadline_s):
                code = partition.nodes[node].order_phase(now, _phase(phase), generation, deadline_s)
                if code == "unreachable":
                    self._answer(now, orders.AgentUnreachable(node, "connection refused"))
                else:
                    self._answer(now, orders.PushAnswered(node, generation, code))
            case orders.PollStatus(node):
                machine = partition.nodes[node]
                if machine.alive:
                    status = machine.status()
                    self._answer(
                        now,
                        orders.StatusReported(node, status.phase, status.target_phase, status.state, status.generation),
                    )

    def _answer(self, now: float, event: orders.Event) -> None:
        """An agent's answer comes after what is being carried out."""
        machine = self.machine

        def arrive(at: float, _: Any) -> None:
            if machine is self.machine:
                self._handle(at, event)

        self.partition.clock.at(now + self.partition.signals.delay_s, TIMEOUT, arrive)


def _phase(name: str) -> PhaseName:
    assert name in ("prefill", "decode", "mixed")
    return name  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Believed:
    """What the planner takes a node's coefficients to be."""

    prefill: PrefillCoefficients
    decode: DecodeCoefficients


@dataclass
class OwnPlanner:
    """Our planner: `domain.loop` with its memory in a variable. `policy` as people set it; `watch` False undoes nothing."""

    partition: Partition
    policy: PlannerPolicy
    driver: OrderDriver
    slices_per_window: int = 10
    switch_s: float = 0.0
    watch: bool = True
    memory: loop.Memory = field(default_factory=loop.Memory)
    pieces: list[LoadPiece] = field(default_factory=list)
    thinks: list[tuple[float, float]] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    rollbacks: list[tuple[float, str]] = field(default_factory=list)
    last: LastSwitch | None = None
    down: bool = False
    _undoing: bool = False
    _answered_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slice_s = self.policy.window_s / self.slices_per_window
        self.policy = replace(self.policy, slice_s=slice_s)
        self.partition.on_record.append(self._record)
        self.partition.on_ended.append(self._pause)
        self.partition.clock.at(slice_s + loop.LAG_S, TIMEOUT, self._slice)
        if self.watch:
            self.partition.clock.at(WATCH_EVERY_S, TIMEOUT, self._watch)

    def _record(self, now: float, record: dict[str, Any]) -> None:
        if record["kind"] == "load":
            self.pieces.append(
                LoadPiece(
                    t0=record["t0"],
                    t1=record["t1"],
                    prefilled=record["prefilled"],
                    t_uc=record["t_uc"],
                    pairs=record["pairs"],
                    t_rst=record["t_rst"],
                    prefill_iterations=record["prefill_iterations"],
                    finished=record["finished"],
                    t_out=record["t_out"],
                    decode_iterations_of_finished=record["decode_iterations_of_finished"],
                    in_flight_s=record["in_flight_s"],
                    prefill_utilisation=record["prefill_utilisation"],
                    decode_utilisation=record["decode_utilisation"],
                    prefill_waits_s=tuple(record["prefill_waits_s"]),
                    stale_ratio=record["stale_reports_ratio"],
                )
            )

    def _pause(self, now: float, player: Player) -> None:
        """How long the branch had paused before it asked, as the planner process reads it from rows."""
        branch = player.turn.signal.branch_id if player.turn is not None else None
        if branch is None or not self.partition.signals.harness:
            return
        before = self._answered_at.get(branch)
        self._answered_at[branch] = now
        if before is not None and player.asked_at >= before:
            self.thinks.append((now, player.asked_at - before))

    def _slice(self, now: float, _: Any) -> None:
        self.partition.clock.at(now + self.policy.slice_s, TIMEOUT, self._slice)
        self._tick(now)

    def _watch(self, now: float, _: Any) -> None:
        self.partition.clock.at(now + WATCH_EVERY_S, TIMEOUT, self._watch)
        if self.last is not None and now - self.last.finished_at <= watch.WATCH_S + loop.LAG_S:
            self._tick(now)

    def _tick(self, now: float) -> None:
        self._note_last()
        if self.down:
            return
        state = self.state(now)
        since = loop.measured_since(now, self.memory, state)
        self.memory, outcomes = loop.tick(now, self.memory, state, loop.Measured(self.pieces, self.thinks))
        for outcome in outcomes:
            match outcome:
                case loop.Decided(decision=decision):
                    self.decisions.append((now, decision))
                    if decision.verdict == "switch" and decision.chosen is not None:
                        self.driver.order(now, [(move.node, move.to_phase) for move in decision.chosen.moves])
                case loop.UndoSwitch(reason):
                    self.rollbacks.append((now, reason))
                    self._undoing = True
                    self.driver.roll_back(now, reason)
        kept_from = since - 2 * watch.BREACH_S
        self.pieces = [piece for piece in self.pieces if piece.t1 > kept_from]
        self.thinks = [think for think in self.thinks if think[0] > kept_from]

    def _note_last(self) -> None:
        if not self.driver.finished:
            return
        at, _, delta = self.driver.finished[-1]
        if self.last is None or at > self.last.finished_at:
            self.last = LastSwitch(at, delta, watched=self.watch and not self._undoing)
            self._undoing = False

    def state(self, now: float) -> PlannerState:
        """As the planner process builds it from rows."""
        partition = self.partition
        nodes = []
        for known in partition.yard.fleet.nodes:
            config, status = known.config, known.status
            nodes.append(
                PlannerNode(
                    name=config.name,
                    order=config.order,
                    phase=config.phase,
                    capacity=NodeCapacity(config.prefill, config.decode, float(config.decode_limit)),
                    available=known.health != "down",
                    draining=config.draining,
                    running=status.running_prefill + status.running_decode if status else 0,
                    referenced_blocks=status.pool_referenced_blocks if status else 0,
                    switch_s=self.switch_s,
                )
            )
        return PlannerState(now, tuple(nodes), self.policy, self.last, self.driver.running)


@dataclass
class BaselineDriver:
    """Runs a published planner every `every_s`; its flips go through the same orders."""

    partition: Partition
    planner: BaselinePlanner
    driver: OrderDriver
    down: bool = False
    flips: list[tuple[float, str, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sums = [0, 0, 0, 0]
        self.partition.on_record.append(self._record)
        self.partition.clock.at(self.planner.every_s, TIMEOUT, self._look)

    def _record(self, now: float, record: dict[str, Any]) -> None:
        if record["kind"] == "load":
            sums = self._sums
            sums[0] += record["prefilled"]
            sums[1] += record["t_uc"] + record["t_c"]
            sums[2] += record["finished"]
            sums[3] += record["t_out"]

    def _look(self, now: float, _: Any) -> None:
        self.partition.clock.at(now + self.planner.every_s, TIMEOUT, self._look)
        demand = Demand(self.planner.every_s, *self._sums)
        self._sums = [0, 0, 0, 0]
        if self.down or self.driver.running:
            return
        flip = self.planner.decide(now, self.reports(), demand)
        if flip is not None:
            self.flips.append((now, flip.node, flip.phase, flip.reason))
            self.driver.order(now, [(flip.node, flip.phase)])

    def reports(self) -> list[NodeReport]:
        """The nodes as they last reported themselves. KV usage is what the engine has at this moment."""
        found = []
        for known in self.partition.yard.fleet.nodes:
            status = known.status
            if status is None or known.health == "down":
                continue
            node = self.partition.nodes[known.name]
            found.append(
                NodeReport(
                    name=known.name,
                    order=known.config.order,
                    phase=known.config.phase,
                    queued_tokens=status.queued_tokens,
                    kv_usage=node.decode.tokens_needed() / node.spec.device_tokens,
                    running=status.running_prefill + status.running_decode,
                    ready=status.state == "ready" and not known.config.draining,
                )
            )
        return found
