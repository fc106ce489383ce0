"""A live snapshot as a tenant user may see it: the own flows and requests, and nothing of anybody else. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]
_SHARED = ("v", "partition", "t", "seq", "verdict")


def scoped(snapshot: Json, tenants: frozenset[str]) -> dict[str, Any]:
    """Only what concerns `tenants`. Totals over all tenants, nodes, stages and the configuration are left out.

    The verdict keeps its level; its words may name what others do, so they are replaced.
    """
    bands = [own for band in snapshot.get("bands") or [] if (own := _band(band, tenants)) is not None]
    recent = [entry for entry in snapshot.get("recent") or [] if entry.get("tenant") in tenants]
    mine = {name: snapshot[name] for name in _SHARED if name in snapshot}
    level = (snapshot.get("verdict") or {}).get("level") or "down"
    mine["verdict"] = {"level": level, "stage": None, "reason": _WORDS.get(level, "")}
    return mine | {
        "bands": bands,
        "recent": [{**entry, "prefill_node": None, "decode_node": None, "reason": ""} for entry in recent],
        "requests": {"waiting": sum(band["waiting"] for band in bands)},
        "nodes": [],
        "stages": {},
        "latency": {"window_s": None} | _latency(recent),
    }


_WORDS = {
    "fine": "the cluster answers everybody as it should",
    "degraded": "the cluster is slower than it should be; its operators see why",
    "down": "the cluster cannot answer at the moment",
}


def _band(band: Json, tenants: frozenset[str]) -> dict[str, Any] | None:
    flows = [flow for flow in band.get("flows") or [] if flow.get("id") in tenants]
    if not flows:
        return None
    waiting = sum(flow.get("waiting") or 0 for flow in flows)
    return {
        "name": band.get("name"),
        "priority": band.get("priority"),
        "waiting": waiting,
        "oldest_s": max((flow.get("oldest_s") or 0.0 for flow in flows), default=0.0),
        "expected_wait_s": band.get("expected_wait_s"),
        "dispatched_total": sum(flow.get("dispatched_total") or 0 for flow in flows),
        "dropped": {},
        "flows": flows,
    }


def _latency(recent: list[Json]) -> dict[str, Any]:
    """Percentiles of the tenant's own recent requests."""
    found: dict[str, Any] = {}
    for name in ("ttft_s", "e2e_s", "queue_s"):
        values = sorted(entry[name] for entry in recent if entry.get(name) is not None)
        rank = {q: values[max(0, -(-len(values) * q // 100) - 1)] if values else None for q in (50, 95, 99)}
        found[name] = {"p50": rank[50], "p95": rank[95], "p99": rank[99], "n": len(values)}
    return found
