"""Phases, states, engines and routing policies, each with the label and the colour that every page uses."""

from __future__ import annotations

from django.db.models import TextChoices


class Phase(TextChoices):
    PREFILL = "prefill", "Prefill"
    DECODE = "decode", "Decode"
    MIXED = "mixed", "Mixed"

    @property
    def colour(self) -> str:
        return {"prefill": "blue", "decode": "green", "mixed": "violet"}[self.value]


class NodeState(TextChoices):
    READY = "ready", "Ready"
    DRAINING = "draining", "Draining"
    SWITCHING = "switching", "Switching"
    DOWN = "down", "Down"

    @property
    def colour(self) -> str:
        return {"ready": "green", "draining": "amber", "switching": "orange", "down": "red"}[self.value]


class Engine(TextChoices):
    REFERENCE = "reference", "Reference (numpy)"
    SIMULATED = "simulated", "Simulated"
    VLLM = "vllm", "vLLM (existing)"
    SGLANG = "sglang", "SGLang (existing)"

    @property
    def colour(self) -> str:
        return {"reference": "blue", "simulated": "grey", "vllm": "violet", "sglang": "green"}[self.value]

    @property
    def is_direct(self) -> bool:
        """An existing server, driven by its URL without an agent."""
        return self in (Engine.VLLM, Engine.SGLANG)


class RoutingPolicy(TextChoices):
    TTFT = "ttft", "Least predicted TTFT"
    ROUND_ROBIN = "round-robin", "Round robin"
    LEAST_LOADED = "least-loaded", "Least loaded"
    CACHE_AWARE = "cache-aware", "Cache aware"
    STICKY = "sticky", "Sticky session"
    DYNAMO_KV = "dynamo-kv", "Dynamo KV cost"

    @property
    def colour(self) -> str:
        return "blue" if self is RoutingPolicy.TTFT else "grey"
