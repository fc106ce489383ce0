from django.contrib import admin

from apps.tenancy.models import ApiKey, Membership, Tenant
from controlplane.admin import ReadOnlyAdmin


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
