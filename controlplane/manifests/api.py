"""REST of configuration as YAML: everything exported, compared, applied."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import Router, Schema

from apps.flowcontrol.api import ChangeOut, ImportIn
from apps.topology.selectors import partition_named
from controlplane.manifests import applying
from controlplane.permissions import require

router = Router(tags=["configuration"])


class ApplyIn(ImportIn):
    """`partition`: where flow control and new nodes go, when no document says so."""

    partition: str = ""


class AppliedOut(Schema):
    """Of a change, `path` is kind, name and field. `versions` are the configurations published for it, by partition; none for a dry run."""

    applied: bool
    changes: list[ChangeOut]
    notes: list[str]
    versions: dict[str, int]


_AS_A_FILE = {"requestBody": {"content": {"application/yaml": {"schema": {"type": "string"}}}}}


@router.post("/apply", response=AppliedOut, openapi_extra=_AS_A_FILE)
def apply_documents(request: HttpRequest, payload: ApplyIn) -> Any:
    """Applies YAML documents, all of them or none: EndpointPickerConfig, InferenceObjective, FlowControl, Tenant,
    Partition, Node, PlannerPolicy. With `dry_run` it only says what would change. A body of the type
    `application/yaml` is the documents themselves, with the other members in the query string."""
    actor = require(request, "operator")
    partition = partition_named(payload.partition) if payload.partition else None
    return applying.apply(
        payload.yaml, actor, payload.reason, partition=partition, pool=payload.pool, dry_run=payload.dry_run
    )


@router.get("/partitions/{partition}/manifests")
def export_documents(request: HttpRequest, partition: str) -> HttpResponse:
    """Everything that `apply` takes, as it is now: the partition, its nodes, policy and flow control, and all tenants."""
    require(request, "viewer")
    row = partition_named(partition)
    response = HttpResponse(applying.export(row), content_type="application/yaml; charset=utf-8")
    response["Content-Disposition"] = f'inline; filename="{row.name}.yaml"'
    return response
