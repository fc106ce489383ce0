"""Roles, and the one question REST and console both ask: may this actor do that?

viewer reads; operator edits queues, approves and drains; administrator also manages tenants, keys and settings, forces and
freezes; a tenant user sees the own tenant only. Each of the first three includes the ones before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.exceptions import PermissionDenied
from django.db.models import TextChoices

from controlplane.actors import Actor

if TYPE_CHECKING:
    from django.http import HttpRequest


class Role(TextChoices):
    VIEWER = "viewer", "Viewer"
    OPERATOR = "operator", "Operator"
    ADMINISTRATOR = "administrator", "Administrator"
    TENANT = "tenant", "Tenant user"


_INCLUDES: dict[str, frozenset[str]] = {
    "viewer": frozenset({"viewer"}),
    "operator": frozenset({"viewer", "operator"}),
    "administrator": frozenset({"viewer", "operator", "administrator"}),
    "tenant": frozenset({"tenant"}),
}


class Forbidden(PermissionDenied):
    """The actor lacks a role; the message says which."""

    def __init__(self, actor: Actor, role: str) -> None:
        super().__init__(f"{actor.name} needs the role {role} for this")
        self.role = role


class NotAuthenticated(PermissionDenied):
    """Nobody is logged in and no valid API key was given."""


def has_role(actor: Actor, role: str) -> bool:
    return any(role in _INCLUDES.get(held, ()) for held in actor.roles)


def actor_of(request: HttpRequest) -> Actor:
    """The actor behind a request: the API key REST has accepted, else the logged-in user. Raises NotAuthenticated."""
    known: Actor | None = getattr(request, "actor", None)
    if known is None:
        if not request.user.is_authenticated:
            raise NotAuthenticated("log in first")
        known = Actor.person(request.user).during(getattr(request, "request_id", ""))
        request.actor = known  # type: ignore[attr-defined]
    return known


def require(subject: Actor | HttpRequest, role: str) -> Actor:
    """Returns the actor when it holds `role` (or one that includes it); raises Forbidden or NotAuthenticated otherwise."""
    if role not in _INCLUDES:
        raise ValueError(f"unknown role {role!r}; expected one of {', '.join(_INCLUDES)}")
    actor = subject if isinstance(subject, Actor) else actor_of(subject)
    if not has_role(actor, role):
        raise Forbidden(actor, role)
    return actor


def require_tenant_view(subject: Actor | HttpRequest, tenant_name: str) -> Actor:
    """Viewers see every tenant; a tenant user sees the own ones."""
    actor = subject if isinstance(subject, Actor) else actor_of(subject)
    if has_role(actor, "viewer") or (has_role(actor, "tenant") and tenant_name in actor.tenants):
        return actor
    raise Forbidden(actor, "viewer")
