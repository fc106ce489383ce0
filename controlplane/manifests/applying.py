"""YAML documents compared with what is there, and applied in one transaction as one published version: all or none."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from django.db import transaction
from django.db.models import Max

from apps.flowcontrol import exchange
from apps.flowcontrol.exchange import FieldChange
from apps.topology.configuration import one_version
from apps.topology.models import ConfigurationVersion, Node, Partition
from apps.topology.selectors import partition_named
from controlplane.actors import Actor
from controlplane.audit import change
from controlplane.errors import InvalidField
from controlplane.manifests import kinds

_HEADER = """\
# Partition {name} and the tenants: everything that `switchyard apply -f` takes. API keys are not in it.
"""


@dataclass(frozen=True, slots=True)
class Applied:
    """What changed, or would (`applied` False); `versions` are the configurations published for it, by partition."""

    applied: bool
    changes: list[FieldChange]
    notes: list[str]
    versions: dict[str, int]


def export(partition: Partition) -> str:
    """Everything of a partition, and all tenants. Applied again, it changes nothing."""
    documents = [
        {
            "apiVersion": kinds.API_VERSION,
            "kind": kind,
            "metadata": {"name": name},
            "spec": {key: value for key, value in _plain(spec).items() if value is not None},
        }
        for (kind, name), spec in kinds.specs_of(partition).items()
    ]
    flow = exchange.export_yaml(partition)
    return _HEADER.format(name=partition.name) + yaml.safe_dump_all(documents, sort_keys=False) + "---\n" + flow


def apply(
    text: str,
    actor: Actor,
    reason: str = "",
    *,
    partition: Partition | None = None,
    pool: str = "",
    dry_run: bool = False,
) -> Applied:
    """Applies the documents, or says what they would change. Operator; a change that needs more is Forbidden.

    `partition` is where flow control and new nodes go. Raises InvalidField naming the document and the field.
    """
    documents = exchange.load_documents(text)
    if not documents:
        raise InvalidField("yaml", "expected at least one document")
    with change(actor, reason, role="operator"):
        own, flow = _sorted_out(documents)
        if partition is None:
            partition = _partition_of(own, flow)
        scope = {found.pk: found for found in _touched(own, partition)}.values()
        before, versions = _state(scope), _versions()
        call = kinds.Applying(partition, actor, reason or "applied from YAML", [])
        with one_version():
            for kind, name, changes in own:
                _apply_one(call, kind, name, changes)
            if flow:
                assert partition is not None
                told = exchange.import_documents(partition, flow, actor, call.reason, pool=pool)
                call.notes += told.notes
        changed = exchange.differences(before, _state(scope))
        published = {name: number for name, number in _versions().items() if versions.get(name) != number}
        if dry_run:
            transaction.set_rollback(True)
    return Applied(not dry_run, changed, call.notes, {} if dry_run else published)


def _sorted_out(documents: list[Any]) -> tuple[list[tuple[str, str, dict[str, Any]]], list[Any]]:
    own, flow = [], []
    known = (*kinds.KINDS, *kinds.FLOW_KINDS)
    for index, document in enumerate(documents):
        place = f"documents[{index}]"
        if not isinstance(document, Mapping):
            raise InvalidField(place, "expected an object with apiVersion, kind, metadata and spec")
        kind = document.get("kind")
        if not isinstance(kind, str) or kind not in known:
            raise InvalidField(f"{place}.kind", f"expected one of {', '.join(known)}")
        if kind in kinds.FLOW_KINDS:
            flow.append(document)
        else:
            own.append(kinds.read(place, document))
    names = [(kind, name) for kind, name, _ in own]
    for kind, name in names:
        if names.count((kind, name)) > 1:
            raise InvalidField(f"{kind}/{name}"[:200], "is there twice")
    return own, flow


def _partition_of(own: list[tuple[str, str, dict[str, Any]]], flow: list[Any]) -> Partition | None:
    """Where the documents themselves name one partition, it need not be said again."""
    named = {name for kind, name, _ in own if kind in ("Partition", "PlannerPolicy")}
    if len(named) == 1:
        return partition_named(named.pop())
    if flow:
        raise InvalidField("partition", "say to which partition the flow control belongs")
    return None


def _touched(own: list[tuple[str, str, dict[str, Any]]], partition: Partition | None) -> list[Partition]:
    found = [] if partition is None else [partition]
    nodes = [name for kind, name, _ in own if kind == "Node"]
    found += [node.partition for node in Node.objects.select_related("partition").filter(name__in=nodes)]
    return found + [partition_named(name) for kind, name, _ in own if kind in ("Partition", "PlannerPolicy")]


def _apply_one(call: kinds.Applying, kind: str, name: str, changes: dict[str, Any]) -> None:
    try:
        kinds.KINDS[kind].apply(call, name, changes)
    except InvalidField as error:
        if error.field in ("partition", "reason", "metadata.name"):
            raise
        raise InvalidField(f"{kind}/{name}.spec.{error.field}"[:300], error.expected) from None


def _state(scope: Any) -> dict[str, Any]:
    found = {"/".join(key): spec for key, spec in kinds.specs_of(None).items()}
    for partition in scope:
        found |= {"/".join(key): spec for key, spec in kinds.specs_of(partition).items()}
        found[f"FlowControl/{partition.name}"] = exchange.normal_document(partition)
    return {name: _plain(spec) for name, spec in found.items()}


def _versions() -> dict[str, int]:
    """Of every partition: a tenant is in all of them."""
    newest = ConfigurationVersion.objects.values("partition__name").annotate(newest=Max("version"))
    return {row["partition__name"]: row["newest"] for row in newest.order_by("partition__name")}


def _plain(spec: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(spec, default=_text))
    return plain


def _text(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else str(value)
