"""A partition's past as the charts show it: one small point of the live snapshot every 15 seconds, kept for 30 days."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from apps.telemetry.models import LiveSample
from apps.topology.models import Partition

EVERY_S = 15.0
MAX_POINTS = 400
# Fixed order and names of what a node can be doing; the console's colours and patterns follow these keys.
KINDS = ("prefill", "decode", "mixed", "draining", "switching", "down")
Json = Mapping[str, Any]


def node_kind(node: Json) -> str:
    """Which of `KINDS` a node of a snapshot counts as: what it is doing now, not what it is meant to do."""
    if node.get("health") == "down" or node.get("state") == "down":
        return "down"
    state = node.get("state")
    if state in ("draining", "switching"):
        return str(state)
    phase = node.get("phase")
    return str(phase) if phase in KINDS else "down"


def point_of(snapshot: Json) -> dict[str, Any]:
    """What the charts keep of one moment: times in seconds, rates a second, tokens since the gateway's start."""
    kinds = [node_kind(node) for node in snapshot.get("nodes") or []]
    latency, throughput = snapshot.get("latency") or {}, snapshot.get("throughput") or {}
    ttft, e2e = latency.get("ttft_s") or {}, latency.get("e2e_s") or {}
    reuse, requests = snapshot.get("reuse") or {}, snapshot.get("requests") or {}
    stages = snapshot.get("stages") or {}
    return {
        "t": snapshot.get("t") or 0.0,
        "p50": ttft.get("p50"),
        "p95": ttft.get("p95"),
        "e2e": e2e.get("p50"),
        "waiting": {band.get("name"): band.get("waiting") for band in snapshot.get("bands") or []},
        "split": {kind: kinds.count(kind) for kind in KINDS},
        "rps": throughput.get("requests_per_s"),
        "out": throughput.get("output_tokens_per_s"),
        "full": {name: (stages.get(name) or {}).get("saturation") for name in ("prefill", "decode")},
        "reuse": {name: reuse.get(f"{name}_tokens") for name in ("prompt", "ideal", "actual")},
        "dropped": requests.get("dropped"),
    }


def keep(partition: Partition, snapshot: Json) -> bool:
    """Stores a point unless one was stored less than 15 seconds before; says whether it did."""
    t = float(snapshot.get("t") or 0.0)
    newest = LiveSample.objects.filter(partition=partition).order_by("-t").values_list("t", flat=True).first()
    if newest is not None and t < newest + EVERY_S:
        return False
    LiveSample.objects.create(partition=partition, t=t, data=point_of(snapshot))
    return True


def between(partition: Partition, start: float, end: float) -> list[dict[str, Any]]:
    """Points of a time range (unix seconds), oldest first, thinned out evenly to at most some `MAX_POINTS`."""
    step = max(1, math.ceil((end - start) / EVERY_S / MAX_POINTS))
    rows = LiveSample.objects.filter(partition=partition, t__gte=start, t__lte=end)
    if step > 1:
        rows = rows.extra(where=["floor(t / %s)::bigint %% %s = 0"], params=[EVERY_S, step])
    return list(rows.order_by("t").values_list("data", flat=True))


def before(partition: Partition, t: float) -> dict[str, Any] | None:
    """The newest point at or before `t`."""
    rows = LiveSample.objects.filter(partition=partition, t__lte=t).order_by("-t")
    return rows.values_list("data", flat=True).first()


def prune(partition: Partition, older_than: float) -> int:
    return LiveSample.objects.filter(partition=partition, t__lt=older_than).delete()[0]
