from django.contrib import admin

from apps.telemetry.models import RequestRecord
from controlplane.admin import ReadOnlyAdmin


@admin.register(RequestRecord)
class RequestRecordAdmin(ReadOnlyAdmin):
    list_display = ("request_id", "partition", "at", "tenant", "band", "outcome", "ttft_s", "e2e_s")
    list_filter = ("partition", "outcome")
    show_full_result_count = False
