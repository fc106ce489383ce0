"""Tables of planning: policy, slices, decisions, proposals and votes, switch orders and their steps, forces, fits."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

from apps.planning.choices import (
    Action,
    Cause,
    DryRunState,
    FitState,
    Mode,
    OrderState,
    ProposalState,
    Source,
    StepState,
    Verdict,
    VoteChoice,
    WarmUpState,
)
from apps.topology.choices import Phase
from controlplane.audit import audited
from controlplane.validators import Between

_SECONDS = Between(0, 86_400)
_MOVING = (OrderState.ORDERED, OrderState.DRAINING, OrderState.SWITCHING)


@audited()
class PlannerPolicy(models.Model):
    """Who decides about a partition's split, and how patiently. `thaw_mode` is what a freeze returns to."""

    partition = models.OneToOneField("topology.Partition", on_delete=models.CASCADE, related_name="planner_policy")
    mode = models.CharField(max_length=16, choices=Mode.choices, default=Mode.APPROVE)
    thaw_mode = models.CharField(max_length=16, choices=Mode.choices, default=Mode.APPROVE)
    frozen_until = models.DateTimeField(null=True, blank=True)
    freeze_reason = models.CharField(max_length=500, blank=True)
    frozen_by = models.CharField(max_length=160, blank=True)
    slice_s = models.FloatField(default=60.0, validators=[Between(2, 3600)])
    slices_per_window = models.PositiveIntegerField(default=10, validators=[Between(5, 100)])
    cooldown_s = models.FloatField(default=120.0, validators=[_SECONDS])
    drain_deadline_s = models.FloatField(default=60.0, validators=[_SECONDS])
    slo_ttft_s = models.FloatField(null=True, blank=True, validators=[Between(0.01, 3600)])
    max_stale_ratio = models.FloatField(default=0.2, validators=[Between(0, 1)])
    min_utilisation = models.FloatField(default=0.7, validators=[Between(0, 1)])
    approvals_required = models.PositiveIntegerField(default=1, validators=[Between(1, 10)])
    self_approval = models.BooleanField(default=False)
    auto_warm_up = models.BooleanField(
        default=False, help_text="warm up by itself while no hardware class has ever been learned"
    )
    warm_up_rung_s = models.FloatField(default=15.0, validators=[Between(5, 3600)])
    warm_up_limit_s = models.FloatField(default=1800.0, validators=[Between(30, 86_400)])

    class Meta:
        verbose_name_plural = "planner policies"

    def __str__(self) -> str:
        return f"planner policy of {self.partition}"

    @property
    def window_s(self) -> float:
        return self.slice_s * self.slices_per_window


class Slice(models.Model):
    """Averages of one slice; `workload` is null when nothing was measured. Unix seconds, as in telemetry."""

    partition = models.ForeignKey("topology.Partition", on_delete=models.CASCADE, related_name="slices")
    t0 = models.FloatField()
    t1 = models.FloatField()
    workload = models.JSONField(
        null=True, help_text="per request: t_uc, pairs, t_rst, t_out, t_acc, u_tokens, in_flight"
    )
    rate = models.FloatField(default=0.0, help_text="requests per second that were prefilled")
    prefill_utilisation = models.FloatField(null=True)
    decode_utilisation = models.FloatField(null=True)
    prefill_wait_p95_s = models.FloatField(null=True)
    stale_ratio = models.FloatField(default=0.0)
    agents = models.FloatField(null=True, help_text="in flight and thinking, by Little's law")
    think_s = models.FloatField(null=True, help_text="mean pause before an answered agent asks again")

    class Meta:
        ordering = ["t0"]
        constraints = [models.UniqueConstraint(fields=["partition", "t0"], name="one_slice_per_start")]

    def __str__(self) -> str:
        return f"{self.partition} {self.t0:.0f}-{self.t1:.0f}"


class Decision(models.Model):
    """A window's verdict. `rule` is the code of the rule that decided; `detail` has every candidate with its numbers."""

    partition = models.ForeignKey("topology.Partition", on_delete=models.CASCADE, related_name="decisions")
    at = models.DateTimeField(default=timezone.now)
    window_start = models.FloatField()
    window_end = models.FloatField()
    verdict = models.CharField(max_length=16, choices=Verdict.choices)
    rule = models.CharField(max_length=40)
    reason = models.CharField(max_length=500)
    source = models.CharField(max_length=16, choices=Source.choices)
    mode = models.CharField(max_length=16, choices=Mode.choices)
    action = models.CharField(max_length=16, choices=Action.choices, default=Action.NONE)
    current_prefill = models.JSONField(default=list)
    current_decode = models.JSONField(default=list)
    chosen_prefill = models.JSONField(null=True)
    chosen_decode = models.JSONField(null=True)
    theta = models.FloatField(null=True, help_text="what the current split carries, requests per second")
    gain = models.FloatField(null=True)
    standard_error = models.FloatField(null=True)
    threshold = models.FloatField(null=True)
    slices = models.PositiveIntegerField()
    slices_used = models.PositiveIntegerField()
    detail = models.JSONField(default=dict)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["partition", "-at", "-id"], name="decision_by_time")]
        constraints = [
            models.UniqueConstraint(
                fields=["partition", "window_end"],
                condition=~Q(rule__in=("empty_phase", "watch")),
                name="one_decision_per_window",
            )
        ]

    def __str__(self) -> str:
        return f"{self.partition} {self.verdict} ({self.rule})"


@audited()
class Proposal(models.Model):
    """A split that waits for people. Evidence and policy are as they were when it was made."""

    partition = models.ForeignKey("topology.Partition", on_delete=models.CASCADE, related_name="proposals")
    decision = models.ForeignKey(Decision, null=True, blank=True, on_delete=models.SET_NULL, related_name="proposals")
    state = models.CharField(max_length=16, choices=ProposalState.choices, default=ProposalState.OPEN)
    prefill = models.JSONField(help_text="names of the nodes that would prefill")
    decode = models.JSONField()
    from_prefill = models.JSONField()
    from_decode = models.JSONField()
    gain = models.FloatField(null=True)
    standard_error = models.FloatField(null=True)
    threshold = models.FloatField(null=True)
    reason = models.CharField(max_length=500)
    proposed_by = models.CharField(max_length=160)
    proposer = models.CharField(max_length=150, blank=True, help_text="the person behind a key's proposal")
    people = models.JSONField(default=list, help_text="names of everyone who can have made it")
    evidence = models.JSONField(default=dict)
    policy = models.JSONField(default=dict)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True, blank=True)
    closed_reason = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["partition"], condition=Q(state=ProposalState.OPEN), name="one_open_proposal_per_partition"
            )
        ]

    def __str__(self) -> str:
        return f"{self.partition}: {len(self.prefill)}P{len(self.decode)}D ({self.state})"


@audited()
class Vote(models.Model):
    """One person's word on a proposal; each has one, through whatever key.

    `actor` is who acted (a person or a key), `person` whose vote that is; `people` have acted or know the key.
    """

    proposal = models.ForeignKey(Proposal, on_delete=models.CASCADE, related_name="votes")
    actor = models.CharField(max_length=160)
    person = models.CharField(max_length=150, blank=True)
    people = models.JSONField(default=list)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL)
    choice = models.CharField(max_length=16, choices=VoteChoice.choices)
    reason = models.CharField(max_length=500, blank=True)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["at"]
        constraints = [models.UniqueConstraint(fields=["proposal", "person"], name="one_vote_per_person")]

    def __str__(self) -> str:
        return f"{self.actor}: {self.choice}"


@audited()
class ForcedSplit(models.Model):
    """An operator's will over the planner's, until it expires or is cleared. `phases` maps node names to phases."""

    partition = models.ForeignKey("topology.Partition", on_delete=models.CASCADE, related_name="forces")
    node = models.CharField(max_length=63, blank=True, help_text="empty: the whole split is forced")
    phases = models.JSONField()
    reason = models.CharField(max_length=500)
    forced_by = models.CharField(max_length=160)
    created_at = models.DateTimeField(default=timezone.now)
    expires_at = models.DateTimeField(null=True, blank=True)
    cleared_at = models.DateTimeField(null=True, blank=True)
    cleared_by = models.CharField(max_length=160, blank=True)
    clear_reason = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["partition", "node"], condition=Q(cleared_at=None), name="one_live_force_per_node"
            )
        ]

    def __str__(self) -> str:
        return f"{self.partition}: {self.node or 'split'} forced by {self.forced_by}"


class SwitchOrder(models.Model):
    """A change of the split under way or past. `undoing` is set once its roll-back was asked for while it ran."""

    partition = models.ForeignKey("topology.Partition", on_delete=models.CASCADE, related_name="orders")
    cause = models.CharField(max_length=16, choices=Cause.choices)
    ordered_by = models.CharField(max_length=160)
    reason = models.CharField(max_length=500)
    decision = models.ForeignKey(Decision, null=True, blank=True, on_delete=models.SET_NULL, related_name="orders")
    proposal = models.ForeignKey(Proposal, null=True, blank=True, on_delete=models.SET_NULL, related_name="orders")
    rolls_back = models.ForeignKey("self", null=True, blank=True, on_delete=models.SET_NULL, related_name="undone_by")
    state = models.CharField(max_length=16, choices=OrderState.choices, default=OrderState.ORDERED)
    from_prefill = models.JSONField()
    from_decode = models.JSONField()
    to_prefill = models.JSONField()
    to_decode = models.JSONField()
    drain_deadline_s = models.FloatField()
    cooldown_s = models.FloatField()
    ordered_at = models.DateTimeField(default=timezone.now)
    switched_at = models.DateTimeField(null=True, blank=True, help_text="when the last node had switched")
    cooling_until = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    undoing = models.BooleanField(default=False)
    outcome = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["-ordered_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["partition"], condition=Q(state__in=_MOVING), name="one_moving_order_per_partition"
            )
        ]

    def __str__(self) -> str:
        return f"order {self.pk} of {self.partition} ({self.state})"

    @property
    def prefill_delta(self) -> int:
        return len(self.to_prefill) - len(self.from_prefill)


class SwitchStep(models.Model):
    """One node's move within an order. `generation` is the newest it was pushed under."""

    order = models.ForeignKey(SwitchOrder, on_delete=models.CASCADE, related_name="steps")
    position = models.PositiveIntegerField()
    node = models.CharField(max_length=63)
    from_phase = models.CharField(max_length=16, choices=Phase.choices)
    to_phase = models.CharField(max_length=16, choices=Phase.choices)
    state = models.CharField(max_length=16, choices=StepState.choices, default=StepState.WAITING)
    generation = models.PositiveBigIntegerField(default=0)
    began_at = models.DateTimeField(null=True, blank=True)
    pushed_at = models.DateTimeField(null=True, blank=True)
    drained_at = models.DateTimeField(null=True, blank=True, help_text="when its old work had ended")
    finished_at = models.DateTimeField(null=True, blank=True)
    accepted = models.BooleanField(default=False)
    reason = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["order", "position"]
        constraints = [models.UniqueConstraint(fields=["order", "node"], name="one_step_per_node")]

    def __str__(self) -> str:
        return f"{self.node}: {self.from_phase} -> {self.to_phase} ({self.state})"


class FittedModel(models.Model):
    """Coefficients learned for one hardware class of a partition, with how far they may be believed."""

    partition = models.ForeignKey("topology.Partition", on_delete=models.CASCADE, related_name="fits")
    hardware_class = models.CharField(max_length=63)
    state = models.CharField(max_length=16, choices=FitState.choices)
    prefill = models.JSONField(help_text="c0..c3, seconds")
    decode = models.JSONField(help_text="d0..d2, seconds")
    prefill_rows = models.PositiveIntegerField()
    decode_rows = models.PositiveIntegerField()
    prefill_error_ratio = models.FloatField()
    decode_error_ratio = models.FloatField()
    prefill_condition = models.FloatField(null=True)
    decode_condition = models.FloatField(null=True)
    batch_low = models.FloatField()
    batch_high = models.FloatField()
    warnings = models.JSONField(default=list)
    summary = models.JSONField(default=dict, help_text="what it was learned from: period, nodes, ranges, deviations")
    residuals = models.JSONField(default=dict, help_text="per phase: [node, t0, measured_s, predicted_s, held out]")
    drift = models.JSONField(default=dict, help_text="the CUSUM over what was measured since")
    created_at = models.DateTimeField(default=timezone.now)
    retired_at = models.DateTimeField(null=True, blank=True)
    retired_reason = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["-created_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["partition", "hardware_class"],
                condition=Q(state=FitState.ACCEPTED),
                name="one_accepted_fit_per_class",
            )
        ]

    def __str__(self) -> str:
        return f"{self.hardware_class} ({self.state})"


@audited()
class WarmUp(models.Model):
    """A time in which every node serves both phases while its concurrency ramps, so that the model can be learned."""

    partition = models.ForeignKey("topology.Partition", on_delete=models.CASCADE, related_name="warm_ups")
    state = models.CharField(max_length=16, choices=WarmUpState.choices, default=WarmUpState.RUNNING)
    phases = models.JSONField(help_text="each node's phase before")
    rung_s = models.FloatField()
    limit_s = models.FloatField()
    rung = models.PositiveIntegerField(default=0, help_text="the rung whose limits are published")
    reason = models.CharField(max_length=500)
    started_by = models.CharField(max_length=160)
    started_at = models.DateTimeField(default=timezone.now)
    climbing_since = models.DateTimeField(null=True, blank=True, help_text="when every node had become mixed")
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["-started_at", "-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["partition"], condition=Q(state=WarmUpState.RUNNING), name="one_running_warm_up_per_partition"
            )
        ]

    def __str__(self) -> str:
        return f"warm-up of {self.partition} ({self.state})"


class DryRun(models.Model):
    """A split tried in the simulator from the live state. `result` compares it with the present split."""

    partition = models.ForeignKey("topology.Partition", on_delete=models.CASCADE, related_name="dry_runs")
    proposal = models.ForeignKey(Proposal, null=True, blank=True, on_delete=models.SET_NULL, related_name="dry_runs")
    state = models.CharField(max_length=16, choices=DryRunState.choices, default=DryRunState.WAITING)
    prefill = models.JSONField()
    decode = models.JSONField()
    asked_by = models.CharField(max_length=160)
    asked_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True, blank=True)
    result = models.JSONField(null=True)
    problem = models.CharField(max_length=500, blank=True)

    class Meta:
        ordering = ["-asked_at", "-id"]

    def __str__(self) -> str:
        return f"dry run {self.pk} of {self.partition} ({self.state})"
