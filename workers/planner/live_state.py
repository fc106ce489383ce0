"""What a dry run starts from: the published configuration, the agents' own limits, and the newest window's workload."""

from __future__ import annotations

from typing import Any

from apps.planning.domain.capacity import Workload
from apps.planning.dryruns import recent_slices
from apps.planning.models import Slice
from apps.telemetry.models import LoadWindow
from apps.topology import configuration
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from workers.planner.reach import Reach
from workers.planner.simulating import LiveState, NodeLimits


class NothingToSimulate(Exception):
    """The live state is not complete enough for a dry run; the message says what is missing."""


def live_state(partition: Partition) -> LiveState:
    """Raises NothingToSimulate."""
    version = configuration.latest(partition)
    slices = recent_slices(partition)
    if version is None or not slices:
        raise NothingToSimulate("nothing has been published or measured yet")
    limits = _limits(partition)
    if len(limits) < 2:
        raise NothingToSimulate(f"{len(limits)} nodes answer; a split needs two")
    thinks = [row.think_s for row in slices if row.think_s is not None]
    return LiveState(
        document=version.document,
        limits=limits,
        workload=_mean_workload(slices),
        t_c=_cached_tokens(partition, slices[0].t0, slices[-1].t1),
        rate=sum(row.rate for row in slices) / len(slices),
        think_s=sum(thinks) / len(thinks) if thinks else None,
    )


def _mean_workload(slices: list[Slice]) -> Workload:
    found: list[dict[str, float]] = [row.workload for row in slices if row.workload]
    return Workload(**{name: sum(load[name] for load in found) / len(found) for name in Workload.__slots__})


def _cached_tokens(partition: Partition, start: float, end: float) -> float:
    """Mean cached tokens of a prompt."""
    rows = LoadWindow.objects.filter(partition=partition, t0__gte=start, t1__lte=end).values_list("prefilled", "t_c")
    prefilled, t_c = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return t_c / prefilled if prefilled else 0.0


def _limits(partition: Partition) -> dict[str, NodeLimits]:
    """Of the enabled nodes that answer. Raises NothingToSimulate when one says something that is not understood."""
    nodes = [node for node in nodes_of(partition) if node.enabled]
    found = {}
    with Reach(partition, nodes) as agents:
        for node in nodes:
            said = agents.document(node.name)
            if said is not None:
                found[node.name] = _limits_of(node.name, said)
    return found


def _limits_of(node: str, said: dict[str, Any]) -> NodeLimits:
    try:
        return NodeLimits(
            pool_blocks=int(said["pool"]["capacity_blocks"]),
            kv_tokens=int(said["limits"]["kv_tokens"]),
            prefill_chunk_tokens=int(said["limits"]["prefill_chunk_tokens"]),
        )
    except (KeyError, TypeError, ValueError):
        raise NothingToSimulate(f"{node} does not tell its pool and limits") from None
