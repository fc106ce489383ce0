"""Policies of flow control, with label and colour."""

from __future__ import annotations

from django.db.models import TextChoices


class Fairness(TextChoices):
    """Whose turn it is within a band."""

    GLOBAL_STRICT = "global-strict", "One line"
    ROUND_ROBIN = "round-robin", "Round robin"
    TOKEN_FAIR = "token-fair", "Token fair"
    LEAST_ATTAINED_SERVICE = "least-attained-service", "Least attained service"

    @property
    def colour(self) -> str:
        return "grey"


class Ordering(TextChoices):
    """Which request of a flow goes first."""

    FCFS = "fcfs", "First come, first served"
    EDF = "edf", "Earliest deadline"
    SLO_DEADLINE = "slo-deadline", "SLO deadline"
    CONTINUE_FIRST = "continue-first", "Running branches first"

    @property
    def colour(self) -> str:
        return "grey"


class Detector(TextChoices):
    """How a stage's saturation is measured."""

    CONCURRENCY = "concurrency", "Concurrency"
    UTILIZATION = "utilization", "Utilization"
    PREDICTED_TTFT = "predicted-ttft", "Predicted TTFT"

    @property
    def colour(self) -> str:
        return "grey"


class LimitMode(TextChoices):
    """What the concurrency detector counts."""

    REQUESTS = "requests", "Requests"
    TOKENS = "tokens", "Tokens"
    HYBRID = "hybrid", "Requests and tokens"

    @property
    def colour(self) -> str:
        return "grey"
