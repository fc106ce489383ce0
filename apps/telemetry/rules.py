"""The rules that raise alerts, each with what to do about it. Pure: facts in, findings out.

The same conditions are shipped as Prometheus rules (docs/monitoring/alerts.yaml); their names are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from apps.telemetry.choices import Severity

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at. `snapshot` is None while the gateway is silent; rates are of the last minutes."""

    now: float
    snapshot: Json | None
    slo_ttft_s: float | None = None
    dropped_per_min: float | None = None
    lost_ratio: float | None = None
    telemetry_age_s: float | None = None
    moving_order_s: float | None = None
    failed_order: str = ""
    keys_expiring: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule holds about `subject` ("" for the partition)."""

    subject: str
    summary: str
    value: float | None = None


Check = Callable[[Facts, float], list[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """`threshold` in `unit`; None where there is nothing to set. It fires once it has held for `for_s`."""

    name: str
    title: str
    severity: Severity
    check: Check = field(repr=False)
    for_s: float
    means: str
    look: str
    do: str
    page: str
    threshold: float | None = None
    unit: str = ""


def _silent(facts: Facts, threshold: float) -> list[Finding]:
    return [] if facts.snapshot else [Finding("", "the gateway has published nothing for ten seconds")]


def _down(facts: Facts, threshold: float) -> list[Finding]:
    verdict = (facts.snapshot or {}).get("verdict") or {}
    return [Finding("", str(verdict.get("reason") or "down"))] if verdict.get("level") == "down" else []


def _nodes(facts: Facts, threshold: float) -> list[Finding]:
    nodes = (facts.snapshot or {}).get("nodes") or []
    return [Finding(str(n.get("name")), f"{n.get('name')} does not answer") for n in nodes if n.get("health") == "down"]


def _ttft(facts: Facts, threshold: float) -> list[Finding]:
    ttft = ((facts.snapshot or {}).get("latency") or {}).get("ttft_s") or {}
    p95, target = ttft.get("p95"), facts.slo_ttft_s
    if p95 is None or target is None or (ttft.get("n") or 0) < 20 or p95 <= target * threshold:
        return []
    return [Finding("", f"TTFT p95 is {p95:.2f} s, target {target:g} s", p95)]


def _oldest(facts: Facts, threshold: float) -> list[Finding]:
    return [
        Finding(str(b.get("name")), f"the oldest request of {b.get('name')} waits for {b['oldest_s']:.0f} s", b["oldest_s"])
        for b in (facts.snapshot or {}).get("bands") or []
        if b.get("waiting") and (b.get("oldest_s") or 0) > threshold
    ]  # fmt: skip


def _stages(facts: Facts, threshold: float) -> list[Finding]:
    return [
        Finding(name, f"{name} is at {stage['saturation']:.0%} of its limit", stage["saturation"])
        for name, stage in ((facts.snapshot or {}).get("stages") or {}).items()
        if (stage.get("saturation") or 0) > threshold
    ]


def _drops(facts: Facts, threshold: float) -> list[Finding]:
    rate = facts.dropped_per_min
    return [Finding("", f"{rate:.0f} requests a minute are refused", rate)] if rate and rate > threshold else []


def _config(facts: Facts, threshold: float) -> list[Finding]:
    error = (facts.snapshot or {}).get("config_error")
    return [Finding("", f"refused: {error}"[:280])] if error else []


def _degraded(facts: Facts, threshold: float) -> list[Finding]:
    degraded = ((facts.snapshot or {}).get("gateway") or {}).get("degraded") or []
    return [Finding("", "; ".join(map(str, degraded))[:280])] if degraded else []


def _prediction(facts: Facts, threshold: float) -> list[Finding]:
    error = ((facts.snapshot or {}).get("latency") or {}).get("ttft_error_ratio") or {}
    p50 = error.get("p50")
    if p50 is None or (error.get("n") or 0) < 50 or p50 <= threshold:
        return []
    return [Finding("", f"predicted TTFT is off by {p50:.0%} (median of {error['n']})", p50)]


def _lost(facts: Facts, threshold: float) -> list[Finding]:
    ratio = facts.lost_ratio
    return (
        [Finding("", f"{ratio:.0%} of reusable tokens are computed again", ratio)]
        if ratio and ratio > threshold
        else []
    )


def _telemetry(facts: Facts, threshold: float) -> list[Finding]:
    age = facts.telemetry_age_s
    if not facts.snapshot or age is None or age <= threshold:
        return []
    return [Finding("", f"no telemetry was stored for {age:.0f} s", age)]


def _stuck(facts: Facts, threshold: float) -> list[Finding]:
    took = facts.moving_order_s
    return [Finding("", f"a switch is under way for {took:.0f} s", took)] if took and took > threshold else []


def _failed(facts: Facts, threshold: float) -> list[Finding]:
    return [Finding("", facts.failed_order)] if facts.failed_order else []


def _keys(facts: Facts, threshold: float) -> list[Finding]:
    return [
        Finding(name, f"key {name} expires in {left_s / 86400:.0f} days", left_s / 86400)
        for name, left_s in facts.keys_expiring
        if 0 < left_s < threshold * 86400
    ]


RULES: tuple[Rule, ...] = (
    Rule(
        "gateway-silent", "Gateway silent", Severity.CRITICAL, _silent, 10.0,
        "The gateway process has stopped, hangs, or cannot reach Redis. Nobody can be sure that requests are served.",
        "Ask the gateway itself: GET /healthz at the partition's address. Look at its log and at Redis.",
        "Restart the gateway; it starts from its last good configuration even without Redis. If /healthz answers, mend Redis.",
        "overview",
    ),
    Rule(
        "partition-down", "Partition down", Severity.CRITICAL, _down, 5.0,
        "A stage has no healthy node, so no request can be answered.",
        "Nodes shows which are down and which drain. Split shows whether a switch is under way.",
        "Bring a node back, end a drain, or force a node into the stage that is missing.",
        "nodes",
    ),
    Rule(
        "node-down", "Node down", Severity.CRITICAL, _nodes, 15.0,
        "An agent does not answer. Its requests were moved, its share of the KV pool cannot be fetched.",
        "Nodes shows when it last reported. Look at the agent's log on that machine.",
        "Restart the agent: it adopts its pool again. If the machine is gone, remove the node so that the planner stops counting on it.",
        "nodes",
    ),
    Rule(
        "config-refused", "Configuration refused", Severity.CRITICAL, _config, 5.0,
        "The gateway runs an older configuration because the newest is not valid for it. Edits since then have no effect.",
        "Settings names the field and compares the versions.",
        "Correct the field, or revert to the version that runs.",
        "settings",
    ),
    Rule(
        "ttft-over-target", "TTFT over its target", Severity.WARNING, _ttft, 60.0,
        "People wait longer for the first token than was promised.",
        "Overview names the stage. Queues shows who waits; Requests shows where one request spent its time.",
        "Prefill full: let the planner move a node to prefill, or force one. One tenant floods: lower its weight or pause it.",
        "queues", 1.0, "x target",
    ),
    Rule(
        "queue-old", "Somebody waits for long", Severity.WARNING, _oldest, 15.0,
        "A band is not served: it is outranked, its limit is too low, or a stage is full.",
        "Queues: is the stage full, or only this band held back by its ceiling?",
        "Raise the band's priority or least share, or raise the stage's limit if engines have room.",
        "queues", 30.0, "s",
    ),
    Rule(
        "stage-full", "Stage full", Severity.WARNING, _stages, 60.0,
        "More work is in flight than the stage may hold; new requests wait in the queue.",
        "Split: does the planner propose to move a node there, and why does it hold?",
        "Approve the proposal or force a split. If both stages are full the cluster is too small for this load.",
        "split", 1.05, "x limit",
    ),
    Rule(
        "refusals", "Requests refused", Severity.WARNING, _drops, 30.0,
        "Requests are dropped: saturated, expired or displaced. Clients see 429 or 503 with a reason.",
        "Queues shows drops by reason and band.",
        "Expired: raise the longest wait or add room. Queue full: raise the band's limits. Displaced: premium pushes others out.",
        "queues", 10.0, "a minute",
    ),
    Rule(
        "gateway-degraded", "Gateway degraded", Severity.WARNING, _degraded, 15.0,
        "The gateway serves, but without something: Redis, a confirmed configuration, or telemetry.",
        "The text says what is missing and since when.",
        "Mend Redis; the gateway catches up by itself. Lost telemetry records are not recovered.",
        "overview",
    ),
    Rule(
        "telemetry-late", "Planner works on old numbers", Severity.WARNING, _telemetry, 30.0,
        "No load window was stored lately: the planner worker is away, or PostgreSQL refuses writes.",
        "Look at the log of the planner worker and at beat.",
        "Restart the worker. The split stays as it is meanwhile; the gateway is not affected.",
        "split", 60.0, "s",
    ),
    Rule(
        "switch-stuck", "Switch takes long", Severity.WARNING, _stuck, 0.0,
        "A node drains or switches for longer than its deadline allows.",
        "Split shows each node's step with its time.",
        "Roll the order back, or end the long answers that keep the node draining.",
        "split", 300.0, "s",
    ),
    Rule(
        "switch-failed", "Switch failed", Severity.WARNING, _failed, 0.0,
        "An order ended without its nodes having moved.",
        "Split, history: the step that failed says what the agent answered.",
        "Mend the node. The planner proposes again at the end of its next window.",
        "split",
    ),
    Rule(
        "reuse-lost", "KV computed twice", Severity.INFO, _lost, 300.0,
        "Much of what was in the cache once is computed again.",
        "KV reuse shows the cause: evicted (pool too small), routed (home node too busy), switched, fetch failed.",
        "Evicted: larger pools or shorter leases. Routed: fewer, larger nodes or a looser balance.",
        "reuse", 0.25, "of reusable",
    ),
    Rule(
        "prediction-off", "TTFT prediction off", Severity.INFO, _prediction, 300.0,
        "The router chooses by predictions that do not hold; the cost model no longer fits the engines.",
        "Model compares predicted with measured.",
        "Let it refit; if it stays off, an engine runs slower than its class.",
        "model", 0.5, "ratio",
    ),
    Rule(
        "key-expires", "API key expires", Severity.INFO, _keys, 0.0,
        "Clients that use this key are refused from that day on.",
        "Tenants shows when it was last used.",
        "Rotate the key and give the new one to its users before that day.",
        "tenants", 7.0, "days",
    ),
)  # fmt: skip
BY_NAME: dict[str, Rule] = {rule.name: rule for rule in RULES}
