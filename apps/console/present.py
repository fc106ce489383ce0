"""From a live snapshot (docs/interfaces.md, section 9) to what a page shows: texts, tones and shares.

Pure: the server-rendered page and the websocket frame both come from `present`, so the two can never disagree, and the
browser only puts texts where they belong. A part that is missing from the snapshot shows as unknown, not as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from apps.console import formats
from apps.telemetry.samples import KINDS, node_kind, point_of

VERDICTS = {"fine": "Fine", "degraded": "Degraded", "down": "Down"}
LOST_CAUSES = {
    "evicted": "evicted from the pool",
    "routed": "sent to another node",
    "switched": "node changed its phase",
    "fetch-failed": "fetch failed",
    "never-stored": "never stored",
}
DROP_REASONS = {
    "rejected-saturated": "saturated",
    "rejected-capacity": "queue full",
    "evicted-priority": "displaced",
    "rejected-ttl-expired": "expired",
    "rejected-no-endpoints": "no node",
    "rejected-context-cancelled": "cancelled",
    "rejected-shutting-down": "shutting down",
}
NEAR_FULL_RATIO = 0.8
RECENT_SHOWN = 20
# What a frame holds at most; the rest is asked for by name.
NODES_SHOWN = 96
CARS_SHOWN = 64
FLOWS_SHOWN = 12
TENANTS_SHOWN = 200

Json = Mapping[str, Any]


def present(snapshot: Json, now: float, slo_ttft_s: float | None = None) -> dict[str, Any]:
    """Everything the console's pages show of one snapshot. `now` is unix seconds; `slo_ttft_s` the policy's target or None."""
    every = snapshot.get("nodes") or []
    nodes = present_nodes(every)
    bands = _bands(snapshot.get("bands") or [])
    return {
        "partition": snapshot.get("partition"),
        "t": snapshot.get("t"),
        "seq": snapshot.get("seq"),
        "age_s": max(0.0, now - (snapshot.get("t") or now)),
        "config_version": snapshot.get("config_version"),
        "config_error": snapshot.get("config_error") or "",
        "verdict": _verdict(snapshot.get("verdict") or {}),
        "notices": _notices(snapshot),
        "throughput": _throughput(snapshot.get("throughput") or {}),
        "latency": _latency(snapshot.get("latency") or {}, slo_ttft_s),
        "split": _split(every, nodes),
        "nodes": nodes,
        "nodes_more": _more(len(every) - NODES_SHOWN, "node"),
        "bands": bands,
        "queue": _queue(snapshot.get("bands") or []),
        "tenants_by_id": _tenants(snapshot.get("bands") or []),
        "stages": [_stage(name, (snapshot.get("stages") or {}).get(name) or {}) for name in ("prefill", "decode")],
        "reuse": _reuse(snapshot.get("reuse") or {}, snapshot.get("nodes") or []),
        "requests": {name: formats.count(n) for name, n in (snapshot.get("requests") or {}).items()},
        "recent": [_recent(entry) for entry in (snapshot.get("recent") or [])[:RECENT_SHOWN]],
        "point": point_of(snapshot),
    }


def present_nodes(nodes: Iterable[Json]) -> list[dict[str, Any]]:
    """At most `NODES_SHOWN` nodes ready to show; where there are more, those that need a look come first."""
    chosen = list(nodes)
    if len(chosen) > NODES_SHOWN:
        chosen.sort(key=lambda node: (node.get("health") == "ok", node.get("state") not in ("draining", "switching")))
    return [_node(node) for node in chosen[:NODES_SHOWN]]


def _more(left_out: int, one: str) -> str:
    """What to say of what a frame leaves out; nothing when it leaves nothing out."""
    return f"and {formats.plural(left_out, one)} more" if left_out > 0 else ""


def _verdict(verdict: Json) -> dict[str, str]:
    level = verdict.get("level") or "down"
    stage = verdict.get("stage")
    label = VERDICTS.get(level, level)
    return {"level": level, "label": f"{label} at {stage}" if stage else label, "reason": verdict.get("reason") or ""}


def _notices(snapshot: Json) -> list[dict[str, str]]:
    notices = []
    if snapshot.get("config_error"):
        text = f"The gateway refused the newest configuration and runs version {snapshot.get('config_version')}: "
        notices.append({"id": "config", "tone": "bad", "text": text + str(snapshot["config_error"])})
    degraded = (snapshot.get("gateway") or {}).get("degraded") or []
    return notices + [{"id": f"gateway-{reason}", "tone": "warn", "text": f"Gateway: {reason}"} for reason in degraded]


def _throughput(throughput: Json) -> dict[str, str]:
    return {name.removesuffix("_per_s"): formats.rate(value) for name, value in throughput.items()}


def latency_rows(latency: Json, slo_ttft_s: float | None) -> list[dict[str, Any]]:
    """A row each of TTFT, E2E, TPOT and the wait in the queue; above the target a TTFT is marked."""
    rows = []
    for name, label in (("ttft", "TTFT"), ("e2e", "E2E"), ("tpot", "TPOT"), ("queue", "Queue wait")):
        measured = latency.get(f"{name}_s") or {}
        row: dict[str, Any] = {"id": name, "label": label, "n": formats.exact(measured.get("n"))}
        for quantile in ("p50", "p95", "p99"):
            value = measured.get(quantile)
            row[quantile] = formats.duration(value)
            over = name == "ttft" and slo_ttft_s is not None and value is not None and value > slo_ttft_s
            row[f"{quantile}_tone"] = "bad" if over else ""
        rows.append(row)
    return rows


def _latency(latency: Json, slo_ttft_s: float | None) -> dict[str, Any]:
    rows = latency_rows(latency, slo_ttft_s)
    error = latency.get("ttft_error_ratio") or {}
    ttft = latency.get("ttft_s") or {}
    return {
        "rows": rows,
        "window": formats.duration(latency.get("window_s")),
        "ttft_p95": rows[0]["p95"],
        "ttft_p50": rows[0]["p50"],
        "e2e_p50": rows[1]["p50"],
        "e2e_p95": rows[1]["p95"],
        "ttft_tone": rows[0]["p95_tone"],
        "slo": formats.duration(slo_ttft_s),
        "slo_text": _slo_text(ttft.get("p95"), slo_ttft_s),
        "ttft_error": formats.percent(error.get("p50")),
        "ttft_error_n": formats.exact(error.get("n")),
    }


def _slo_text(p95_s: float | None, slo_ttft_s: float | None) -> str:
    if slo_ttft_s is None:
        return "no target set"
    if p95_s is None:
        return f"target {formats.duration(slo_ttft_s)}, nothing served yet"
    relation = "over" if p95_s > slo_ttft_s else "within"
    return f"p95 {relation} the {formats.duration(slo_ttft_s)} target"


def _node(node: Json) -> dict[str, Any]:
    kind = node_kind(node)
    phase, target = node.get("phase") or "", node.get("target_phase") or ""
    label = f"{kind} → {target}" if kind in ("draining", "switching") and target and target != phase else kind
    used, capacity = node.get("pool_used_blocks"), node.get("pool_capacity_blocks")
    referenced = node.get("pool_referenced_blocks")
    decode_running, announced = node.get("running_decode") or 0, node.get("announced_decode") or 0
    prefill_running, prefill_queued = node.get("running_prefill") or 0, node.get("queued_prefill") or 0
    limit = node.get("decode_limit")
    health = node.get("health") or "down"
    last_switch = node.get("last_switch") or {}
    return {
        "id": node.get("name"),
        "name": node.get("name"),
        "kind": kind,
        "label": label,
        "phase": phase,
        "target": target,
        "state": node.get("state") or "",
        "generation": node.get("generation"),
        "health": {"ok": "healthy", "stale": "no recent report", "down": "down"}.get(health, health),
        "health_tone": {"ok": "fine", "stale": "warn"}.get(health, "bad"),
        "age": formats.age(node.get("age_s")),
        "prefill_text": f"{formats.exact(prefill_running)} running · {formats.exact(prefill_queued)} queued",
        "queued_tokens": formats.count(node.get("queued_tokens")),
        "wait": formats.duration(node.get("predicted_wait_s")),
        "decode_text": f"{formats.exact(decode_running)} of {formats.exact(limit)}"
        + (f" · {formats.exact(announced)} announced" if announced else ""),
        "decode_share": share(decode_running, limit),
        "announced_share": share(min(announced, max(0, (limit or 0) - decode_running)), limit),
        "pool_text": f"{formats.count(used)} of {formats.count(capacity)} blocks",
        "pool_percent": formats.percent(used / capacity if capacity and used is not None else None),
        "pool_share": share(referenced, capacity),
        "pool_rest_share": share((used or 0) - (referenced or 0), capacity),
        "referenced_text": f"{formats.count(referenced)} still referenced",
        "pool_referenced": formats.exact(referenced),
        "pool_reclaimable": formats.exact(None if used is None else max(0, used - (referenced or 0))),
        "load_share": share(decode_running, limit) if phase == "decode" else share(prefill_running + prefill_queued, 4),
        "load_text": _load_text(kind, prefill_running, prefill_queued, decode_running, limit),
        "last_switch": _last_switch(last_switch),
    }


def _load_text(kind: str, running: int, queued: int, decoding: int, limit: int | None) -> str:
    if kind == "down":
        return "no report"
    parts = []
    if kind != "decode":
        parts.append(f"{formats.exact(running + queued)} prefilling")
    if kind != "prefill":
        parts.append(f"{formats.exact(decoding)} decoding")
    return " · ".join(parts)


def _last_switch(last_switch: Any) -> str:
    if not isinstance(last_switch, Mapping) or not last_switch:
        return "none since start"
    took = last_switch.get("duration_s")
    text = f"to {last_switch.get('phase')}"
    return f"{text} in {formats.duration(took)}" if took is not None else text


def _split(every: Sequence[Json], nodes: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = [node_kind(node) for node in every]
    counts = {kind: kinds.count(kind) for kind in KINDS}
    text = " · ".join(f"{n} {kind}" for kind, n in counts.items() if n or kind in ("prefill", "decode"))
    order = sorted(nodes, key=_track) if len(every) <= CARS_SHOWN else []
    cars = [
        {
            "id": node["id"],
            "short": _short(node["name"]),
            "kind": node["kind"],
            "track": str(_track(node)),
            "grow": "1",
            "title": f"{node['name']}: {node['label']}, {node['load_text']}",
        }
        for node in order
    ]
    return {
        "text": text if every else "no nodes",
        "cars": cars or _blocks(counts, len(every)),
        "prefill": counts["prefill"],
        "decode": counts["decode"],
    }


def _blocks(counts: Mapping[str, int], total: int) -> list[dict[str, Any]]:
    """One long car a kind, as wide as its share, where a car a node would be too thin to see."""
    tracks = {"prefill": "0", "mixed": "1", "decode": "2"}
    return [
        {
            "id": kind,
            "short": formats.exact(n),
            "kind": kind,
            "track": tracks.get(kind, "3"),
            "grow": str(n),
            "title": f"{formats.plural(n, 'node')} of {formats.exact(total)}: {kind}",
        }
        for kind, n in counts.items()
        if n
    ]


def _short(name: str | None) -> str:
    """A node's last word: gb300-7 -> 7; the whole name stays in the title and in every table."""
    return (name or "").rpartition("-")[2]


def _track(node: Json) -> int:
    """Where a node stands in the split bar: by its phase, so that a draining node stays among its old peers."""
    order = {"prefill": 0, "mixed": 1, "decode": 2}
    return 3 if node["kind"] == "down" else order.get(node["phase"], 3)


def _bands(bands: Iterable[Json]) -> list[dict[str, Any]]:
    ordered = sorted(bands, key=lambda band: -(band.get("priority") or 0))
    most = max((band.get("waiting") or 0 for band in ordered), default=0)
    return [_band(band, most) for band in ordered]


def _band(band: Json, most_waiting: int) -> dict[str, Any]:
    waiting = band.get("waiting") or 0
    dropped = {reason: n for reason, n in (band.get("dropped") or {}).items() if n}
    flows = band.get("flows") or []
    drops = [f"{formats.count(n)} {DROP_REASONS.get(reason, reason)}" for reason, n in dropped.items()]
    return {
        "id": band.get("name"),
        "name": band.get("name"),
        "priority": str(band.get("priority", formats.UNKNOWN)),
        "waiting": formats.exact(waiting),
        "waiting_share": share(waiting, most_waiting),
        "waiting_bytes": formats.size(band.get("waiting_bytes")),
        "oldest": formats.duration(band.get("oldest_s")) if waiting else "–",
        "expected_wait": formats.duration(band.get("expected_wait_s")),
        "dispatched_per_s": formats.rate(band.get("dispatched_per_s")),
        "dispatched": formats.count(band.get("dispatched_total")),
        "dropped": formats.count(sum(dropped.values())),
        "dropped_text": " · ".join(drops) or "none",
        "dropped_tone": "warn" if dropped else "",
        "flows": [_flow(flow) for flow in sorted(flows, key=_urgency)[:FLOWS_SHOWN]],
        "flows_more": _more(len(flows) - FLOWS_SHOWN, "flow"),
    }


def _flow(flow: Json) -> dict[str, str]:
    waiting = flow.get("waiting") or 0
    return {
        "id": str(flow.get("id")),
        "waiting": formats.exact(waiting),
        "oldest": formats.duration(flow.get("oldest_s")) if waiting else "–",
        "dispatched": formats.count(flow.get("dispatched_total")),
    }


def _urgency(flow: Json) -> tuple[int, float, str]:
    """The longest queues first; among the empty ones those that were served most."""
    return -(flow.get("waiting") or 0), -(flow.get("dispatched_total") or 0), str(flow.get("id"))


def present_flows(bands: Iterable[Json], wanted: str, band_name: str, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Flows of all bands whose id contains `wanted`, longest queue first, and how many there are."""
    found = [
        (_urgency(flow), {**_flow(flow), "band": band.get("name")})
        for band in bands
        if band_name in ("", band.get("name"))
        for flow in band.get("flows") or []
        if wanted in str(flow.get("id")).lower()
    ]
    found.sort(key=lambda pair: pair[0])
    return [flow for _, flow in found[:limit]], len(found)


def _queue(bands: list[Json]) -> dict[str, str]:
    waiting = sum(band.get("waiting") or 0 for band in bands)
    oldest = max((band.get("oldest_s") or 0 for band in bands if band.get("waiting")), default=None)
    return {"waiting": formats.exact(waiting), "oldest": formats.duration(oldest) if waiting else "nobody waits"}


def _tenants(bands: list[Json]) -> dict[str, dict[str, str]]:
    """One entry a flow, summed over the bands it waits in; a flow is a tenant unless a trusted client named it."""
    sums: dict[str, dict[str, float]] = {}
    for flow in (flow for band in bands for flow in band.get("flows") or []):
        total = sums.setdefault(str(flow.get("id")), {"waiting": 0, "oldest_s": 0.0, "dispatched_total": 0})
        total["waiting"] += flow.get("waiting") or 0
        total["oldest_s"] = max(total["oldest_s"], flow.get("oldest_s") or 0.0)
        total["dispatched_total"] += flow.get("dispatched_total") or 0
    largest = sorted(sums.items(), key=lambda pair: _urgency({"id": pair[0], **pair[1]}))[:TENANTS_SHOWN]
    return {name: _flow({"id": name, **total}) for name, total in largest}


def _stage(name: str, stage: Json) -> dict[str, Any]:
    saturation = stage.get("saturation")
    parts = [f"{formats.exact(stage.get('in_flight'))} in flight"]
    if stage.get("announced") is not None:
        parts.append(f"{formats.exact(stage['announced'])} announced")
    parts.append(f"limit {formats.exact(stage.get('limit'))}")
    tone, word = _fullness(saturation)
    return {
        "id": name,
        "name": name,
        "saturation": formats.percent(saturation),
        "share": share(saturation, 1.0),
        "over": bool(saturation is not None and saturation > 1),
        "tone": tone,
        "word": word,
        "text": " · ".join(parts),
    }


def _fullness(saturation: float | None) -> tuple[str, str]:
    if saturation is None:
        return "unknown", "unknown"
    if saturation >= 1:
        return "bad", "full: requests wait"
    if saturation >= NEAR_FULL_RATIO:
        return "warn", "nearly full"
    return "fine", "has room"


def _reuse(reuse: Json, nodes: Iterable[Json]) -> dict[str, Any]:
    prompt, ideal, actual = (reuse.get(f"{name}_tokens") for name in ("prompt", "ideal", "actual"))
    lost = reuse.get("lost") or {}
    causes = [
        {
            "id": cause,
            "label": LOST_CAUSES.get(cause, cause),
            "tokens": formats.count(tokens),
            "share": share(tokens, prompt),
            "percent": formats.percent(tokens / prompt if prompt else None, 1),
        }
        for cause, tokens in lost.items()
    ]
    gap = ideal - actual if ideal is not None and actual is not None else None
    return {
        "prompt": formats.count(prompt),
        "ideal": formats.percent(ideal / prompt if prompt and ideal is not None else None, 1),
        "actual": formats.percent(actual / prompt if prompt and actual is not None else None, 1),
        "ideal_share": share(ideal, prompt),
        "actual_share": share(actual, prompt),
        "gap_share": share(max(0, gap or 0), prompt),
        "gap": formats.count(gap),
        "branches": formats.exact(reuse.get("branches_live")),
        "reclaimable": formats.count(
            sum(max(0, (n.get("pool_used_blocks") or 0) - (n.get("pool_referenced_blocks") or 0)) for n in nodes)
        ),
        "causes": causes,
    }


def _recent(entry: Json) -> dict[str, Any]:
    outcome = str(entry.get("outcome") or "running")
    good = outcome in ("completed", "ok", "stop", "length", "finished", "dispatched")
    prompt, cached = entry.get("prompt_tokens"), entry.get("cached_tokens")
    return {
        "id": str(entry.get("id")),
        "short": str(entry.get("id"))[-8:],
        "time": entry.get("t"),
        "tenant": entry.get("tenant") or "–",
        "band": entry.get("band") or "–",
        "route": f"{entry.get('prefill_node') or '–'} → {entry.get('decode_node') or '–'}",
        "prompt": formats.count(prompt),
        "cached": formats.percent(cached / prompt if prompt and cached is not None else None),
        "output": formats.count(entry.get("output_tokens")),
        "queue": formats.duration(entry.get("queue_s")),
        "ttft": formats.duration(entry.get("ttft_s")),
        "predicted": formats.duration(entry.get("predicted_ttft_s")),
        "e2e": formats.duration(entry.get("e2e_s")),
        "outcome": outcome,
        "tone": "" if good else "muted" if outcome in ("running", "cancelled") else "bad",
        "reason": entry.get("reason") or "",
    }


def share(part: float | None, whole: float | None) -> str:
    """A CSS percentage between 0 % and 100 %; the text next to a bar is what is never clamped."""
    if not whole or part is None:
        return "0%"
    return f"{max(0.0, min(1.0, part / whole)) * 100:.1f}%"
