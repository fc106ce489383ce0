"""REST of tenants' members: the people who see one tenant's requests and branches, and nothing else."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest
from ninja import Query, Router, Schema, Status

from apps.tenancy import selectors, services
from apps.tenancy.models import Membership
from controlplane.audit import MAX_REASON_CHARS
from controlplane.errors import InvalidField, NotFound
from controlplane.permissions import require
from controlplane.rest.paging import Page, PageQuery, page
from controlplane.rest.schemas import Reason

router = Router(tags=["tenancy"])


class MemberOut(Schema):
    username: str

    @staticmethod
    def resolve_username(membership: Any) -> str:
        return str(membership.user.username)


class MemberIn(Reason):
    username: str


@router.get("/tenants/{name}/members", response=Page[MemberOut])
def list_members(request: HttpRequest, name: str, query: Query[PageQuery]) -> Any:
    require(request, "viewer")
    rows = Membership.objects.select_related("user").filter(tenant=selectors.tenant_named(name))
    return page(rows, query, "user__username")


@router.post("/tenants/{name}/members", response={201: MemberOut})
def add_member(request: HttpRequest, name: str, payload: MemberIn) -> Any:
    """A person who has signed in before, or whom an administrator made."""
    actor = require(request, "administrator")
    tenant = selectors.tenant_named(name)
    user = User.objects.filter(username=payload.username).first()
    if user is None:
        raise InvalidField("username", "there is no such person")
    return Status(201, services.add_member(tenant, user, actor, payload.reason))


@router.delete("/tenants/{name}/members/{username}", response={204: None})
def remove_member(
    request: HttpRequest, name: str, username: str, reason: str = Query("", max_length=MAX_REASON_CHARS)
) -> Any:
    actor = require(request, "administrator")
    tenant = selectors.tenant_named(name)
    user = User.objects.filter(username=username, memberships__tenant=tenant).first()
    if user is None:
        raise NotFound("member", username)
    services.remove_member(tenant, user, actor, reason)
    return Status(204, None)
