"""REST of telemetry: what happened to requests, and what the gateway reports right now."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import HttpRequest
from ninja import Query, Router, Schema
from pydantic import AwareDatetime

from apps.telemetry import selectors
from apps.topology.selectors import partition_named
from controlplane.permissions import actor_of, has_role, require, require_tenant_view
from controlplane.rest.paging import Page, PageQuery, page

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


@router.get("/partitions/{partition}/requests", response=Page[RequestOut])
def list_requests(request: HttpRequest, partition: str, query: Query[RequestQuery]) -> Any:
    """Newest first. Tenant users see the requests of their own tenants."""
    actor = actor_of(request)
    own_only = not has_role(actor, "viewer")
    if own_only and not actor.tenants:
        require(actor, "viewer")
    if own_only and query.tenant:
        require_tenant_view(actor, query.tenant)
    narrow = selectors.RequestFilter(
        **query.model_dump(exclude={"limit", "cursor"}), tenants=actor.tenants if own_only else None
    )
    return page(selectors.requests_of(partition_named(partition), narrow), query, "-at", "-id")


@router.get("/partitions/{partition}/requests/{request_id}", response=RequestDetail)
def get_request(request: HttpRequest, partition: str, request_id: str) -> Any:
    actor = actor_of(request)
    if not has_role(actor, "tenant"):
        require(actor, "viewer")
    record = selectors.request_record(partition_named(partition), request_id)
    require_tenant_view(actor, record.tenant)
    return record
