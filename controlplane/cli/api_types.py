"""Types and calls of the REST API. Written by `make openapi` from docs/openapi.json; do not edit."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Protocol, TypedDict

Action = Literal['none', 'ordered', 'proposed', 'advised']

class AlertOut(TypedDict):
    acknowledged_at: str | None
    acknowledged_by: str
    fired_at: str | None
    id: int
    note: str
    resolved_at: str | None
    rule: str
    severity: str
    since: str
    state: str
    subject: str
    summary: str
    value: float | None

class AlertQuery(TypedDict):
    cursor: NotRequired[str | None]
    limit: NotRequired[int]
    rule: NotRequired[str]
    state: NotRequired[str]

class AppliedOut(TypedDict):
    applied: bool
    changes: list[ChangeOut]
    notes: list[str]
    versions: dict[str, int]

class ApplyIn(TypedDict):
    dry_run: NotRequired[bool]
    partition: NotRequired[str]
    pool: NotRequired[str]
    reason: NotRequired[str]
    yaml: str

class AuditChangeOut(TypedDict):
    after: NotRequired[Any]
    before: NotRequired[Any]
    field: str

class AuditOut(TypedDict):
    actor: str
    actor_kind: str
    at: str
    cause: str
    changes: list[AuditChangeOut]
    done: str
    person: str
    reason: str
    request_id: str
    subject: str
    table: str

class AuditQuery(TypedDict):
    actor: NotRequired[str]
    before: NotRequired[str | None]
    cause: NotRequired[str]
    limit: NotRequired[int]
    request_id: NotRequired[str]
    since: NotRequired[str | None]
    skip: NotRequired[int]
    table: NotRequired[str]
    text: NotRequired[str]

class BandEdit(TypedDict):
    ceiling: NotRequired[float | None]
    fairness: NotRequired[Fairness | None]
    max_bytes: NotRequired[int | None]
    max_requests: NotRequired[int | None]
    min_share: NotRequired[float | None]
    ordering: NotRequired[Ordering | None]
    priority: NotRequired[int | None]
    reason: NotRequired[str]
    ttft_budget_s: NotRequired[float | None]
    ttl_s: NotRequired[float | None]

class BandIn(TypedDict):
    ceiling: NotRequired[float | None]
    fairness: NotRequired[Fairness | None]
    max_bytes: NotRequired[int | None]
    max_requests: NotRequired[int | None]
    min_share: NotRequired[float | None]
    name: str
    ordering: NotRequired[Ordering | None]
    priority: int
    reason: NotRequired[str]
    ttft_budget_s: NotRequired[float | None]
    ttl_s: NotRequired[float | None]

class BandOut(TypedDict):
    ceiling: float
    fairness: Fairness
    max_bytes: int
    max_requests: int
    min_share: float
    name: str
    ordering: Ordering
    partition: str
    priority: int
    ttft_budget_s: float | None
    ttl_s: float | None

class BandSumsOut(TypedDict):
    band: str
    outcomes: dict[str, int]
    queue_s: SpreadOut
    requests: int

class Because(TypedDict):
    reason: str

class BranchEndIn(TypedDict):
    id: str
    reason: str

class BranchQuery(TypedDict):
    kind: NotRequired[str]
    limit: NotRequired[int]
    node: NotRequired[str]
    q: NotRequired[str]
    tenant: NotRequired[str]

Cause = Literal['planner', 'proposal', 'force', 'rollback', 'watch', 'warm-up']

CeilingPolicy = Literal['static', 'priority-holdback']

class Ceilings(TypedDict):
    min_ceiling: float
    policy: CeilingPolicy

class CeilingsEdit(TypedDict):
    min_ceiling: NotRequired[float | None]
    policy: NotRequired[CeilingPolicy | None]

class ChangeOut(TypedDict):
    after: Any
    before: Any
    path: str

class ChannelEdit(TypedDict):
    enabled: NotRequired[bool | None]
    kinds: NotRequired[list[str] | None]
    reason: NotRequired[str]
    url: NotRequired[str | None]

class ChannelIn(TypedDict):
    kinds: NotRequired[list[str]]
    name: str
    reason: NotRequired[str]
    url: str

class ChannelOut(TypedDict):
    created_at: str
    enabled: bool
    kinds: list[str]
    last_at: str | None
    last_status: str
    name: str
    secret_set_at: str
    url: str

class ClusterOut(TypedDict):
    name: str
    partitions: list[str]
    title: str

class ConfigurationDetail(TypedDict):
    author: str
    created_at: str
    document: dict[str, Any]
    reason: str
    version: int

class ConfigurationOut(TypedDict):
    author: str
    created_at: str
    reason: str
    version: int

class CurrentOut(TypedDict):
    decode: list[str]
    mixed: list[str]
    nodes: list[SplitNodeOut]
    prefill: list[str]

class DecisionInputsOut(TypedDict):
    action: Action
    at: str
    candidates: list[dict[str, Any]]
    chosen: NamesOut | None
    closed_loop: float | None
    current: NamesOut
    fits: list[int]
    gain: float | None
    id: int
    mode: Mode
    reason: str
    rule: str
    rules: list[list[str]]
    slices: int
    slices_used: int
    source: Source
    standard_error: float | None
    state: dict[str, Any]
    theta: float | None
    threshold: float | None
    verdict: Verdict
    window: list[dict[str, Any]]
    window_end: float
    window_start: float

class DecisionOut(TypedDict):
    action: Action
    at: str
    candidates: list[dict[str, Any]]
    chosen: NamesOut | None
    closed_loop: float | None
    current: NamesOut
    gain: float | None
    id: int
    mode: Mode
    reason: str
    rule: str
    rules: list[list[str]]
    slices: int
    slices_used: int
    source: Source
    standard_error: float | None
    theta: float | None
    threshold: float | None
    verdict: Verdict
    window: list[dict[str, Any]]
    window_end: float
    window_start: float

class DeliveryOut(TypedDict):
    attempts: int
    created_at: str
    delivered_at: str | None
    event_id: str
    given_up_at: str | None
    id: int
    kind: str
    last_error: str
    next_try_at: str

Detector = Literal['concurrency', 'utilization', 'predicted-ttft', 'off']

class DirectIn(TypedDict):
    bootstrap_port: NotRequired[int | None]
    kv_events: NotRequired[KvEventsIn | None]
    kv_tokens: NotRequired[int | None]
    token_env: NotRequired[str | None]

class DryRunIn(TypedDict):
    prefill_nodes: int | list[str]
    reason: NotRequired[str]

class DryRunOut(TypedDict):
    asked_at: str
    asked_by: str
    decode: list[str]
    finished_at: str | None
    id: int
    prefill: list[str]
    problem: str
    proposal: int | None
    result: dict[str, Any] | None
    state: DryRunState

DryRunState = Literal['waiting', 'running', 'done', 'failed']

Engine = Literal['reference', 'simulated', 'vllm', 'sglang']

class ExchangeOut(TypedDict):
    applied: bool
    changes: list[ChangeOut]
    notes: list[str]
    version: int | None

class ExperimentDetail(TypedDict):
    job: ExperimentJobOut | None
    measured_at: str | None
    name: str
    problem: str
    report: ReportOut | None
    title: str

class ExperimentJobOut(TypedDict):
    asked_by: NotRequired[str]
    problem: NotRequired[str]
    progress: NotRequired[float]
    quick: NotRequired[bool]
    reason: NotRequired[str]
    state: str
    step: NotRequired[str]
    stopping: NotRequired[bool]

class ExperimentOut(TypedDict):
    job: ExperimentJobOut | None
    measured_at: str | None
    name: str
    problem: str
    title: str

Fairness = Literal['round-robin', 'global-strict', 'token-fair', 'least-attained-service']

class FieldProblem(TypedDict):
    field: str
    message: str

class FitOut(TypedDict):
    batch_high: float
    batch_low: float
    created_at: str
    decode: dict[str, float]
    decode_error_ratio: float
    decode_rows: int
    hardware_class: str
    id: int
    prefill: dict[str, float]
    prefill_error_ratio: float
    prefill_rows: int
    retired_at: str | None
    retired_reason: str
    state: str
    summary: dict[str, Any]
    warnings: list[str]

class FitWithResidualsOut(TypedDict):
    batch_high: float
    batch_low: float
    created_at: str
    decode: dict[str, float]
    decode_error_ratio: float
    decode_rows: int
    hardware_class: str
    id: int
    prefill: dict[str, float]
    prefill_error_ratio: float
    prefill_rows: int
    residuals: dict[str, list[ResidualOut]]
    retired_at: str | None
    retired_reason: str
    state: str
    summary: dict[str, Any]
    warnings: list[str]

class FlowEdit(TypedDict):
    ceilings: NotRequired[CeilingsEdit | None]
    decode: NotRequired[StageEdit | None]
    default_band: NotRequired[dict[str, Any] | None]
    default_ttl_s: NotRequired[float | None]
    displacement: NotRequired[bool | None]
    empty_pool_ttl_s: NotRequired[float | None]
    max_bytes: NotRequired[int | None]
    max_requests: NotRequired[int | None]
    prefill: NotRequired[StageEdit | None]
    reason: NotRequired[str]

class FlowOut(TypedDict):
    ceilings: Ceilings
    decode: Stage
    default_band: dict[str, Any]
    default_ttl_s: float | None
    displacement: bool
    empty_pool_ttl_s: float
    max_bytes: int | None
    max_requests: int | None
    prefill: Stage

class ForceIn(TypedDict):
    expires_at: NotRequired[str | None]
    expires_in_s: NotRequired[float | None]
    prefill_nodes: int | list[str]
    reason: str

class ForceOut(TypedDict):
    created_at: str
    expires_at: str | None
    forced_by: str
    id: int
    node: str | None
    phases: dict[str, Phase]
    reason: str

class ForcedOut(TypedDict):
    decode: list[str]
    forces: list[ForceOut]
    mixed: list[str]
    phases: dict[str, Phase]
    prefill: list[str]

class FreezeIn(TypedDict):
    expires_in_s: NotRequired[float | None]
    reason: str
    until: NotRequired[str | None]

class HistoryQuery(TypedDict):
    seconds: NotRequired[float]

class ImportIn(TypedDict):
    dry_run: NotRequired[bool]
    pool: NotRequired[str]
    reason: NotRequired[str]
    yaml: str

class IssuedKeyOut(TypedDict):
    key: KeyOut
    secret: str | None

class KeyIn(TypedDict):
    expires_at: NotRequired[str | None]
    name: str
    objectives: NotRequired[list[str]]
    owner: NotRequired[str | None]
    reason: NotRequired[str]
    role: NotRequired[KeyRole]
    trusted: NotRequired[bool]

class KeyOut(TypedDict):
    created_at: str
    expires_at: str | None
    id: int
    known_to: list[str]
    last_used_at: str | None
    name: str
    objectives: list[str]
    owner: str | None
    prefix: str
    revoked_at: str | None
    role: KeyRole
    tenant: str
    trusted: bool

KeyRole = Literal['', 'viewer', 'operator', 'administrator']

class KvEventsIn(TypedDict):
    endpoint: str
    replay: NotRequired[str | None]
    topic: NotRequired[str]

class LeaseIn(TypedDict):
    ceiling_s: float
    floor_s: float
    multiple: float

LimitMode = Literal['requests', 'tokens', 'hybrid']

class LineOut(TypedDict):
    case: str
    figure: str
    published: float | None
    ratio: float | None
    seeds: int
    spread: float | None
    unit: str
    value: float | None

class LivingQuery(TypedDict):
    band: NotRequired[str]
    flow: NotRequired[str]
    limit: NotRequired[int]
    node: NotRequired[str]
    q: NotRequired[str]
    stage: NotRequired[str]
    tenant: NotRequired[str]

class MemberIn(TypedDict):
    reason: NotRequired[str]
    username: str

class MemberOut(TypedDict):
    username: str

Mode = Literal['automatic', 'approve', 'advisory', 'frozen']

class ModeIn(TypedDict):
    mode: Mode
    reason: NotRequired[str]

class NamesOut(TypedDict):
    decode: list[str]
    prefill: list[str]

class NewChannelOut(TypedDict):
    channel: ChannelOut
    secret: str | None

class NodeEdit(TypedDict):
    decode_limit: NotRequired[int | None]
    direct: NotRequired[DirectIn | None]
    draining: NotRequired[bool | None]
    enabled: NotRequired[bool | None]
    reason: NotRequired[str]
    url: NotRequired[str | None]

class NodeIn(TypedDict):
    coefficients: NotRequired[dict[str, float] | None]
    decode_limit: NotRequired[int | None]
    direct: NotRequired[DirectIn | None]
    engine: Engine
    hardware_class: NotRequired[str | None]
    name: str
    phase: Phase
    reason: NotRequired[str]
    url: str

class NodeOut(TypedDict):
    coefficients: dict[str, Any]
    decode_limit: int
    desired_phase: Phase
    direct: dict[str, Any] | None
    draining: bool
    enabled: bool
    engine: Engine
    generation: int
    hardware_class: str
    name: str
    observed_at: str | None
    observed_generation: int | None
    observed_phase: str
    observed_state: str
    order: int
    partition: str
    url: str

NodeState = Literal['ready', 'draining', 'switching', 'down']

class ObjectiveEdit(TypedDict):
    band: NotRequired[str | None]
    reason: NotRequired[str]
    slo_ttft_s: NotRequired[float | None]
    ttl_s: NotRequired[float | None]

class ObjectiveIn(TypedDict):
    band: str
    name: str
    reason: NotRequired[str]
    slo_ttft_s: NotRequired[float | None]
    ttl_s: NotRequired[float | None]

class ObjectiveOut(TypedDict):
    band: str
    name: str
    partition: str
    slo_ttft_s: float | None
    ttl_s: float | None

OrderOut = TypedDict('OrderOut', {
    'can_roll_back': 'bool',
    'cause': 'Cause',
    'cooling_until': 'str | None',
    'finished_at': 'str | None',
    'from': 'NamesOut',
    'id': 'int',
    'ordered_at': 'str',
    'ordered_by': 'str',
    'outcome': 'str',
    'reason': 'str',
    'rolls_back': 'int | None',
    'state': 'OrderState',
    'steps': 'list[StepOut]',
    'switched_at': 'str | None',
    'to': 'NamesOut',
    'undoing': 'bool',
})

OrderState = Literal['ordered', 'draining', 'switching', 'cooling', 'done', 'failed', 'rolled-back']

Ordering = Literal['fcfs', 'edf', 'slo-deadline', 'continue-first']

class PageQuery(TypedDict):
    cursor: NotRequired[str | None]
    limit: NotRequired[int]

class Page_AlertOut_(TypedDict):
    items: list[AlertOut]
    next_cursor: NotRequired[str | None]

class Page_BandOut_(TypedDict):
    items: list[BandOut]
    next_cursor: NotRequired[str | None]

class Page_ChannelOut_(TypedDict):
    items: list[ChannelOut]
    next_cursor: NotRequired[str | None]

class Page_ClusterOut_(TypedDict):
    items: list[ClusterOut]
    next_cursor: NotRequired[str | None]

class Page_ConfigurationOut_(TypedDict):
    items: list[ConfigurationOut]
    next_cursor: NotRequired[str | None]

class Page_DecisionOut_(TypedDict):
    items: list[DecisionOut]
    next_cursor: NotRequired[str | None]

class Page_DeliveryOut_(TypedDict):
    items: list[DeliveryOut]
    next_cursor: NotRequired[str | None]

class Page_DryRunOut_(TypedDict):
    items: list[DryRunOut]
    next_cursor: NotRequired[str | None]

class Page_FitOut_(TypedDict):
    items: list[FitOut]
    next_cursor: NotRequired[str | None]

class Page_KeyOut_(TypedDict):
    items: list[KeyOut]
    next_cursor: NotRequired[str | None]

class Page_MemberOut_(TypedDict):
    items: list[MemberOut]
    next_cursor: NotRequired[str | None]

class Page_NodeOut_(TypedDict):
    items: list[NodeOut]
    next_cursor: NotRequired[str | None]

class Page_ObjectiveOut_(TypedDict):
    items: list[ObjectiveOut]
    next_cursor: NotRequired[str | None]

class Page_OrderOut_(TypedDict):
    items: list[OrderOut]
    next_cursor: NotRequired[str | None]

class Page_PartitionOut_(TypedDict):
    items: list[PartitionOut]
    next_cursor: NotRequired[str | None]

class Page_ProposalOut_(TypedDict):
    items: list[ProposalOut]
    next_cursor: NotRequired[str | None]

class Page_RequestOut_(TypedDict):
    items: list[RequestOut]
    next_cursor: NotRequired[str | None]

class Page_TenantOut_(TypedDict):
    items: list[TenantOut]
    next_cursor: NotRequired[str | None]

class PartitionEdit(TypedDict):
    lease: NotRequired[LeaseIn | None]
    reason: NotRequired[str]
    routing_policy: NotRequired[RoutingPolicy | None]
    title: NotRequired[str | None]

class PartitionOut(TypedDict):
    cluster: str
    gateway_url: str
    lease: dict[str, Any]
    model: dict[str, Any]
    name: str
    network: dict[str, Any]
    routing_policy: RoutingPolicy
    title: str

Phase = Literal['prefill', 'decode', 'mixed']

class PhaseIn(TypedDict):
    expires_at: NotRequired[str | None]
    expires_in_s: NotRequired[float | None]
    phase: Phase
    reason: str

class PolicyEdit(TypedDict):
    approvals_required: NotRequired[int | None]
    auto_warm_up: NotRequired[bool | None]
    cooldown_s: NotRequired[float | None]
    drain_deadline_s: NotRequired[float | None]
    max_stale_ratio: NotRequired[float | None]
    min_utilisation: NotRequired[float | None]
    reason: NotRequired[str]
    self_approval: NotRequired[bool | None]
    slice_s: NotRequired[float | None]
    slices_per_window: NotRequired[int | None]
    slo_ttft_s: NotRequired[float | None]
    warm_up_limit_s: NotRequired[float | None]
    warm_up_rung_s: NotRequired[float | None]

class PolicyOut(TypedDict):
    approvals_required: int
    auto_warm_up: bool
    cooldown_s: float
    drain_deadline_s: float
    freeze_reason: str
    frozen_by: str
    frozen_until: str | None
    max_stale_ratio: float
    min_utilisation: float
    mode: Mode
    self_approval: bool
    slice_s: float
    slices_per_window: int
    slo_ttft_s: float | None
    thaw_mode: Mode
    warm_up_limit_s: float
    warm_up_rung_s: float

class PrioritiesIn(TypedDict):
    priorities: dict[str, int]
    reason: NotRequired[str]

class Problem(TypedDict):
    code: str
    detail: str
    errors: NotRequired[list[FieldProblem]]
    instance: str
    request_id: str
    status: int
    title: str
    type: str

class ProposalIn(TypedDict):
    expires_at: NotRequired[str | None]
    expires_in_s: NotRequired[float | None]
    prefill_nodes: int | list[str]
    reason: str

class ProposalOut(TypedDict):
    approvals_required: int
    closed_at: str | None
    closed_reason: str
    created_at: str
    decode: list[str]
    dry_run: DryRunOut | None
    expires_at: str
    from_decode: list[str]
    from_prefill: list[str]
    gain: float | None
    id: int
    prefill: list[str]
    proposed_by: str
    proposer: str | None
    reason: str
    standard_error: float | None
    state: ProposalState
    threshold: float | None
    votes: list[VoteOut]

ProposalState = Literal['open', 'approved', 'rejected', 'stale', 'expired']

class QueuesOut(TypedDict):
    bands: list[dict[str, Any]]
    config_version: int | None
    partition: str
    stages: dict[str, Any]
    t: float

class Reason(TypedDict):
    reason: NotRequired[str]

class ReasonIn(TypedDict):
    reason: str

class ReportOut(TypedDict):
    configuration: dict[str, Any]
    found: list[LineOut]
    notes: list[str]
    verdicts: list[VerdictOut]

class RequestDetail(TypedDict):
    at: str
    band: str
    branch: str
    branch_kind: str
    cached_tokens: int
    computed_tokens: int
    decode_node: str
    detail: dict[str, Any]
    drop_code: str
    e2e_s: float | None
    fetched_tokens: int
    outcome: str
    output_tokens: int
    predicted_ttft_s: float | None
    prefill_node: str
    prompt_tokens: int
    queue_s: float | None
    reason: str
    request_id: str
    tenant: str
    ttft_s: float | None

class RequestOut(TypedDict):
    at: str
    band: str
    branch: str
    branch_kind: str
    cached_tokens: int
    computed_tokens: int
    decode_node: str
    drop_code: str
    e2e_s: float | None
    fetched_tokens: int
    outcome: str
    output_tokens: int
    predicted_ttft_s: float | None
    prefill_node: str
    prompt_tokens: int
    queue_s: float | None
    reason: str
    request_id: str
    tenant: str
    ttft_s: float | None

class RequestQuery(TypedDict):
    band: NotRequired[str]
    branch: NotRequired[str]
    cursor: NotRequired[str | None]
    limit: NotRequired[int]
    node: NotRequired[str]
    outcome: NotRequired[str]
    since: NotRequired[str | None]
    tenant: NotRequired[str]
    until: NotRequired[str | None]

class RequestSumsOut(TypedDict):
    bands: list[BandSumsOut]
    since: str
    tenants: list[TenantSumsOut]
    until: str
    whole: WholeSumsOut | None

class ResidualOut(TypedDict):
    held_out: bool
    measured_s: float
    node: str
    predicted_s: float
    t0: float

class RevertIn(TypedDict):
    dry_run: NotRequired[bool]
    reason: NotRequired[str]
    version: int

RoutingPolicy = Literal['ttft', 'round-robin', 'least-loaded', 'cache-aware', 'sticky', 'dynamo-kv']

class RuleEdit(TypedDict):
    enabled: NotRequired[bool | None]
    reason: NotRequired[str]
    silenced_until: NotRequired[str | None]
    threshold: NotRequired[float | None]

class RuleOut(TypedDict):
    do: str
    enabled: bool
    for_s: float
    look: str
    means: str
    name: str
    own_threshold: bool
    severity: str
    silenced_until: str | None
    threshold: float | None
    title: str
    unit: str

Source = Literal['learned', 'configured']

class SplitNodeOut(TypedDict):
    desired_phase: Phase
    draining: bool
    enabled: bool
    generation: int
    name: str
    observed_at: str | None
    observed_phase: Phase | None
    observed_state: NodeState | None

class SplitOut(TypedDict):
    active_orders: list[OrderOut]
    current: CurrentOut
    fits: list[FitOut]
    forced: ForcedOut | None
    history: list[OrderOut]
    last_decision: DecisionOut | None
    open_proposal: ProposalOut | None
    partition: str
    policy: PolicyOut
    proposed: NamesOut | None
    warm_up: WarmUpOut | None

class SpreadOut(TypedDict):
    n: int
    p50: float | None
    p95: float | None
    p99: float | None

class Stage(TypedDict):
    detector: Detector
    kv_threshold: float
    limit_per_node: int | None
    mode: LimitMode
    queue_threshold: float
    stale_after_s: float
    token_limit_per_node: int | None
    ttft_budget_s: float

class StageEdit(TypedDict):
    detector: NotRequired[Detector | None]
    kv_threshold: NotRequired[float | None]
    limit_per_node: NotRequired[int | None]
    mode: NotRequired[LimitMode | None]
    queue_threshold: NotRequired[float | None]
    stale_after_s: NotRequired[float | None]
    token_limit_per_node: NotRequired[int | None]
    ttft_budget_s: NotRequired[float | None]

class StartIn(TypedDict):
    quick: NotRequired[bool]
    reason: NotRequired[str]

class StepOut(TypedDict):
    accepted: bool
    began_at: str | None
    drain_s: float | None
    drained_at: str | None
    finished_at: str | None
    from_phase: Phase
    generation: int
    node: str
    pushed_at: str | None
    reason: str
    state: StepState
    switch_s: float | None
    to_phase: Phase

StepState = Literal['waiting', 'draining', 'switching', 'switched', 'failed', 'cancelled']

class SumsQuery(TypedDict):
    band: NotRequired[str]
    since: NotRequired[str | None]
    tenant: NotRequired[str]
    until: NotRequired[str | None]

class TenantEdit(TypedDict):
    default_objective: NotRequired[str | None]
    paused: NotRequired[bool | None]
    reason: NotRequired[str]
    sharing_domain: NotRequired[str | None]
    title: NotRequired[str | None]
    weight: NotRequired[float | None]

class TenantIn(TypedDict):
    default_objective: NotRequired[str]
    name: str
    reason: NotRequired[str]
    sharing_domain: NotRequired[str]
    title: NotRequired[str]
    weight: NotRequired[float]

class TenantOut(TypedDict):
    created_at: str
    default_objective: str
    name: str
    paused: bool
    sharing_domain: str
    title: str
    weight: float

class TenantSumsOut(TypedDict):
    cached_tokens: int
    mean_ttft_s: float | None
    output_tokens: int
    prompt_tokens: int
    requests: int
    tenant: str

class TestedOut(TypedDict):
    delivered: bool
    status: str

Verdict = Literal['switch', 'hold']

class VerdictOut(TypedDict):
    aim: str
    met: bool | None
    target: float
    text: str
    value: float | None

VoteChoice = Literal['approve', 'reject']

class VoteOut(TypedDict):
    actor: str
    at: str
    choice: VoteChoice
    person: str
    reason: str

class WarmUpOut(TypedDict):
    climbing_since: str | None
    ended_at: str | None
    id: int
    limit_s: float
    outcome: str
    reason: str
    rung: int
    rung_s: float
    started_at: str
    started_by: str
    state: WarmUpState

WarmUpState = Literal['running', 'done', 'stopped', 'given-up']

class WhoOut(TypedDict):
    kind: str
    name: str
    person: str | None
    roles: list[str]
    tenants: list[str]

class WholeSumsOut(TypedDict):
    lost_tokens: dict[str, int]
    outcomes: dict[str, int]
    prediction_error_ratio: SpreadOut
    requests: int
    times_s: dict[str, SpreadOut]
    tokens: dict[str, int]

class Caller(Protocol):
    """Sends one call and gives back the answer's JSON, or its text when it is none."""

    def __call__(self, method: str, path: str, places: dict[str, Any], query: dict[str, Any], body: Any) -> Any: ...


class Api:
    """One method for each operation, named as in the description."""

    def __init__(self, call: Caller) -> None:
        self._call = call

    def apply_documents(
        self,
        body: ApplyIn,
    ) -> AppliedOut:
        return self._call(
            'POST', '/api/v1/apply', {}, {}, body
        )

    def list_channels(
        self,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_ChannelOut_:
        return self._call(
            'GET', '/api/v1/channels', {}, {'limit': limit, 'cursor': cursor}, None
        )

    def create_channel(
        self,
        body: ChannelIn,
    ) -> NewChannelOut:
        return self._call(
            'POST', '/api/v1/channels', {}, {}, body
        )

    def delete_channel(
        self,
        name: str,
        *,
        reason: str | None = None,
    ) -> None:
        self._call(
            'DELETE', '/api/v1/channels/{name}', {'name': name}, {'reason': reason}, None
        )

    def get_channel(
        self,
        name: str,
    ) -> ChannelOut:
        return self._call(
            'GET', '/api/v1/channels/{name}', {'name': name}, {}, None
        )

    def edit_channel(
        self,
        name: str,
        body: ChannelEdit,
    ) -> ChannelOut:
        return self._call(
            'PATCH', '/api/v1/channels/{name}', {'name': name}, {}, body
        )

    def list_deliveries(
        self,
        name: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_DeliveryOut_:
        return self._call(
            'GET', '/api/v1/channels/{name}/deliveries', {'name': name}, {'limit': limit, 'cursor': cursor}, None
        )

    def rotate_channel_secret(
        self,
        name: str,
        body: Reason,
    ) -> NewChannelOut:
        return self._call(
            'POST', '/api/v1/channels/{name}/rotate', {'name': name}, {}, body
        )

    def test_channel(
        self,
        name: str,
        body: Reason,
    ) -> TestedOut:
        return self._call(
            'POST', '/api/v1/channels/{name}/test', {'name': name}, {}, body
        )

    def list_clusters(
        self,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_ClusterOut_:
        return self._call(
            'GET', '/api/v1/clusters', {}, {'limit': limit, 'cursor': cursor}, None
        )

    def get_cluster(
        self,
        name: str,
    ) -> ClusterOut:
        return self._call(
            'GET', '/api/v1/clusters/{name}', {'name': name}, {}, None
        )

    def list_experiments(
        self,
    ) -> list[ExperimentOut]:
        return self._call(
            'GET', '/api/v1/experiments', {}, {}, None
        )

    def get_experiment(
        self,
        name: str,
    ) -> ExperimentDetail:
        return self._call(
            'GET', '/api/v1/experiments/{name}', {'name': name}, {}, None
        )

    def cancel_experiment(
        self,
        name: str,
        body: Reason,
    ) -> ExperimentOut:
        return self._call(
            'POST', '/api/v1/experiments/{name}/cancel', {'name': name}, {}, body
        )

    def start_experiment(
        self,
        name: str,
        body: StartIn,
    ) -> ExperimentOut:
        return self._call(
            'POST', '/api/v1/experiments/{name}/start', {'name': name}, {}, body
        )

    def revoke_key(
        self,
        key_id: int,
        body: Reason,
    ) -> KeyOut:
        return self._call(
            'POST', '/api/v1/keys/{key_id}/revoke', {'key_id': key_id}, {}, body
        )

    def rotate_key(
        self,
        key_id: int,
        body: Reason,
    ) -> IssuedKeyOut:
        return self._call(
            'POST', '/api/v1/keys/{key_id}/rotate', {'key_id': key_id}, {}, body
        )

    def who_am_i(
        self,
    ) -> WhoOut:
        return self._call(
            'GET', '/api/v1/me', {}, {}, None
        )

    def delete_node(
        self,
        name: str,
        *,
        reason: str | None = None,
    ) -> None:
        self._call(
            'DELETE', '/api/v1/nodes/{name}', {'name': name}, {'reason': reason}, None
        )

    def get_node(
        self,
        name: str,
    ) -> NodeOut:
        return self._call(
            'GET', '/api/v1/nodes/{name}', {'name': name}, {}, None
        )

    def edit_node(
        self,
        name: str,
        body: NodeEdit,
    ) -> NodeOut:
        return self._call(
            'PATCH', '/api/v1/nodes/{name}', {'name': name}, {}, body
        )

    def drain_node(
        self,
        name: str,
        body: Reason,
    ) -> NodeOut:
        return self._call(
            'POST', '/api/v1/nodes/{name}/drain', {'name': name}, {}, body
        )

    def undrain_node(
        self,
        name: str,
        body: Reason,
    ) -> NodeOut:
        return self._call(
            'POST', '/api/v1/nodes/{name}/undrain', {'name': name}, {}, body
        )

    def force_node(
        self,
        node: str,
        body: PhaseIn,
    ) -> SplitOut:
        return self._call(
            'PUT', '/api/v1/nodes/{node}/phase', {'node': node}, {}, body
        )

    def list_partitions(
        self,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_PartitionOut_:
        return self._call(
            'GET', '/api/v1/partitions', {}, {'limit': limit, 'cursor': cursor}, None
        )

    def get_partition(
        self,
        partition: str,
    ) -> PartitionOut:
        return self._call(
            'GET', '/api/v1/partitions/{partition}', {'partition': partition}, {}, None
        )

    def edit_partition(
        self,
        partition: str,
        body: PartitionEdit,
    ) -> PartitionOut:
        return self._call(
            'PATCH', '/api/v1/partitions/{partition}', {'partition': partition}, {}, body
        )

    def list_alert_rules(
        self,
        partition: str,
    ) -> list[RuleOut]:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/alert-rules', {'partition': partition}, {}, None
        )

    def get_alert_rule(
        self,
        partition: str,
        name: str,
    ) -> RuleOut:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/alert-rules/{name}', {'partition': partition, 'name': name}, {}, None
        )

    def edit_alert_rule(
        self,
        partition: str,
        name: str,
        body: RuleEdit,
    ) -> RuleOut:
        return self._call(
            'PATCH', '/api/v1/partitions/{partition}/alert-rules/{name}', {'partition': partition, 'name': name}, {}, body
        )

    def list_alerts(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
        state: str | None = None,
        rule: str | None = None,
    ) -> Page_AlertOut_:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/alerts', {'partition': partition}, {'limit': limit, 'cursor': cursor, 'state': state, 'rule': rule}, None
        )

    def acknowledge_alert(
        self,
        partition: str,
        number: int,
        body: ReasonIn,
    ) -> AlertOut:
        return self._call(
            'POST', '/api/v1/partitions/{partition}/alerts/{number}/acknowledge', {'partition': partition, 'number': number}, {}, body
        )

    def list_changes(
        self,
        partition: str,
        *,
        table: str | None = None,
        actor: str | None = None,
        cause: str | None = None,
        request_id: str | None = None,
        text: str | None = None,
        since: str | None = None,
        before: str | None = None,
        skip: int | None = None,
        limit: int | None = None,
    ) -> list[AuditOut]:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/audit', {'partition': partition}, {'table': table, 'actor': actor, 'cause': cause, 'request_id': request_id, 'text': text, 'since': since, 'before': before, 'skip': skip, 'limit': limit}, None
        )

    def set_priorities(
        self,
        partition: str,
        body: PrioritiesIn,
    ) -> list[BandOut]:
        return self._call(
            'PUT', '/api/v1/partitions/{partition}/band-priorities', {'partition': partition}, {}, body
        )

    def list_bands(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_BandOut_:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/bands', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def create_band(
        self,
        partition: str,
        body: BandIn,
    ) -> BandOut:
        return self._call(
            'POST', '/api/v1/partitions/{partition}/bands', {'partition': partition}, {}, body
        )

    def delete_band(
        self,
        partition: str,
        name: str,
        *,
        reason: str | None = None,
    ) -> None:
        self._call(
            'DELETE', '/api/v1/partitions/{partition}/bands/{name}', {'partition': partition, 'name': name}, {'reason': reason}, None
        )

    def get_band(
        self,
        partition: str,
        name: str,
    ) -> BandOut:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/bands/{name}', {'partition': partition, 'name': name}, {}, None
        )

    def edit_band(
        self,
        partition: str,
        name: str,
        body: BandEdit,
    ) -> BandOut:
        return self._call(
            'PATCH', '/api/v1/partitions/{partition}/bands/{name}', {'partition': partition, 'name': name}, {}, body
        )

    def list_branches(
        self,
        partition: str,
        *,
        tenant: str | None = None,
        node: str | None = None,
        kind: str | None = None,
        q: str | None = None,
        limit: int | None = None,
    ) -> dict[str, Any]:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/branches', {'partition': partition}, {'tenant': tenant, 'node': node, 'kind': kind, 'q': q, 'limit': limit}, None
        )

    def end_branch(
        self,
        partition: str,
        body: BranchEndIn,
    ) -> None:
        self._call(
            'POST', '/api/v1/partitions/{partition}/branches/end', {'partition': partition}, {}, body
        )

    def get_branch(
        self,
        partition: str,
        branch_id: str,
    ) -> dict[str, Any]:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/branches/{branch_id}', {'partition': partition, 'branch_id': branch_id}, {}, None
        )

    def list_configurations(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_ConfigurationOut_:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/configurations', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def get_configuration(
        self,
        partition: str,
        version: int,
    ) -> ConfigurationDetail:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/configurations/{version}', {'partition': partition, 'version': version}, {}, None
        )

    def export_flow_config(
        self,
        partition: str,
    ) -> Any:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/flow-config', {'partition': partition}, {}, None
        )

    def import_flow_config(
        self,
        partition: str,
        body: ImportIn,
    ) -> ExchangeOut:
        return self._call(
            'POST', '/api/v1/partitions/{partition}/flow-config/import', {'partition': partition}, {}, body
        )

    def revert_flow_config(
        self,
        partition: str,
        body: RevertIn,
    ) -> ExchangeOut:
        return self._call(
            'POST', '/api/v1/partitions/{partition}/flow-config/revert', {'partition': partition}, {}, body
        )

    def get_flow_settings(
        self,
        partition: str,
    ) -> FlowOut:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/flow-settings', {'partition': partition}, {}, None
        )

    def edit_flow_settings(
        self,
        partition: str,
        body: FlowEdit,
    ) -> FlowOut:
        return self._call(
            'PATCH', '/api/v1/partitions/{partition}/flow-settings', {'partition': partition}, {}, body
        )

    def list_history(
        self,
        partition: str,
        *,
        seconds: float | None = None,
    ) -> list[dict[str, Any]]:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/history', {'partition': partition}, {'seconds': seconds}, None
        )

    def get_live(
        self,
        partition: str,
    ) -> dict[str, Any]:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/live', {'partition': partition}, {}, None
        )

    def list_living_requests(
        self,
        partition: str,
        *,
        tenant: str | None = None,
        band: str | None = None,
        stage: str | None = None,
        flow: str | None = None,
        node: str | None = None,
        q: str | None = None,
        limit: int | None = None,
    ) -> dict[str, Any]:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/living-requests', {'partition': partition}, {'tenant': tenant, 'band': band, 'stage': stage, 'flow': flow, 'node': node, 'q': q, 'limit': limit}, None
        )

    def cancel_request(
        self,
        partition: str,
        request_id: str,
        body: ReasonIn,
    ) -> None:
        self._call(
            'POST', '/api/v1/partitions/{partition}/living-requests/{request_id}/cancel', {'partition': partition, 'request_id': request_id}, {}, body
        )

    def export_documents(
        self,
        partition: str,
    ) -> Any:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/manifests', {'partition': partition}, {}, None
        )

    def list_nodes(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_NodeOut_:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/nodes', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def add_node(
        self,
        partition: str,
        body: NodeIn,
    ) -> NodeOut:
        return self._call(
            'POST', '/api/v1/partitions/{partition}/nodes', {'partition': partition}, {}, body
        )

    def list_objectives(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_ObjectiveOut_:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/objectives', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def create_objective(
        self,
        partition: str,
        body: ObjectiveIn,
    ) -> ObjectiveOut:
        return self._call(
            'POST', '/api/v1/partitions/{partition}/objectives', {'partition': partition}, {}, body
        )

    def delete_objective(
        self,
        partition: str,
        name: str,
        *,
        reason: str | None = None,
    ) -> None:
        self._call(
            'DELETE', '/api/v1/partitions/{partition}/objectives/{name}', {'partition': partition, 'name': name}, {'reason': reason}, None
        )

    def get_objective(
        self,
        partition: str,
        name: str,
    ) -> ObjectiveOut:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/objectives/{name}', {'partition': partition, 'name': name}, {}, None
        )

    def edit_objective(
        self,
        partition: str,
        name: str,
        body: ObjectiveEdit,
    ) -> ObjectiveOut:
        return self._call(
            'PATCH', '/api/v1/partitions/{partition}/objectives/{name}', {'partition': partition, 'name': name}, {}, body
        )

    def get_queues(
        self,
        partition: str,
    ) -> QueuesOut:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/queues', {'partition': partition}, {}, None
        )

    def get_request_sums(
        self,
        partition: str,
        *,
        since: str | None = None,
        until: str | None = None,
        band: str | None = None,
        tenant: str | None = None,
    ) -> RequestSumsOut:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/request-sums', {'partition': partition}, {'since': since, 'until': until, 'band': band, 'tenant': tenant}, None
        )

    def list_requests(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
        tenant: str | None = None,
        band: str | None = None,
        branch: str | None = None,
        node: str | None = None,
        outcome: str | None = None,
        since: str | None = None,
        until: str | None = None,
    ) -> Page_RequestOut_:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/requests', {'partition': partition}, {'limit': limit, 'cursor': cursor, 'tenant': tenant, 'band': band, 'branch': branch, 'node': node, 'outcome': outcome, 'since': since, 'until': until}, None
        )

    def get_request(
        self,
        partition: str,
        request_id: str,
    ) -> RequestDetail:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/requests/{request_id}', {'partition': partition, 'request_id': request_id}, {}, None
        )

    def get_reuse(
        self,
        partition: str,
    ) -> dict[str, Any]:
        return self._call(
            'GET', '/api/v1/partitions/{partition}/reuse', {'partition': partition}, {}, None
        )

    def get_split(
        self,
        partition: str,
    ) -> SplitOut:
        return self._call(
            'GET', '/api/v1/split/{partition}', {'partition': partition}, {}, None
        )

    def list_decisions(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_DecisionOut_:
        return self._call(
            'GET', '/api/v1/split/{partition}/decisions', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def get_decision(
        self,
        partition: str,
        number: int,
    ) -> DecisionInputsOut:
        return self._call(
            'GET', '/api/v1/split/{partition}/decisions/{number}', {'partition': partition, 'number': number}, {}, None
        )

    def list_dry_runs(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_DryRunOut_:
        return self._call(
            'GET', '/api/v1/split/{partition}/dry-runs', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def ask_dry_run(
        self,
        partition: str,
        body: DryRunIn,
    ) -> DryRunOut:
        return self._call(
            'POST', '/api/v1/split/{partition}/dry-runs', {'partition': partition}, {}, body
        )

    def get_dry_run(
        self,
        partition: str,
        number: int,
    ) -> DryRunOut:
        return self._call(
            'GET', '/api/v1/split/{partition}/dry-runs/{number}', {'partition': partition, 'number': number}, {}, None
        )

    def list_fits(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_FitOut_:
        return self._call(
            'GET', '/api/v1/split/{partition}/fits', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def get_fit(
        self,
        partition: str,
        number: int,
    ) -> FitWithResidualsOut:
        return self._call(
            'GET', '/api/v1/split/{partition}/fits/{number}', {'partition': partition, 'number': number}, {}, None
        )

    def clear_force(
        self,
        partition: str,
        *,
        reason: str | None = None,
    ) -> SplitOut:
        return self._call(
            'DELETE', '/api/v1/split/{partition}/force', {'partition': partition}, {'reason': reason}, None
        )

    def force_split(
        self,
        partition: str,
        body: ForceIn,
    ) -> SplitOut:
        return self._call(
            'PUT', '/api/v1/split/{partition}/force', {'partition': partition}, {}, body
        )

    def unfreeze_split(
        self,
        partition: str,
        *,
        reason: str | None = None,
    ) -> PolicyOut:
        return self._call(
            'DELETE', '/api/v1/split/{partition}/freeze', {'partition': partition}, {'reason': reason}, None
        )

    def freeze_split(
        self,
        partition: str,
        body: FreezeIn,
    ) -> PolicyOut:
        return self._call(
            'PUT', '/api/v1/split/{partition}/freeze', {'partition': partition}, {}, body
        )

    def set_mode(
        self,
        partition: str,
        body: ModeIn,
    ) -> PolicyOut:
        return self._call(
            'PUT', '/api/v1/split/{partition}/mode', {'partition': partition}, {}, body
        )

    def list_orders(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_OrderOut_:
        return self._call(
            'GET', '/api/v1/split/{partition}/orders', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def get_order(
        self,
        partition: str,
        number: int,
    ) -> OrderOut:
        return self._call(
            'GET', '/api/v1/split/{partition}/orders/{number}', {'partition': partition, 'number': number}, {}, None
        )

    def roll_back_order(
        self,
        partition: str,
        number: int,
        body: Because,
    ) -> OrderOut:
        return self._call(
            'POST', '/api/v1/split/{partition}/orders/{number}/rollback', {'partition': partition, 'number': number}, {}, body
        )

    def get_policy(
        self,
        partition: str,
    ) -> PolicyOut:
        return self._call(
            'GET', '/api/v1/split/{partition}/policy', {'partition': partition}, {}, None
        )

    def edit_policy(
        self,
        partition: str,
        body: PolicyEdit,
    ) -> PolicyOut:
        return self._call(
            'PATCH', '/api/v1/split/{partition}/policy', {'partition': partition}, {}, body
        )

    def list_proposals(
        self,
        partition: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_ProposalOut_:
        return self._call(
            'GET', '/api/v1/split/{partition}/proposals', {'partition': partition}, {'limit': limit, 'cursor': cursor}, None
        )

    def propose_split(
        self,
        partition: str,
        body: ProposalIn,
    ) -> ProposalOut:
        return self._call(
            'POST', '/api/v1/split/{partition}/proposals', {'partition': partition}, {}, body
        )

    def approve_proposal(
        self,
        partition: str,
        number: int,
        body: Reason,
    ) -> ProposalOut:
        return self._call(
            'POST', '/api/v1/split/{partition}/proposals/{number}/approve', {'partition': partition, 'number': number}, {}, body
        )

    def reject_proposal(
        self,
        partition: str,
        number: int,
        body: Because,
    ) -> ProposalOut:
        return self._call(
            'POST', '/api/v1/split/{partition}/proposals/{number}/reject', {'partition': partition, 'number': number}, {}, body
        )

    def stop_warm_up(
        self,
        partition: str,
        *,
        reason: str | None = None,
    ) -> WarmUpOut:
        return self._call(
            'DELETE', '/api/v1/split/{partition}/warm-up', {'partition': partition}, {'reason': reason}, None
        )

    def start_warm_up(
        self,
        partition: str,
        body: Because,
    ) -> WarmUpOut:
        return self._call(
            'POST', '/api/v1/split/{partition}/warm-up', {'partition': partition}, {}, body
        )

    def list_tenants(
        self,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_TenantOut_:
        return self._call(
            'GET', '/api/v1/tenants', {}, {'limit': limit, 'cursor': cursor}, None
        )

    def create_tenant(
        self,
        body: TenantIn,
    ) -> TenantOut:
        return self._call(
            'POST', '/api/v1/tenants', {}, {}, body
        )

    def get_tenant(
        self,
        name: str,
    ) -> TenantOut:
        return self._call(
            'GET', '/api/v1/tenants/{name}', {'name': name}, {}, None
        )

    def edit_tenant(
        self,
        name: str,
        body: TenantEdit,
    ) -> TenantOut:
        return self._call(
            'PATCH', '/api/v1/tenants/{name}', {'name': name}, {}, body
        )

    def list_keys(
        self,
        name: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_KeyOut_:
        return self._call(
            'GET', '/api/v1/tenants/{name}/keys', {'name': name}, {'limit': limit, 'cursor': cursor}, None
        )

    def issue_key(
        self,
        name: str,
        body: KeyIn,
    ) -> IssuedKeyOut:
        return self._call(
            'POST', '/api/v1/tenants/{name}/keys', {'name': name}, {}, body
        )

    def list_members(
        self,
        name: str,
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page_MemberOut_:
        return self._call(
            'GET', '/api/v1/tenants/{name}/members', {'name': name}, {'limit': limit, 'cursor': cursor}, None
        )

    def add_member(
        self,
        name: str,
        body: MemberIn,
    ) -> MemberOut:
        return self._call(
            'POST', '/api/v1/tenants/{name}/members', {'name': name}, {}, body
        )

    def remove_member(
        self,
        name: str,
        username: str,
        *,
        reason: str | None = None,
    ) -> None:
        self._call(
            'DELETE', '/api/v1/tenants/{name}/members/{username}', {'name': name, 'username': username}, {'reason': reason}, None
        )

    def pause_tenant(
        self,
        name: str,
        body: Reason,
    ) -> TenantOut:
        return self._call(
            'POST', '/api/v1/tenants/{name}/pause', {'name': name}, {}, body
        )

    def resume_tenant(
        self,
        name: str,
        body: Reason,
    ) -> TenantOut:
        return self._call(
            'POST', '/api/v1/tenants/{name}/resume', {'name': name}, {}, body
        )
