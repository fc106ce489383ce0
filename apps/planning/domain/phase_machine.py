"""A switch order: how nodes change phase without an empty phase, a lost request or two masters.

An order goes `ordered -> draining -> switching -> cooling -> done`, or ends `failed` or `rolled-back`. It holds one
*move* per node. A move takes its node in the database (desired phase, next generation, draining), is pushed to the
agent until the agent answers, and is over when the agent reports the phase under that generation. Moves start as soon as
that leaves a serving node in both phases, so several nodes go together where it is safe and one after the other where not.

The machine only asks. `TakeNode`, `ReleaseNode` and `Publish` are done by the driver in the transaction that stores the
machine's state; `PushPhase` and `PollStatus` go out after it, and their answers come back as events. Everything may be
delivered twice: an answer under another generation than the move's is old news and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

OrderState = Literal["ordered", "draining", "switching", "cooling", "done", "failed", "rolled-back"]
MoveState = Literal["waiting", "draining", "switching", "switched", "failed", "cancelled"]

ACTIVE: tuple[OrderState, ...] = ("ordered", "draining", "switching")
ENDED: tuple[OrderState, ...] = ("done", "failed", "rolled-back")
SETTLED: tuple[MoveState, ...] = ("switched", "failed", "cancelled")

POLL_EVERY_S = 0.1
PUSH_EVERY_S = 1.0
# Beyond the drain deadline a node that has not switched is given up; one that already serves both phases (`mixed`) gets
# longer, because it does no harm while it ends its old work.
GRACE_S = 120.0
MIXED_GRACE_S = 900.0


@dataclass(slots=True)
class MovePlan:
    """One node's move. `to_phase` turns round when the order is rolled back; `generation` fences everything pushed."""

    node: str
    from_phase: str
    to_phase: str
    state: MoveState = "waiting"
    generation: int = 0
    began_at: float | None = None
    drained_at: float | None = None
    finished_at: float | None = None
    pushed_at: float | None = None
    accepted: bool = False
    reason: str = ""

    @property
    def moving(self) -> bool:
        return self.state in ("draining", "switching")


@dataclass(slots=True)
class OrderPlan:
    """What is stored of an order. `undoing` is True once a roll-back was asked for."""

    state: OrderState
    moves: list[MovePlan]
    drain_deadline_s: float
    cooldown_s: float
    ordered_at: float
    cooling_until: float | None = None
    undoing: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as stored: desired phase, generation, and whether it serves (enabled and not known to be down).

    `by_routing`: its switch is routing alone. It serves the new phase from the publication on while its old work goes on,
    so it needs no draining, and nodes may even swap.
    """

    phase: str
    generation: int
    serving: bool = True
    by_routing: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; or the driver came back after a crash."""


@dataclass(frozen=True, slots=True)
class PushAnswered:
    """The agent answered a push. `code` is None when accepted, else its error code."""

    node: str
    generation: int
    code: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class StatusReported:
    """The agent's status: its actual phase, where it is going, its state and the generation it obeys."""

    node: str
    phase: str
    target_phase: str
    state: str
    generation: int


@dataclass(frozen=True, slots=True)
class AgentUnreachable:
    node: str
    message: str


@dataclass(frozen=True, slots=True)
class RollBackAsked:
    reason: str


Event = Tick | PushAnswered | StatusReported | AgentUnreachable | RollBackAsked


@dataclass(frozen=True, slots=True)
class TakeNode:
    """Store this desired phase and generation, and that the node drains: the router sends it nothing new.

    A node that comes from or goes to `mixed` does not drain: it goes on with the phase that it keeps.
    """

    node: str
    phase: str
    generation: int


@dataclass(frozen=True, slots=True)
class ReleaseNode:
    """Store that the node no longer drains."""

    node: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the configuration so that the gateway knows."""

    reason: str


@dataclass(frozen=True, slots=True)
class PushPhase:
    node: str
    phase: str
    generation: int
    drain_deadline_s: float


@dataclass(frozen=True, slots=True)
class PollStatus:
    node: str


Command = TakeNode | ReleaseNode | Publish | PushPhase | PollStatus


class InvalidTransition(Exception):
    """The order was asked to go where it cannot; the message tells its story."""


@dataclass(slots=True)
class PhaseMachine:
    """Drives one order. Build it from what is stored, handle events, store `plan` again.

    `nodes` are all nodes of the partition; the machine keeps them current as it takes nodes, so the safety check sees
    its own moves.
    """

    plan: OrderPlan
    nodes: dict[str, NodeFacts]

    def handle(self, now: float, event: Event) -> list[Command]:
        """Apply one event; the commands are in the order in which to do them."""
        if self.plan.state in ENDED:
            if isinstance(event, RollBackAsked):
                raise InvalidTransition(
                    f"a {self.plan.state} order cannot be rolled back here; order the reverse moves"
                )
            return []
        self._live_with_a_clock_set_back(now)
        match event:
            case RollBackAsked(reason):
                commands = self._roll_back(now, reason)
            case PushAnswered():
                commands = self._push_answered(now, event)
            case StatusReported():
                commands = self._status_reported(now, event)
            case AgentUnreachable(node, message):
                commands = self._note(node, message)
            case Tick():
                commands = []
        commands += self._give_up_late_moves(now)
        commands += self._start_safe_moves(now)
        self._advance(now)
        return commands + self._pushes_and_polls(now, event)

    def next_deadline(self) -> float | None:
        """When to call again with `Tick` if nothing else happens; None when the order has ended."""
        if self.plan.state in ENDED:
            return None
        if self.plan.state == "cooling":
            return self.plan.cooling_until
        pushed = [move.pushed_at for move in self.plan.moves if move.moving and move.pushed_at is not None]
        return min(pushed) + POLL_EVERY_S if pushed else self.plan.ordered_at

    def check_integrity(self) -> None:
        """Raise AssertionError if the order contradicts itself."""
        plan = self.plan
        assert len({move.node for move in plan.moves}) == len(plan.moves), "a node moves twice"
        assert all(move.generation > 0 for move in plan.moves if move.moving), "a moving node has no generation"
        if plan.state in (*ENDED, "cooling"):
            assert all(move.state in SETTLED for move in plan.moves), f"{plan.state} with unsettled moves"

    def _live_with_a_clock_set_back(self, now: float) -> None:
        """Moments in the future were noted when the clock was ahead: waiting for them could take as long as it was."""
        plan = self.plan
        plan.ordered_at = min(plan.ordered_at, now)
        if plan.cooling_until is not None:
            plan.cooling_until = min(plan.cooling_until, now + plan.cooldown_s)
        for move in plan.moves:
            if move.began_at is not None:
                move.began_at = min(move.began_at, now)
            if move.pushed_at is not None and move.pushed_at > now:
                move.pushed_at = None

    # -- moves -------------------------------------------------------------------------------------------------------

    def _start_safe_moves(self, now: float) -> list[Command]:
        commands: list[Command] = []
        if self._failed() and not self.plan.undoing:
            for move in self.plan.moves:
                if move.state == "waiting":
                    move.state, move.reason = "cancelled", "an earlier move of this order failed"
            return commands
        for move in self.plan.moves:
            if move.state == "waiting" and (self.nodes[move.node].by_routing or self._leaves_its_phase_served(move)):
                commands += self._transition_waiting_draining(now, move)
        if not any(move.moving for move in self.plan.moves):
            # A lone node that comes to serve both phases goes on with the one it has: nobody need stand in for it.
            lone = next((m for m in self.plan.moves if m.state == "waiting" and m.to_phase == "mixed"), None)
            if lone is not None:
                commands += self._transition_waiting_draining(now, lone)
        self._fail_moves_that_never_become_safe(now)
        return commands

    def _leaves_its_phase_served(self, move: MovePlan) -> bool:
        """Whether the phase this node leaves keeps a serving node that is not moving itself. That the *other* phase is
        empty is no reason to wait: the move may be what fills it."""
        moving = {m.node for m in self.plan.moves if m.moving} | {move.node}
        serving = {facts.phase for name, facts in self.nodes.items() if facts.serving and name not in moving}
        left = {"prefill", "decode"} - {move.to_phase} if move.from_phase == "mixed" else {move.from_phase}
        return left <= serving or "mixed" in serving

    def _fail_moves_that_never_become_safe(self, now: float) -> None:
        """Nothing moves any more and the rest still cannot start: wait as long as a drain may take, then say so."""
        if any(move.moving for move in self.plan.moves) or now - self.plan.ordered_at < self.plan.drain_deadline_s:
            return
        for move in self.plan.moves:
            if move.state == "waiting":
                move.state, move.finished_at = "failed", now
                move.reason = f"{move.node} cannot leave {move.from_phase}: no other node would serve it"

    def _transition_waiting_draining(self, now: float, move: MovePlan) -> list[Command]:
        move.state, move.began_at, move.accepted, move.pushed_at = "draining", now, False, None
        move.drained_at = None
        return self._take(move, f"{move.node} leaves {move.from_phase} for {move.to_phase}")

    def _take(self, move: MovePlan, reason: str) -> list[Command]:
        facts = self.nodes[move.node]
        move.generation = max(facts.generation, move.generation) + 1
        move.reason = reason
        self.nodes[move.node] = replace(facts, phase=move.to_phase, generation=move.generation)
        return [TakeNode(move.node, move.to_phase, move.generation), Publish(reason)]

    def _transition_draining_switching(self, now: float, move: MovePlan, reason: str) -> None:
        move.state, move.drained_at, move.reason = "switching", now, reason

    def _transition_moving_switched(self, now: float, move: MovePlan) -> list[Command]:
        move.state, move.finished_at = "switched", now
        move.reason = f"{move.node} serves {move.to_phase}"
        return [ReleaseNode(move.node), Publish(move.reason)]

    def _transition_moving_failed(self, now: float, move: MovePlan, reason: str) -> list[Command]:
        """Give the node its old phase back under a newer generation; the push is repeated by the reconciler if lost."""
        back = move.from_phase
        move.generation += 1
        move.state, move.finished_at, move.reason = "failed", now, reason
        facts = self.nodes[move.node]
        self.nodes[move.node] = replace(facts, phase=back, generation=move.generation)
        return [
            TakeNode(move.node, back, move.generation),
            ReleaseNode(move.node),
            Publish(f"{move.node} stays {back}: {reason}"),
            PushPhase(move.node, back, move.generation, self.plan.drain_deadline_s),
        ]

    def _give_up_late_moves(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for move in self.plan.moves:
            if move.moving and move.began_at is not None:
                grace_s = MIXED_GRACE_S if move.state == "switching" and move.accepted else GRACE_S
                if now - move.began_at >= self.plan.drain_deadline_s + grace_s:
                    heard = "" if move.accepted else f"; the agent never accepted: {move.reason}"
                    waited_s = now - move.began_at
                    reason = f"not {move.to_phase} after {waited_s:.0f} s{heard}"
                    commands += self._transition_moving_failed(now, move, reason)
        return commands

    def _failed(self) -> bool:
        return any(move.state == "failed" for move in self.plan.moves)

    # -- events ------------------------------------------------------------------------------------------------------

    def _current(self, node: str, generation: int | None = None) -> MovePlan | None:
        """The moving move of a node, unless the news is about another generation."""
        for move in self.plan.moves:
            if move.node == node and move.moving and generation in (None, move.generation):
                return move
        return None

    def _note(self, node: str, message: str) -> list[Command]:
        move = self._current(node)
        if move is not None:
            move.reason = message
        return []

    def _push_answered(self, now: float, event: PushAnswered) -> list[Command]:
        move = self._current(event.node, event.generation)
        if move is None:
            return []
        if event.code is None:
            move.accepted = True
            return []
        if event.code == "stale-generation":
            return [PollStatus(event.node)]
        move.reason = event.message or event.code
        if event.code in ("wrong-phase", "draining", "unavailable"):
            return []
        return self._transition_moving_failed(now, move, f"the agent refused: {move.reason}")

    def _status_reported(self, now: float, event: StatusReported) -> list[Command]:
        move = self._current(event.node)
        if move is None:
            return []
        if event.generation < move.generation:
            # An agent that restarted with older state has not heard of this move: push again.
            move.accepted = False
            return []
        if event.generation > move.generation or event.target_phase != move.to_phase:
            # The agent obeys an order that the database does not know of (a restored backup): fence above it.
            move.generation, move.accepted, move.pushed_at = event.generation, False, None
            return self._take(move, f"{move.node} obeyed an order not known here; pushed again above it")
        move.accepted = True
        if event.phase == move.to_phase and event.state == "ready":
            return self._transition_moving_switched(now, move)
        if move.state == "draining" and event.state == "switching":
            self._transition_draining_switching(now, move, f"{move.node} is drained and switches")
        if move.state == "draining" and event.phase == "mixed":
            self._transition_draining_switching(
                now, move, f"{move.node} ends its old work as mixed after the drain deadline"
            )
            return [ReleaseNode(move.node), Publish(move.reason)]
        return []

    def _roll_back(self, now: float, reason: str) -> list[Command]:
        """Turn every move round: waiting ones never start, the others go back under a newer generation."""
        if self.plan.undoing:
            return []
        if self.plan.state == "cooling":
            raise InvalidTransition("every node of this order has switched; order the reverse moves")
        self.plan.undoing, self.plan.reason = True, reason
        commands: list[Command] = []
        for move in self.plan.moves:
            if move.state == "waiting":
                move.state, move.reason = "cancelled", reason
            elif move.state in ("draining", "switching", "switched"):
                in_between = move.moving
                move.from_phase, move.to_phase = move.to_phase, move.from_phase
                move.state, move.finished_at = "waiting", None
                if in_between:  # it does not serve the phase it was going to: turning round cannot empty that
                    commands += self._transition_waiting_draining(now, move)
        return commands

    # -- the order ---------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Derive the order's state from its moves."""
        plan, moves = self.plan, self.plan.moves
        if plan.state == "ordered" and any(move.moving for move in moves):
            self._transition_ordered_draining()
        if plan.state == "draining" and not any(move.state == "draining" for move in moves):
            if any(move.state == "switching" for move in moves):
                self._transition_draining_switching_order()
        elif plan.state == "switching" and any(move.state == "draining" for move in moves):
            self._transition_switching_draining()
        if plan.state in ACTIVE and all(move.state in SETTLED for move in moves):
            self._end_moving(now)
        if plan.state == "cooling" and plan.cooling_until is not None and now >= plan.cooling_until:
            self._transition_cooling_done()

    def _transition_ordered_draining(self) -> None:
        self.plan.state = "draining"

    def _transition_draining_switching_order(self) -> None:
        self.plan.state = "switching"

    def _transition_switching_draining(self) -> None:
        """The next node of the order drains."""
        self.plan.state = "draining"

    def _end_moving(self, now: float) -> None:
        if self._failed():
            self.plan.state = "failed"
            self.plan.reason = next(move.reason for move in self.plan.moves if move.state == "failed")
        elif self.plan.undoing:
            self.plan.state = "rolled-back"
        else:
            self.plan.state, self.plan.cooling_until = "cooling", now + self.plan.cooldown_s

    def _transition_cooling_done(self) -> None:
        self.plan.state = "done"

    def _pushes_and_polls(self, now: float, event: Event) -> list[Command]:
        """Push what the agent has not accepted yet; ask about what it has. Only on ticks, so answers cause no storms."""
        commands: list[Command] = []
        for move in self.plan.moves:
            if not move.moving:
                continue
            if not move.accepted and (move.pushed_at is None or now - move.pushed_at >= PUSH_EVERY_S):
                move.pushed_at = now
                commands.append(PushPhase(move.node, move.to_phase, move.generation, self.plan.drain_deadline_s))
            elif isinstance(event, Tick):
                commands.append(PollStatus(move.node))
        return commands
