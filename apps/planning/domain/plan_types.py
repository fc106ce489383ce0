"""What the planner looks at and what it answers: state, slices, candidates, decision. Units: seconds, requests per second."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from apps.planning.domain.capacity import NodeCapacity, Workload
from apps.planning.domain.gate import GateResult

OUTAGE_GRACE_S = 10.0
EMPTY_PHASE = "empty_phase"  # the rule of a decision that gives a lost phase a node again
Mode = Literal["automatic", "approve", "advisory", "frozen"]


@dataclass(frozen=True, slots=True)
class PlannerNode:
    """One node as the planner sees it.

    `available` nodes are enabled and answer; only they count. `down_s` is how long the others have not answered. `fit_ok` is False when the learned model is too wrong
    to plan with, or reality has left it and the next one is not there yet; `fit_problem` says which. `switch_s` is how long the node serves nothing while it switches (a symmetric engine: about 0).
    """

    name: str
    order: int
    phase: str
    capacity: NodeCapacity
    available: bool = True
    down_s: float = 0.0
    draining: bool = False
    source: Literal["learned", "configured"] = "configured"
    fit_ok: bool = True
    fit_problem: str = ""
    running: int = 0
    referenced_blocks: int = 0
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannerPolicy:
    """What people decided about planning in this partition."""

    mode: Mode = "automatic"
    freeze_reason: str = ""
    cooldown_s: float = 120.0
    slice_s: float = 60.0
    window_s: float = 600.0
    slo_ttft_s: float | None = None
    max_stale_ratio: float = 0.2
    min_utilisation: float = 0.7


@dataclass(frozen=True, slots=True)
class LastSwitch:
    """The newest finished switch: when, and how many nodes it added to prefill (negative: to decode).

    `watched` is whether it is undone when it hurts: a forced one, or one that undid another, is not.
    """

    finished_at: float
    prefill_delta: int
    watched: bool = False


@dataclass(frozen=True, slots=True)
class PlannerState:
    now: float
    nodes: tuple[PlannerNode, ...]
    policy: PlannerPolicy = field(default_factory=PlannerPolicy)
    last_switch: LastSwitch | None = None
    switch_running: bool = False
    forced_reason: str | None = None
    warming_up: bool = False

    @property
    def available(self) -> tuple[PlannerNode, ...]:
        return tuple(node for node in self.nodes if node.available)

    @property
    def outage(self) -> str | None:
        """The phase that has lost its last node, once that has lasted longer than a process takes to restart."""
        for phase in ("prefill", "decode"):
            serving = [node for node in self.available if node.phase in (phase, "mixed")]
            lost = [node for node in self.nodes if not node.available and node.phase == phase]
            if not serving and all(node.down_s >= OUTAGE_GRACE_S for node in lost):
                return phase
        return None

    def names(self, phase: str) -> tuple[str, ...]:
        return tuple(node.name for node in self.available if node.phase == phase)


@dataclass(frozen=True, slots=True)
class SliceView:
    """One slice of the window. `workload` is None when the slice is empty; waits and utilisations are as measured."""

    t0: float
    t1: float
    workload: Workload | None
    rate: float = 0.0
    prefill_utilisation: float | None = None
    decode_utilisation: float | None = None
    prefill_wait_p95_s: float | None = None
    stale_ratio: float = 0.0
    agents: float | None = None
    think_s: float | None = None


@dataclass(frozen=True, slots=True)
class Move:
    node: str
    from_phase: str
    to_phase: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One split that was looked at: who would serve which phase, what it would gain, and why it was not taken."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    moves: tuple[Move, ...]
    theta: float
    bottleneck: str
    gate: GateResult
    gains: tuple[float | None, ...]
    prefill_wait_p95_s: float | None
    closed_loop: float | None
    outside_fit: bool
    rule: str
    reason: str

    @property
    def prefill_delta(self) -> int:
        """How many nodes prefill gains."""
        return sum((m.to_phase == "prefill") - (m.from_phase == "prefill") for m in self.moves)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a window's end led to. `rule` is the code of the rule that decided, `reason` the same for a person."""

    verdict: Literal["switch", "hold"]
    rule: str
    reason: str
    source: Literal["learned", "configured"]
    current_prefill: tuple[str, ...]
    current_decode: tuple[str, ...]
    theta: float | None
    closed_loop: float | None
    current_wait_p95_s: float | None
    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    slices: int
    slices_used: int
    rules: tuple[tuple[str, str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for storage and pages."""
        document = asdict(self)
        for candidate, raw in zip(self.candidates, document["candidates"], strict=True):
            raw["gate"]["reason"] = candidate.gate.reason
        return document
