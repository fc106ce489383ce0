"""Tables of telemetry: what the gateways' streams brought (not audited; pruned by age), alerts, channels, actions.

Window borders `t0`, `t1` are unix seconds, as in the stream (docs/interfaces.md, section 10).
"""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from apps.telemetry.choices import AlertState, Severity
from apps.topology.models import Partition
from controlplane.audit import audited
from controlplane.validators import http_url


class RequestRecord(models.Model):
    """One finished (or refused) request. `detail` holds the whole entry: every candidate's terms and what was lost."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="requests")
    request_id = models.CharField(max_length=80)
    at = models.DateTimeField()
    tenant = models.CharField(max_length=63, blank=True)
    band = models.CharField(max_length=63, blank=True)
    branch = models.CharField(max_length=200, blank=True)
    branch_kind = models.CharField(max_length=16, blank=True)
    prefill_node = models.CharField(max_length=63, blank=True)
    decode_node = models.CharField(max_length=63, blank=True)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    cached_tokens = models.PositiveBigIntegerField(default=0)
    computed_tokens = models.PositiveBigIntegerField(default=0)
    fetched_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    queue_s = models.FloatField(null=True)
    ttft_s = models.FloatField(null=True)
    predicted_ttft_s = models.FloatField(null=True)
    e2e_s = models.FloatField(null=True)
    outcome = models.CharField(max_length=40, blank=True)
    drop_code = models.CharField(max_length=40, blank=True)
    reason = models.CharField(max_length=300, blank=True)
    detail = models.JSONField(default=dict)

    class Meta:
        ordering = ["-at", "-id"]
        constraints = [models.UniqueConstraint(fields=["partition", "request_id"], name="one_record_per_request")]
        # A list narrowed to what is rare must not read through a week of requests.
        indexes = [
            models.Index(fields=["partition", "-at", "-id"], name="request_by_time"),
            models.Index(fields=["partition", "tenant", "-at", "-id"], name="request_by_tenant"),
            models.Index(fields=["partition", "band", "-at", "-id"], name="request_by_band"),
            models.Index(fields=["partition", "branch", "-at", "-id"], name="request_by_branch"),
            models.Index(fields=["partition", "outcome", "-at", "-id"], name="request_by_outcome"),
            models.Index(fields=["partition", "prefill_node", "-at", "-id"], name="request_by_prefill_node"),
            models.Index(fields=["partition", "decode_node", "-at", "-id"], name="request_by_decode_node"),
        ]

    def __str__(self) -> str:
        return self.request_id


class CostWindow(models.Model):
    """Five seconds of one node: the row the cost model is fitted on."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="cost_windows")
    node = models.CharField(max_length=63)
    t0 = models.FloatField()
    t1 = models.FloatField()
    boot_id = models.CharField(max_length=80, blank=True)
    prefill_iterations = models.PositiveBigIntegerField(default=0)
    t_uc = models.PositiveBigIntegerField(default=0)
    pairs = models.PositiveBigIntegerField(default=0)
    t_rst = models.PositiveBigIntegerField(default=0)
    requests_prefilled = models.PositiveBigIntegerField(default=0)
    decode_iterations = models.PositiveBigIntegerField(default=0)
    batch_sum = models.PositiveBigIntegerField(default=0)
    batch_min = models.PositiveIntegerField(default=0)
    batch_max = models.PositiveIntegerField(default=0)
    batch_counts = models.JSONField(default=dict, help_text="{batch size: decode iterations}")
    busy_prefill_s = models.FloatField(default=0.0)
    busy_decode_s = models.FloatField(default=0.0)
    switching = models.BooleanField(default=False)

    class Meta:
        ordering = ["t0", "node"]
        constraints = [models.UniqueConstraint(fields=["partition", "node", "t0"], name="one_cost_window_per_node")]
        indexes = [models.Index(fields=["partition", "t1"], name="cost_by_time")]

    def __str__(self) -> str:
        return f"{self.node} {self.t0:.0f}-{self.t1:.0f}"


class LoadWindow(models.Model):
    """Two seconds of a partition's load: what slices are summed from."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="load_windows")
    t0 = models.FloatField()
    t1 = models.FloatField()
    arrived = models.PositiveBigIntegerField(default=0)
    prefilled = models.PositiveBigIntegerField(default=0)
    t_uc = models.PositiveBigIntegerField(default=0)
    t_c = models.PositiveBigIntegerField(default=0)
    pairs = models.PositiveBigIntegerField(default=0)
    t_rst = models.PositiveBigIntegerField(default=0)
    prefill_iterations = models.PositiveBigIntegerField(default=0)
    finished = models.PositiveBigIntegerField(default=0)
    t_out = models.PositiveBigIntegerField(default=0)
    decode_iterations_of_finished = models.FloatField(default=0.0)
    in_flight_s = models.FloatField(default=0.0, help_text="integral of requests in queue, prefill and decode")
    prefill_utilisation = models.FloatField(default=0.0)
    decode_utilisation = models.FloatField(default=0.0)
    prefill_waits_s = models.JSONField(default=list)
    stale_reports_ratio = models.FloatField(default=0.0)
    split = models.JSONField(default=dict, help_text="{prefill: nodes, decode: nodes}")

    class Meta:
        ordering = ["t0"]
        constraints = [models.UniqueConstraint(fields=["partition", "t0"], name="one_load_window_per_start")]
        indexes = [models.Index(fields=["partition", "t1"], name="load_by_time")]

    def __str__(self) -> str:
        return f"{self.partition} {self.t0:.0f}-{self.t1:.0f}"


class RequestSum(models.Model):
    """Requests that ended in one slot of time, summed up as they were stored (`apps.telemetry.periods.Sums`)."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="request_sums")
    slot_s = models.PositiveIntegerField()
    t0 = models.BigIntegerField(help_text="start of the slot, unix seconds")
    data = models.JSONField()
    tenants = models.JSONField(default=dict, help_text="{tenant: what it used}")

    class Meta:
        ordering = ["t0"]
        constraints = [models.UniqueConstraint(fields=["partition", "slot_s", "t0"], name="one_sum_per_slot")]

    def __str__(self) -> str:
        return f"{self.partition} {self.t0}+{self.slot_s} s"


class StreamCursor(models.Model):
    """The last stream id whose entries are stored; written in the same transaction as they are."""

    partition = models.OneToOneField(Partition, on_delete=models.CASCADE, related_name="stream_cursor")
    last_id = models.CharField(max_length=40, default="0-0")
    updated_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return f"{self.partition} at {self.last_id}"


class LiveSample(models.Model):
    """What the charts keep of one moment (a `point` of the console, docs/interfaces.md section 11), every 15 seconds."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="samples")
    t = models.FloatField()
    data = models.JSONField()

    class Meta:
        ordering = ["t"]
        constraints = [models.UniqueConstraint(fields=["partition", "t"], name="one_sample_per_moment")]

    def __str__(self) -> str:
        return f"{self.partition} at {self.t:.0f}"


@audited()
class AlertSetting(models.Model):
    """What an operator changed of a rule in one partition; the rules themselves are `apps.telemetry.rules`."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="alert_settings")
    rule = models.SlugField(max_length=40)
    enabled = models.BooleanField(default=True)
    threshold = models.FloatField(null=True, blank=True, help_text="null: the rule's own")
    silenced_until = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["partition", "rule"], name="one_setting_per_rule")]

    def __str__(self) -> str:
        return f"{self.partition}: {self.rule}"


class Alert(models.Model):
    """One stretch of time during which a rule held about a subject (a node, a band, or "" for the partition)."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="alerts")
    rule = models.SlugField(max_length=40)
    subject = models.CharField(max_length=120, blank=True)
    severity = models.CharField(max_length=16, choices=Severity.choices)
    state = models.CharField(max_length=16, choices=AlertState.choices, default=AlertState.PENDING)
    summary = models.CharField(max_length=300)
    value = models.FloatField(null=True)
    since = models.DateTimeField(default=timezone.now)
    fired_at = models.DateTimeField(null=True, blank=True)
    resolved_at = models.DateTimeField(null=True, blank=True)
    acknowledged_by = models.CharField(max_length=160, blank=True)
    acknowledged_at = models.DateTimeField(null=True, blank=True)
    note = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["-since", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["partition", "rule", "subject"], condition=models.Q(resolved_at=None), name="one_open_alert"
            )
        ]
        indexes = [models.Index(fields=["partition", "-since"], name="alert_by_time")]

    def __str__(self) -> str:
        return f"{self.partition}: {self.rule} {self.subject} ({self.state})"


@audited("secret", "last_status", "last_at")
class Channel(models.Model):
    """Where alerts and decisions are told: an HTTP address that gets signed JSON. `secret` is shown once."""

    name = models.SlugField(max_length=63, unique=True)
    url = models.CharField(max_length=300, validators=[http_url])
    secret = models.CharField(max_length=80)
    secret_set_at = models.DateTimeField(default=timezone.now, editable=False)
    kinds = models.JSONField(default=list, help_text='kinds such as "alert" or "decision"; ["*"] for all')
    enabled = models.BooleanField(default=True)
    last_status = models.CharField(max_length=200, blank=True)
    last_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Delivery(models.Model):
    """One message to one channel, and how it went. Tried again until it is delivered or given up."""

    channel = models.ForeignKey(Channel, on_delete=models.CASCADE, related_name="deliveries")
    event_id = models.CharField(max_length=40)
    kind = models.CharField(max_length=40)
    body = models.JSONField()
    attempts = models.PositiveIntegerField(default=0)
    next_try_at = models.DateTimeField(default=timezone.now)
    delivered_at = models.DateTimeField(null=True, blank=True)
    given_up_at = models.DateTimeField(null=True, blank=True)
    last_error = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["next_try_at"], name="delivery_due", condition=models.Q(delivered_at=None))]

    def __str__(self) -> str:
        return f"{self.kind} to {self.channel}"


@audited()
class OperatorAction(models.Model):
    """Something that was done to a running gateway and changed no row: a request cancelled, a branch ended."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="operator_actions")
    kind = models.CharField(max_length=40)
    subject = models.CharField(max_length=300)
    actor = models.CharField(max_length=160)
    reason = models.CharField(max_length=500, blank=True)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-at", "-id"]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}"
