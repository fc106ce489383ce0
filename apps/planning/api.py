"""REST of planning: the split, proposals, force, freeze, mode, decisions and switch orders."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from ninja import Query, Router, Schema, Status
from pydantic import AwareDatetime, Field

from apps.planning import dryruns, selectors, services, warmups
from apps.planning.choices import (
    Action,
    Cause,
    DryRunState,
    Mode,
    OrderState,
    ProposalState,
    Source,
    StepState,
    Verdict,
    VoteChoice,
    WarmUpState,
)
from apps.planning.models import Decision, DryRun, FittedModel, PlannerPolicy, Proposal, SwitchOrder
from apps.topology.choices import NodeState, Phase
from apps.topology.models import Partition
from apps.topology.selectors import node_named, partition_named
from controlplane import records
from controlplane.audit import MAX_REASON_CHARS
from controlplane.errors import InvalidField
from controlplane.permissions import require
from controlplane.rest.etags import check_if_match, tagged
from controlplane.rest.paging import Page, PageQuery, page
from controlplane.rest.schemas import Body, Edit, Finite, Reason

router = Router(tags=["split"])
PROPOSAL_OPEN = timedelta(hours=1)


# -- what is shown ---------------------------------------------------------------------------------------------------


class NamesOut(Schema):
    prefill: list[str]
    decode: list[str]


class SplitNodeOut(Schema):
    name: str
    desired_phase: Phase
    observed_phase: Phase | None
    observed_state: NodeState | None
    observed_at: datetime | None
    generation: int
    draining: bool
    enabled: bool


class CurrentOut(NamesOut):
    mixed: list[str]
    nodes: list[SplitNodeOut]


class PolicyOut(Schema):
    mode: Mode
    thaw_mode: Mode
    frozen_until: datetime | None
    freeze_reason: str
    frozen_by: str
    slice_s: float
    slices_per_window: int
    cooldown_s: float
    drain_deadline_s: float
    slo_ttft_s: float | None
    max_stale_ratio: float
    min_utilisation: float
    approvals_required: int
    self_approval: bool
    auto_warm_up: bool
    warm_up_rung_s: float
    warm_up_limit_s: float


class ForceOut(Schema):
    id: int
    node: str | None
    phases: dict[str, Phase]
    reason: str
    forced_by: str
    created_at: datetime
    expires_at: datetime | None


class ForcedOut(NamesOut):
    mixed: list[str]
    phases: dict[str, Phase]
    forces: list[ForceOut]


class VoteOut(Schema):
    """`actor` is who acted, a person or a key; `person` whose vote it is."""

    actor: str
    person: str
    choice: VoteChoice
    reason: str
    at: datetime


class DryRunOut(Schema):
    """`result` compares the split with the present one, both simulated from the live state."""

    id: int
    state: DryRunState
    proposal: int | None
    prefill: list[str]
    decode: list[str]
    asked_by: str
    asked_at: datetime
    finished_at: datetime | None
    result: dict[str, Any] | None
    problem: str


class ProposalOut(Schema):
    id: int
    state: ProposalState
    prefill: list[str]
    decode: list[str]
    from_prefill: list[str]
    from_decode: list[str]
    gain: float | None
    standard_error: float | None
    threshold: float | None
    reason: str
    proposed_by: str
    proposer: str | None = Field(description="the person behind it; null: the planner, or a service's key")
    created_at: datetime
    expires_at: datetime
    closed_at: datetime | None
    closed_reason: str
    approvals_required: int
    votes: list[VoteOut]
    dry_run: DryRunOut | None


class DecisionOut(Schema):
    """`candidates`, `rules` and `window` are the numbers it was made of."""

    id: int
    at: datetime
    window_start: float
    window_end: float
    verdict: Verdict
    rule: str
    reason: str
    source: Source
    mode: Mode
    action: Action
    current: NamesOut
    chosen: NamesOut | None
    theta: float | None
    closed_loop: float | None
    gain: float | None
    standard_error: float | None
    threshold: float | None
    slices: int
    slices_used: int
    candidates: list[dict[str, Any]]
    rules: list[list[str]]
    window: list[dict[str, Any]]


class DecisionInputsOut(DecisionOut):
    """With `state`, everything of the nodes and the policy that it was made from, and the fits in use."""

    state: dict[str, Any]
    fits: list[int]


class StepOut(Schema):
    """`drain_s` is how long its old work took to end, `switch_s` how long it took from the order to the new phase."""

    node: str
    from_phase: Phase
    to_phase: Phase
    state: StepState
    generation: int
    began_at: datetime | None
    pushed_at: datetime | None
    accepted: bool
    drained_at: datetime | None
    finished_at: datetime | None
    drain_s: float | None
    switch_s: float | None
    reason: str


class OrderOut(Schema):
    id: int
    state: OrderState
    cause: Cause
    ordered_by: str
    reason: str
    outcome: str
    undoing: bool
    rolls_back: int | None
    from_: NamesOut = Field(alias="from")
    to: NamesOut
    ordered_at: datetime
    switched_at: datetime | None
    cooling_until: datetime | None
    finished_at: datetime | None
    can_roll_back: bool
    steps: list[StepOut]


class FitOut(Schema):
    id: int
    hardware_class: str
    state: str
    prefill: dict[str, float]
    decode: dict[str, float]
    prefill_rows: int
    decode_rows: int
    prefill_error_ratio: float
    decode_error_ratio: float
    batch_low: float
    batch_high: float
    warnings: list[str]
    summary: dict[str, Any]
    created_at: datetime
    retired_at: datetime | None
    retired_reason: str


class ResidualOut(Schema):
    """One window of one node: busy seconds as measured and as predicted. Of a held-out row the others' fit predicts."""

    node: str
    t0: float
    measured_s: float
    predicted_s: float
    held_out: bool


class FitWithResidualsOut(FitOut):
    residuals: dict[str, list[ResidualOut]]


class WarmUpOut(Schema):
    id: int
    state: WarmUpState
    rung: int
    rung_s: float
    limit_s: float
    reason: str
    started_by: str
    started_at: datetime
    climbing_since: datetime | None
    ended_at: datetime | None
    outcome: str


class SplitOut(Schema):
    partition: str
    current: CurrentOut
    proposed: NamesOut | None
    forced: ForcedOut | None
    policy: PolicyOut
    last_decision: DecisionOut | None
    open_proposal: ProposalOut | None
    active_orders: list[OrderOut]
    history: list[OrderOut]
    fits: list[FitOut]
    warm_up: WarmUpOut | None


# -- what is sent ----------------------------------------------------------------------------------------------------


class Because(Body):
    """A reason that must be given."""

    reason: str = Field(min_length=1, max_length=MAX_REASON_CHARS)


Ahead = Annotated[float, Field(gt=0, le=366 * 86_400, allow_inf_nan=False)]


def _moment(named: str, at: datetime | None, in_s: float | None) -> datetime | None:
    """`at`, or `in_s` from now; `named` is what `at` is called. Raises InvalidField when both are given."""
    if in_s is None:
        return at
    if at is not None:
        raise InvalidField("expires_in_s", f"give either {named} or expires_in_s")
    return timezone.now() + timedelta(seconds=in_s)


class Expiring(Because):
    """`expires_at` as a time with its zone, or `expires_in_s` from now; neither means: until cleared."""

    expires_at: AwareDatetime | None = None
    expires_in_s: Ahead | None = None

    def moment(self) -> datetime | None:
        return _moment("expires_at", self.expires_at, self.expires_in_s)


class ForceIn(Expiring):
    """`prefill_nodes`: names of the nodes that shall prefill, or how many."""

    prefill_nodes: int | list[str]


class ProposalIn(Expiring):
    """`prefill_nodes`: names of the nodes that shall prefill, or how many. Open for an hour unless said."""

    prefill_nodes: int | list[str]


class DryRunIn(Reason):
    """`prefill_nodes`: names of the nodes that shall prefill, or how many."""

    prefill_nodes: int | list[str]


class PhaseIn(Expiring):
    phase: Phase


class FreezeIn(Because):
    """`until` as a time with its zone, or `expires_in_s` from now; neither means: until it is thawed."""

    until: AwareDatetime | None = None
    expires_in_s: Ahead | None = None

    def moment(self) -> datetime | None:
        return _moment("until", self.until, self.expires_in_s)


class ModeIn(Reason):
    mode: Mode


class PolicyEdit(Edit):
    slice_s: Finite | None = None
    slices_per_window: int | None = None
    cooldown_s: Finite | None = None
    drain_deadline_s: Finite | None = None
    slo_ttft_s: Finite | None = None
    max_stale_ratio: Finite | None = None
    min_utilisation: Finite | None = None
    approvals_required: int | None = None
    self_approval: bool | None = None
    auto_warm_up: bool | None = None
    warm_up_rung_s: Finite | None = None
    warm_up_limit_s: Finite | None = None


# -- the split -------------------------------------------------------------------------------------------------------


@router.get("/split/{partition}", response=SplitOut, by_alias=True)
def get_split(request: HttpRequest, partition: str) -> Any:
    """Current, proposed and forced split; who decides; the last decision; orders under way and past."""
    require(request, "viewer")
    return selectors.split_view(partition_named(partition))


@router.put("/split/{partition}/force", response=SplitOut, by_alias=True)
def force_split(request: HttpRequest, partition: str, payload: ForceIn) -> Any:
    """Force a split until it expires or is cleared. A switch under way is finished first."""
    actor = require(request, "administrator")
    row = partition_named(partition)
    services.force_split(row, payload.prefill_nodes, actor, payload.reason, payload.moment())
    return selectors.split_view(row)


@router.delete("/split/{partition}/force", response=SplitOut, by_alias=True)
def clear_force(request: HttpRequest, partition: str, reason: str = Query("", max_length=MAX_REASON_CHARS)) -> Any:
    """The split stays as it is; the planner may change it again."""
    actor = require(request, "administrator")
    row = partition_named(partition)
    services.clear_force(row, actor, reason)
    return selectors.split_view(row)


@router.put("/nodes/{node}/phase", response=SplitOut, by_alias=True)
def force_node(request: HttpRequest, node: str, payload: PhaseIn) -> Any:
    """Force one node's phase. Refused (409 `phase-left-empty`) when the other phase would lose its last node."""
    actor = require(request, "administrator")
    row = node_named(node)
    services.force_node(row, payload.phase, actor, payload.reason, payload.moment())
    return selectors.split_view(row.partition)


# -- who decides -----------------------------------------------------------------------------------------------------


@router.put("/split/{partition}/freeze", response=PolicyOut)
def freeze_split(request: HttpRequest, partition: str, payload: FreezeIn) -> Any:
    """The planner changes nothing until `until`, or until unfrozen."""
    actor = require(request, "administrator")
    return _policy(services.freeze(partition_named(partition), actor, payload.reason, payload.moment()))


@router.delete("/split/{partition}/freeze", response=PolicyOut)
def unfreeze_split(request: HttpRequest, partition: str, reason: str = Query("", max_length=MAX_REASON_CHARS)) -> Any:
    actor = require(request, "administrator")
    return _policy(services.unfreeze(partition_named(partition), actor, reason))


@router.put("/split/{partition}/mode", response=PolicyOut)
def set_mode(request: HttpRequest, partition: str, payload: ModeIn) -> Any:
    actor = require(request, "administrator")
    return _policy(services.set_mode(partition_named(partition), payload.mode, actor, payload.reason))


@router.get("/split/{partition}/policy", response=PolicyOut)
def get_policy(request: HttpRequest, response: HttpResponse, partition: str) -> Any:
    """Who decides, and by which limits."""
    require(request, "viewer")
    return tagged(response, PolicyOut(**_policy(selectors.policy_of(partition_named(partition)))))


@router.patch("/split/{partition}/policy", response=PolicyOut)
def edit_policy(request: HttpRequest, response: HttpResponse, partition: str, payload: PolicyEdit) -> Any:
    """Windows, cooldown, deadlines, SLO, approvals."""
    actor = require(request, "administrator")
    with transaction.atomic():
        row = records.locked(partition_named(partition))
        check_if_match(request, PolicyOut(**_policy(selectors.policy_of(row))))
        policy = services.update_policy(row, actor, payload.reason, **payload.changes())
    return tagged(response, PolicyOut(**_policy(policy)))


def _policy(policy: PlannerPolicy) -> dict[str, Any]:
    return selectors.policy_document(policy)


# -- proposals -------------------------------------------------------------------------------------------------------


@router.get("/split/{partition}/proposals", response=Page[ProposalOut])
def list_proposals(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    """Newest first."""
    require(request, "viewer")
    rows = Proposal.objects.filter(partition=partition_named(partition)).prefetch_related("votes", "dry_runs")
    return _documents(page(rows, query, "-created_at", "-id"), selectors.proposal_document)


@router.post("/split/{partition}/proposals", response={201: ProposalOut})
def propose_split(request: HttpRequest, partition: str, payload: ProposalIn) -> Any:
    """A split for others to approve."""
    actor = require(request, "operator")
    until = payload.moment() or timezone.now() + PROPOSAL_OPEN
    proposal = services.propose(partition_named(partition), payload.prefill_nodes, actor, payload.reason, until)
    return Status(201, selectors.proposal_document(proposal))


@router.post("/split/{partition}/proposals/{number}/approve", response=ProposalOut)
def approve_proposal(request: HttpRequest, partition: str, number: int, payload: Reason) -> Any:
    """With enough approvals the switch is ordered. 409 when it is stale, closed, or voted on already; 403 for a service's key."""
    actor = require(request, "operator")
    proposal = selectors.proposal_numbered(number, partition_named(partition))
    return selectors.proposal_document(services.approve(proposal, actor, payload.reason))


@router.post("/split/{partition}/proposals/{number}/reject", response=ProposalOut)
def reject_proposal(request: HttpRequest, partition: str, number: int, payload: Because) -> Any:
    actor = require(request, "operator")
    proposal = selectors.proposal_numbered(number, partition_named(partition))
    return selectors.proposal_document(services.reject(proposal, actor, payload.reason))


@router.get("/split/{partition}/dry-runs", response=Page[DryRunOut])
def list_dry_runs(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    """Newest first."""
    require(request, "viewer")
    rows = DryRun.objects.filter(partition=partition_named(partition))
    return _documents(page(rows, query, "-asked_at", "-id"), selectors.dry_run_document)


@router.get("/split/{partition}/dry-runs/{number}", response=DryRunOut)
def get_dry_run(request: HttpRequest, partition: str, number: int) -> Any:
    require(request, "viewer")
    return selectors.dry_run_document(selectors.dry_run_numbered(number, partition_named(partition)))


@router.post("/split/{partition}/dry-runs", response={202: DryRunOut})
def ask_dry_run(request: HttpRequest, partition: str, payload: DryRunIn) -> Any:
    """Try a split in the simulator from the live state. The answer comes under its number; nothing is switched."""
    actor = require(request, "operator")
    run = dryruns.ask(partition_named(partition), payload.prefill_nodes, actor, payload.reason)
    return Status(202, selectors.dry_run_document(run))


# -- the learned model ------------------------------------------------------------------------------------------------


@router.get("/split/{partition}/fits", response=Page[FitOut])
def list_fits(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    """Cost models learned so far, newest first, each with what it was learned from."""
    require(request, "viewer")
    rows = FittedModel.objects.filter(partition=partition_named(partition))
    return _documents(page(rows, query, "-created_at", "-id"), selectors.fit_document)


@router.get("/split/{partition}/fits/{number}", response=FitWithResidualsOut)
def get_fit(request: HttpRequest, partition: str, number: int) -> Any:
    """One fit with its residuals, for judging it by eye."""
    require(request, "viewer")
    return selectors.fit_with_residuals(selectors.fit_numbered(number, partition_named(partition)))


@router.post("/split/{partition}/warm-up", response={201: WarmUpOut})
def start_warm_up(request: HttpRequest, partition: str, payload: Because) -> Any:
    """Every node serves both phases while its concurrency ramps, until the cost model is learned."""
    actor = require(request, "administrator")
    return Status(201, selectors.warm_up_document(warmups.start(partition_named(partition), actor, payload.reason)))


@router.delete("/split/{partition}/warm-up", response=WarmUpOut)
def stop_warm_up(request: HttpRequest, partition: str, reason: str = Query("", max_length=MAX_REASON_CHARS)) -> Any:
    """The nodes get back the phases they had."""
    actor = require(request, "administrator")
    return selectors.warm_up_document(warmups.stop(partition_named(partition), actor, reason))


# -- history ---------------------------------------------------------------------------------------------------------


@router.get("/split/{partition}/decisions", response=Page[DecisionOut])
def list_decisions(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    """Every window's verdict, newest first; also why the split was held."""
    require(request, "viewer")
    rows = Decision.objects.filter(partition=partition_named(partition))
    return _documents(page(rows, query, "-at", "-id"), selectors.decision_document)


@router.get("/split/{partition}/decisions/{number}", response=DecisionInputsOut)
def get_decision(request: HttpRequest, partition: str, number: int) -> Any:
    """One decision with all its inputs: making it again from them gives the same answer."""
    require(request, "viewer")
    return selectors.decision_with_inputs(selectors.decision_numbered(number, partition_named(partition)))


@router.get("/split/{partition}/orders", response=Page[OrderOut], by_alias=True)
def list_orders(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    """Newest first."""
    require(request, "viewer")
    rows = SwitchOrder.objects.filter(partition=partition_named(partition)).prefetch_related("steps")
    return _documents(page(rows, query, "-ordered_at", "-id"), selectors.order_document)


@router.get("/split/{partition}/orders/{number}", response=OrderOut, by_alias=True)
def get_order(request: HttpRequest, partition: str, number: int) -> Any:
    require(request, "viewer")
    return selectors.order_document(selectors.order_numbered(number, partition_named(partition)))


@router.post("/split/{partition}/orders/{number}/rollback", response=OrderOut, by_alias=True)
def roll_back_order(request: HttpRequest, partition: str, number: int, payload: Because) -> Any:
    """Undo a switch; the answer is the order that does it. 409 when the split has moved on."""
    actor = require(request, "operator")
    row: Partition = partition_named(partition)
    order = services.roll_back(selectors.order_numbered(number, row), actor, payload.reason)
    return selectors.order_document(order)


def _documents(found: dict[str, Any], document: Any) -> dict[str, Any]:
    return {**found, "items": [document(row) for row in found["items"]]}
