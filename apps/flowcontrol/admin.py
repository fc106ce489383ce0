from django.contrib import admin

from apps.flowcontrol.models import Band, FlowSettings, Objective
from controlplane.admin import ReadOnlyAdmin


@admin.register(Band)
class BandAdmin(ReadOnlyAdmin):
    list_display = ("name", "partition", "priority", "fairness", "ordering", "max_requests", "max_bytes", "ttl_s")
    list_filter = ("partition",)


@admin.register(Objective)
class ObjectiveAdmin(ReadOnlyAdmin):
    list_display = ("name", "partition", "band", "slo_ttft_s", "ttl_s")


@admin.register(FlowSettings)
class FlowSettingsAdmin(ReadOnlyAdmin):
    list_display = ("partition", "max_requests", "max_bytes", "default_ttl_s", "displacement")
