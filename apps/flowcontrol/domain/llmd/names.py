"""llm-d's names for policies and detectors beside ours, and its defaults. Names with us alone end in the same way."""

from __future__ import annotations

from typing import Final

API_VERSIONS: Final = (
    "llm-d.ai/v1alpha1",
    "llm-d.ai/v1",
    "inference.networking.x-k8s.io/v1alpha1",
    "config.apix.gateway-api-inference-extension.sigs.k8s.io/v1alpha1",
)
OBJECTIVE_VERSIONS: Final = ("llm-d.ai/v1alpha2", "llm-d.ai/v1", "inference.networking.x-k8s.io/v1alpha2")
OWN_VERSION: Final = "switchyard/v1"
OWN_KIND: Final = "FlowControl"
SLO_ANNOTATION: Final = "switchyard/slo-ttft"
TTL_ANNOTATION: Final = "switchyard/ttl"

FAIRNESS: Final = {
    "global-strict-fairness-policy": "global-strict",
    "round-robin-fairness-policy": "round-robin",
    "program-aware-fairness": "least-attained-service",
    "token-fair-fairness-policy": "token-fair",
}
ORDERING: Final = {
    "fcfs-ordering-policy": "fcfs",
    "edf-ordering-policy": "edf",
    "slo-deadline-ordering-policy": "slo-deadline",
    "continue-first-ordering-policy": "continue-first",
}
OURS_ALONE: Final = ("token-fair-fairness-policy", "continue-first-ordering-policy", "predicted-ttft-detector")
CONCURRENCY: Final = "concurrency-detector"
UTILIZATION: Final = "utilization-detector"
PREDICTED_TTFT: Final = "predicted-ttft-detector"
COMPOSITE: Final = "max-saturation-detector"
OFF: Final = "no-detector"
DETECTORS: Final = (CONCURRENCY, UTILIZATION, PREDICTED_TTFT, COMPOSITE, OFF)
HOLDBACK: Final = "priority-holdback-policy"
STATIC_LIMIT: Final = "static-usage-limit-policy"

DEFAULT_FAIRNESS: Final = "global-strict-fairness-policy"
DEFAULT_ORDERING: Final = "fcfs-ordering-policy"
DEFAULT_BAND_REQUESTS: Final = 5000
DEFAULT_BAND_BYTES: Final = 10**9
DEFAULT_TTL_S: Final = 60.0
DEFAULT_CONCURRENCY: Final = 100
DEFAULT_TOKEN_CONCURRENCY: Final = 1_000_000
DEFAULT_QUEUE_DEPTH: Final = 5
DEFAULT_KV_UTILIZATION: Final = 0.8
DEFAULT_STALENESS: Final = "200ms"
LONGEST_TTL_S: Final = 86_400.0


def type_of(ours: str, names: dict[str, str]) -> str:
    """llm-d's plugin type for one of our policies."""
    return next(theirs for theirs, name in names.items() if name == ours)
