"""Writes of flow control: bands, objectives, limits. Live at the gateway within a second, without losing a queued request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError

from apps.flowcontrol import selectors
from apps.flowcontrol.domain.config import FlowConfig, FlowConfigError
from apps.flowcontrol.models import Band, FlowSettings, Objective, default_band
from apps.flowcontrol.selectors import BAND_FIELDS, bands_of
from apps.tenancy.models import Tenant
from apps.topology.configuration import publish
from apps.topology.models import ConfigurationVersion, Partition
from controlplane import records
from controlplane.actors import Actor
from controlplane.audit import change
from controlplane.errors import Conflict, InvalidField

_BAND_FIELDS = frozenset(BAND_FIELDS) - {"name"}
_OBJECTIVE_FIELDS = frozenset({"band", "slo_ttft_s", "ttl_s"})
_FLOW_FIELDS = frozenset(f.name for f in FlowSettings._meta.fields) - {"id", "partition"}


def create_band(partition: Partition, name: str, priority: int, actor: Actor, reason: str = "", **fields: Any) -> Band:
    """Raises InvalidField, or Conflict when the name or the priority is taken."""
    with change(actor, reason, role="operator"):
        lock_partition(partition)
        band = Band(partition=partition, name=name)
        _check_priority(band, priority)
        records.apply(band, {"priority": priority, **fields}, _BAND_FIELDS)
        band.save()
        publish_checked(partition, actor, reason or f"band {name} created")
    return band


def update_band(band: Band, actor: Actor, reason: str = "", **changes: Any) -> Band:
    """Edits a band in place: queued requests stay in it. Raises InvalidField, or Conflict when the priority is taken."""
    with change(actor, reason, role="operator"):
        lock_partition(band.partition)
        row = records.locked(band)
        _check_priority(row, changes.get("priority", row.priority))
        if records.apply(row, changes, _BAND_FIELDS):
            row.save()
            what = ", ".join(f"{name} {value}" for name, value in changes.items())
            publish_checked(row.partition, actor, reason or f"band {row.name}: {what}")
    return row


def set_priorities(partition: Partition, priorities: Mapping[str, int], actor: Actor, reason: str = "") -> list[Band]:
    """Several priorities at once, so that bands can trade places. Raises InvalidField or Conflict."""
    with change(actor, reason, role="operator"):
        lock_partition(partition)
        bands = {band.name: band for band in bands_of(partition)}
        for name, priority in priorities.items():
            if name not in bands:
                raise InvalidField("priorities", f"{name!r} is not a band; expected {', '.join(bands)}")
            bands[name].priority = priority
            clean_band(bands[name], f"priorities.{name}")
        taken = [band.priority for band in bands.values()]
        if len(set(taken)) < len(taken):
            raise Conflict("two bands would have the same priority", "priority-taken")
        for name in priorities:
            bands[name].save(update_fields=["priority"])
        publish_checked(partition, actor, reason or "priorities edited")
    return list(bands_of(partition))


def delete_band(band: Band, actor: Actor, reason: str = "") -> None:
    """Raises Conflict while an objective leads to it. What is queued in it keeps its place and
    its limits until it has gone, without a guaranteed share."""
    with change(actor, reason, role="operator"):
        lock_partition(band.partition)
        users = sorted(band.objectives.values_list("name", flat=True))
        if users:
            raise Conflict(f"band {band.name} is used by {', '.join(users)}", "band-in-use")
        band.delete()
        publish_checked(band.partition, actor, reason or f"band {band.name} removed")


def create_objective(
    partition: Partition, name: str, band: Band, actor: Actor, reason: str = "", **fields: Any
) -> Objective:
    """Raises InvalidField or Conflict."""
    with change(actor, reason, role="operator"):
        objective = Objective(partition=partition, name=name)
        _check_same_partition(band, partition)
        records.apply(objective, {"band": band, **fields}, _OBJECTIVE_FIELDS)
        objective.save()
        publish_checked(partition, actor, reason or f"objective {name} created")
    return objective


def update_objective(objective: Objective, actor: Actor, reason: str = "", **changes: Any) -> Objective:
    """`band` is a Band of the same partition. Raises InvalidField."""
    with change(actor, reason, role="operator"):
        row = records.locked(objective)
        if "band" in changes:
            _check_same_partition(changes["band"], row.partition)
        if records.apply(row, changes, _OBJECTIVE_FIELDS):
            row.save()
            publish_checked(row.partition, actor, reason or f"objective {row.name} edited")
    return row


def delete_objective(objective: Objective, actor: Actor, reason: str = "") -> None:
    """Raises Conflict while it is a tenant's default: the gateway would refuse the configuration."""
    with change(actor, reason, role="operator"):
        users = sorted(Tenant.objects.filter(default_objective=objective.name).values_list("name", flat=True))
        if users:
            raise Conflict(f"objective {objective.name} is the default of {', '.join(users)}", "objective-in-use")
        objective.delete()
        publish_checked(objective.partition, actor, reason or f"objective {objective.name} removed")


def update_flow_settings(partition: Partition, actor: Actor, reason: str = "", **changes: Any) -> FlowSettings:
    """Global limits, the gate of each stage, and `default_band`, of which any part may be given. Raises InvalidField."""
    with change(actor, reason, role="operator"):
        lock_partition(partition)
        row, _ = FlowSettings.objects.select_for_update(of=("self",)).get_or_create(partition=partition)
        if "default_band" in changes:
            changes["default_band"] = _checked_template(row.default_band, changes["default_band"])
        if records.apply(row, changes, _FLOW_FIELDS):
            row.save()
            publish_checked(partition, actor, reason or "flow settings edited")
    return row


def lock_partition(partition: Partition) -> None:
    """Edits of a partition's bands wait for each other, so that their checks hold when they commit."""
    records.locked(partition)


def _check_priority(band: Band, priority: Any) -> None:
    """Refuses a priority that another band has; one that is no priority at all is left to the field's own check."""
    if isinstance(priority, int):
        holder = band.partition.bands.filter(priority=priority).exclude(pk=band.pk).first()
        if holder is not None:
            raise Conflict(f"band {holder.name} has priority {priority} already", "priority-taken")


def publish_checked(partition: Partition, actor: Actor, reason: str) -> ConfigurationVersion | None:
    """Publishes what the gateway's machine accepts. Raises InvalidField, with the machine's own words, for anything else."""
    try:
        FlowConfig.parse(selectors.flow_document(partition))
    except FlowConfigError as error:
        raise InvalidField(error.field, f"expected {error.expected}") from None
    return publish(partition, actor, reason)


def _check_same_partition(band: Band, partition: Partition) -> None:
    if band.partition_id != partition.pk:
        raise InvalidField("band", f"{band.name!r} is not a band of {partition.name}")


def _checked_template(present: dict[str, Any], changes: Any) -> dict[str, Any]:
    if not isinstance(changes, dict):
        raise InvalidField("default_band", "expected an object")
    for name in changes:
        if name not in default_band():
            raise InvalidField(f"default_band.{name}", f"expected one of {', '.join(default_band())}")
    template = {**default_band(), **present, **changes}
    clean_band(Band(name="template", priority=0, **template), "default_band")
    return template


def clean_band(band: Band, prefix: str) -> None:
    """Checks each field by itself. Raises InvalidField with the field's path under `prefix`."""
    try:
        band.clean_fields(exclude={"partition"})
    except ValidationError as error:
        field, messages = next(iter(error.message_dict.items()))
        path = prefix if prefix.endswith(f".{band.name}") else f"{prefix}.{field}"
        raise InvalidField(path, messages[0]) from None
