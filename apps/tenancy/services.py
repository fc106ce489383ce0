"""Writes of tenancy. Each takes an actor and a reason, checks the actor's role, is audited, and reaches the gateways."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import Group, User
from django.db.models import Q
from django.utils import timezone

from apps.flowcontrol.selectors import objective_names, partitions_without_objective
from apps.tenancy.choices import KeyRole
from apps.tenancy.models import ApiKey, Membership, Tenant
from apps.tenancy.selectors import digest
from apps.topology.configuration import one_version, publish_all
from controlplane import records
from controlplane.actors import SYSTEM, Actor
from controlplane.audit import change
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Role, has_role
from controlplane.validators import check_future

KEY_PREFIX = "sy_"
SHOWN_PREFIX_CHARS = 10
_TOUCH_EVERY = timedelta(minutes=1)
_OPERATOR_FIELDS = frozenset({"weight", "paused"})
_ADMINISTRATOR_FIELDS = frozenset({"title", "sharing_domain", "default_objective"})


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key with its text, which is nowhere else and cannot be shown again."""

    key: ApiKey
    plain_text: str

    def __repr__(self) -> str:
        return f"IssuedKey({self.key})"


def create_tenant(
    name: str,
    actor: Actor,
    reason: str = "",
    *,
    title: str = "",
    sharing_domain: str = "",
    weight: float = 1.0,
    default_objective: str = "standard",
) -> Tenant:
    """A tenant with a sharing domain of its own unless another is named. Raises InvalidField or Conflict."""
    with change(actor, reason, role="administrator"):
        tenant = Tenant(
            name=name,
            title=title,
            sharing_domain=sharing_domain or name,
            weight=weight,
            default_objective=default_objective,
        )
        records.validate(tenant)
        _check_objective(default_objective)
        tenant.save()
        publish_all(actor, reason or f"tenant {name} created")
    return tenant


def update_tenant(tenant: Tenant, actor: Actor, reason: str = "", **changes: Any) -> Tenant:
    """Operators edit weight and pause; administrators everything but the name. Raises InvalidField."""
    role = "operator" if changes.keys() <= _OPERATOR_FIELDS else "administrator"
    with change(actor, reason, role=role):
        row = records.locked(tenant)
        if records.apply(row, changes, _OPERATOR_FIELDS | _ADMINISTRATOR_FIELDS):
            if "default_objective" in changes:
                _check_objective(row.default_objective)
            row.save()
            publish_all(actor, reason or f"tenant {row.name} edited")
    return row


def pause_tenant(tenant: Tenant, actor: Actor, reason: str = "") -> Tenant:
    """The gateways refuse new requests of a paused tenant; running ones finish."""
    return update_tenant(tenant, actor, reason or f"tenant {tenant.name} paused", paused=True)


def resume_tenant(tenant: Tenant, actor: Actor, reason: str = "") -> Tenant:
    return update_tenant(tenant, actor, reason or f"tenant {tenant.name} resumed", paused=False)


def issue_key(
    tenant: Tenant,
    name: str,
    actor: Actor,
    reason: str = "",
    *,
    role: str = KeyRole.INFERENCE,
    trusted: bool = False,
    objectives: Sequence[str] = ("*",),
    expires_at: datetime | None = None,
    owner: str | None = None,
) -> IssuedKey:
    """A new key. `trusted` keys may set fairness id and objective headers; `role` opens the control plane to it.

    `owner` is the name of the person who acts through it, and must hold the role; without one it is a service's.
    """
    with change(actor, reason, role="administrator"):
        _check_key_objectives(objectives)
        check_future("expires_at", expires_at)
        key = ApiKey(
            tenant=tenant,
            name=name,
            role=role,
            trusted=trusted,
            objectives=list(objectives),
            expires_at=expires_at,
            owner=_owner_named(owner, role) if owner else None,
        )
        return _issue(key, actor, reason)


def _issue(key: ApiKey, actor: Actor, reason: str) -> IssuedKey:
    """Give a new key its text, which whoever acts comes to know."""
    plain_text = KEY_PREFIX + secrets.token_urlsafe(32)
    key.prefix, key.sha256 = plain_text[:SHOWN_PREFIX_CHARS], digest(plain_text)
    key.known_to = sorted(actor.people)
    _save_new_key(key)
    publish_all(actor, reason or f"key {key} issued")
    return IssuedKey(key, plain_text)


def _owner_named(name: str, role: str) -> User:
    """Raises InvalidField for somebody who does not exist, may not log in, or has less than the key's role."""
    user = User.objects.filter(username=name, is_active=True).first()
    if user is None:
        raise InvalidField("owner", f"{name[:80]!r} is not a user who may log in; leave it out for a service's key")
    if role and not has_role(Actor.person(user), role):
        raise InvalidField("owner", f"expected somebody with the role {role}, which {name} does not have")
    return user


def _role_to_end(key: ApiKey, actor: Actor) -> str | None:
    """Administrators end keys; a person, logged in, also the own ones."""
    own = actor.kind == "person" and actor.user is not None and key.owner_id == actor.user.pk
    return None if own else "administrator"


def revoke_key(key: ApiKey, actor: Actor, reason: str = "") -> ApiKey:
    """Refused everywhere as soon as the gateways have the new configuration. Revoking twice changes nothing.

    Administrator, or the key's owner.
    """
    with change(actor, reason, role=_role_to_end(key, actor)):
        row = records.locked(key)
        if row.revoked_at is None:
            row.revoked_at = timezone.now()
            row.save(update_fields=["revoked_at"])
            publish_all(actor, reason or f"key {row} revoked")
    return row


def rotate_key(key: ApiKey, actor: Actor, reason: str = "") -> IssuedKey:
    """A new key with the rights of `key`, which is revoked in the same transaction. Raises Conflict for a revoked one.

    Administrator, or the key's owner: one that its owner rotates is known to nobody else.
    """
    with change(actor, reason, role=_role_to_end(key, actor)), one_version():
        old = records.locked(key)
        if not old.is_live():
            raise Conflict(f"key {old} is revoked or expired; issue a new one", "key-not-live")
        reason = reason or f"key {old} rotated"
        revoke_key(old, actor, reason)
        kept = ("tenant", "name", "role", "trusted", "objectives", "expires_at", "owner")
        return _issue(ApiKey(**{name: getattr(old, name) for name in kept}), actor, reason)


def owner_saved(instance: User, created: bool, update_fields: frozenset[str] | None = None, **_: Any) -> None:
    """Somebody who may not log in any more has keys that no gateway takes: they learn it with the next version."""
    concerns = not created and (update_fields is None or "is_active" in update_fields)
    if concerns and ApiKey.objects.filter(owner=instance, revoked_at=None).exists():
        publish_all(SYSTEM, f"keys of {instance.get_username()}")


def touch_key(key: ApiKey) -> None:
    """Notes that a key was used, at most once a minute; not audited."""
    now = timezone.now()
    stale = Q(last_used_at=None) | Q(last_used_at__lt=now - _TOUCH_EVERY)
    ApiKey.objects.filter(stale, pk=key.pk).update(last_used_at=now)


def add_member(tenant: Tenant, user: User, actor: Actor, reason: str = "") -> Membership:
    """Makes `user` a tenant user of `tenant`."""
    with change(actor, reason, role="administrator"):
        membership, _ = Membership.objects.get_or_create(tenant=tenant, user=user)
        user.groups.add(Group.objects.get_or_create(name=Role.TENANT)[0])
    return membership


def remove_member(tenant: Tenant, user: User, actor: Actor, reason: str = "") -> None:
    with change(actor, reason, role="administrator"):
        Membership.objects.filter(tenant=tenant, user=user).delete()


def _save_new_key(key: ApiKey) -> None:
    if ApiKey.objects.filter(tenant=key.tenant, name=key.name, revoked_at=None).exists():
        raise Conflict(
            f"tenant {key.tenant} already has a key called {key.name!r}; rotate or revoke it", "already-exists"
        )
    records.validate(key)
    key.save()


def _check_key_objectives(objectives: Sequence[str]) -> None:
    if not objectives:
        raise InvalidField("objectives", 'expected at least one name, or ["*"] for all')
    known = objective_names()
    for name in objectives:
        if name != "*" and name not in known:
            raise InvalidField("objectives", f"{name!r} is not an objective; expected {_among(known)}")


def _check_objective(name: str) -> None:
    """A tenant's default must exist in every partition: a gateway refuses a configuration in which it does not."""
    missing = partitions_without_objective(name)
    if missing:
        raise InvalidField(
            "default_objective",
            f"{name!r} is not an objective of {', '.join(missing)}; expected {_among(objective_names())}",
        )


def _among(names: set[str]) -> str:
    return f"one of {', '.join(sorted(names))}" if names else "an objective, and there is none yet"
