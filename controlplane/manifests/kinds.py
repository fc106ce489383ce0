"""Our own kinds of documents: what a spec may hold (the fields of the REST call that edits it), and how it is applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from apps.planning import services as planning
from apps.planning.api import PolicyEdit
from apps.planning.choices import Mode
from apps.planning.selectors import policy_document, policy_of
from apps.tenancy import services as tenancy
from apps.tenancy.api import TenantEdit
from apps.tenancy.models import Tenant
from apps.topology import services as topology
from apps.topology.api import NodeEdit, PartitionEdit
from apps.topology.choices import Engine, Phase
from apps.topology.models import Node, Partition
from apps.topology.selectors import partition_named
from controlplane.actors import Actor
from controlplane.errors import InvalidField
from controlplane.rest.schemas import Body, Edit, Finite

API_VERSION = "switchyard/v1"
Fields = dict[str, Any]


class TenantSpec(TenantEdit):
    """A tenant that is not there yet is created."""


class PartitionSpec(PartitionEdit):
    pass


class NodeSpec(NodeEdit):
    """`engine`, `phase`, `hardware_class` and `coefficients` are for a node that is not there yet: of one that is, the
    engine stays, the phase is the split's, the class and figures are the planner's to learn."""

    engine: Engine | None = None
    phase: Phase | None = None
    hardware_class: str | None = None
    coefficients: dict[str, Finite] | None = None


class PolicySpec(PolicyEdit):
    mode: Mode | None = None


class Metadata(Body):
    name: str


class Document(Body):
    apiVersion: str
    kind: str
    metadata: Metadata
    spec: dict[str, Any]


@dataclass(slots=True)
class Applying:
    """One call: who applies what why, to which partition unless a document says, and what is worth saying about it."""

    partition: Partition | None
    actor: Actor
    reason: str
    notes: list[str]


def _tenant(call: Applying, name: str, changes: Fields) -> None:
    tenant = Tenant.objects.filter(name=name).first()
    if tenant is None:
        first = {key: changes.pop(key) for key in tuple(changes) if key != "paused"}
        tenant = tenancy.create_tenant(name, call.actor, call.reason, **first)
    if changes:
        tenancy.update_tenant(tenant, call.actor, call.reason, **_differing(tenant, changes))


def _partition(call: Applying, name: str, changes: Fields) -> None:
    partition = partition_named(name)
    topology.update_partition(partition, call.actor, call.reason, **_differing(partition, changes))


_ONCE = ("engine", "phase", "hardware_class", "coefficients")


def _node(call: Applying, name: str, changes: Fields) -> None:
    node = Node.objects.select_related("partition").filter(name=name).first()
    if node is None:
        _join(call, name, changes)
        return
    if call.partition is not None and node.partition != call.partition:
        raise InvalidField("metadata.name", f"{name} is a node of {node.partition}, not of {call.partition}")
    fixed = {key: changes.pop(key) for key in _ONCE if key in changes}
    if fixed.get("engine") not in (None, node.engine):
        raise InvalidField("engine", f"expected {node.engine}: a node keeps its engine")
    if fixed.get("phase") not in (None, node.desired_phase):
        call.notes.append(f"Node/{name}: phase {node.desired_phase} stays; the split is changed by force or proposal")
    topology.update_node(node, call.actor, call.reason, **_differing(node, changes))


def _join(call: Applying, name: str, changes: Fields) -> None:
    if call.partition is None:
        raise InvalidField("partition", f"say which; node {name} is new")
    for field in ("url", "engine", "phase"):
        if not changes.get(field):
            raise InvalidField(field, f"expected a value: node {name} is new")
    given = {key: value for key, value in changes.items() if value is not None}
    later: Fields = {key: given.pop(key) for key in ("enabled", "draining") if key in given}
    engine, phase = given.pop("engine"), given.pop("phase")
    node = topology.add_node(call.partition, name, call.actor, call.reason, engine=engine, phase=phase, **given)
    if later:
        topology.update_node(node, call.actor, call.reason, **_differing(node, later))


def _policy(call: Applying, name: str, changes: Fields) -> None:
    partition = partition_named(name)
    mode = changes.pop("mode", None)
    current = policy_document(policy_of(partition))
    changes = {key: value for key, value in changes.items() if current[key] != value}
    if changes:
        planning.update_policy(partition, call.actor, call.reason, **changes)
    if mode is not None and mode != current["mode"]:
        planning.set_mode(partition, mode, call.actor, call.reason)


def _differing(row: Any, changes: Mapping[str, Any]) -> Fields:
    """What is the same already needs no role and no new version."""
    return {key: value for key, value in changes.items() if getattr(row, key) != value}


@dataclass(frozen=True, slots=True)
class Kind:
    spec: type[Edit]
    apply: Callable[[Applying, str, Fields], None]


KINDS: Mapping[str, Kind] = {
    "Tenant": Kind(TenantSpec, _tenant),
    "Partition": Kind(PartitionSpec, _partition),
    "Node": Kind(NodeSpec, _node),
    "PlannerPolicy": Kind(PolicySpec, _policy),
}
FLOW_KINDS = ("EndpointPickerConfig", "InferenceObjective", "FlowControl")
SHOWN: Mapping[str, tuple[str, ...]] = {
    "Tenant": ("title", "sharing_domain", "weight", "paused", "default_objective"),
    "Partition": ("title", "routing_policy", "lease"),
    "Node": ("url", "engine", "phase", "direct", "decode_limit", "enabled", "draining"),
    "PlannerPolicy": ("mode", *sorted(set(PolicyEdit.model_fields) - {"reason"})),
}


def specs_of(partition: Partition | None) -> dict[tuple[str, str], Fields]:
    """Every document of ours as it would be written now: all tenants, and what belongs to the partition."""
    found = {("Tenant", tenant.name): _shown("Tenant", tenant) for tenant in Tenant.objects.order_by("name")}
    if partition is None:
        return found
    fresh = Partition.objects.get(pk=partition.pk)
    found["Partition", fresh.name] = _shown("Partition", fresh)
    policy = policy_document(policy_of(fresh))
    found["PlannerPolicy", fresh.name] = {name: policy[name] for name in SHOWN["PlannerPolicy"]}
    for node in Node.objects.filter(partition=fresh).order_by("order"):
        spec = {name: getattr(node, name) for name in SHOWN["Node"] if name != "phase"}
        found["Node", node.name] = spec | {"phase": node.desired_phase}
    return found


def _shown(kind: str, row: Any) -> Fields:
    return {name: getattr(row, name) for name in SHOWN[kind]}


def read(place: str, raw: Any) -> tuple[str, str, Fields]:
    """Kind, name and changes of one document. Raises InvalidField naming the place in it."""
    try:
        document = Document.model_validate(raw)
        if document.apiVersion != API_VERSION:
            raise InvalidField(f"{place}.apiVersion", f"expected {API_VERSION}")
        place = f"{document.kind}/{document.metadata.name}.spec"
        if "reason" in document.spec:
            raise InvalidField(f"{place}.reason", "the reason is given with the call")
        return document.kind, document.metadata.name, KINDS[document.kind].spec.model_validate(document.spec).changes()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise InvalidField(".".join([place, *map(str, first["loc"])])[:300], first["msg"]) from None
