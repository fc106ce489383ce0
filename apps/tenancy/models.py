"""Tables of tenancy: tenants, their API keys, their members."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone

from apps.tenancy.choices import KeyRole
from controlplane.audit import audited
from controlplane.validators import Between


@audited()
class Tenant(models.Model):
    """Whose requests these are. KV is shared within a sharing domain only."""

    name = models.SlugField(max_length=63, unique=True)
    title = models.CharField(max_length=120, blank=True)
    sharing_domain = models.SlugField(max_length=63)
    weight = models.FloatField(default=1.0, validators=[Between(0.001, 1000)])
    paused = models.BooleanField(default=False)
    default_objective = models.CharField(max_length=63, default="standard")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name"]
        constraints = [models.CheckConstraint(condition=models.Q(weight__gt=0), name="tenant_weight_is_positive")]

    def __str__(self) -> str:
        return self.name


@audited("sha256", "last_used_at")
class ApiKey(models.Model):
    """A bearer key. Only its SHA-256 is kept; `prefix` is the part shown in lists.

    `owner` is the person whose key it is (null: a service's); `known_to` names the people who issued it, and so know it.
    """

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="keys")
    name = models.CharField(max_length=63)
    prefix = models.CharField(max_length=16)
    sha256 = models.CharField(max_length=64, unique=True)
    role = models.CharField(max_length=16, choices=KeyRole.choices, blank=True, default=KeyRole.INFERENCE)
    trusted = models.BooleanField(default=False)
    objectives = models.JSONField(default=list)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.PROTECT, related_name="api_keys"
    )
    known_to = models.JSONField(default=list, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["tenant__name", "name", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "name"], condition=models.Q(revoked_at=None), name="one_live_key_per_name"
            )
        ]

    def __str__(self) -> str:
        return f"{self.tenant}/{self.name}"

    def is_live(self) -> bool:
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > timezone.now())


@audited()
class Membership(models.Model):
    """A tenant user's tenant."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["tenant", "user"], name="one_membership_per_tenant")]

    def __str__(self) -> str:
        return f"{self.user} of {self.tenant}"


class IdempotentCall(models.Model):
    """A POST that carried an `Idempotency-Key`, and its answer, so that a repeat is answered and not done again."""

    actor = models.CharField(max_length=200)
    key = models.CharField(max_length=200)
    request_sha256 = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(default=0)
    body = models.TextField(blank=True)
    created_at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["actor", "key"], name="one_call_per_idempotency_key")]

    def __str__(self) -> str:
        return f"{self.actor}: {self.key}"
