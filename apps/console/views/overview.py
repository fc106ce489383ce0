"""The first page: is it fine, and if not, where."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse

from apps.console.access import partition_view
from apps.console.views.shell import page
from apps.topology.models import Partition


@partition_view("viewer")
def overview(request: HttpRequest, partition: Partition) -> HttpResponse:
    return page(request, partition, "overview")
