"""KV reuse: what came from the cache, what could have, why it did not; and the branches that the cache is kept for."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_http_methods

from apps.console import branches as trees
from apps.console.access import partition_view
from apps.console.exports import exported
from apps.console.filters import choice, read, text
from apps.console.forms import WhyForm
from apps.console.present import LOST_CAUSES
from apps.console.views.actions import answer, posted
from apps.console.views.shell import live_view, page, past
from apps.telemetry import gateways
from apps.telemetry.selectors import own_branch
from apps.tenancy.models import Tenant
from apps.topology.models import Partition
from apps.topology.selectors import nodes_of
from controlplane.errors import InvalidField, NotFound, Unavailable

SHOWN = 80


@partition_view("viewer")
def reuse(request: HttpRequest, partition: Partition) -> HttpResponse:
    dimension = request.GET.get("by", "tenant")
    dimension = dimension if dimension in ("tenant", "node", "workload") else "tenant"
    found: dict[str, Any] = {}
    note = ""
    try:
        found = gateways.reuse(partition)
    except (Unavailable, NotFound, InvalidField) as error:
        note = error.message
    table = found.get("by", {}).get(dimension, {})
    kind = request.GET.get("format")
    rows = [
        {"name": name, **{k: v for k, v in row.items() if k != "lost"}, **row["lost"]} for name, row in table.items()
    ]
    file = exported(kind, f"{partition.name}-reuse-by-{dimension}", rows)
    if file is not None:
        return file
    context: dict[str, Any] = {
        "by": dimension,
        "rows": trees.totals(table, LOST_CAUSES),
        "note": note,
    }
    seen = live_view(request, partition)
    return page(request, partition, "reuse", seen, **context, **past(request, partition, seen.slo_ttft_s))


@partition_view("viewer", tenants=True)
def branches(request: HttpRequest, partition: Partition) -> HttpResponse:
    scope = request.scope  # type: ignore[attr-defined]
    tenants = Tenant.objects.order_by("name").values_list("name", flat=True)
    fields = [choice("tenant", "Tenant", [name for name in tenants if scope is None or name in scope])]
    if scope is None:
        fields.append(choice("node", "Home", nodes_of(partition).values_list("name", flat=True)))
    kinds = [("new", "conversation"), ("fork", "fork"), ("subagent", "sub-agent"), ("version", "new version")]
    filters = read(
        request, *fields, choice("kind", "Kind", kinds), text("q", "Branch or program", "part of it")
    )  # fmt: skip
    found: dict[str, Any] = {"rows": [], "closed": [], "live": 0, "total": 0, "block_tokens": 1}
    note = ""
    try:
        found = gateways.branches(partition, filters.values, scope, limit=SHOWN)
    except (Unavailable, NotFound, InvalidField) as error:
        note = error.message
    rows = found["rows"] if scope is None else [own_branch(row) for row in found["rows"]]
    file = exported(request.GET.get("format"), f"{partition.name}-branches", rows)
    if file is not None:
        return file
    context: dict[str, Any] = {
        "filters": filters,
        "note": note,
        "live": found["live"],
        "total": found["total"],
        "rows": trees.tree(rows, found["block_tokens"]),
        "shown": min(SHOWN, found["total"]),
        "closed": [trees.closed(row) for row in found["closed"][:20]],
    }
    return page(request, partition, "branches", **context)


@partition_view("operator")
@require_http_methods(["GET", "POST"])
def end_branch(request: HttpRequest, partition: Partition) -> HttpResponse:
    """`id` in the query string names the branch."""
    branch_id = request.GET.get("id", "")
    if not branch_id or "\x00" in branch_id:
        raise Http404("Which branch?")
    form = WhyForm(posted(request), prefix="end-branch")

    def write() -> str:
        gateways.end_branch(partition, branch_id, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"Branch {branch_id} is ended; its blocks go first when room is needed."

    return answer(
        request, form, write, slot="branch-slot", title=f"End branch {branch_id}", submit="End this branch",
        about="For one whose agent is gone. If it comes back, it starts again under the same id and may have to compute "
        "its context anew.", danger=True,
    )  # fmt: skip
