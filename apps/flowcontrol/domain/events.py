"""What happens to flow control. Every event is handed in with the time it happened, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from apps.flowcontrol.domain.config import FlowConfig

Stage = Literal["prefill", "decode"]
STAGES: tuple[Stage, Stage] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class FlowRequest:
    """One request that asks to be dispatched.

    `band` is the name of its priority band; `priority` is used only when no band of that name is configured, which
    then gets its own band from the default template. `ttl_s` can only shorten the band's. `starts_branch`: it begins
    new agent work, so under pressure it is shed before a turn of work that is under way. `output_tokens` is what it may
    produce at most; `weight` its tenant's share among the flows of a `token-fair` band.
    """

    request_id: str
    band: str
    flow_id: str
    bytes: int
    prompt_tokens: int = 0
    uncached_tokens: int = 0
    output_tokens: int = 0
    received_at: float = 0.0
    ttl_s: float | None = None
    slo_ttft_s: float | None = None
    starts_branch: bool = False
    program: str | None = None
    tenant: str = ""
    priority: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Enqueue:
    """A request arrived. Answered by `Dispatch` or `Drop`, now or later; its id must not be known already."""

    request: FlowRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone. A waiting request is dropped; a dispatched one gives back its places at once."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StageReleased:
    """A dispatched request left a stage. `prefill` frees its prefill place and turns the announced decode place into a
    running one; `decode` is the end of the request and frees whatever it still holds. Unknown ids are ignored.

    `tokens`: what the request really cost in the stage (prompt tokens computed, tokens produced); it corrects what was
    expected of it. None where that is not known, or where the request was broken off.
    """

    request_id: str
    stage: Stage
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """A dispatched request could not be placed: it gives back its places and waits again at the head of its line.

    It is not tried again in the same call, but on the next event or at `next_deadline()`.
    """

    request_id: str


@dataclass(frozen=True, slots=True)
class PoolChanged:
    """How many healthy nodes serve a stage now, and what they say they take together, in requests and in tokens.

    The reported limits count where a limit is `auto`. `nodes` names the healthy ones for detectors that look at each.
    """

    stage: Stage
    healthy_nodes: int
    reported_limit: int | None = None
    reported_tokens: int | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node's own load in a stage: requests that wait and that run there. `at` is when the node measured it."""

    node: str
    stage: Stage
    queue_depth: int
    kv_usage_ratio: float
    at: float
    running: int = 0


@dataclass(frozen=True, slots=True)
class PredictedTtft:
    """The best node's predicted TTFT for a request placed now; also used for Retry-After.

    The `predicted-ttft` detector lets one request through for each prediction, since every placement changes it: report
    again after each `Dispatch` was placed, and as work is done.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """A new configuration; it counts from the very next dispatch, and every waiting request stays in its band."""

    config: FlowConfig


@dataclass(frozen=True, slots=True)
class Drain:
    """Shutdown: everything waiting and everything that arrives from now on is dropped; running requests go on."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened but time."""


Event = (
    Enqueue | Cancel | StageReleased | Withdraw | PoolChanged | NodeReport | PredictedTtft | Reconfigure | Drain | Tick
)
