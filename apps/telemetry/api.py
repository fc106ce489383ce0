"""REST of telemetry: what happened to requests, and what the gateway reports right now."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import HttpRequest
from ninja import Query, Router, Schema, Status
from pydantic import AwareDatetime, Field

from apps.telemetry import alerting, gateways, selectors
from apps.telemetry.models import Alert
from apps.topology.selectors import partition_named
from controlplane.audit_trail import Narrow, trail
from controlplane.permissions import actor_of, has_role, require, require_tenant_view
from controlplane.rest.paging import Page, PageQuery, page
from controlplane.rest.schemas import Body, Storable

router = Router(tags=["telemetry"])


class RequestOut(Schema):
    """Seconds and tokens; null where the request did not get so far."""

    request_id: str
    at: datetime
    tenant: str
    band: str
    branch: str
    branch_kind: str
    prefill_node: str
    decode_node: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    fetched_tokens: int
    output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    predicted_ttft_s: float | None
    e2e_s: float | None
    outcome: str
    drop_code: str
    reason: str


class RequestDetail(RequestOut):
    """`detail` is the gateway's whole record: each candidate's terms, and what was lost and why."""

    detail: dict[str, Any]


class RequestQuery(PageQuery):
    tenant: str = ""
    band: str = ""
    branch: str = ""
    node: str = ""
    outcome: str = ""
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None


@router.get("/partitions/{partition}/live", response=dict[str, Any])
def get_live(request: HttpRequest, partition: str) -> Any:
    """The gateway's last snapshot. 503 when it has not reported for ten seconds."""
    require(request, "viewer")
    return selectors.live_snapshot(partition_named(partition))


def _own_only(request: HttpRequest, tenant: str, node: str) -> frozenset[str] | None:
    """The tenants to which the answer is narrowed; None for those who may see all. Tenant users hear of no node, so they
    cannot ask for one's. Raises Forbidden for another tenant's."""
    actor = actor_of(request)
    if has_role(actor, "viewer"):
        return None
    if node or not actor.tenants:
        require(actor, "viewer")
    if tenant:
        require_tenant_view(actor, tenant)
    return actor.tenants


@router.get("/partitions/{partition}/requests", response=Page[RequestOut])
def list_requests(request: HttpRequest, partition: str, query: Query[RequestQuery]) -> Any:
    """Newest first. Tenant users see the requests of their own tenants, without nodes and reasons."""
    scope = _own_only(request, query.tenant, query.node)
    narrow = selectors.RequestFilter(**query.model_dump(exclude={"limit", "cursor"}), tenants=scope)
    found = page(selectors.requests_of(partition_named(partition), narrow), query, "-at", "-id")
    if scope is not None:
        found["items"] = [selectors.own_record(record) for record in found["items"]]
    return found


@router.get("/partitions/{partition}/requests/{request_id}", response=RequestDetail)
def get_request(request: HttpRequest, partition: str, request_id: str) -> Any:
    actor = actor_of(request)
    if not has_role(actor, "tenant"):
        require(actor, "viewer")
    record = selectors.request_record(partition_named(partition), request_id)
    require_tenant_view(actor, record.tenant)
    return record if has_role(actor, "viewer") else selectors.own_record(record, whole=True)


class BranchEndIn(Body):
    """`id` as `list_branches` names it, the tenant included."""

    id: str = Field(min_length=1, max_length=500)
    reason: str = Field(min_length=1, max_length=500)


class BranchQuery(Storable):
    tenant: str = ""
    node: str = ""
    kind: str = ""
    q: str = ""
    limit: int = Field(200, ge=1, le=2000)


@router.get("/partitions/{partition}/reuse", response=dict[str, Any])
def get_reuse(request: HttpRequest, partition: str) -> Any:
    """KV reuse since the gateway's start: ideal, actual and lost tokens by cause; in all, by node, tenant and workload. The
    causes add up to ideal - actual everywhere. 503 when the gateway does not answer."""
    require(request, "viewer")
    return gateways.reuse(partition_named(partition))


@router.get("/partitions/{partition}/branches", response=dict[str, Any])
def list_branches(request: HttpRequest, partition: str, query: Query[BranchQuery]) -> Any:
    """Live branches, the one heard of last first, and those lately closed. Tenant users see those of their own tenants,
    without nodes."""
    scope = _own_only(request, query.tenant, query.node)
    found = gateways.branches(partition_named(partition), query.model_dump(exclude={"limit"}), scope, limit=query.limit)
    if scope is not None:
        found["rows"] = [selectors.own_branch(row) for row in found["rows"]]
    return found


@router.post("/partitions/{partition}/branches/end", response={204: None})
def end_branch(request: HttpRequest, partition: str, body: BranchEndIn) -> Any:
    """Its blocks become the first to be evicted."""
    gateways.end_branch(partition_named(partition), body.id, actor_of(request), body.reason)
    return Status(204, None)


@router.get("/partitions/{partition}/branches/{path:branch_id}", response=dict[str, Any])
def get_branch(request: HttpRequest, partition: str, branch_id: str) -> Any:
    """Where one live branch's blocks are, what was lost of them, and what keeps it alive."""
    require(request, "viewer")
    return gateways.branch(partition_named(partition), branch_id)


class LivingQuery(Storable):
    """`stage`: queued, waiting, prefilling, handing-over or decoding."""

    tenant: str = ""
    band: str = ""
    stage: str = ""
    flow: str = ""
    node: str = ""
    q: str = ""
    limit: int = Field(100, ge=1, le=2000)


class ReasonIn(Body):
    reason: str = Field(min_length=1, max_length=500)


class AlertOut(Schema):
    id: int
    rule: str
    subject: str
    severity: str
    state: str
    summary: str
    value: float | None
    since: datetime
    fired_at: datetime | None
    resolved_at: datetime | None
    acknowledged_by: str
    acknowledged_at: datetime | None
    note: str


class AlertQuery(PageQuery):
    state: str = ""
    rule: str = ""


class AuditQuery(Storable):
    """`table` as the entries name it; `cause` is one action's id; `before` continues a page, after the `skip` rows of exactly
    that time that were listed already (one edit of many rows gives them all the same time)."""

    table: str = ""
    actor: str = ""
    cause: str = ""
    request_id: str = ""
    text: str = ""
    since: AwareDatetime | None = None
    before: AwareDatetime | None = None
    skip: int = Field(0, ge=0, le=1_000_000)
    limit: int = Field(50, ge=1, le=500)


class AuditChangeOut(Schema):
    field: str
    before: Any = None
    after: Any = None


class AuditOut(Schema):
    """`cause` is shared by everything that one action changed; `person` is whose key acted, empty for nobody's."""

    table: str
    subject: str
    done: str
    at: datetime
    actor: str
    actor_kind: str
    person: str
    reason: str
    request_id: str
    cause: str
    changes: list[AuditChangeOut]


@router.get("/partitions/{partition}/living-requests", response=dict[str, Any])
def list_living_requests(request: HttpRequest, partition: str, query: Query[LivingQuery]) -> Any:
    """Requests that have not ended, longest here first. Tenant users see those of their own tenants, without nodes and
    reasons. 503 when the gateway does not answer."""
    scope = _own_only(request, query.tenant, query.node)
    narrow = query.model_dump(exclude={"limit"})
    found = gateways.living_requests(partition_named(partition), narrow, scope, limit=query.limit)
    if scope is not None:
        found["rows"] = [selectors.own_request(row) for row in found["rows"]]
    return found


@router.post("/partitions/{partition}/living-requests/{request_id}/cancel", response={204: None})
def cancel_request(request: HttpRequest, partition: str, request_id: str, body: ReasonIn) -> Any:
    """Its client gets an error that says so, and its nodes stop."""
    gateways.cancel_request(partition_named(partition), request_id, actor_of(request), body.reason)
    return Status(204, None)


@router.get("/partitions/{partition}/alerts", response=Page[AlertOut])
def list_alerts(request: HttpRequest, partition: str, query: Query[AlertQuery]) -> Any:
    """Newest first; `state` is pending, firing or resolved."""
    require(request, "viewer")
    rows = Alert.objects.filter(partition=partition_named(partition))
    wanted = {"state": query.state, "rule": query.rule}
    return page(rows.filter(**{name: value for name, value in wanted.items() if value}), query, "-since", "-id")


@router.post("/partitions/{partition}/alerts/{number}/acknowledge", response=AlertOut)
def acknowledge_alert(request: HttpRequest, partition: str, number: int, body: ReasonIn) -> Any:
    """Says that someone looks after it; the reason is the note that others see."""
    actor = require(request, "operator")
    return alerting.acknowledge(alerting.alert_numbered(partition_named(partition), number), actor, body.reason)


@router.get("/partitions/{partition}/audit", response=list[AuditOut])
def list_changes(request: HttpRequest, partition: str, query: Query[AuditQuery]) -> Any:
    """Who changed what of this partition, and of what belongs to none; newest first."""
    require(request, "viewer")
    narrow = Narrow(**query.model_dump(exclude={"limit"}))
    return trail(partition_named(partition), narrow, query.limit)[0]
