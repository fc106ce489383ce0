"""REST of tenancy: tenants and API keys."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Field, Query, Router, Schema, Status
from pydantic import AwareDatetime

from apps.tenancy import selectors, services
from apps.tenancy.choices import KeyRole
from apps.tenancy.models import ApiKey, Tenant
from controlplane import records
from controlplane.permissions import actor_of, require, require_tenant_view
from controlplane.rest.etags import check_if_match, tagged
from controlplane.rest.paging import Page, PageQuery, page
from controlplane.rest.schemas import Edit, Finite, Reason

router = Router(tags=["tenancy"])


class WhoOut(Schema):
    """`person` is whose vote a vote of this caller is; null: nobody's."""

    kind: str
    name: str
    person: str | None
    roles: list[str]
    tenants: list[str]


class TenantOut(Schema):
    name: str
    title: str
    sharing_domain: str
    weight: float
    paused: bool
    default_objective: str
    created_at: datetime


class TenantIn(Reason):
    name: str
    title: str = ""
    sharing_domain: str = Field("", description="tenants of one domain share KV; blank gives a domain of its own")
    weight: Finite = 1.0
    default_objective: str = "standard"


class TenantEdit(Edit):
    title: str | None = None
    sharing_domain: str | None = None
    weight: Finite | None = None
    paused: bool | None = None
    default_objective: str | None = None


class KeyOut(Schema):
    id: int
    tenant: str
    name: str
    prefix: str
    role: KeyRole
    trusted: bool
    objectives: list[str]
    owner: str | None = Field(description="the person who acts through it; null: a service")
    known_to: list[str] = Field(description="people who issued it, and so know its text")
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    created_at: datetime

    @staticmethod
    def resolve_tenant(key: Any) -> str:
        return str(key.tenant)

    @staticmethod
    def resolve_owner(key: Any) -> str | None:
        return key.owner.get_username() if key.owner is not None else None


class IssuedKeyOut(Schema):
    """`secret` is the key's text, shown this once; null when the answer repeats an earlier call."""

    key: KeyOut
    secret: str | None


class KeyIn(Reason):
    name: str
    role: KeyRole = KeyRole.INFERENCE
    trusted: bool = False
    objectives: list[str] = ["*"]
    expires_at: AwareDatetime | None = None
    owner: str | None = Field(
        None, description="name of the person who acts through it; none: a service, without a vote"
    )


@router.get("/me", response=WhoOut)
def who_am_i(request: HttpRequest) -> Any:
    """Who this call is made as, and what that may do."""
    actor = actor_of(request)
    return {
        "kind": actor.kind,
        "name": actor.name,
        "person": actor.voice or None,
        "roles": sorted(actor.roles),
        "tenants": sorted(actor.tenants),
    }


@router.get("/tenants", response=Page[TenantOut])
def list_tenants(request: HttpRequest, query: Query[PageQuery]) -> Any:
    actor = actor_of(request)
    if not actor.tenants:
        require(actor, "viewer")
    return page(selectors.tenants_visible_to(actor), query, "name")


@router.post("/tenants", response={201: TenantOut})
def create_tenant(request: HttpRequest, payload: TenantIn) -> Any:
    actor = require(request, "administrator")
    return Status(201, services.create_tenant(actor=actor, **payload.model_dump()))


@router.get("/tenants/{name}", response=TenantOut)
def get_tenant(request: HttpRequest, response: HttpResponse, name: str) -> Any:
    require_tenant_view(request, name)
    return tagged(response, TenantOut.from_orm(selectors.tenant_named(name)))


@router.patch("/tenants/{name}", response=TenantOut)
def edit_tenant(request: HttpRequest, response: HttpResponse, name: str, payload: TenantEdit) -> Any:
    """Weight and pause need the role operator, everything else administrator."""
    actor = require(request, "operator")
    with transaction.atomic():
        tenant = records.locked(selectors.tenant_named(name))
        check_if_match(request, TenantOut.from_orm(tenant))
        tenant = services.update_tenant(tenant, actor, payload.reason, **payload.changes())
    return tagged(response, TenantOut.from_orm(tenant))


def _tenant(request: HttpRequest, name: str, role: str) -> Tenant:
    require(request, role)
    return selectors.tenant_named(name)


@router.post("/tenants/{name}/pause", response=TenantOut)
def pause_tenant(request: HttpRequest, name: str, payload: Reason) -> Any:
    return services.pause_tenant(_tenant(request, name, "operator"), actor_of(request), payload.reason)


@router.post("/tenants/{name}/resume", response=TenantOut)
def resume_tenant(request: HttpRequest, name: str, payload: Reason) -> Any:
    return services.resume_tenant(_tenant(request, name, "operator"), actor_of(request), payload.reason)


@router.get("/tenants/{name}/keys", response=Page[KeyOut])
def list_keys(request: HttpRequest, name: str, query: Query[PageQuery]) -> Any:
    """Revoked keys included; newest first."""
    require_tenant_view(request, name)
    keys = ApiKey.objects.select_related("tenant", "owner").filter(tenant=selectors.tenant_named(name))
    return page(keys, query, "-id")


@router.post("/tenants/{name}/keys", response={201: IssuedKeyOut})
def issue_key(request: HttpRequest, name: str, payload: KeyIn) -> Any:
    tenant = _tenant(request, name, "administrator")
    issued = services.issue_key(tenant, actor=actor_of(request), **payload.model_dump())
    return Status(201, {"key": issued.key, "secret": issued.plain_text})


@router.post("/keys/{key_id}/rotate", response={201: IssuedKeyOut})
def rotate_key(request: HttpRequest, key_id: int, payload: Reason) -> Any:
    """An administrator's, or, logged in, the key's owner's."""
    issued = services.rotate_key(_ending(request, key_id), actor_of(request), payload.reason)
    return Status(201, {"key": issued.key, "secret": issued.plain_text})


@router.post("/keys/{key_id}/revoke", response=KeyOut)
def revoke_key(request: HttpRequest, key_id: int, payload: Reason) -> Any:
    """An administrator's, or, logged in, the key's owner's."""
    return services.revoke_key(_ending(request, key_id), actor_of(request), payload.reason)


def _ending(request: HttpRequest, key_id: int) -> ApiKey:
    """The key to end, for who may. Raises NotFound, to who may not know of it Forbidden."""
    actor = actor_of(request)
    own = ApiKey.objects.filter(pk=key_id, owner=actor.user).first() if actor.user is not None else None
    if own is None:
        require(actor, "administrator")
    return own or selectors.key_numbered(key_id)
