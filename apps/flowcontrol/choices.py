"""Policies that flow control offers, with label and colour; the machine's own lists in `domain/config.py` decide."""

from __future__ import annotations

from django.db.models import TextChoices


class Fairness(TextChoices):
    """Whose turn it is within a band."""

    ROUND_ROBIN = "round-robin", "Round robin"
    GLOBAL_STRICT = "global-strict", "One line"

    @property
    def colour(self) -> str:
        return "grey"


class Ordering(TextChoices):
    """Which request of a flow goes first."""

    FCFS = "fcfs", "First come, first served"
    EDF = "edf", "Earliest deadline"

    @property
    def colour(self) -> str:
        return "grey"


class Detector(TextChoices):
    """How a stage's saturation is measured."""

    CONCURRENCY = "concurrency", "Concurrency"
    OFF = "off", "Off"

    @property
    def colour(self) -> str:
        return "red" if self is Detector.OFF else "grey"


class LimitMode(TextChoices):
    """What the concurrency detector counts."""

    REQUESTS = "requests", "Requests"

    @property
    def colour(self) -> str:
        return "grey"
