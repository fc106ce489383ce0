"""Severities and states of alerts."""

from __future__ import annotations

from django.db.models import TextChoices


class Severity(TextChoices):
    CRITICAL = "critical", "Critical"
    WARNING = "warning", "Warning"
    INFO = "info", "Note"

    @property
    def tone(self) -> str:
        return {"critical": "bad", "warning": "warn", "info": "note"}[self.value]


class AlertState(TextChoices):
    """pending: holds, though not yet for as long as the rule asks."""

    PENDING = "pending", "Pending"
    FIRING = "firing", "Firing"
    RESOLVED = "resolved", "Resolved"
