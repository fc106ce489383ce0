"""Forms of the console. They read what was typed; what is allowed is the services' business."""

from __future__ import annotations

from typing import Any

from django import forms

from apps.flowcontrol.choices import Fairness, Ordering
from apps.flowcontrol.models import Band
from controlplane.audit import MAX_REASON_CHARS
from controlplane.errors import InvalidField, SwitchyardError


class ServiceForm(forms.Form):
    """A form whose fields are a service's arguments; a service's error lands at the field it names."""

    reason = forms.CharField(
        required=False, max_length=MAX_REASON_CHARS, label="Reason", help_text="Kept in the audit trail."
    )
    # Codes of conflicts that belong to one field.
    conflict_fields: dict[str, str] = {}

    def refuse(self, error: SwitchyardError) -> None:
        """Shows a service's error at its field, or above the form when it concerns none."""
        field = error.field if isinstance(error, InvalidField) else self.conflict_fields.get(error.code)
        known = field if field in self.fields else None
        message = error.expected if isinstance(error, InvalidField) and known else error.message
        self.add_error(known, f"{message[:1].upper()}{message[1:]}.")

    @property
    def reason_given(self) -> str:
        return str(self.cleaned_data.get("reason") or "")


class BandForm(ServiceForm):
    """What an operator may edit of a band."""

    conflict_fields = {"priority-taken": "priority"}

    priority = forms.IntegerField(help_text="Higher goes first.")
    ttl_s = forms.FloatField(label="Longest wait (s)", help_text="Then the request is refused.")
    max_requests = forms.IntegerField(label="Most requests")
    max_bytes = forms.IntegerField(label="Most bytes")
    min_share = forms.FloatField(label="Least share", help_text="0 to 1, kept free for this band.")
    ceiling = forms.FloatField(help_text="0 to 1: the fullness at which it must wait.")
    fairness = forms.ChoiceField(choices=Fairness.choices, help_text="Whose turn it is.")
    ordering = forms.ChoiceField(choices=Ordering.choices, help_text="Within one tenant.")
    field_order = [
        "priority",
        "ttl_s",
        "max_requests",
        "max_bytes",
        "min_share",
        "ceiling",
        "fairness",
        "ordering",
        "reason",
    ]

    def __init__(self, band: Band, data: Any = None) -> None:
        names = [name for name in self.field_order if name != "reason"]
        super().__init__(data, initial={name: getattr(band, name) for name in names}, prefix=f"band-{band.name}")

    def changes(self) -> dict[str, Any]:
        """Only what was changed, so that two people who edit different fields do not undo each other."""
        return {name: self.cleaned_data[name] for name in self.changed_data if name != "reason"}
