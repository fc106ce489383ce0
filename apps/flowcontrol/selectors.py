"""Reads of flow control, and its sections of the configuration document."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from apps.flowcontrol.models import Band, FlowSettings, Objective
from apps.topology.models import Partition
from controlplane.errors import InvalidField, NotFound

BAND_FIELDS = (
    "name",
    "priority",
    "fairness",
    "ordering",
    "max_requests",
    "max_bytes",
    "ttl_s",
    "ceiling",
    "min_share",
    "ttft_budget_s",
)

STAGE_FIELDS = (
    "detector",
    "mode",
    "limit_per_node",
    "token_limit_per_node",
    "queue_threshold",
    "kv_threshold",
    "stale_after_s",
    "ttft_budget_s",
)


def bands_of(partition: Partition) -> QuerySet[Band]:
    """Highest priority first."""
    return Band.objects.select_related("partition").filter(partition=partition).order_by("-priority", "name")


def band_named(partition: Partition, name: str) -> Band:
    """Raises NotFound."""
    band = bands_of(partition).filter(name=name).first()
    if band is None:
        raise NotFound(f"band of {partition.name}", name)
    return band


def band_for(partition: Partition, name: str | None) -> Band:
    """The band that an objective names. Raises InvalidField: here the name is a value, not an address."""
    bands = {band.name: band for band in bands_of(partition)}
    if name not in bands:
        raise InvalidField("band", f"{name!r} is not a band of {partition.name}; expected {', '.join(bands) or 'one'}")
    return bands[name]


def objectives_of(partition: Partition) -> QuerySet[Objective]:
    return Objective.objects.select_related("partition", "band").filter(partition=partition).order_by("name")


def objective_named(partition: Partition, name: str) -> Objective:
    """Raises NotFound."""
    objective = objectives_of(partition).filter(name=name).first()
    if objective is None:
        raise NotFound(f"objective of {partition.name}", name)
    return objective


def objective_names() -> set[str]:
    """Names of objectives over all partitions."""
    return set(Objective.objects.values_list("name", flat=True))


def partitions_without_objective(name: str) -> list[str]:
    """Partitions in which no objective of this name exists."""
    return sorted(Partition.objects.exclude(objectives__name=name).values_list("name", flat=True))


def flow_settings_of(partition: Partition) -> FlowSettings:
    """The partition's settings; the defaults, unsaved, when nobody has edited them."""
    stored = FlowSettings.objects.select_related("partition").filter(partition=partition).first()
    return stored or FlowSettings(partition=partition)


def bands_section(partition: Partition) -> list[dict[str, Any]]:
    return list(bands_of(partition).values(*BAND_FIELDS))


def objectives_section(partition: Partition) -> list[dict[str, Any]]:
    return [
        {"name": o.name, "band": o.band.name, "slo_ttft_s": o.slo_ttft_s, "ttl_s": o.ttl_s}
        for o in objectives_of(partition)
    ]


def default_band_section(partition: Partition) -> dict[str, Any]:
    return dict(flow_settings_of(partition).default_band)


def flow_section(partition: Partition) -> dict[str, Any]:
    return settings_section(flow_settings_of(partition))


def settings_section(settings: FlowSettings) -> dict[str, Any]:
    """The section `flow` of the configuration document."""
    names = ("max_requests", "max_bytes", "default_ttl_s", "empty_pool_ttl_s", "displacement")
    ceilings = {"policy": settings.ceiling_policy, "min_ceiling": settings.min_ceiling}
    stages = {
        stage: {part: getattr(settings, f"{stage}_{part}") for part in STAGE_FIELDS} for stage in ("prefill", "decode")
    }
    return {name: getattr(settings, name) for name in names} | {"ceilings": ceilings} | stages


def flow_document(partition: Partition) -> dict[str, Any]:
    """The sections that the flow control machine reads."""
    return {
        "bands": bands_section(partition),
        "default_band": default_band_section(partition),
        "flow": flow_section(partition),
    }
