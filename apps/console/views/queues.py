"""Who waits, in which band, of which tenant; and the edits that change it at once."""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_http_methods, require_POST

from apps.console.access import partition_view
from apps.console.forms import BandForm
from apps.console.present import present_flows
from apps.console.views.actions import stale
from apps.console.views.requests import waiting_context
from apps.console.views.shell import abilities, last_snapshot, live_view, page
from apps.flowcontrol.models import Band
from apps.flowcontrol.selectors import bands_of
from apps.flowcontrol.services import update_band
from apps.tenancy.models import Tenant
from apps.tenancy.services import pause_tenant, resume_tenant
from apps.topology import configuration
from apps.topology.models import Partition
from controlplane.errors import SwitchyardError

FLOWS_FOUND = 40


@partition_view("viewer")
def queues(request: HttpRequest, partition: Partition) -> HttpResponse:
    bands = {band.name: band for band in bands_of(partition)}
    seen = live_view(request, partition)
    context = waiting_context(request, partition) | _flows(request, seen.snapshot)
    tenants = list(Tenant.objects.order_by("name"))
    return page(request, partition, "queues", seen, bands=bands, tenants=tenants, **context)


@partition_view("viewer")
def flows(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The part of the Queues page that finds flows by id, where the live list shows only the longest."""
    context = {"partition": partition} | _flows(request, last_snapshot(partition))
    return render(request, "console/_flows.html", context)


def _flows(request: HttpRequest, snapshot: dict[str, Any]) -> dict[str, Any]:
    wanted = request.GET.get("find", "")[:200]
    found, total = present_flows(snapshot.get("bands") or [], wanted.lower(), "", FLOWS_FOUND)
    return {"find": wanted, "found_flows": found, "flows_total": total, "flows_shown": len(found)}


@partition_view("operator")
@require_http_methods(["GET", "POST"])
def band(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    """The form that edits a band in place: 422 with the error at its field, or what was saved and as which version."""
    row = get_object_or_404(Band.objects.select_related("partition"), partition=partition, name=name)
    form = BandForm(row, request.POST if request.method == "POST" else None)
    context = {"partition": partition, "band": row, "form": form}
    if request.method == "GET":
        return render(request, "console/_band_form.html", context)
    if form.is_valid():
        if stale(form):
            return render(request, "console/_band_form.html", context, status=409)
        try:
            saved = update_band(row, request.actor, form.reason_given, **form.changes())  # type: ignore[attr-defined]
        except SwitchyardError as error:
            form.refuse(error)
        else:
            return render(
                request,
                "console/_band_saved.html",
                context | {"band": saved, "changed": form.changes()} | _saved(partition),
            )
    return render(request, "console/_band_form.html", context, status=422)


@partition_view("operator")
@require_POST
def tenant(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    """Pauses a tenant, or resumes it: `paused` is `true` or `false`."""
    row = get_object_or_404(Tenant, name=name)
    write = pause_tenant if request.POST.get("paused") == "true" else resume_tenant
    row = write(row, request.actor)  # type: ignore[attr-defined]
    context = {"partition": partition, "tenant": row, "just_saved": True} | _saved(partition) | abilities(request)
    return render(request, "console/_tenant_state.html", context)


def _saved(partition: Partition) -> dict[str, Any]:
    """Which version of the configuration holds the edit, and when it was saved (unix seconds)."""
    version = configuration.latest(partition)
    return {"version": version.version if version else None, "saved_at": time.time()}
