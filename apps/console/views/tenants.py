"""Tenants and their keys: who may ask for what, up to which limit, and where that limit comes from."""

from __future__ import annotations

import time
from typing import Any

from django.contrib.auth.models import User
from django.db.models import Count
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from apps.console.access import partition_view
from apps.console.exports import exported
from apps.console.forms import KeyForm, MemberForm, NewTenantForm, ReasonForm, TenantForm, WhyForm
from apps.console.views.actions import CHANGED, answer, posted
from apps.console.views.shell import page
from apps.flowcontrol.models import Objective
from apps.flowcontrol.selectors import flow_settings_of, objective_names
from apps.telemetry.periods import TenantSums, tenants_between
from apps.tenancy import services
from apps.tenancy.models import ApiKey, Tenant
from apps.tenancy.selectors import tenants_visible_to
from apps.topology.models import Partition
from controlplane.errors import SwitchyardError

form_view = require_http_methods(["GET", "POST"])
USAGE_S = 3600


def _tenant(request: HttpRequest, name: str) -> Tenant:
    found = tenants_visible_to(request.actor).filter(name=name).first()  # type: ignore[attr-defined]
    if found is None:
        raise Http404("There is no tenant of this name.")
    return found


def _key(tenant: Tenant, number: int) -> ApiKey:
    found = ApiKey.objects.select_related("tenant").filter(tenant=tenant, pk=number).first()
    if found is None:
        raise Http404("There is no such key.")
    return found


@partition_view("viewer", tenants=True)
def tenants(request: HttpRequest, partition: Partition) -> HttpResponse:
    rows = tenants_visible_to(request.actor).annotate(live_keys=Count("keys"))  # type: ignore[attr-defined]
    used = _usage(partition)
    objectives = {o.name: o for o in Objective.objects.filter(partition=partition).select_related("band")}
    table = [_row(tenant, used.get(tenant.name, TenantSums()), objectives) for tenant in rows]
    file = exported(
        request.GET.get("format"), "tenants", [{k: v for k, v in row.items() if k != "tenant"} for row in table]
    )
    return file or page(request, partition, "tenants", rows=table)


def _row(tenant: Tenant, used: TenantSums, objectives: dict[str, Objective]) -> dict[str, Any]:
    objective = objectives.get(tenant.default_objective)
    return {
        "tenant": tenant,
        "name": tenant.name,
        "title": tenant.title,
        "weight": tenant.weight,
        "paused": tenant.paused,
        "sharing_domain": tenant.sharing_domain,
        "keys": tenant.live_keys,  # type: ignore[attr-defined]
        "objective": tenant.default_objective,
        "band": objective.band.name if objective else "",
        "requests": used.requests,
        "prompt_tokens": used.prompt_tokens,
        "output_tokens": used.output_tokens,
        "cached_ratio": used.cached_tokens / used.prompt_tokens if used.prompt_tokens else None,
        "ttft_s": used.ttft_s,
    }


def _usage(partition: Partition) -> dict[str, TenantSums]:
    """What each tenant used in the last hour."""
    now = time.time()
    return tenants_between(partition, now - USAGE_S, now, now)


@partition_view("viewer", tenants=True)
def tenant(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    found = _tenant(request, name)
    now = timezone.now()
    keys = [{"key": key, "state": _key_state(key, now)} for key in found.keys.order_by("-revoked_at", "name")]
    keys.sort(key=lambda row: row["state"] != "live")
    context: dict[str, Any] = {
        "tenant": found,
        "keys": keys,
        "members": list(found.memberships.select_related("user").order_by("user__username")),
        "limits": effective_limits(partition, found),
        "used": _usage(partition).get(name, TenantSums()),
        "template": "console/tenant.html",
        "title": f"Tenant {name}",
    }
    return page(request, partition, "tenants", **context)


def _key_state(key: ApiKey, now: Any) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "live"


def effective_limits(partition: Partition, tenant: Tenant) -> list[dict[str, Any]]:
    """What holds for this tenant's requests in a partition, and which setting says so."""
    objective = Objective.objects.select_related("band").filter(
        partition=partition, name=tenant.default_objective
    ).first()  # fmt: skip
    flow = flow_settings_of(partition)
    rows = [
        {"what": "Weight among tenants", "value": f"{tenant.weight:g}", "origin": "this tenant"},
        {"what": "Sharing domain", "value": tenant.sharing_domain, "origin": "this tenant"},
        {"what": "Objective", "value": tenant.default_objective, "origin": "this tenant’s default"},
    ]
    if objective is None:
        return [*rows, {"what": "Band", "value": "none", "origin": f"{partition.name} has no such objective"}]
    band = objective.band
    ttl, origin = _first((objective.ttl_s, f"objective {objective.name}"), (band.ttl_s, f"band {band.name}"),
                         (flow.default_ttl_s, "flow settings"))  # fmt: skip
    most, most_origin = _first(
        (band.max_requests, f"band {band.name}, all tenants together"), (flow.max_requests, "flow settings")
    )
    return [
        *rows,
        {"what": "Band", "value": f"{band.name} (priority {band.priority})", "origin": f"objective {objective.name}"},
        {"what": "Longest wait", "value": f"{ttl:g} s" if ttl else "no limit", "origin": origin},
        {"what": "Waiting at most", "value": f"{most} requests" if most else "no limit", "origin": most_origin},
        {"what": "Turn", "value": band.get_fairness_display().lower(), "origin": f"band {band.name}"},
        {
            "what": "TTFT target",
            "value": f"{objective.slo_ttft_s:g} s" if objective.slo_ttft_s else "none",
            "origin": f"objective {objective.name}",
        },
    ]


def _first(*pairs: tuple[Any, str]) -> tuple[Any, str]:
    return next(((value, origin) for value, origin in pairs if value is not None), (None, "nothing limits it"))


@partition_view("administrator")
@form_view
def create(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = NewTenantForm(sorted(objective_names()), posted(request), prefix="new-tenant")

    def write() -> str:
        fields = {k: v for k, v in form.cleaned_data.items() if k not in ("name", "reason")}
        made = services.create_tenant(form.cleaned_data["name"], request.actor, form.reason_given, **fields)  # type: ignore[attr-defined]
        return f"Tenant {made.name} exists; give it a key next."

    return answer(
        request, form, write, slot="tenant-slot", title="New tenant", submit="Create the tenant",
        about="KV is shared only within a sharing domain; leave it empty for one of its own.",
    )  # fmt: skip


@partition_view("administrator")
@form_view
def edit(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    found = _tenant(request, name)
    form = TenantForm(found, sorted(objective_names()), posted(request))

    def write() -> str:
        services.update_tenant(found, request.actor, form.reason_given, **form.changes())  # type: ignore[attr-defined]
        return f"Tenant {name} is saved."

    return answer(request, form, write, slot="tenant-slot", title=f"Edit {name}", submit="Save")


@partition_view("administrator")
@form_view
def issue(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    found = _tenant(request, name)
    form = KeyForm(sorted(objective_names()), posted(request), prefix="key")
    context = {
        "form": form, "slot": "tenant-slot", "title": f"New key of {name}", "submit": "Issue the key",
        "about": "Its text is shown once and stored nowhere: only its hash is.", "action": request.get_full_path(),
    }  # fmt: skip
    if request.method == "POST" and form.is_valid():
        data = form.cleaned_data
        try:
            issued = services.issue_key(
                found, data["name"], request.actor, form.reason_given, role=data["role"],  # type: ignore[attr-defined]
                trusted=data["trusted"], objectives=data["objectives"] or ["*"], expires_at=form.until,
                owner=data["owner"] or None,
            )  # fmt: skip
        except SwitchyardError as error:
            form.refuse(error)
        else:
            return _shown_once(request, issued)
    return render(request, "console/_action_form.html", context, status=422 if request.method == "POST" else 200)


@partition_view("administrator")
@form_view
def rotate(request: HttpRequest, partition: Partition, name: str, number: int) -> HttpResponse:
    key = _key(_tenant(request, name), number)
    form = ReasonForm(posted(request), prefix="rotate")
    if request.method == "POST" and form.is_valid():
        try:
            return _shown_once(request, services.rotate_key(key, request.actor, form.reason_given))  # type: ignore[attr-defined]
        except SwitchyardError as error:
            form.refuse(error)
    context = {
        "form": form, "slot": "tenant-slot", "title": f"Rotate {key.name}", "submit": "Rotate the key",
        "about": "A new key with the same rights; the old one stops working at once.", "action": request.get_full_path(),
    }  # fmt: skip
    return render(request, "console/_action_form.html", context, status=422 if form.errors else 200)


def _shown_once(request: HttpRequest, issued: services.IssuedKey) -> HttpResponse:
    response = render(request, "console/_key_shown.html", {"issued": issued})
    response["Cache-Control"] = "no-store"
    response["HX-Trigger"] = CHANGED
    return response


@partition_view("administrator")
@form_view
def revoke(request: HttpRequest, partition: Partition, name: str, number: int) -> HttpResponse:
    key = _key(_tenant(request, name), number)
    form = WhyForm(posted(request), prefix="revoke")

    def write() -> str:
        services.revoke_key(key, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"Key {key.name} is revoked; gateways refuse it as soon as they have the new configuration."

    return answer(
        request, form, write, slot="tenant-slot", title=f"Revoke {key.name}", submit="Revoke the key",
        about="Cannot be undone. Clients that use it get 401.", danger=True,
    )  # fmt: skip


@partition_view("administrator")
@form_view
def add_member(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    found = _tenant(request, name)
    form = MemberForm(posted(request), prefix="member")

    def write() -> str:
        user = User.objects.get(username=form.cleaned_data["username"])
        services.add_member(found, user, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"{user.username} sees what concerns {name}, and nothing else of other tenants."

    return answer(request, form, write, slot="tenant-slot", title=f"Add a user to {name}", submit="Add the user")


@partition_view("administrator")
@form_view
def remove_member(request: HttpRequest, partition: Partition, name: str, username: str) -> HttpResponse:
    found = _tenant(request, name)
    user = User.objects.filter(username=username, memberships__tenant=found).first()
    if user is None:
        raise Http404("There is no such member.")
    form = ReasonForm(posted(request), prefix="remove-member")

    def write() -> str:
        services.remove_member(found, user, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"{username} is no member of {name} any more."

    return answer(
        request, form, write, slot="tenant-slot", title=f"Remove {username}", submit="Remove the user", danger=True
    )
