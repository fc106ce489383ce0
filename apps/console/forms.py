"""Forms of the console. They read what was typed; what is allowed is the services' business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.contrib.auth.models import User
from django.core import signing
from django.db.models import Model
from django.forms.models import fields_for_model
from django.utils import timezone

from apps.flowcontrol.models import Band, FlowSettings, Objective
from apps.flowcontrol.selectors import BAND_FIELDS
from apps.planning.choices import Mode
from apps.planning.models import PlannerPolicy
from apps.telemetry import webhooks
from apps.telemetry.models import AlertSetting
from apps.telemetry.rules import Rule
from apps.tenancy.choices import KeyRole
from apps.tenancy.models import Tenant
from apps.topology.choices import Phase
from apps.topology.models import Node, Partition
from controlplane.audit import MAX_REASON_CHARS
from controlplane.errors import InvalidField, SwitchyardError


class ServiceForm(forms.Form):
    """A form whose fields are a service's arguments; a service's error lands at the field it names."""

    reason = forms.CharField(
        required=False, max_length=MAX_REASON_CHARS, label="Reason", help_text="Kept in the audit trail."
    )
    # Codes of conflicts that belong to one field.
    conflict_fields: dict[str, str] = {}
    stale: list[dict[str, Any]] = []

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


class RowForm(ServiceForm):
    """Edits one row in place. It remembers what the row was when it was shown (`base`), so that an edit of someone else in
    between is seen: `theirs` says what they changed, and nothing is saved over it unread."""

    row_fields: tuple[str, ...] = ()
    base = forms.CharField(required=False, widget=forms.HiddenInput)

    def __init__(self, row: Model, data: Any = None, **kwargs: Any) -> None:
        self.row = row
        now = {name: self.read(row, name) for name in self.row_fields}
        self._now = now
        super().__init__(data, initial=now | {"base": signing.dumps(now)}, **kwargs)
        self.fields["base"].initial = signing.dumps(now)

    @staticmethod
    def read(row: Any, name: str) -> Any:
        """The value of the row that a field shows."""
        return getattr(row, name)

    def clean_base(self) -> dict[str, Any]:
        """What the row was; without it (a form that was not shown by us) nothing is known to have changed since."""
        text = str(self.cleaned_data["base"])
        try:
            was: dict[str, Any] = signing.loads(text) if text else {}
        except signing.BadSignature:
            self.add_error(None, "This form is not the one that was shown; open it again.")
            return {}
        return was

    @property
    def _base(self) -> dict[str, Any]:
        return dict(self.cleaned_data.get("base") or self._now)

    @property
    def theirs(self) -> dict[str, tuple[Any, Any]]:
        """What was changed since the form was shown: name to (was, is now)."""
        return {name: (self._base.get(name), now) for name, now in self._now.items() if self._base.get(name) != now}

    def changes(self) -> dict[str, Any]:
        """Only what was changed in this form, so that two people who edit different fields do not undo each other."""
        return {
            name: self.cleaned_data[name]
            for name in self.row_fields
            if name in self.cleaned_data and self.cleaned_data[name] != self._base.get(name)
        }

    def onto_theirs(self) -> None:
        """Makes the form show what the row is now, with the own changes on top; saving it again saves those."""
        mine = self.changes()
        values: Any = self.data.copy()  # type: ignore[attr-defined]
        for name, now in self._now.items():
            if name not in mine:
                values.setlist(self.add_prefix(name), now if isinstance(now, list) else ["" if now is None else now])
        values[self.add_prefix("base")] = signing.dumps(self._now)
        self.data = values


def _of_model(model: type[Model], names: Sequence[str], told: Mapping[str, tuple[str, str]] = {}) -> dict[str, Any]:
    """Form fields for columns of a table, with `told` as (label, help) where the column's own words are not for operators."""
    fields: dict[str, Any] = fields_for_model(model, fields=list(names))
    for name, (label, help_text) in told.items():
        if name in fields:
            fields[name].label, fields[name].help_text = label or fields[name].label, help_text
    return fields


_BAND_NAMES = tuple(name for name in BAND_FIELDS if name != "name")
_BAND_TOLD = {
    "priority": ("", "Higher goes first."),
    "ttl_s": ("Longest wait (s)", "Then the request is refused. Empty takes the default of all bands."),
    "max_requests": ("Most requests", "Waiting at once."),
    "max_bytes": ("Most bytes", "Waiting at once."),
    "min_share": ("Least share", "0 to 0.9, kept free for this band."),
    "ceiling": ("", "0 to 1: the fullness at which it must wait."),
    "fairness": ("", "Whose turn it is."),
    "ordering": ("", "Within one tenant."),
    "ttft_budget_s": ("TTFT budget (s)", "For the predicted-ttft gate. Empty takes the stage's."),
}


class _BandFields(RowForm):
    """What an operator may edit of a band."""

    conflict_fields = {"priority-taken": "priority"}
    row_fields = _BAND_NAMES
    field_order = [*_BAND_NAMES, "reason"]


class BandForm(_BandFields):
    locals().update(_of_model(Band, _BAND_NAMES, _BAND_TOLD))

    def __init__(self, band: Band, data: Any = None) -> None:
        super().__init__(band, data, prefix=f"band-{band.name}")


_FLOW_NAMES = tuple(
    column.name for column in FlowSettings._meta.fields if column.name not in ("id", "partition", "default_band")
)


class FlowForm(RowForm):
    """A partition's limits and the gates of its stages."""

    row_fields = _FLOW_NAMES
    locals().update(
        _of_model(FlowSettings, _FLOW_NAMES, {"displacement": ("", "A full queue drops from the lowest band.")})
    )
    field_order = [*_FLOW_NAMES, "reason"]


_POLICY_TOLD = {
    "slice_s": ("Slice (s)", "What is averaged over."),
    "slices_per_window": ("Slices in a window", "Then the planner decides."),
    "cooldown_s": ("Cooldown (s)", "After a switch nothing is switched for so long."),
    "drain_deadline_s": ("Drain deadline (s)", "Then a node switches while old work still runs."),
    "slo_ttft_s": ("TTFT target (s)", "Empty: no target."),
    "max_stale_ratio": ("Stale reports at most", "0 to 1; with more the planner holds."),
    "min_utilisation": ("Busy at least", "0 to 1; an idle cluster is not switched."),
    "approvals_required": ("Approvals needed", ""),
    "self_approval": ("Own approval counts", "Who proposed may approve."),
}


class PolicyForm(RowForm):
    """How patiently the planner decides."""

    row_fields = tuple(_POLICY_TOLD)
    locals().update(_of_model(PlannerPolicy, tuple(_POLICY_TOLD), _POLICY_TOLD))
    field_order = [*_POLICY_TOLD, "reason"]


class RoutingForm(RowForm):
    row_fields = ("title", "routing_policy")
    locals().update(_of_model(Partition, ("title", "routing_policy")))
    field_order = ["title", "routing_policy", "reason"]


class LeaseForm(RowForm):
    """How long a silent branch keeps its blocks."""

    row_fields = ("multiple", "floor_s", "ceiling_s")
    multiple = forms.FloatField(min_value=0.1, help_text="Of its longest pause so far.")
    floor_s = forms.FloatField(label="At least (s)", min_value=1)
    ceiling_s = forms.FloatField(label="At most (s)", min_value=1)
    field_order = ["multiple", "floor_s", "ceiling_s", "reason"]
    conflict_fields = {"lease": "multiple"}

    def __init__(self, partition: Partition, data: Any = None) -> None:
        super().__init__(partition, data, prefix="lease")

    @staticmethod
    def read(row: Any, name: str) -> Any:
        return row.lease[name]


class ObjectiveForm(RowForm):
    row_fields = ("band_name", "slo_ttft_s", "ttl_s")
    band_name = forms.ChoiceField(label="Band")
    slo_ttft_s = forms.FloatField(label="TTFT target (s)", required=False, help_text="Empty: none.")
    ttl_s = forms.FloatField(label="Longest wait (s)", required=False, help_text="Empty: the band's.")
    field_order = ["band_name", "slo_ttft_s", "ttl_s", "reason"]
    conflict_fields = {"band": "band_name"}

    def __init__(self, objective: Objective, bands: Sequence[str], data: Any = None) -> None:
        super().__init__(objective, data, prefix=f"objective-{objective.name}")
        self.fields["band_name"].choices = [(name, name) for name in bands]  # type: ignore[attr-defined]

    @staticmethod
    def read(row: Any, name: str) -> Any:
        return row.band.name if name == "band_name" else getattr(row, name)


class TenantForm(RowForm):
    row_fields = ("title", "weight", "sharing_domain", "default_objective")
    title = forms.CharField(required=False, max_length=120)
    weight = forms.FloatField(help_text="Its share beside other tenants of a band.")
    sharing_domain = forms.SlugField(max_length=63, help_text="KV is shared with all tenants of the same domain.")
    default_objective = forms.ChoiceField(label="Objective", help_text="For requests that name none.")
    field_order = ["title", "weight", "sharing_domain", "default_objective", "reason"]

    def __init__(self, tenant: Tenant, objectives: Sequence[str], data: Any = None) -> None:
        super().__init__(tenant, data, prefix="tenant")
        self.fields["default_objective"].choices = [(name, name) for name in objectives]  # type: ignore[attr-defined]


class NewTenantForm(ServiceForm):
    name = forms.SlugField(max_length=63, help_text="Lower case, cannot be changed.")
    title = forms.CharField(required=False, max_length=120)
    sharing_domain = forms.SlugField(required=False, max_length=63, help_text="Empty: one of its own.")
    weight = forms.FloatField(initial=1.0)
    default_objective = forms.ChoiceField(label="Objective")
    field_order = ["name", "title", "weight", "sharing_domain", "default_objective", "reason"]

    def __init__(self, objectives: Sequence[str], data: Any = None, **kwargs: Any) -> None:
        super().__init__(data, **kwargs)
        self.fields["default_objective"].choices = [(name, name) for name in objectives]  # type: ignore[attr-defined]
        if "standard" in objectives:
            self.fields["default_objective"].initial = "standard"


class MemberForm(ServiceForm):
    username = forms.CharField(max_length=150, label="User name")
    field_order = ["username", "reason"]

    def clean_username(self) -> str:
        name = str(self.cleaned_data["username"])
        if not User.objects.filter(username=name).exists():
            raise forms.ValidationError("There is no user of this name; an administrator adds users in the admin site.")
        return name


def _address() -> forms.CharField:
    return forms.CharField(label="Address", max_length=300, help_text="http:// or https://")


def _kinds() -> forms.MultipleChoiceField:
    choices = [("*", "everything"), *((kind, kind) for kind in webhooks.KINDS if kind != "test")]
    return forms.MultipleChoiceField(
        choices=choices, widget=forms.CheckboxSelectMultiple, initial=["alert"], label="Told of"
    )


class ChannelForm(ServiceForm):
    name = forms.SlugField(max_length=63)
    url = _address()
    kinds = _kinds()
    field_order = ["name", "url", "kinds", "reason"]


class ChannelEditForm(RowForm):
    row_fields = ("url", "kinds")
    url = _address()
    kinds = _kinds()
    field_order = ["url", "kinds", "reason"]


class RuleForm(ServiceForm):
    enabled = forms.BooleanField(required=False, label="Looked at")
    threshold = forms.FloatField(required=False, min_value=0)
    field_order = ["enabled", "threshold", "reason"]

    def __init__(self, rule: Rule, setting: AlertSetting | None, data: Any = None) -> None:
        initial = {
            "enabled": setting is None or setting.enabled,
            "threshold": setting.threshold if setting is not None else None,
        }
        super().__init__(data, initial=initial, prefix=f"rule-{rule.name}")
        if rule.threshold is None:
            del self.fields["threshold"]
        else:
            self.fields["threshold"].label = f"Threshold ({rule.unit})"
            self.fields["threshold"].help_text = f"Empty: the rule's own, {rule.threshold:g}."

    def changes(self) -> dict[str, Any]:
        return {name: self.cleaned_data[name] for name in ("enabled", "threshold") if name in self.changed_data}


class ReasonForm(ServiceForm):
    """An action that needs nothing but a reason; whether it may be empty is the service's business."""


class WhyForm(ServiceForm):
    """An action that is not done without saying why."""

    def __init__(self, data: Any = None, **kwargs: Any) -> None:
        super().__init__(data, **kwargs)
        self.fields["reason"].required = True
        self.fields["reason"].error_messages["required"] = "Say why; this needs a reason."


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


class SilenceForm(_Ending):
    field_order = ["minutes", "reason"]


KEY_LIVES = (("30", "30 days"), ("90", "90 days"), ("365", "1 year"), ("", "until it is revoked"))


class KeyForm(ServiceForm):
    name = forms.CharField(max_length=63, help_text="What it is for.")
    role = forms.ChoiceField(
        choices=KeyRole.choices, required=False, help_text="Of the control plane, beside inference."
    )
    objectives = forms.MultipleChoiceField(
        required=False, widget=forms.CheckboxSelectMultiple, help_text="None chosen: all."
    )
    trusted = forms.BooleanField(
        required=False, label="Trusted", help_text="May set fairness id, objective and deadlines."
    )
    days = forms.ChoiceField(choices=KEY_LIVES, initial="90", required=False, label="Valid for")
    owner = forms.CharField(
        required=False,
        max_length=150,
        label="Whose",
        help_text="The user who acts through it. Empty: a service, without a vote.",
    )
    field_order = ["name", "role", "owner", "days", "trusted", "objectives", "reason"]
    conflict_fields = {"already-exists": "name", "expires_at": "days"}

    def __init__(self, objectives: Sequence[str], data: Any = None, **kwargs: Any) -> None:
        super().__init__(data, **kwargs)
        self.fields["objectives"].choices = [(name, name) for name in objectives]  # type: ignore[attr-defined]

    @property
    def until(self) -> datetime | None:
        days = self.cleaned_data.get("days")
        return timezone.now() + timedelta(days=int(days)) if days else None


class TryForm(ServiceForm):
    """A split to try in the simulator."""

    prefill_nodes = forms.MultipleChoiceField(
        required=False, widget=forms.CheckboxSelectMultiple, label="Nodes that prefill", help_text="All others decode."
    )
    conflict_fields = {"phase-left-empty": "prefill_nodes"}
    field_order = ["prefill_nodes", "reason"]

    def __init__(self, nodes: list[Node], data: Any = None, **kwargs: Any) -> None:
        chosen = [node.name for node in nodes if node.desired_phase == Phase.PREFILL]
        super().__init__(data, initial={"prefill_nodes": chosen}, **kwargs)
        self.fields["prefill_nodes"].choices = [(node.name, node.name) for node in nodes]  # type: ignore[attr-defined]


class RunForm(ServiceForm):
    """How much of an experiment is run."""

    how = forms.ChoiceField(
        label="How much",
        choices=[("quick", "One seed, half of the time"), ("full", "Three seeds, the whole time")],
        help_text="The whole takes about six times as long.",
    )
    field_order = ["how", "reason"]


class ConfirmForm(_Confirmed):
    """A typed confirmation and a reason, and nothing that ends."""

    field_order = ["reason", "confirm"]

    def __init__(self, expected: str, data: Any = None, **kwargs: Any) -> None:
        super().__init__(expected, data, **kwargs)
        del self.fields["minutes"]


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
