"""Tables of topology: clusters, partitions, nodes, published configurations."""

from __future__ import annotations

from django.db import models
from django.utils import timezone

from apps.topology.choices import Engine, NodeState, Phase, RoutingPolicy
from controlplane.audit import audited
from controlplane.validators import Between, JsonFields, direct_settings, http_url

_MODEL = JsonFields(
    name="text",
    served_names="list of texts",
    tokenizer="text",
    tokenizer_path="text or null",
    dtype="text",
    block_tokens="whole number",
    ids_per_block="whole number",
    tokens_per_id="whole number",
    context_tokens="whole number",
)
_NETWORK = JsonFields(
    **dict.fromkeys(
        ("kv_bytes_per_token", "peer_bandwidth_bytes_s", "host_to_device_bytes_s", "latency_s"),
        "number",
    )
)
_COEFFICIENTS = JsonFields(
    **dict.fromkeys(("c0", "c1", "c2", "c3", "d0", "d1", "d2", "t_fwd", "t_acc"), "number"),
    **dict.fromkeys(("experts", "experts_per_token"), "whole number"),
)
_LEASE = JsonFields(multiple="number", ceiling_s="number", floor_s="number")
OBSERVED = ("observed_phase", "observed_state", "observed_generation", "observed_at")


def default_lease() -> dict[str, float]:
    """How long an idle branch keeps its references: a multiple of its own pauses, within floor and ceiling."""
    return {"multiple": 4.0, "ceiling_s": 3600, "floor_s": 600}


@audited()
class Cluster(models.Model):
    name = models.SlugField(max_length=63, unique=True)
    title = models.CharField(max_length=120, blank=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


@audited()
class Partition(models.Model):
    """What one gateway serves and one planner splits. Its name is unique over all clusters: Redis keys are made of it."""

    cluster = models.ForeignKey(Cluster, on_delete=models.CASCADE, related_name="partitions")
    name = models.SlugField(max_length=63, unique=True)
    title = models.CharField(max_length=120, blank=True)
    model = models.JSONField(validators=[_MODEL], help_text="section `model` of the configuration document")
    network = models.JSONField(validators=[_NETWORK], help_text="section `network` of the configuration document")
    gateway_url = models.CharField(max_length=200, validators=[http_url])
    routing_policy = models.CharField(max_length=32, choices=RoutingPolicy.choices, default=RoutingPolicy.TTFT)
    lease = models.JSONField(default=default_lease, validators=[_LEASE])

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


@audited(*OBSERVED)
class Node(models.Model):
    """One engine. `desired_phase` and `generation` are what was decided; `observed_*` what its agent last said, or the
    gateway of an existing engine (`direct`)."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="nodes")
    name = models.SlugField(max_length=63, unique=True)
    order = models.PositiveIntegerField()
    url = models.CharField(max_length=200, validators=[http_url])
    engine = models.CharField(max_length=32, choices=Engine.choices)
    hardware_class = models.CharField(max_length=63)
    coefficients = models.JSONField(validators=[_COEFFICIENTS])
    decode_limit = models.PositiveIntegerField(validators=[Between(1, 100_000)])
    direct = models.JSONField(
        null=True,
        blank=True,
        validators=[direct_settings],
        help_text="an existing engine's; null for a node with an agent",
    )
    desired_phase = models.CharField(max_length=16, choices=Phase.choices)
    generation = models.PositiveBigIntegerField(default=0)
    draining = models.BooleanField(default=False)
    enabled = models.BooleanField(default=True)
    observed_phase = models.CharField(max_length=16, choices=Phase.choices, blank=True, default="")
    observed_state = models.CharField(max_length=16, choices=NodeState.choices, blank=True, default="")
    observed_generation = models.PositiveBigIntegerField(null=True, blank=True)
    observed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["partition__name", "order"]
        constraints = [models.UniqueConstraint(fields=["partition", "order"], name="one_node_per_order")]

    def __str__(self) -> str:
        return self.name


class ConfigurationVersion(models.Model):
    """A document as it was published to the gateway. Never edited, so it is its own history."""

    partition = models.ForeignKey(Partition, on_delete=models.CASCADE, related_name="configurations")
    version = models.PositiveBigIntegerField()
    document = models.JSONField()
    author = models.CharField(max_length=160)
    reason = models.CharField(max_length=500, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-version"]
        constraints = [models.UniqueConstraint(fields=["partition", "version"], name="one_document_per_version")]

    def __str__(self) -> str:
        return f"{self.partition} v{self.version}"
