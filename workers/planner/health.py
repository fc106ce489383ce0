"""What the agents say of themselves against what was decided, and bringing the two together again."""

from __future__ import annotations

from datetime import UTC, datetime

from apps.planning import orders
from apps.planning.domain.phase_machine import AgentUnreachable, PushAnswered, PushPhase, StatusReported
from apps.planning.selectors import policy_of
from apps.topology.choices import NodeState
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from apps.topology.services import record_status, record_unreachable
from workers.planner.reach import Reach

Reports = dict[str, StatusReported | AgentUnreachable]


def observe(partition: Partition, now: float) -> Reports:
    """Ask every enabled node, and store what it says. A node that is already known to be down keeps the time it went."""
    nodes = [node for node in nodes_of(partition) if node.enabled]
    at = datetime.fromtimestamp(now, UTC)
    reports: Reports = {}
    with Reach(partition, nodes) as agents:
        for node in nodes:
            said = reports[node.name] = agents.status(node.name)
            if isinstance(said, StatusReported):
                record_status(node, phase=said.phase, state=said.state, generation=said.generation, at=at)
            elif node.observed_state != NodeState.DOWN:
                record_unreachable(node, at)
    return reports


def heal(partition: Partition, reports: Reports) -> list[str]:
    """Push the decided phase to nodes that drifted from it; those that an order is moving are left to the order."""
    did = []
    nodes = {node.name: node for node in nodes_of(partition)}
    deadline_s = policy_of(partition).drain_deadline_s
    with Reach(partition, list(nodes.values())) as agents:
        for name, said in reports.items():
            node = nodes.get(name)  # None: taken out of the records since it was asked
            if node is None or not isinstance(said, StatusReported) or orders.is_moving(node):
                continue
            if said.generation == node.generation and said.target_phase == node.desired_phase:
                continue
            if said.generation >= node.generation:
                if not orders.fence(node, said.generation):
                    continue
                node.refresh_from_db()
            answer = agents.push(PushPhase(name, node.desired_phase, node.generation, deadline_s))
            if isinstance(answer, PushAnswered) and answer.code is None:
                did.append(f"{name} told again to {node.desired_phase}")
    return did
