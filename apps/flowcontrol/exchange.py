"""Flow control as a whole: exported and imported as llm-d's YAML, compared, and set back to an earlier version.

Every write is one transaction that ends in one published version; a document that is wrong anywhere changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from django.db import transaction

from apps.flowcontrol import selectors
from apps.flowcontrol.domain import llmd
from apps.flowcontrol.domain.fields import FlowConfigError
from apps.flowcontrol.domain.llmd.writing import unknown_to_llmd
from apps.flowcontrol.models import Band, FlowSettings, Objective, default_band
from apps.flowcontrol.services import clean_band, lock_partition, publish_checked
from apps.tenancy.models import Tenant
from apps.topology.models import Partition
from apps.topology.selectors import configuration_numbered
from controlplane import records, yaml_text
from controlplane.actors import Actor
from controlplane.audit import change
from controlplane.errors import Conflict, InvalidField

_HEADER = """\
# Flow control of partition {name}: llm-d's EndpointPickerConfig (its flowControl part) and InferenceObjectives,
# and a FlowControl document of Switchyard's own for what those cannot say.
"""


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One field of the configuration document; `before` is None for what is new, `after` for what is gone."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a whole configuration changes, or would change (`applied` False). `version` is the one it was published as."""

    applied: bool
    version: int | None
    changes: list[FieldChange]
    notes: list[str]


def whole_document(partition: Partition) -> dict[str, Any]:
    """Everything the exchange is about: `bands`, `default_band`, `flow`, `objectives`."""
    return selectors.flow_document(partition) | {"objectives": selectors.objectives_section(partition)}


def export_yaml(partition: Partition) -> str:
    """The partition's flow control as YAML; importing it again changes nothing."""
    documents = llmd.write(_normal(whole_document(partition)), partition.name)
    header = _HEADER.format(name=partition.name)
    alone = unknown_to_llmd(documents)
    if alone:
        header += f"# Only Switchyard has {', '.join(alone)}.\n"
    return header + yaml.safe_dump_all(documents, sort_keys=False)


def import_yaml(
    partition: Partition, text: str, actor: Actor, reason: str = "", *, pool: str = "", dry_run: bool = False
) -> Exchange:
    """Takes llm-d's YAML over, or says what it would change. `pool` is the partition's name in it, when it has another.

    Raises InvalidField naming the field of the YAML or, where the values do not go together, of the document.
    """
    return import_documents(partition, load_documents(text), actor, reason, pool=pool, dry_run=dry_run)


def import_documents(
    partition: Partition, documents: list[Any], actor: Actor, reason: str = "", *, pool: str = "", dry_run: bool = False
) -> Exchange:
    """As `import_yaml`, of documents that are loaded already."""
    with change(actor, reason, role="operator"):
        lock_partition(partition)
        try:
            imported = llmd.read(documents, _normal(whole_document(partition)), pool or partition.name)
        except FlowConfigError as error:
            raise InvalidField(error.field, f"expected {error.expected}") from None
        return _replace(partition, imported.document, actor, reason or "imported from YAML", imported.notes, dry_run)


def revert(partition: Partition, version: int, actor: Actor, reason: str = "", *, dry_run: bool = False) -> Exchange:
    """Sets bands, objectives and limits back to what they were in an earlier version; that becomes a new version.

    Raises NotFound for a version that does not exist, Conflict when a tenant's default objective would be gone.
    """
    old = configuration_numbered(partition, version).document
    wanted: dict[str, Any] = {name: old.get(name) or [] for name in ("bands", "objectives")}
    wanted |= {name: old.get(name) or {} for name in ("default_band", "flow")}
    with change(actor, reason, role="operator"):
        lock_partition(partition)
        return _replace(partition, _normal(wanted), actor, reason or f"back to version {version}", (), dry_run)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FieldChange]:
    """Field by field; bands and objectives are compared by name."""
    was, will = dict(_leaves("", before)), dict(_leaves("", after))
    paths = list(dict.fromkeys([*was, *will]))
    return [FieldChange(path, was.get(path), will.get(path)) for path in paths if was.get(path) != will.get(path)]


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(f"{path}[{item['name']}]", item)]
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(f"{path}.{key}" if path else key, item)]
    return [(path, value)]


def normal_document(partition: Partition) -> dict[str, Any]:
    """`whole_document` with every field, as JSON would store it; two of them compare."""
    return _normal(whole_document(partition))


def load_documents(text: str) -> list[Any]:
    """The YAML's documents. Raises InvalidField saying where it is wrong."""
    try:
        return yaml_text.load(text)
    except yaml_text.YamlTextError as error:
        raise InvalidField("yaml", str(error)) from None


def _normal(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with every field, so that documents of any age compare; as JSON would store it."""
    band = {"ttft_budget_s": None}
    flow, defaults = document["flow"], selectors.settings_section(FlowSettings())
    flow = {
        name: default | (flow.get(name) or {}) if isinstance(default, dict) else flow.get(name, default)
        for name, default in defaults.items()
    }
    normal = {
        "bands": [band | item for item in document["bands"]],
        "default_band": default_band() | document["default_band"],
        "flow": flow,
        "objectives": list(document["objectives"]),
    }
    loaded: dict[str, Any] = json.loads(json.dumps(normal))
    return loaded


def _replace(
    partition: Partition, wanted: dict[str, Any], actor: Actor, reason: str, notes: tuple[str, ...], dry_run: bool
) -> Exchange:
    """Makes the rows say what `wanted` says. Runs inside `change`; a dry run goes all the way and is rolled back."""
    before = _normal(whole_document(partition))
    _write_bands(partition, wanted["bands"])
    _write_objectives(partition, wanted["objectives"])
    partition.bands.exclude(name__in=[band["name"] for band in wanted["bands"]]).delete()
    _write_settings(partition, wanted["flow"], wanted["default_band"])
    changes = differences(before, _normal(whole_document(partition)))
    version = publish_checked(partition, actor, reason) if changes else None
    if dry_run:
        transaction.set_rollback(True)
    return Exchange(not dry_run, version.version if version and not dry_run else None, changes, list(notes))


def _write_bands(partition: Partition, wanted: list[dict[str, Any]]) -> None:
    known = {band.name: band for band in selectors.bands_of(partition)}
    for fields in wanted:
        band = known.get(fields["name"]) or Band(partition=partition)
        before = {name: getattr(band, name) for name in selectors.BAND_FIELDS}
        for name in selectors.BAND_FIELDS:
            setattr(band, name, fields[name])
        clean_band(band, f"bands[{band.name}]")
        if band.pk is None or before != {name: getattr(band, name) for name in selectors.BAND_FIELDS}:
            band.save()


def _write_objectives(partition: Partition, wanted: list[dict[str, Any]]) -> None:
    bands = {band.name: band for band in selectors.bands_of(partition)}
    known = {objective.name: objective for objective in selectors.objectives_of(partition)}
    gone = set(known) - {fields["name"] for fields in wanted}
    in_use = Tenant.objects.filter(default_objective__in=gone).order_by("name").first()
    if in_use is not None:
        raise Conflict(f"objective {in_use.default_objective} is the default of {in_use.name}", "objective-in-use")
    Objective.objects.filter(partition=partition, name__in=gone).delete()
    for fields in wanted:
        path = f"objectives[{fields['name']}]"
        if fields["band"] not in bands:
            raise InvalidField(f"{path}.band", f"{fields['band']!r} is not a band of {partition.name}")
        objective = known.get(fields["name"]) or Objective(partition=partition, name=fields["name"])
        changes = {"band": bands[fields["band"]], "slo_ttft_s": fields["slo_ttft_s"], "ttl_s": fields["ttl_s"]}
        try:
            if records.apply(objective, changes, changes) or objective.pk is None:
                objective.save()
        except InvalidField as error:
            raise InvalidField(f"{path}.{error.field}", error.expected) from None


def _write_settings(partition: Partition, flow: dict[str, Any], template: dict[str, Any]) -> None:
    row, _ = FlowSettings.objects.select_for_update(of=("self",)).get_or_create(partition=partition)
    clean_band(Band(name="template", priority=0, **template), "default_band")
    flat = {"default_band": template}
    for name, value in flow.items():
        if name == "ceilings":
            flat |= {"ceiling_policy": value["policy"], "min_ceiling": value["min_ceiling"]}
        elif isinstance(value, dict):
            flat |= {f"{name}_{part}": inner for part, inner in value.items()}
        else:
            flat[name] = value
    try:
        if records.apply(row, flat, flat):
            row.save()
    except InvalidField as error:
        raise InvalidField(f"flow.{error.field}", error.expected) from None
