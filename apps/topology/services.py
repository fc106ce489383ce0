"""Writes of topology. Each takes an actor and a reason, is audited, and reaches the gateway with the next publication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from apps.topology.choices import Engine, NodeState, Phase
from apps.topology.configuration import publish
from apps.topology.models import Cluster, Node, Partition
from apps.topology.selectors import serving
from controlplane import records
from controlplane.actors import Actor
from controlplane.audit import change
from controlplane.errors import Conflict, InvalidField

_PARTITION_FIELDS = frozenset({"title", "routing_policy", "lease", "gateway_url", "model", "network"})
_NODE_OPERATOR_FIELDS = frozenset({"enabled", "draining", "decode_limit"})
_NODE_FIELDS = _NODE_OPERATOR_FIELDS | {"url", "hardware_class", "coefficients", "direct"}


def create_cluster(name: str, actor: Actor, reason: str = "", *, title: str = "") -> Cluster:
    """Raises InvalidField or Conflict."""
    with change(actor, reason, role="administrator"):
        cluster = Cluster(name=name, title=title)
        records.validate(cluster)
        cluster.save()
    return cluster


def create_partition(cluster: Cluster, name: str, actor: Actor, reason: str = "", **fields: Any) -> Partition:
    """A partition without nodes; it is not published until it has some."""
    with change(actor, reason, role="administrator"):
        partition = Partition(cluster=cluster, name=name)
        records.apply(partition, fields, _PARTITION_FIELDS)
        partition.save()
    return partition


def update_partition(partition: Partition, actor: Actor, reason: str = "", **changes: Any) -> Partition:
    with change(actor, reason, role="administrator"):
        row = records.locked(partition)
        if records.apply(row, changes, _PARTITION_FIELDS):
            row.save()
            publish(row, actor, reason or f"partition {row.name} edited")
    return row


def create_node(
    partition: Partition,
    name: str,
    actor: Actor,
    reason: str = "",
    *,
    order: int,
    engine: str,
    phase: str,
    **fields: Any,
) -> Node:
    """A node as its agent starts: generation 0. Does not publish; call `configuration.publish` when all of them exist.

    Raises InvalidField where the engine and `direct` do not belong together, or the partition's other nodes are of
    another kind; Conflict for a name or order that is taken.
    """
    with change(actor, reason, role="administrator"):
        node = Node(partition=partition, name=name, order=order, engine=engine, desired_phase=phase)
        records.apply(node, fields, _NODE_FIELDS)
        _check_kind(node)
        node.save()
    return node


def add_node(
    partition: Partition, name: str, actor: Actor, reason: str = "", *, engine: str, phase: str, **fields: Any
) -> Node:
    """A node joins a partition that serves; published at once. What is not given is as on the partition's first node of
    the same hardware class. Raises as `create_node`."""
    with change(actor, reason, role="administrator"):
        locked = records.locked(partition)
        nodes = list(Node.objects.filter(partition=locked).order_by("order"))
        given = _as_the_others(nodes, fields) | fields
        order = max((node.order for node in nodes), default=-1) + 1
        node = create_node(locked, name, actor, reason, order=order, engine=engine, phase=phase, **given)
        publish(locked, actor, reason or f"node {name} added")
    return node


def update_node(node: Node, actor: Actor, reason: str = "", **changes: Any) -> Node:
    """Operators drain, enable and limit; administrators also move and describe a node.

    Raises Conflict when nobody would serve the node's phase any more.
    """
    role = "operator" if changes.keys() <= _NODE_OPERATOR_FIELDS else "administrator"
    with change(actor, reason, role=role):
        # The partition's row guards the count of serving nodes: two drains at once must not take the last two.
        records.locked(node.partition)
        row = records.locked(node)
        was_serving = row.enabled and not row.draining
        if records.apply(row, changes, _NODE_FIELDS):
            _check_kind(row)
            if was_serving and not (row.enabled and not row.draining):
                _check_others_serve(row)
            row.save()
            publish(row.partition, actor, reason or f"node {row.name} edited")
    return row


def drain_node(node: Node, actor: Actor, reason: str = "") -> Node:
    """No new work; running requests finish. Raises Conflict for the last node that serves its phase."""
    return update_node(node, actor, reason or f"node {node.name} drained", draining=True)


def undrain_node(node: Node, actor: Actor, reason: str = "") -> Node:
    return update_node(node, actor, reason or f"node {node.name} back in service", draining=False)


def enable_node(node: Node, actor: Actor, reason: str = "") -> Node:
    return update_node(node, actor, reason or f"node {node.name} enabled", enabled=True)


def disable_node(node: Node, actor: Actor, reason: str = "") -> Node:
    """The gateway forgets the node. Raises Conflict for the last node that serves its phase."""
    return update_node(node, actor, reason or f"node {node.name} disabled", enabled=False)


def set_desired_phases(partition: Partition, phases: Mapping[str, str], actor: Actor, reason: str) -> list[Node]:
    """Gives nodes (by name) a new desired phase and the next generation, in one publication; returns the changed ones.

    Raises InvalidField for an unknown node or phase, Conflict when a phase would be left without a node.
    """
    with change(actor, reason, role="operator"):
        nodes = {node.name: node for node in Node.objects.select_for_update().filter(partition=partition)}
        for name, phase in phases.items():
            if name not in nodes:
                raise InvalidField("nodes", f"{name!r} is not a node of {partition.name}; expected {', '.join(nodes)}")
            if phase not in Phase.values:
                raise InvalidField("phase", f"expected one of {', '.join(Phase.values)}")
        changed = [nodes[name] for name, phase in phases.items() if nodes[name].desired_phase != phase]
        for node in changed:
            node.desired_phase = phases[node.name]
            node.generation += 1
            node.save(update_fields=["desired_phase", "generation"])
        if changed:
            for phase in (Phase.PREFILL, Phase.DECODE):
                if not serving(partition, phase).exists():
                    raise Conflict(f"no node of {partition.name} would serve {phase.label.lower()}", "phase-left-empty")
            publish(partition, actor, reason)
    return changed


def record_status(node: Node, *, phase: str, state: str, generation: int, at: datetime) -> bool:
    """What the agent says of itself; not audited. False for a report older than the one stored."""
    if phase not in Phase.values:
        raise InvalidField("phase", f"expected one of {', '.join(Phase.values)}")
    if state not in NodeState.values:
        raise InvalidField("state", f"expected one of {', '.join(NodeState.values)}")
    return bool(
        Node.objects.filter(pk=node.pk)
        .exclude(observed_at__gt=at)
        .update(observed_phase=phase, observed_state=state, observed_generation=generation, observed_at=at)
    )


def record_unreachable(node: Node, at: datetime) -> bool:
    """Nobody answers at the node's address; phase and generation stay as last heard."""
    fresh = Node.objects.filter(pk=node.pk).exclude(observed_at__gt=at)
    return bool(fresh.update(observed_state=NodeState.DOWN, observed_at=at))


def _as_the_others(nodes: Sequence[Node], fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a new node has in common with the first one of its hardware class."""
    alike = [node for node in nodes if node.hardware_class == fields.get("hardware_class", node.hardware_class)]
    if alike:
        first = alike[0]
        names = ("hardware_class", "coefficients", "decode_limit")
        return {name: getattr(first, name) for name in names}
    if not fields.keys() >= {"hardware_class", "coefficients", "decode_limit"}:
        known = ", ".join(sorted({node.hardware_class for node in nodes})) or "none yet"
        text = f"no node here is of it (known: {known}); expected coefficients and decode_limit with it"
        raise InvalidField("hardware_class", text)
    return {}


def _check_kind(node: Node) -> None:
    """An existing engine is said to be one, and a partition's nodes are all of one kind: KV goes from node to node."""
    engine = Engine(node.engine)
    if engine.is_direct and node.direct is None:
        raise InvalidField("direct", f"expected an object, {{}} at least: {engine.value} is an existing engine")
    if node.direct is not None and not engine.is_direct:
        raise InvalidField("direct", f"expected null: engine {engine.value} has an agent")
    model = node.partition.model
    if node.direct is None and model["tokenizer"] == "text":
        raise InvalidField("engine", f"expected vllm or sglang: {node.partition} has no tokenizer, which agents need")
    if node.direct is not None and node.direct.get("kv_events") is not None and model["tokenizer"] == "text":
        text = "expected null: they speak of token ids, and this partition's tokenizer is 'text'"
        raise InvalidField("direct.kv_events", text)
    for other in Node.objects.filter(partition=node.partition).exclude(pk=node.pk):
        if (other.engine if other.direct is not None else "") != (engine.value if engine.is_direct else ""):
            kind = f"existing {Engine(other.engine).value} engines" if other.direct is not None else "agents"
            raise InvalidField("engine", f"expected as the other nodes of {node.partition}, which are {kind}")


def _check_others_serve(node: Node) -> None:
    phases = (Phase.PREFILL, Phase.DECODE) if node.desired_phase == Phase.MIXED else (Phase(node.desired_phase),)
    for phase in phases:
        if not serving(node.partition, phase).exclude(pk=node.pk).exists():
            raise Conflict(
                f"{node.name} is the last node of {node.partition.name} that serves {phase.label.lower()}",
                "last-of-phase",
            )
