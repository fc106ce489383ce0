"""Switch orders in the database: placing one, and driving its machine one event at a time.

`advance` is the only place where a stored order changes. It loads the machine, handles the event, stores the machine with
the nodes it took and the configuration it published in one transaction, and returns what is left to do outside: pushes and
polls. Dying anywhere in between loses nothing: the next `advance` asks for the same again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django.db import transaction

from apps.planning.choices import Cause, OrderState
from apps.planning.domain.phase_machine import (
    ACTIVE,
    ENDED,
    Event,
    InvalidTransition,
    MovePlan,
    NodeFacts,
    OrderPlan,
    PhaseMachine,
    PollStatus,
    Publish,
    PushPhase,
    ReleaseNode,
    RollBackAsked,
    TakeNode,
)
from apps.planning.models import Decision, Proposal, SwitchOrder, SwitchStep
from apps.planning.selectors import desired_split, policy_of
from apps.telemetry import webhooks
from apps.topology.choices import Engine, NodeState, Phase
from apps.topology.configuration import publish, send_live_event
from apps.topology.models import Node, Partition
from apps.topology.selectors import nodes_of
from controlplane import records
from controlplane.actors import PLANNER, Actor
from controlplane.audit import change
from controlplane.errors import Conflict, InvalidField

logger = logging.getLogger(__name__)
_STEP_FIELDS = (
    "from_phase",
    "to_phase",
    "state",
    "generation",
    "accepted",
    "reason",
    "began_at",
    "pushed_at",
    "drained_at",
    "finished_at",
)
DRIVE_TASK = "workers.planner.tasks.drive_switch"
TOLD_OUTSIDE = frozenset({"decision", "proposal", "switch"})


def place(
    partition: Partition,
    targets: Mapping[str, str],
    cause: Cause,
    actor: Actor,
    reason: str,
    *,
    decision: Decision | None = None,
    proposal: Proposal | None = None,
    rolls_back: SwitchOrder | None = None,
) -> SwitchOrder | None:
    """Order that these nodes (by name) get these phases; None when they have them already.

    Call within `change`. Raises InvalidField for an unknown node or phase, Conflict when a switch is under way or a phase
    would be left without a node. The driver starts when the transaction commits.
    """
    records.locked(partition)
    nodes = {node.name: node for node in Node.objects.select_for_update().filter(partition=partition).order_by("order")}
    check_targets(nodes, targets)
    moves = [
        (node, targets[name])
        for name, node in nodes.items()
        if targets.get(name, node.desired_phase) != node.desired_phase
    ]
    if not moves:
        return None
    _check_engines(moves)
    if moving_order(partition) is not None:
        raise Conflict(
            f"a switch of {partition.name} is under way; wait until it is done or roll it back", "switch-running"
        )
    policy = policy_of(partition)
    before = desired_split(nodes.values())
    after = desired_split(nodes.values(), targets)
    order = SwitchOrder.objects.create(
        partition=partition,
        cause=cause,
        ordered_by=str(actor),
        reason=reason,
        decision=decision,
        proposal=proposal,
        rolls_back=rolls_back,
        from_prefill=before["prefill"],
        from_decode=before["decode"],
        to_prefill=after["prefill"],
        to_decode=after["decode"],
        drain_deadline_s=policy.drain_deadline_s,
        cooldown_s=policy.cooldown_s,
    )
    SwitchStep.objects.bulk_create(
        SwitchStep(order=order, position=index, node=node.name, from_phase=node.desired_phase, to_phase=phase)
        for index, (node, phase) in enumerate(moves)
    )
    tell(partition.name, "switch", order=order.pk, state=order.state, reason=reason)
    start_driving(order)
    return order


def split_targets(nodes: Sequence[Node], prefill_nodes: int | Sequence[str]) -> dict[str, str]:
    """The phase of every enabled node when these nodes (by name, or so many of them) prefill and the rest decode.

    A number keeps who prefills already and adds, or takes away, nodes in order. Raises InvalidField.
    """
    enabled = [node for node in nodes if node.enabled]
    if isinstance(prefill_nodes, int):
        if not 1 <= prefill_nodes < len(enabled):
            raise InvalidField("prefill_nodes", f"expected 1 to {len(enabled) - 1}, so that each phase has a node")
        rank = {Phase.PREFILL: 0, Phase.MIXED: 1, Phase.DECODE: 2}
        line = sorted(enabled, key=lambda node: (rank[Phase(node.desired_phase)], node.order))
        chosen = {node.name for node in line[:prefill_nodes]}
    else:
        chosen = set(prefill_nodes)
        for name in prefill_nodes:
            if name not in {node.name for node in enabled}:
                expected = ", ".join(node.name for node in enabled)
                raise InvalidField("prefill_nodes", f"{name!r} is not an enabled node; expected some of {expected}")
    return {node.name: Phase.PREFILL.value if node.name in chosen else Phase.DECODE.value for node in enabled}


def check_targets(nodes: Mapping[str, Node], targets: Mapping[str, str]) -> None:
    """Raises InvalidField for an unknown node or phase, Conflict when a phase would be left without an enabled node."""
    for name, phase in targets.items():
        if name not in nodes:
            raise InvalidField("nodes", f"{name!r} is not one of {', '.join(nodes)}")
        if phase not in Phase.values:
            raise InvalidField("phase", f"expected one of {', '.join(Phase.values)}")
    after = {targets.get(node.name, node.desired_phase) for node in nodes.values() if node.enabled}
    for phase in (Phase.PREFILL, Phase.DECODE):
        if phase not in after and Phase.MIXED not in after:
            raise Conflict(
                f"no enabled node would {phase.label.lower()}; each phase keeps at least one", "phase-left-empty"
            )


def check_after_switch(partition: Partition, targets: Mapping[str, str]) -> None:
    """Raises Conflict for targets that could not be ordered after the switch under way, if there is one."""
    order = moving_order(partition)
    if order is None:
        return
    nodes = {node.name: node for node in nodes_of(partition)}
    after = dict(order.steps.values_list("node", "to_phase")) | dict(targets)
    known = {name: phase for name, phase in after.items() if name in nodes}
    check_targets(nodes, known)
    _check_engines([(nodes[name], phase) for name, phase in known.items() if phase != nodes[name].desired_phase])


def moving_order(partition: Partition) -> SwitchOrder | None:
    """The order whose nodes are moving now, if any. A cooling one no longer stands in anyone's way but the planner's."""
    return SwitchOrder.objects.filter(partition=partition, state__in=ACTIVE).first()


def advance(
    order_id: int, now: float, event: Event, actor: Actor = PLANNER
) -> tuple[str, list[PushPhase | PollStatus]]:
    """Handle one event of an order; returns its state and what is to be done outside the database.

    Raises InvalidTransition for a roll-back that comes too late, SwitchOrder.DoesNotExist for an unknown order.
    """
    with change(actor, f"switch order {order_id}"):
        order = SwitchOrder.objects.select_related("partition").get(pk=order_id)
        # The partition first, as every service locks it, so that two of them never wait for each other crosswise.
        records.locked(order.partition)
        order = SwitchOrder.objects.select_for_update(of=("self",)).select_related("partition").get(pk=order_id)
        nodes = {node.name: node for node in Node.objects.select_for_update().filter(partition=order.partition)}
        steps = list(order.steps.select_for_update())
        machine = PhaseMachine(_plan_of(order, steps), {name: _facts_of(node) for name, node in nodes.items()})
        before = order.state, [step.state for step in steps]
        commands = machine.handle(now, event)
        machine.check_integrity()
        _store(order, steps, machine.plan, now)
        _apply(order.partition, nodes, commands, actor)
        if before != (order.state, [step.state for step in steps]):
            _tell_progress(order, steps)
            _close_original(order)
    return order.state, [command for command in commands if isinstance(command, PushPhase | PollStatus)]


def turn_round(order: SwitchOrder, actor: Actor, reason: str) -> SwitchOrder:
    """Send the nodes of an order under way back where they came from. Raises Conflict when it comes too late."""
    try:
        asked = RollBackAsked(f"rolled back by {actor}: {reason}"[:500])
        advance(order.pk, time.time(), asked, actor)
    except InvalidTransition as error:
        raise Conflict(str(error), "not-undoable") from None
    order.refresh_from_db()
    start_driving(order)
    return order


def start_driving(order: SwitchOrder) -> None:
    """Ask a worker to drive the order, once this transaction is committed. If nobody hears, the reconciler does it."""
    order_id = order.pk

    def send() -> None:
        from controlplane.celery import app

        try:
            app.send_task(DRIVE_TASK, args=[order_id], ignore_result=True, retry=False)
        except Exception as error:  # the broker's client has no common base class for "away"
            logger.warning("order %s waits for the reconciler: the broker is away (%s)", order_id, error)

    transaction.on_commit(send)


def tell(partition_name: str, kind: str, **data: Any) -> None:
    """A live event to the partition's browsers after commit, and a webhook of the kinds that have one, queued with the
    change itself. Nobody listening, or Redis away, stops nothing."""
    if kind in TOLD_OUTSIDE:
        webhooks.tell(kind, {"partition": partition_name, **data})

    def send() -> None:
        try:
            send_live_event(partition_name, kind, **data)
        except Exception as error:
            logger.info("live event %s of %s not sent: %s", kind, partition_name, error)

    transaction.on_commit(send)


def _facts_of(node: Node) -> NodeFacts:
    serving = node.enabled and node.observed_state != NodeState.DOWN
    return NodeFacts(node.desired_phase, node.generation, serving, _by_routing(node))


def _by_routing(node: Node) -> bool:
    """A vLLM server is told its part with each request."""
    return node.engine == Engine.VLLM


def _check_engines(moves: Sequence[tuple[Node, str]]) -> None:
    """Raises Conflict for a change of phase that an existing engine cannot make while it runs."""
    for node, phase in moves:
        if node.engine == Engine.SGLANG and Phase.MIXED in (phase, node.desired_phase):
            raise Conflict(
                f"{node.name} cannot go from {node.desired_phase} to {phase}: a running SGLang server changes between "
                "prefill and decode only; restart it in the other mode",
                "engine-cannot-switch",
            )


def _seconds(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment else None


def _moment(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None


def _plan_of(order: SwitchOrder, steps: list[SwitchStep]) -> OrderPlan:
    moves = [
        MovePlan(
            node=step.node,
            from_phase=step.from_phase,
            to_phase=step.to_phase,
            state=step.state,  # type: ignore[arg-type]
            generation=step.generation,
            began_at=_seconds(step.began_at),
            drained_at=_seconds(step.drained_at),
            finished_at=_seconds(step.finished_at),
            pushed_at=_seconds(step.pushed_at),
            accepted=step.accepted,
            reason=step.reason,
        )
        for step in steps
    ]
    return OrderPlan(
        state=order.state,  # type: ignore[arg-type]
        moves=moves,
        drain_deadline_s=order.drain_deadline_s,
        cooldown_s=order.cooldown_s,
        ordered_at=order.ordered_at.timestamp(),
        cooling_until=_seconds(order.cooling_until),
        undoing=order.undoing,
        reason=order.outcome,
    )


def _store(order: SwitchOrder, steps: list[SwitchStep], plan: OrderPlan, now: float) -> None:
    was_moving = order.state in ACTIVE
    order.state, order.undoing = plan.state, plan.undoing
    order.outcome = plan.reason[:500]
    order.ordered_at = datetime.fromtimestamp(plan.ordered_at, UTC)
    order.cooling_until = _moment(plan.cooling_until)
    if was_moving and plan.state not in ACTIVE:
        order.switched_at = _moment(now)
    if plan.state in ENDED and order.finished_at is None:
        order.finished_at = _moment(now)
    order.save()
    for step, move in zip(steps, plan.moves, strict=True):
        step.from_phase, step.to_phase, step.state = move.from_phase, move.to_phase, move.state
        step.generation, step.accepted, step.reason = move.generation, move.accepted, move.reason[:500]
        step.began_at, step.pushed_at = _moment(move.began_at), _moment(move.pushed_at)
        step.drained_at, step.finished_at = _moment(move.drained_at), _moment(move.finished_at)
    SwitchStep.objects.bulk_update(steps, _STEP_FIELDS)


def _apply(partition: Partition, nodes: dict[str, Node], commands: list[Any], actor: Actor) -> None:
    """Do the commands that belong into the transaction; several publications become one."""
    reasons = []
    touched = set()
    for command in commands:
        match command:
            case TakeNode(name, phase, generation):
                node = nodes[name]
                node.draining = not _by_routing(node) and Phase.MIXED not in (node.desired_phase, phase)
                node.desired_phase, node.generation = phase, generation
                touched.add(name)
            case ReleaseNode(name):
                nodes[name].draining = False
                touched.add(name)
            case Publish(reason):
                reasons.append(reason)
    for name in sorted(touched):
        nodes[name].save(update_fields=["desired_phase", "generation", "draining"])
    if reasons:
        publish(partition, actor, "; ".join(reasons)[:500])


def _tell_progress(order: SwitchOrder, steps: list[SwitchStep]) -> None:
    moves = [{"node": step.node, "to_phase": step.to_phase, "state": step.state} for step in steps]
    reason = order.outcome or order.reason
    tell(order.partition.name, "switch", order=order.pk, state=order.state, reason=reason, moves=moves)


def fence(node: Node, agent_generation: int) -> bool:
    """Lift a node's generation above one under which its agent obeys what was not decided here (a restored backup).

    False when that is no longer so, or an order is moving the node and does it itself.
    """
    with change(PLANNER, f"{node.name} obeys an order of generation {agent_generation} that is not known here"):
        partition = records.locked(node.partition)
        row = Node.objects.select_for_update(of=("self",)).get(pk=node.pk)
        if row.generation > agent_generation or is_moving(row):
            return False
        row.generation = agent_generation + 1
        row.save(update_fields=["generation"])
        publish(partition, PLANNER, f"{row.name} is fenced at generation {row.generation}")
    return True


def is_moving(node: Node) -> bool:
    """Whether an order under way moves this node."""
    return SwitchStep.objects.filter(
        node=node.name, order__partition=node.partition_id, order__state__in=ACTIVE
    ).exists()


def _close_original(order: SwitchOrder) -> None:
    """A finished roll-back marks the order it undid."""
    if order.state in (OrderState.COOLING, OrderState.DONE) and order.rolls_back_id:
        SwitchOrder.objects.filter(pk=order.rolls_back_id, state__in=(OrderState.DONE, OrderState.COOLING)).update(
            state=OrderState.ROLLED_BACK, outcome=f"undone by order {order.pk}: {order.reason}"[:500]
        )
