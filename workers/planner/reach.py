"""Every node of a partition by its name, whichever way it is reached: by its agent, or through its gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from django.conf import settings

from apps.planning.domain.phase_machine import AgentUnreachable, PushAnswered, PushPhase, StatusReported
from apps.telemetry.selectors import live_snapshot
from apps.topology.models import Node, Partition
from controlplane.errors import Unavailable
from workers.planner.agents import Agents
from workers.planner.engines import Engines


class Reach:
    """The planner's calls to nodes. Use as a context manager."""

    def __init__(self, partition: Partition, nodes: Sequence[Node]) -> None:
        self._agents = Agents({node.name: node.url for node in nodes if node.direct is None}, settings.AGENT_TOKEN)
        direct = [node for node in nodes if node.direct is not None]
        self._engines = Engines(direct, lambda: live(partition), int(partition.model["block_tokens"]))

    def __enter__(self) -> Reach:
        self._agents.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._agents.__exit__(kind, error, trace)
        self._engines.close()

    def push(self, command: PushPhase) -> PushAnswered | AgentUnreachable:
        """Order a phase. A node that is away is unreachable: the push is repeated."""
        return self._engines.push(command) if command.node in self._engines else self._agents.push(command)

    def status(self, node: str) -> StatusReported | AgentUnreachable:
        """What is known of the node now."""
        return self._engines.status(node) if node in self._engines else self._agents.status(node)

    def progress(self, node: str) -> StatusReported | PushAnswered | AgentUnreachable:
        """The status of a node under an order; an engine without an agent is helped on."""
        return self._engines.progress(node) if node in self._engines else self._agents.status(node)

    def document(self, node: str) -> dict[str, Any] | None:
        """The node's pool and limits, in the form of an agent's status; None when it does not answer."""
        return self._engines.document(node) if node in self._engines else self._agents.document(node)


def live(partition: Partition) -> Mapping[str, Any] | None:
    """The gateway's newest snapshot; None while there is none."""
    try:
        return live_snapshot(partition)
    except Unavailable:
        return None
