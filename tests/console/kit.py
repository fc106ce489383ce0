"""What the console's tests start from: a snapshot as a gateway would publish it, and its way into Redis."""

import json
import time

from controlplane import redis_client


def node(name, phase="prefill", **changes):
    return {
        "name": name,
        "phase": phase,
        "target_phase": phase,
        "state": "ready",
        "generation": 1,
        "health": "ok",
        "age_s": 0.4,
        "running_prefill": 1 if phase == "prefill" else 0,
        "queued_prefill": 2 if phase == "prefill" else 0,
        "queued_tokens": 12_345 if phase == "prefill" else 0,
        "predicted_wait_s": 0.75,
        "running_decode": 0 if phase == "prefill" else 32,
        "announced_decode": 0 if phase == "prefill" else 3,
        "decode_limit": 128,
        "pool_used_blocks": 600,
        "pool_capacity_blocks": 1000,
        "pool_referenced_blocks": 250,
        "last_switch": None,
        **changes,
    }


def band(name, priority, waiting=0, **changes):
    return {
        "name": name,
        "priority": priority,
        "waiting": waiting,
        "waiting_bytes": waiting * 1000,
        "oldest_s": 1.5 if waiting else 0.0,
        "expected_wait_s": 2.5,
        "dispatched_per_s": 3.25,
        "dispatched_total": 1234,
        "dropped": {},
        "flows": [{"id": "acme", "waiting": waiting, "oldest_s": 1.5, "dispatched_total": 1234}],
        **changes,
    }


def snapshot(partition="gb300", seq=1, **changes):
    """A snapshot in which everything is fine; `changes` replace whole parts."""
    quantiles = {"p50": 0.5, "p95": 1.25, "p99": 2.0, "n": 60}
    return {
        "v": 1,
        "partition": partition,
        "t": time.time(),
        "seq": seq,
        "config_version": 1,
        "config_error": None,
        "gateway": {"started_at": time.time() - 60, "degraded": []},
        "verdict": {"level": "fine", "stage": None, "reason": "no stage is full"},
        "split": {"prefill": 1, "decode": 2, "mixed": 0, "down": 0},
        "nodes": [node(f"{partition}-1"), node(f"{partition}-2", "decode"), node(f"{partition}-3", "decode")],
        "bands": [band("standard", 0, 4), band("premium", 100)],
        "stages": {
            "prefill": {"saturation": 1.3, "in_flight": 4, "limit": 3},
            "decode": {"saturation": 0.25, "in_flight": 64, "announced": 6, "limit": 256},
        },
        "latency": {
            "window_s": 60,
            "ttft_s": quantiles,
            "e2e_s": quantiles,
            "tpot_s": quantiles,
            "queue_s": quantiles,
            "ttft_error_ratio": {"p50": 0.07, "n": 60},
        },
        "throughput": {
            "requests_per_s": 1.5,
            "prompt_tokens_per_s": 120_000,
            "computed_tokens_per_s": 20_000,
            "output_tokens_per_s": 900,
        },
        "reuse": {
            "prompt_tokens": 1000,
            "ideal_tokens": 900,
            "actual_tokens": 800,
            "lost": {"evicted": 60, "routed": 40},
            "branches_live": 7,
        },
        "requests": {
            "arrived": 10,
            "dispatched": 9,
            "completed": 8,
            "failed": 0,
            "dropped": 1,
            "cancelled": 0,
            "waiting": 4,
            "running": 1,
        },
        "recent": [
            {
                "id": "req-00000001",
                "t": time.time(),
                "tenant": "acme",
                "band": "standard",
                "branch": "b1",
                "prefill_node": f"{partition}-1",
                "decode_node": f"{partition}-2",
                "prompt_tokens": 1000,
                "cached_tokens": 800,
                "output_tokens": 20,
                "queue_s": 0.1,
                "ttft_s": 0.6,
                "predicted_ttft_s": 0.5,
                "e2e_s": 2.0,
                "outcome": "completed",
                "reason": "least predicted TTFT <0.5 s>",
            }
        ],
        **changes,
    }


def publish_snapshot(client, data):
    """Puts a snapshot where the gateway puts it."""
    client.set(redis_client.live_key(data["partition"]), json.dumps(data), ex=10)
    return data


def candidate(prefill, decode, gain, error, threshold, code, moves=(), rule=None):
    """A candidate as the planner stores it."""
    passed = code == "switch"
    return {
        "prefill": list(prefill),
        "decode": list(decode),
        "moves": [{"node": n, "from_phase": a, "to_phase": b} for n, a, b in moves],
        "theta": 2.0 + (gain or 0.0),
        "bottleneck": "prefill",
        "gate": {
            "passed": passed,
            "gain": gain,
            "standard_error": error,
            "slices": 8,
            "code": code,
            "threshold": threshold,
            "autocorrelation": 0.0,
        },
        "gains": [gain],
        "prefill_wait_p95_s": 0.5,
        "closed_loop": None,
        "outside_fit": False,
        "rule": rule or code,
        "reason": f"because of {code}",
    }
