"""Small builders of nodes and queries for the routing tests."""

from __future__ import annotations

from apps.planning.domain.cost_model import DecodeCoefficients, NetworkProfile, PrefillCoefficients
from apps.routing.domain.views import DecodeQuery, NodeFacts, NodeView, PrefillQuery, RoutingPolicy

PREFILL = PrefillCoefficients(c0=0.01, c1=1e-4, c2=0.0, c3=0.0)
DECODE = DecodeCoefficients(d0=0.010, d1=0.0, d2=0.001)
NETWORK = NetworkProfile(
    kv_bytes_per_token=1000, peer_bandwidth_bytes_s=1e9, host_to_device_bytes_s=1e12, latency_s=0.001
)


def facts(name: str, phase: str = "prefill", **fields) -> NodeFacts:
    values = {"prefill": PREFILL, "decode": DECODE, "decode_limit": 8, **fields}
    return NodeFacts(name=name, order=int(name[1:]), phase=phase, **values)


def view(name: str, phase: str = "prefill", load: dict | None = None, **fields) -> NodeView:
    return NodeView(facts(name, phase, **fields), **(load or {}))


def prefill_query(prompt_tokens: int = 1600, matches: dict | None = None, **fields) -> PrefillQuery:
    return PrefillQuery("r", prompt_tokens, matches or {}, 16, **fields)


def decode_query(context_tokens: int = 100, output_tokens: int = 10, **fields) -> DecodeQuery:
    return DecodeQuery("r", context_tokens, output_tokens, **fields)


def policy(name: str = "ttft", **fields) -> RoutingPolicy:
    return RoutingPolicy(name, NETWORK, **fields)
