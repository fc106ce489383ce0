"""Tables of flow control: bands, objectives, and a partition's limits."""

from __future__ import annotations

from typing import Any

from django.db import models

from apps.flowcontrol.choices import CeilingPolicy, Detector, Fairness, LimitMode, Ordering
from apps.topology.models import Partition
from controlplane.audit import audited
from controlplane.validators import Between

_TTL_S = Between(0.05, 86400)
_AT_LEAST_ONE = Between(1, 10**15)
_PER_NODE = Between(1, 10_000_000)
_TOKENS_PER_NODE = Between(1, 10**12)
_REPORT_AGE_S = Between(1, 3600)


def default_band() -> dict[str, Any]:
    """The template of a band that a request's unknown priority gets."""
    return {
        "fairness": Fairness.ROUND_ROBIN.value,
        "ordering": Ordering.FCFS.value,
        "max_requests": 1000,
        "max_bytes": 1_000_000_000,
        "ttl_s": 60.0,
        "ceiling": 1.0,
        "min_share": 0.0,
        "ttft_budget_s": None,
    }


@audited()
class Band(models.Model):
    """All flows of one priority. Its name stays when an operator edits the priority, and so do its queued requests."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="bands")
    name = models.SlugField(max_length=63)
    priority = models.IntegerField()
    fairness = models.CharField(max_length=32, choices=Fairness.choices, default=Fairness.ROUND_ROBIN)
    ordering = models.CharField(max_length=32, choices=Ordering.choices, default=Ordering.FCFS)
    max_requests = models.PositiveIntegerField(default=1000, validators=[_AT_LEAST_ONE])
    max_bytes = models.PositiveBigIntegerField(default=1_000_000_000, validators=[_AT_LEAST_ONE])
    ttl_s = models.FloatField(
        default=60.0, null=True, blank=True, validators=[_TTL_S], help_text="null takes the default of all bands"
    )
    ceiling = models.FloatField(default=1.0, validators=[Between(0, 1)])
    min_share = models.FloatField(default=0.0, validators=[Between(0, 0.9)])
    ttft_budget_s = models.FloatField(
        null=True, blank=True, validators=[_TTL_S], help_text="for the predicted-ttft detector; null takes the stage's"
    )

    class Meta:
        ordering = ["partition__name", "-priority"]
        constraints = [
            models.UniqueConstraint(fields=["partition", "name"], name="one_band_per_name"),
            # Deferred, so that two bands can trade priorities within one transaction.
            models.UniqueConstraint(
                fields=["partition", "priority"], name="one_band_per_priority", deferrable=models.Deferrable.DEFERRED
            ),
        ]

    def __str__(self) -> str:
        return f"{self.partition}/{self.name}"


@audited()
class Objective(models.Model):
    """What a client asks for by name: a band, and how fast."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="objectives")
    name = models.SlugField(max_length=63)
    band = models.ForeignKey(Band, on_delete=models.PROTECT, related_name="objectives")
    slo_ttft_s = models.FloatField(null=True, blank=True, validators=[_TTL_S])
    ttl_s = models.FloatField(null=True, blank=True, validators=[_TTL_S])

    class Meta:
        ordering = ["partition__name", "name"]
        constraints = [models.UniqueConstraint(fields=["partition", "name"], name="one_objective_per_name")]

    def __str__(self) -> str:
        return f"{self.partition}/{self.name}"


@audited()
class FlowSettings(models.Model):
    """A partition's limits, the gate of each stage, and the template for bands nobody has described."""

    partition = models.OneToOneField(Partition, on_delete=models.CASCADE, related_name="flow_settings")
    max_requests = models.PositiveIntegerField(default=5000, null=True, blank=True, validators=[_AT_LEAST_ONE])
    max_bytes = models.PositiveBigIntegerField(default=4_000_000_000, null=True, blank=True, validators=[_AT_LEAST_ONE])
    default_ttl_s = models.FloatField(default=60.0, null=True, blank=True, validators=[_TTL_S])
    empty_pool_ttl_s = models.FloatField(default=30.0, validators=[_TTL_S])
    displacement = models.BooleanField(default=True)
    ceiling_policy = models.CharField(max_length=32, choices=CeilingPolicy.choices, default=CeilingPolicy.STATIC)
    min_ceiling = models.FloatField(default=0.5, validators=[Between(0, 1)])
    prefill_detector = models.CharField(max_length=32, choices=Detector.choices, default=Detector.CONCURRENCY)
    prefill_mode = models.CharField(max_length=16, choices=LimitMode.choices, default=LimitMode.REQUESTS)
    prefill_limit_per_node = models.PositiveIntegerField(
        default=4, null=True, blank=True, validators=[_PER_NODE], help_text="null follows what the engines report"
    )
    prefill_token_limit_per_node = models.PositiveBigIntegerField(
        default=None, null=True, blank=True, validators=[_TOKENS_PER_NODE], help_text="null follows what they report"
    )
    prefill_queue_threshold = models.FloatField(default=5.0, validators=[Between(0.001, 100_000)])
    prefill_kv_threshold = models.FloatField(default=0.8, validators=[Between(0.001, 1)])
    prefill_stale_after_s = models.FloatField(default=3.0, validators=[_REPORT_AGE_S])
    prefill_ttft_budget_s = models.FloatField(default=5.0, validators=[_TTL_S])
    decode_detector = models.CharField(max_length=32, choices=Detector.choices, default=Detector.CONCURRENCY)
    decode_mode = models.CharField(max_length=16, choices=LimitMode.choices, default=LimitMode.REQUESTS)
    decode_limit_per_node = models.PositiveIntegerField(
        default=64, null=True, blank=True, validators=[_PER_NODE], help_text="null follows what the engines report"
    )
    decode_token_limit_per_node = models.PositiveBigIntegerField(
        default=None, null=True, blank=True, validators=[_TOKENS_PER_NODE], help_text="null follows what they report"
    )
    decode_queue_threshold = models.FloatField(default=5.0, validators=[Between(0.001, 100_000)])
    decode_kv_threshold = models.FloatField(default=0.8, validators=[Between(0.001, 1)])
    decode_stale_after_s = models.FloatField(default=3.0, validators=[_REPORT_AGE_S])
    decode_ttft_budget_s = models.FloatField(default=5.0, validators=[_TTL_S])
    default_band = models.JSONField(default=default_band)

    class Meta:
        verbose_name_plural = "flow settings"

    def __str__(self) -> str:
        return f"flow settings of {self.partition}"
