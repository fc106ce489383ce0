"""Policies that flow control offers, with label and colour; the machine's own lists in `domain/config.py` decide."""

from __future__ import annotations

from django.db.models import TextChoices


class Fairness(TextChoices):
    """Whose turn it is within a band."""

    ROUND_ROBIN = "round-robin", "Round robin"
    GLOBAL_STRICT = "global-strict", "One line"
    TOKEN_FAIR = "token-fair", "Equal tokens by weight"
    LEAST_ATTAINED = "least-attained-service", "Least served agent"

    @property
    def colour(self) -> str:
        return "grey"


class Ordering(TextChoices):
    """Which request of a flow goes first."""

    FCFS = "fcfs", "First come, first served"
    EDF = "edf", "Earliest deadline"
    SLO_DEADLINE = "slo-deadline", "Earliest wished TTFT"
    CONTINUE_FIRST = "continue-first", "Agents under way first"

    @property
    def colour(self) -> str:
        return "grey"


class Detector(TextChoices):
    """How a stage's saturation is measured."""

    CONCURRENCY = "concurrency", "Concurrency"
    UTILIZATION = "utilization", "Utilization"
    PREDICTED_TTFT = "predicted-ttft", "Predicted TTFT"
    OFF = "off", "Off"

    @property
    def colour(self) -> str:
        return "red" if self is Detector.OFF else "grey"


class LimitMode(TextChoices):
    """What the concurrency detector counts."""

    REQUESTS = "requests", "Requests"
    TOKENS = "tokens", "Tokens"
    HYBRID = "hybrid", "Requests and tokens"

    @property
    def colour(self) -> str:
        return "grey"


class CeilingPolicy(TextChoices):
    """How full the stages may be for a band to go."""

    STATIC = "static", "Each band's own"
    PRIORITY_HOLDBACK = "priority-holdback", "Lower by rank"

    @property
    def colour(self) -> str:
        return "grey"
