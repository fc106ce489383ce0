"""Reads of tenancy, and its sections of the configuration document."""

from __future__ import annotations

import hashlib
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone

from apps.tenancy.models import ApiKey, Tenant
from apps.topology.models import Partition
from controlplane.actors import Actor
from controlplane.errors import NotFound
from controlplane.permissions import has_role


def digest(plain_text: str) -> str:
    """What is stored of a key: the hexadecimal SHA-256 of its text."""
    return hashlib.sha256(plain_text.encode()).hexdigest()


def tenant_named(name: str) -> Tenant:
    """Raises NotFound."""
    tenant = Tenant.objects.filter(name=name).first()
    if tenant is None:
        raise NotFound("tenant", name)
    return tenant


def tenants_visible_to(actor: Actor) -> QuerySet[Tenant]:
    tenants = Tenant.objects.all()
    return tenants if has_role(actor, "viewer") else tenants.filter(name__in=actor.tenants)


def key_numbered(key_id: int) -> ApiKey:
    """Raises NotFound."""
    key = ApiKey.objects.select_related("tenant").filter(pk=key_id).first()
    if key is None:
        raise NotFound("API key", key_id)
    return key


def _live() -> Q:
    return Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=timezone.now()))


def _of_who_may_act() -> Q:
    return Q(owner=None) | Q(owner__is_active=True)


def live_key(plain_text: str) -> ApiKey | None:
    """The key with this text; None when there is none, it is revoked or expired, or its owner may not log in any more."""
    keys = ApiKey.objects.select_related("tenant", "owner").filter(
        _live(), _of_who_may_act(), sha256=digest(plain_text)
    )
    return keys.first()


def key_actor(key: ApiKey) -> Actor:
    """Who acts through a key: with the key's role, but with no more than its owner has by now."""
    roles = frozenset({key.role})
    if key.owner is not None:
        owner = Actor.person(key.owner)
        roles = roles if has_role(owner, key.role) else owner.roles - {"tenant"}
    return Actor("key", str(key), key.owner, roles, frozenset({key.tenant.name}), known_to=frozenset(key.known_to))


def tenants_section(partition: Partition) -> list[dict[str, Any]]:
    fields = ("name", "sharing_domain", "weight", "paused", "default_objective")
    return list(Tenant.objects.order_by("name").values(*fields))


def keys_section(partition: Partition) -> list[dict[str, Any]]:
    """Keys that are not revoked, nor of somebody who may not log in any more.

    Expired ones stay in: the gateway checks `expires_at` itself, at its own time.
    """
    keys = ApiKey.objects.select_related("tenant").filter(_of_who_may_act(), revoked_at=None)
    return [
        {
            "id": str(key.pk),
            "sha256": key.sha256,
            "tenant": key.tenant.name,
            "trusted": key.trusted,
            "objectives": key.objectives,
            "expires_at": key.expires_at.timestamp() if key.expires_at else None,
        }
        for key in keys.order_by("pk")
    ]
