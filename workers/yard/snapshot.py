"""The live snapshot (docs/interfaces.md, section 9): what browsers see of a partition, twice a second."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from apps.flowcontrol.domain.snapshot import FlowSnapshot
from apps.kvcache.domain.events import LOST_CAUSES
from workers.yard.nodes import STAGES, KnownNode, NodeTable
from workers.yard.requests import Stage

if TYPE_CHECKING:
    from workers.yard.yard import Yard

FEWEST_FOR_SLO = 20


def take_snapshot(now: float, yard: Yard, seq: int) -> dict[str, Any]:
    """The snapshot of a yard at `now`. A pure read."""
    flow = yard.flow.snapshot(now)
    latency = yard.outcomes.latency(now)
    return {
        "v": 1,
        "partition": yard.config.partition,
        "t": now,
        "seq": seq,
        "config_version": yard.config.version,
        "config_error": None,
        "gateway": {"started_at": yard.started_at, "degraded": []},
        "verdict": verdict(yard.fleet.nodes, flow, yard.waiting_for_nodes, latency["ttft_s"], yard.config.slo_ttft_s),
        "split": yard.fleet.nodes.split(),
        "nodes": [_node(now, yard, node) for node in yard.fleet.nodes],
        "bands": [_band(band) for band in asdict(flow)["bands"]],
        "stages": {stage: _stage(asdict(numbers)) for stage, numbers in flow.stages.items()},
        "latency": latency,
        "throughput": yard.outcomes.throughput(now),
        "reuse": _reuse(yard),
        "router": _router(now, yard),
        "requests": _requests(yard),
        "recent": list(yard.outcomes.recent),
    }


def verdict(
    nodes: NodeTable, flow: FlowSnapshot, waiting_for_nodes: int, ttft_s: dict[str, Any], slo_ttft_s: float | None
) -> dict[str, Any]:
    """One level for the whole partition, the stage that decides it, and the reason in words.

    `ttft_s` are the percentiles of the last minute; with fewer than `FEWEST_FOR_SLO` answers they decide nothing.
    """
    for stage in STAGES:
        if not nodes.taking(stage):
            return _verdict("down", stage, f"no healthy node takes {stage}")
    enabled = [node for node in nodes if node.config.enabled]
    down = [node.name for node in enabled if node.health == "down"]
    if down:
        return _verdict("degraded", None, f"down: {', '.join(down)}")
    if waiting_for_nodes:
        return _verdict("degraded", None, f"{waiting_for_nodes} admitted requests wait for a node")
    if flow.gating_stage is not None:
        stage_now = flow.stages[flow.gating_stage]
        text = f"{flow.gating_stage} is full ({stage_now.saturation:.0%}); {flow.totals.waiting} requests wait"
        return _verdict("degraded", flow.gating_stage, text)
    if slo_ttft_s is not None and ttft_s["n"] >= FEWEST_FOR_SLO and ttft_s["p95"] > slo_ttft_s:
        return _verdict(
            "degraded", "prefill", f"TTFT p95 is {ttft_s['p95']:.1f} s, over its target of {slo_ttft_s:g} s"
        )
    stale = [node.name for node in enabled if node.health == "stale"]
    if stale:
        return _verdict("degraded", None, f"no recent report from {', '.join(stale)}")
    return _verdict("fine", None, "every node answers and nothing waits for room")


def _verdict(level: str, stage: str | None, reason: str) -> dict[str, Any]:
    return {"level": level, "stage": stage, "reason": reason}


def _node(now: float, yard: Yard, node: KnownNode) -> dict[str, Any]:
    status = node.status
    view = yard.placement.view(now, node)
    return {
        "name": node.name,
        "phase": status.phase if status else node.config.phase,
        "target_phase": node.config.phase,
        "state": "down" if node.health == "down" else ("draining" if node.config.draining else _state(node)),
        "generation": status.generation if status else node.config.generation,
        "health": node.health,
        "age_s": node.age_s(now),
        "running_prefill": status.running_prefill if status else 0,
        "queued_prefill": status.queued_prefill if status else 0,
        "queued_tokens": status.queued_tokens if status else 0,
        "predicted_wait_s": round(yard.placement.wait_s(now, node), 4),
        "running_decode": view.running_decode,
        "announced_decode": view.announced_decode,
        "decode_limit": node.config.decode_limit,
        "pool_used_blocks": status.pool_used_blocks if status else 0,
        "pool_capacity_blocks": status.pool_capacity_blocks if status else 0,
        "pool_referenced_blocks": _referenced_blocks(yard, node),
        "last_switch": dict(status.last_switch) if status and status.last_switch else None,
    }


def _referenced_blocks(yard: Yard, node: KnownNode) -> int:
    """By the node's own count; an existing engine keeps none, so there it is the directory's."""
    if node.config.direct is not None:
        return yard.kv.node_usage(node.name)[1]
    return node.status.pool_referenced_blocks if node.status is not None else 0


def _state(node: KnownNode) -> str:
    return node.status.state if node.status is not None else "down"


def _band(band: dict[str, Any]) -> dict[str, Any]:
    return band | {"flows": list(band["flows"])}


def _stage(numbers: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: a stage without a node is saturated as `null`."""
    saturation = numbers["saturation"]
    return numbers | {"saturation": None if saturation == float("inf") else round(saturation, 4)}


def _router(now: float, yard: Yard) -> dict[str, Any]:
    """How well the router sees and foresees."""
    return yard.outcomes.foresight.view(now, yard.config.routing.name, yard.blind(now))


def _reuse(yard: Yard) -> dict[str, Any]:
    totals = yard.kv.reuse()
    return {
        "prompt_tokens": totals.prompt_tokens,
        "ideal_tokens": totals.ideal_tokens,
        "actual_tokens": totals.actual_tokens,
        "lost": {cause: totals.lost.get(cause, 0) for cause in LOST_CAUSES},
        "branches_live": yard.kv.branches_live,
    }


def _requests(yard: Yard) -> dict[str, int]:
    queued = sum(state.stage is Stage.QUEUED for state in yard.requests.values())
    return asdict(yard.outcomes.counters) | {"waiting": queued, "running": len(yard.requests) - queued}
