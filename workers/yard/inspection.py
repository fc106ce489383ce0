"""What an operator may ask about one partition's living requests and branches. Pure reads, on demand, bounded."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from apps.kvcache.domain.events import BranchView, ReuseTotals
from workers.yard.outcomes import terms_document

if TYPE_CHECKING:
    from workers.yard.requests import RequestState
    from workers.yard.yard import Yard


def living_requests(
    now: float, yard: Yard, wanted: dict[str, str], tenants: frozenset[str] | None, limit: int
) -> dict[str, Any]:
    """Requests between arrival and end, longest waiting first: `{"total", "waiting", "rows"}`.

    `wanted` narrows by `tenant`, `band`, `stage`, `flow`, `node` and `q` (part of the id or of the branch's id); `tenants`
    is what the asker may see (None: all).
    """
    found = [s for s in yard.requests.values() if (tenants is None or s.request.tenant in tenants) and _fits(s, wanted)]
    found.sort(key=lambda state: state.arrived_at)
    waiting = sum(state.stage.value == "queued" for state in found)
    rows = [_request(now, yard, state) for state in found[:limit]]
    return {"total": len(found), "waiting": waiting, "rows": rows}


def living_request(now: float, yard: Yard, request_id: str) -> dict[str, Any] | None:
    """One of them with its story and every candidate's terms; None when it has ended or never was."""
    state = yard.requests.get(request_id)
    if state is None:
        return None
    terms = [terms_document(row) for row in state.terms]
    return _request(now, yard, state) | {"story": list(state.story), "router_terms": terms}


def _fits(state: RequestState, wanted: dict[str, str]) -> bool:
    request = state.request
    exact = {"tenant": request.tenant, "band": request.band, "stage": state.stage.value, "flow": request.flow_id}
    if any(wanted.get(name) and wanted[name] != value for name, value in exact.items()):
        return False
    if wanted.get("node") and wanted["node"] not in (state.prefill_node, state.decode_node):
        return False
    text = wanted.get("q", "")
    return not text or text in request.request_id or text in (state.branch_id or "")


def _request(now: float, yard: Yard, state: RequestState) -> dict[str, Any]:
    request = state.request
    return {
        "id": request.request_id,
        "tenant": request.tenant,
        "band": request.band,
        "flow": request.flow_id,
        "objective": request.objective,
        "branch": state.branch_id,
        "branch_kind": state.branch_kind,
        "stage": state.stage.value,
        "arrived_at": state.arrived_at,
        "age_s": max(0.0, now - state.arrived_at),
        "ttl_s": request.ttl_s,
        "prompt_tokens": request.prompt.tokens,
        "uncached_tokens": state.uncached_estimate_tokens,
        "output_tokens": state.sent_tokens,
        "max_tokens": request.output_tokens,
        "prefill_node": state.prefill_node,
        "decode_node": state.decode_node,
        "queue_s": state.queue_s,
        "predicted_ttft_s": state.predicted_ttft_s,
        "waiting_for": state.waiting_for,
        "reason": state.reason,
    }


def branches(
    now: float, yard: Yard, wanted: dict[str, str], tenants: frozenset[str] | None, limit: int
) -> dict[str, Any]:
    """Live branches, the one heard of last first, each with where its blocks are; and those that closed lately.

    A row whose parent is not among the rows brings its parent along, so that the tree has no loose ends.
    """
    every = [v for v in yard.kv.branches() if tenants is None or v.tenant in tenants]
    found = [view for view in every if _branch_fits(view, wanted)]
    by_id = {view.branch_id: view for view in every}
    chosen: dict[str, BranchView] = {}
    for view in found[:limit]:
        line: BranchView | None = view
        while line is not None and line.branch_id not in chosen:
            chosen[line.branch_id] = line
            line = by_id.get(line.parent) if line.parent else None
    closed = [row for row in yard.closed_branches if _may_see_closed(row, tenants)]
    return {
        "live": len(every),
        "total": len(found),
        "block_tokens": yard.config.model.block_tokens,
        "rows": [_branch(now, yard, view) for view in chosen.values()],
        "closed": closed,
    }


def branch(now: float, yard: Yard, branch_id: str) -> dict[str, Any] | None:
    """One live branch; None when it does not live."""
    view = yard.kv.branch(branch_id)
    return None if view is None else _branch(now, yard, view)


def _branch_fits(view: BranchView, wanted: dict[str, str]) -> bool:
    if wanted.get("tenant") and wanted["tenant"] != view.tenant:
        return False
    if wanted.get("kind") and wanted["kind"] != view.kind:
        return False
    if wanted.get("node") and wanted["node"] not in view.homes.values():
        return False
    return wanted.get("q", "") in view.branch_id or wanted.get("q", "") in (view.program or "")


def _may_see_closed(row: dict[str, Any], tenants: frozenset[str] | None) -> bool:
    """A branch's id begins with its tenant's name, except where it was inferred."""
    return tenants is None or str(row["id"]).partition("/")[0] in tenants


def _branch(now: float, yard: Yard, view: BranchView) -> dict[str, Any]:
    context = yard.kv.context(view.branch_id)
    assert context is not None
    return {
        "id": view.branch_id,
        "parent": view.parent,
        "kind": view.kind,
        "version": view.version,
        "inferred": view.inferred,
        "program": view.program,
        "tenant": view.tenant,
        "blocks": view.context_blocks,
        "homes": view.homes,
        "held": context.held,
        "shared_blocks": context.shared_blocks,
        "produced_blocks": context.produced_blocks,
        "gone": context.gone,
        "idle_s": max(0.0, now - context.heard_s),
        "pause_s": context.pause_s,
        "open_requests": list(context.open_requests),
        "lease_left_s": view.lease_until_s - now,
        "held_by_subagents": context.held_by_subagents_until_s > now,
    }


def reuse(yard: Yard) -> dict[str, Any]:
    """Ideal, actual and lost tokens since the start, by node, tenant and workload, and each node's counted blocks."""
    by = {
        dimension: {name: _totals(totals) for name, totals in yard.kv.reuse_by(dimension).items()}
        for dimension in ("node", "tenant", "workload")
    }
    usage = {node.name: yard.kv.node_usage(node.name) for node in yard.fleet.nodes}
    pools = {name: {"known_blocks": known, "referenced_blocks": counted} for name, (known, counted) in usage.items()}
    return {"total": _totals(yard.kv.reuse()), "by": by, "pools": pools}


def _totals(totals: ReuseTotals) -> dict[str, Any]:
    return asdict(totals)
