"""Roles a control-plane key may carry."""

from __future__ import annotations

from django.db.models import TextChoices


class KeyRole(TextChoices):
    """What an API key may do with the control plane; blank is a key for inference alone."""

    INFERENCE = "", "Inference only"
    VIEWER = "viewer", "Viewer"
    OPERATOR = "operator", "Operator"
    ADMINISTRATOR = "administrator", "Administrator"

    @property
    def colour(self) -> str:
        return {"": "grey", "viewer": "blue", "operator": "amber", "administrator": "red"}[self.value]
