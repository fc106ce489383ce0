"""REST of flow control: bands, objectives, limits, and the queues as they are now."""

from __future__ import annotations

import re
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status

from apps.flowcontrol import exchange, selectors, services
from apps.flowcontrol.choices import CeilingPolicy, Detector, Fairness, LimitMode, Ordering
from apps.flowcontrol.models import FlowSettings
from apps.telemetry.selectors import live_snapshot
from apps.topology.models import Partition
from apps.topology.selectors import partition_named
from controlplane import records
from controlplane.errors import InvalidField
from controlplane.permissions import require
from controlplane.rest.etags import check_if_match, tagged
from controlplane.rest.paging import Page, PageQuery, page
from controlplane.rest.schemas import Body, Edit, Finite, Reason

router = Router(tags=["flow control"])
_STAGE_COLUMN = re.compile(r"^(prefill|decode)_")
_CEILING_COLUMNS = {"policy": "ceiling_policy", "min_ceiling": "min_ceiling"}
_CEILING_FIELDS = {column: f"ceilings.{part}" for part, column in _CEILING_COLUMNS.items()}


class BandOut(Schema):
    name: str
    partition: str
    priority: int
    fairness: Fairness
    ordering: Ordering
    max_requests: int
    max_bytes: int
    ttl_s: float | None
    ceiling: float
    min_share: float
    ttft_budget_s: float | None

    @staticmethod
    def resolve_partition(band: Any) -> str:
        return str(band.partition)


class BandEdit(Edit):
    priority: int | None = None
    fairness: Fairness | None = None
    ordering: Ordering | None = None
    max_requests: int | None = None
    max_bytes: int | None = None
    ttl_s: Finite | None = None
    ceiling: Finite | None = None
    min_share: Finite | None = None
    ttft_budget_s: Finite | None = None


class BandIn(BandEdit):
    name: str
    priority: int


class PrioritiesIn(Reason):
    priorities: dict[str, int]


class ObjectiveOut(Schema):
    name: str
    partition: str
    band: str
    slo_ttft_s: float | None
    ttl_s: float | None

    @staticmethod
    def resolve_partition(objective: Any) -> str:
        return str(objective.partition)

    @staticmethod
    def resolve_band(objective: Any) -> str:
        return str(objective.band.name)


class ObjectiveEdit(Edit):
    band: str | None = None
    slo_ttft_s: Finite | None = None
    ttl_s: Finite | None = None


class ObjectiveIn(ObjectiveEdit):
    name: str
    band: str


class Stage(Body):
    """Which fields count depends on the detector; a limit of null follows what the engines report."""

    detector: Detector
    mode: LimitMode
    limit_per_node: int | None
    token_limit_per_node: int | None
    queue_threshold: float
    kv_threshold: float
    stale_after_s: float
    ttft_budget_s: float


class StageEdit(Body):
    detector: Detector | None = None
    mode: LimitMode | None = None
    limit_per_node: int | None = None
    token_limit_per_node: int | None = None
    queue_threshold: Finite | None = None
    kv_threshold: Finite | None = None
    stale_after_s: Finite | None = None
    ttft_budget_s: Finite | None = None


class Ceilings(Body):
    policy: CeilingPolicy
    min_ceiling: float


class CeilingsEdit(Body):
    policy: CeilingPolicy | None = None
    min_ceiling: Finite | None = None


class FlowOut(Schema):
    max_requests: int | None
    max_bytes: int | None
    default_ttl_s: float | None
    empty_pool_ttl_s: float
    displacement: bool
    ceilings: Ceilings
    prefill: Stage
    decode: Stage
    default_band: dict[str, Any]


class FlowEdit(Edit):
    max_requests: int | None = None
    max_bytes: int | None = None
    default_ttl_s: Finite | None = None
    empty_pool_ttl_s: Finite | None = None
    displacement: bool | None = None
    ceilings: CeilingsEdit | None = None
    prefill: StageEdit | None = None
    decode: StageEdit | None = None
    default_band: dict[str, Any] | None = None

    def changes(self) -> dict[str, Any]:
        """Stages are flat in the table: `prefill.mode` is `prefill_mode`."""
        flat: dict[str, Any] = {}
        for name, value in super().changes().items():
            if name in ("prefill", "decode"):
                flat |= {f"{name}_{part}": inner for part, inner in (value or {}).items()}
            elif name == "ceilings":
                flat |= {_CEILING_COLUMNS[part]: inner for part, inner in (value or {}).items()}
            else:
                flat[name] = value
        return flat


class QueuesOut(Schema):
    """Of the gateway's snapshot (docs/interfaces.md, section 9): `t` says of when."""

    partition: str
    t: float
    config_version: int | None
    bands: list[dict[str, Any]]
    stages: dict[str, Any]


def _partition(request: HttpRequest, name: str, role: str = "viewer") -> Partition:
    require(request, role)
    return partition_named(name)


@router.get("/partitions/{partition}/queues", response=QueuesOut)
def get_queues(request: HttpRequest, partition: str) -> Any:
    """Who waits in which band, live. 503 when the gateway has not reported for ten seconds."""
    snapshot = live_snapshot(_partition(request, partition))
    return {name: snapshot.get(name) for name in ("partition", "t", "config_version", "bands", "stages")}


@router.get("/partitions/{partition}/bands", response=Page[BandOut])
def list_bands(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    """Highest priority first."""
    return page(selectors.bands_of(_partition(request, partition)), query, "-priority")


@router.post("/partitions/{partition}/bands", response={201: BandOut})
def create_band(request: HttpRequest, partition: str, payload: BandIn) -> Any:
    actor = require(request, "operator")
    fields = payload.changes()
    return Status(201, services.create_band(partition_named(partition), actor=actor, reason=payload.reason, **fields))


@router.put("/partitions/{partition}/band-priorities", response=list[BandOut])
def set_priorities(request: HttpRequest, partition: str, payload: PrioritiesIn) -> Any:
    """Several priorities at once; this is how bands trade places."""
    actor = require(request, "operator")
    return services.set_priorities(partition_named(partition), payload.priorities, actor, payload.reason)


@router.get("/partitions/{partition}/bands/{name}", response=BandOut)
def get_band(request: HttpRequest, response: HttpResponse, partition: str, name: str) -> Any:
    return tagged(response, BandOut.from_orm(selectors.band_named(_partition(request, partition), name)))


@router.patch("/partitions/{partition}/bands/{name}", response=BandOut)
def edit_band(request: HttpRequest, response: HttpResponse, partition: str, name: str, payload: BandEdit) -> Any:
    """Takes effect at the gateway within a second; queued requests stay in their band."""
    actor = require(request, "operator")
    with transaction.atomic():
        owner = records.locked(partition_named(partition))
        band = selectors.band_named(owner, name)
        check_if_match(request, BandOut.from_orm(band))
        band = services.update_band(band, actor, payload.reason, **payload.changes())
    return tagged(response, BandOut.from_orm(band))


@router.delete("/partitions/{partition}/bands/{name}", response={204: None})
def delete_band(request: HttpRequest, partition: str, name: str, reason: str = "") -> Any:
    """Refused (409 `band-in-use`) while an objective leads to it."""
    actor = require(request, "operator")
    with transaction.atomic():
        band = selectors.band_named(records.locked(partition_named(partition)), name)
        check_if_match(request, BandOut.from_orm(band))
        services.delete_band(band, actor, reason)
    return Status(204, None)


@router.get("/partitions/{partition}/objectives", response=Page[ObjectiveOut])
def list_objectives(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    return page(selectors.objectives_of(_partition(request, partition)), query, "name")


@router.post("/partitions/{partition}/objectives", response={201: ObjectiveOut})
def create_objective(request: HttpRequest, partition: str, payload: ObjectiveIn) -> Any:
    actor = require(request, "operator")
    owner = partition_named(partition)
    fields = {**payload.changes(), "band": selectors.band_for(owner, payload.band)}
    return Status(201, services.create_objective(owner, actor=actor, reason=payload.reason, **fields))


@router.get("/partitions/{partition}/objectives/{name}", response=ObjectiveOut)
def get_objective(request: HttpRequest, response: HttpResponse, partition: str, name: str) -> Any:
    return tagged(response, ObjectiveOut.from_orm(selectors.objective_named(_partition(request, partition), name)))


@router.patch("/partitions/{partition}/objectives/{name}", response=ObjectiveOut)
def edit_objective(
    request: HttpRequest, response: HttpResponse, partition: str, name: str, payload: ObjectiveEdit
) -> Any:
    actor = require(request, "operator")
    with transaction.atomic():
        owner = records.locked(partition_named(partition))
        objective = selectors.objective_named(owner, name)
        check_if_match(request, ObjectiveOut.from_orm(objective))
        changes = payload.changes()
        if "band" in changes:
            changes["band"] = selectors.band_for(owner, changes["band"])
        objective = services.update_objective(objective, actor, payload.reason, **changes)
    return tagged(response, ObjectiveOut.from_orm(objective))


@router.delete("/partitions/{partition}/objectives/{name}", response={204: None})
def delete_objective(request: HttpRequest, partition: str, name: str, reason: str = "") -> Any:
    """Refused (409 `objective-in-use`) while it is a tenant's default."""
    actor = require(request, "operator")
    with transaction.atomic():
        objective = selectors.objective_named(records.locked(partition_named(partition)), name)
        check_if_match(request, ObjectiveOut.from_orm(objective))
        services.delete_objective(objective, actor, reason)
    return Status(204, None)


def _flow_out(settings: FlowSettings) -> FlowOut:
    """The same shape as in the configuration document, with the default band's template."""
    partition = settings.partition
    return FlowOut(**selectors.flow_section(partition), default_band=selectors.default_band_section(partition))


@router.get("/partitions/{partition}/flow-settings", response=FlowOut)
def get_flow_settings(request: HttpRequest, response: HttpResponse, partition: str) -> Any:
    return tagged(response, _flow_out(selectors.flow_settings_of(_partition(request, partition))))


@router.patch("/partitions/{partition}/flow-settings", response=FlowOut)
def edit_flow_settings(request: HttpRequest, response: HttpResponse, partition: str, payload: FlowEdit) -> Any:
    actor = require(request, "operator")
    with transaction.atomic():
        owner = records.locked(partition_named(partition))
        check_if_match(request, _flow_out(selectors.flow_settings_of(owner)))
        try:
            settings = services.update_flow_settings(owner, actor, payload.reason, **payload.changes())
        except InvalidField as error:
            field = _CEILING_FIELDS.get(error.field) or _STAGE_COLUMN.sub(r"\1.", error.field)
            raise InvalidField(field, error.expected) from None
    return tagged(response, _flow_out(settings))


class ImportIn(Reason):
    """`pool`: what the YAML calls this partition, when that is not its name."""

    yaml: str
    pool: str = ""
    dry_run: bool = False


class RevertIn(Reason):
    version: int
    dry_run: bool = False


class ChangeOut(Schema):
    path: str
    before: Any
    after: Any


class ExchangeOut(Schema):
    """`version` is null when nothing was published: a dry run, or nothing to change."""

    applied: bool
    version: int | None
    changes: list[ChangeOut]
    notes: list[str]


@router.get("/partitions/{partition}/flow-config")
def export_flow_config(request: HttpRequest, partition: str) -> HttpResponse:
    """Flow control as llm-d's YAML: EndpointPickerConfig, InferenceObjectives, and a document for what those lack."""
    text = exchange.export_yaml(_partition(request, partition))
    response = HttpResponse(text, content_type="application/yaml; charset=utf-8")
    response["Content-Disposition"] = f'inline; filename="{partition}-flow-control.yaml"'
    return response


@router.post("/partitions/{partition}/flow-config/import", response=ExchangeOut)
def import_flow_config(request: HttpRequest, partition: str, payload: ImportIn) -> Any:
    """Takes llm-d's YAML over as one version, live within a second; a dry run only says what would change."""
    actor = require(request, "operator")
    owner = partition_named(partition)
    return exchange.import_yaml(owner, payload.yaml, actor, payload.reason, pool=payload.pool, dry_run=payload.dry_run)


@router.post("/partitions/{partition}/flow-config/revert", response=ExchangeOut)
def revert_flow_config(request: HttpRequest, partition: str, payload: RevertIn) -> Any:
    """Bands, objectives and limits as they were in an earlier version; nodes, tenants and keys stay."""
    actor = require(request, "operator")
    owner = partition_named(partition)
    return exchange.revert(owner, payload.version, actor, payload.reason, dry_run=payload.dry_run)
