"""A node's status as Prometheus text. Names start with `switchyard_node_`; every series carries `node`."""

from __future__ import annotations

from typing import Any


def render_metrics(status: dict[str, Any]) -> str:
    """Prometheus exposition (text 0.0.4) of one node's `status`."""
    node = status["node"]
    lines: list[str] = []

    def gauge(name: str, help_text: str, series: dict[str, float], kind: str = "gauge") -> None:
        lines.append(f"# HELP switchyard_node_{name} {help_text}")
        lines.append(f"# TYPE switchyard_node_{name} {kind}")
        for labels, value in series.items():
            extra = f",{labels}" if labels else ""
            lines.append(f'switchyard_node_{name}{{node="{node}"{extra}}} {value:.10g}')

    gauge("phase", "1 for the phase the node is in.", {f'phase="{status["phase"]}",state="{status["state"]}"': 1})
    gauge("generation", "Generation of the newest phase order.", {"": status["generation"]})
    for key in ("running", "queued"):
        series = {f'stage="{stage}"': value for stage, value in status[key].items()}
        gauge(f"{key}_requests", f"Requests {key} in the engine.", series)
    gauge("orphans", "Requests in the engine that nobody waits for.", {"": status["orphans"]})
    gauge("handoffs", "Computed contexts that wait for their decode node.", {"": status["handoffs"]})
    gauge("leases_ended_total", "Silent gateways whose requests were aborted.", {"": status["leases_ended"]}, "counter")
    gauge("stalled_seconds", "Time for which running work has made no iteration.", {"": status["stalled_s"]})
    gauge("queued_tokens", "Prompt tokens waiting for prefill.", {"": status["queued_tokens"]})
    pool = status["pool"]
    gauge("pool_capacity_blocks", "Blocks the host pool can hold.", {"": pool["capacity_blocks"]})
    gauge("pool_used_blocks", "Blocks in the host pool.", {"": pool["used_blocks"]})
    gauge(
        "pool_referenced_blocks", "Blocks in the host pool that a live branch needs.", {"": pool["referenced_blocks"]}
    )
    gauge("kv_free_tokens", "Free device KV.", {"": status["kv_free_tokens"]})
    for name, value in sorted(status["counters"].items()):
        gauge(f"{name}_total", f"Engine counter {name}.", {"": value}, "counter")
    return "\n".join(lines) + "\n"
