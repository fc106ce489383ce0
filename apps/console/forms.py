"""Forms of the console. They read what was typed; what is allowed is the services' business."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.utils import timezone

from apps.flowcontrol.choices import Fairness, Ordering
from apps.flowcontrol.models import Band
from apps.planning.choices import Mode
from apps.topology.choices import Phase
from apps.topology.models import Node
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
        field = self.conflict_fields.get(error.code)
        if isinstance(error, InvalidField):
            field = self.conflict_fields.get(error.field, error.field)
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


class ReasonForm(ServiceForm):
    """An action that needs nothing but a reason; whether it may be empty is the service's business."""


EXPIRIES = (
    ("15", "15 minutes"),
    ("60", "1 hour"),
    ("240", "4 hours"),
    ("1440", "24 hours"),
    ("", "until someone ends it"),
)


class _Ending(ServiceForm):
    """Something that holds until a chosen time."""

    minutes = forms.ChoiceField(choices=EXPIRIES, initial="60", required=False, label="Holds for")
    conflict_fields = {"expires_at": "minutes", "until": "minutes"}

    @property
    def until(self) -> datetime | None:
        minutes = self.cleaned_data.get("minutes")
        return timezone.now() + timedelta(minutes=int(minutes)) if minutes else None


class _Confirmed(_Ending):
    """An action that asks for the name of what it concerns, so that it never happens by a slip."""

    confirm = forms.CharField(required=False, max_length=80)

    def __init__(self, expected: str, data: Any = None, **kwargs: Any) -> None:
        super().__init__(data, **kwargs)
        self._expected = expected
        self.fields["reason"].required = True
        self.fields["reason"].error_messages["required"] = "Say why; this needs a reason."
        self.fields["confirm"].label = f"Type {expected} to confirm"
        self.fields["confirm"].widget.attrs |= {"autocomplete": "off", "autocapitalize": "none", "spellcheck": "false"}

    def clean_confirm(self) -> str:
        typed = str(self.cleaned_data["confirm"]).strip()
        if typed != self._expected:
            raise forms.ValidationError(f"Type {self._expected} here, exactly.")
        return typed


class ForceSplitForm(_Confirmed):
    """Who prefills; every other enabled node decodes."""

    conflict_fields = {"phase-left-empty": "prefill_nodes", "expires_at": "minutes"}
    prefill_nodes = forms.MultipleChoiceField(
        required=False, widget=forms.CheckboxSelectMultiple, label="Nodes that prefill", help_text="All others decode."
    )
    field_order = ["prefill_nodes", "minutes", "reason", "confirm"]

    def __init__(self, partition: str, nodes: list[Node], data: Any = None) -> None:
        prefilling = [node.name for node in nodes if node.desired_phase == Phase.PREFILL]
        super().__init__(partition, data, initial={"prefill_nodes": prefilling}, prefix="force")
        self.fields["prefill_nodes"].choices = [(node.name, node.name) for node in nodes]  # type: ignore[attr-defined]


class ForceNodeForm(_Confirmed):
    conflict_fields = {"phase-left-empty": "phase", "expires_at": "minutes"}
    phase = forms.ChoiceField(choices=Phase.choices)
    field_order = ["phase", "minutes", "reason", "confirm"]

    def __init__(self, node: Node, data: Any = None) -> None:
        other = Phase.DECODE if node.desired_phase == Phase.PREFILL else Phase.PREFILL
        super().__init__(node.name, data, initial={"phase": other}, prefix=f"force-{node.name}")


class FreezeForm(_Ending):
    field_order = ["minutes", "reason"]


class ModeForm(ServiceForm):
    """Who decides. Freezing has a form of its own, since it ends."""

    mode = forms.ChoiceField(
        choices=[choice for choice in Mode.choices if choice[0] != Mode.FROZEN], widget=forms.RadioSelect
    )
    field_order = ["mode", "reason"]
