"""Driving a switch order: pushes and polls out, answers back in as events, until the order's nodes have moved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from apps.planning import orders
from apps.planning.domain.phase_machine import (
    ACTIVE,
    POLL_EVERY_S,
    Event,
    PollStatus,
    PushPhase,
    StatusReported,
    Tick,
)
from apps.planning.models import SwitchOrder
from apps.topology.models import Node
from apps.topology.services import record_status
from workers.planner.reach import Reach

TICK_EVERY_S = 1.0


def drive(
    order: SwitchOrder,
    budget_s: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Move an order on until its nodes have moved or `budget_s` is over; returns its state.

    The agents are asked every 100 ms, but only news goes to the database.
    """
    nodes = {node.name: node for node in Node.objects.filter(partition=order.partition)}
    ends_at = clock() + budget_s
    known: dict[str, Event] = {}
    with Reach(order.partition, list(nodes.values())) as agents:
        state, commands = orders.advance(order.pk, clock(), Tick())
        ticked_at = clock()
        while state in ACTIVE or commands:
            todo, moving = deque(commands), {}
            while todo:
                command = todo.popleft()
                moving[command.node] = PollStatus(command.node)
                said = agents.push(command) if isinstance(command, PushPhase) else agents.progress(command.node)
                if isinstance(command, PollStatus) and known.get(command.node) == said:
                    continue
                if isinstance(command, PollStatus):
                    known[command.node] = said
                if isinstance(said, StatusReported):
                    _record(nodes[said.node], said, clock())
                state, more = orders.advance(order.pk, clock(), said)
                todo.extend(more)
            if state not in ACTIVE or clock() >= ends_at:
                break
            sleep(POLL_EVERY_S)
            commands = list(moving.values())
            if clock() - ticked_at >= TICK_EVERY_S:
                state, commands = orders.advance(order.pk, clock(), Tick())
                ticked_at = clock()
    return state


def _record(node: Node, said: StatusReported, now: float) -> None:
    at = datetime.fromtimestamp(now, UTC)
    record_status(node, phase=said.phase, state=said.state, generation=said.generation, at=at)
