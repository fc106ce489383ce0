from typing import Any

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import User
from django.http import HttpRequest

from apps.tenancy.models import ApiKey, Membership, Tenant
from controlplane.admin import ReadOnlyAdmin

admin.site.unregister(User)


@admin.register(User)
class PeopleAdmin(UserAdmin):
    """People keep their names: votes, keys and the audit trail go by them."""

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return (*super().get_readonly_fields(request, obj), *(("username",) if obj is not None else ()))


@admin.register(Tenant)
class TenantAdmin(ReadOnlyAdmin):
    list_display = ("name", "title", "sharing_domain", "weight", "paused", "default_objective")
    search_fields = ("name", "title")


@admin.register(ApiKey)
class ApiKeyAdmin(ReadOnlyAdmin):
    list_display = ("name", "tenant", "prefix", "role", "trusted", "expires_at", "revoked_at", "last_used_at")
    exclude = ("sha256",)


@admin.register(Membership)
class MembershipAdmin(admin.ModelAdmin):
    list_display = ("user", "tenant")
