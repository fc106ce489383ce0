from django.contrib import admin

from apps.planning.models import (
    Decision,
    FittedModel,
    ForcedSplit,
    PlannerPolicy,
    Proposal,
    Slice,
    SwitchOrder,
    SwitchStep,
    Vote,
)
from controlplane.admin import ReadOnlyAdmin


@admin.register(PlannerPolicy)
class PlannerPolicyAdmin(ReadOnlyAdmin):
    list_display = ("partition", "mode", "frozen_until", "slice_s", "slices_per_window", "cooldown_s", "slo_ttft_s")


@admin.register(Slice)
class SliceAdmin(ReadOnlyAdmin):
    list_display = ("partition", "t0", "t1", "rate", "prefill_utilisation", "decode_utilisation", "prefill_wait_p95_s")
    list_filter = ("partition",)


@admin.register(Decision)
class DecisionAdmin(ReadOnlyAdmin):
    list_display = ("at", "partition", "verdict", "rule", "action", "gain", "threshold", "source")
    list_filter = ("partition", "verdict", "rule")


@admin.register(Proposal)
class ProposalAdmin(ReadOnlyAdmin):
    list_display = ("created_at", "partition", "state", "gain", "proposed_by", "expires_at")
    list_filter = ("partition", "state")


@admin.register(Vote)
class VoteAdmin(ReadOnlyAdmin):
    list_display = ("at", "proposal", "actor", "choice", "reason")


@admin.register(ForcedSplit)
class ForcedSplitAdmin(ReadOnlyAdmin):
    list_display = ("created_at", "partition", "node", "forced_by", "expires_at", "cleared_at")
    list_filter = ("partition",)


class SwitchStepInline(admin.TabularInline):
    model = SwitchStep
    extra = 0
    can_delete = False


@admin.register(SwitchOrder)
class SwitchOrderAdmin(ReadOnlyAdmin):
    list_display = ("ordered_at", "partition", "state", "cause", "ordered_by", "reason", "finished_at")
    list_filter = ("partition", "state", "cause")
    inlines = (SwitchStepInline,)


@admin.register(FittedModel)
class FittedModelAdmin(ReadOnlyAdmin):
    list_display = ("created_at", "partition", "hardware_class", "state", "prefill_error_ratio", "decode_error_ratio")
    list_filter = ("partition", "state")
