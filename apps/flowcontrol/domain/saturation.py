"""Is there room in a stage? A detector answers with a saturation: 1.0 is full, above 1.0 is too much.

Room is taken at the moment of dispatch: every detector counts what was dispatched since a node last reported, so a burst
cannot pass a gate that still looks open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum, inf
from typing import Protocol

from apps.flowcontrol.domain.config import BandConfig, StageConfig
from apps.flowcontrol.domain.events import NodeReport, PredictedTtft, Stage
from apps.flowcontrol.domain.waiting import Waiting

UNREPORTED_LIMIT_PER_NODE = 1


@dataclass(slots=True)
class StageLoad:
    """What one stage holds. `announced` requests are on their way to it and take up room like running ones.

    Tokens are prompt tokens to compute in prefill, and the KV a request is expected to hold in decode.
    """

    stage: Stage
    healthy_nodes: int = 0
    nodes: tuple[str, ...] = ()
    reported_limit: int | None = None
    reported_tokens: int | None = None
    running: int = 0
    announced: int = 0
    tokens: int = 0

    @property
    def requests(self) -> int:
        return self.running + self.announced


class SaturationDetector(Protocol):
    """One stage's gate. It reads the shared `StageLoad` and keeps what else it needs from `observe`.

    `per_band`: saturation depends on who asks. `per_request`: `fits` must be asked before each dispatch.
    """

    per_band: bool
    per_request: bool

    def observe(self, event: NodeReport | PredictedTtft) -> None: ...

    def dispatched(self) -> None:
        """A request was sent to this stage."""
        ...

    def saturation(self, now: float, load: StageLoad, band: BandConfig | None = None) -> float: ...

    def fits(self, load: StageLoad, waiting: Waiting) -> bool:
        """Whether this request may enter a stage that is not saturated."""
        ...

    def limit(self, load: StageLoad) -> int | None:
        """How many requests fit, where the detector counts requests; else None."""
        ...

    def token_limit(self, load: StageLoad) -> int | None:
        """How many tokens fit, where the detector counts tokens; else None."""
        ...

    def describe(self, load: StageLoad) -> str:
        """How full the stage is, in a few characters."""
        ...


def tokens_in(stage: Stage, waiting: Waiting) -> int:
    """What a request takes up in a stage, in tokens."""
    return waiting.request.uncached_tokens if stage == "prefill" else waiting.context_tokens


class _Detector:
    """What detectors have in common."""

    per_band = False
    per_request = False

    def observe(self, event: NodeReport | PredictedTtft) -> None:
        """Looks at nothing but the load."""

    def dispatched(self) -> None:
        """Nothing to remember: the load says it."""

    def fits(self, load: StageLoad, waiting: Waiting) -> bool:
        return True

    def limit(self, load: StageLoad) -> int | None:
        return None

    def token_limit(self, load: StageLoad) -> int | None:
        return None

    def describe(self, load: StageLoad) -> str:
        return f"{load.requests} requests"


class RequestConcurrency(_Detector):
    """Requests in the stage against `limit_per_node` times its healthy nodes, or against what the engines report.

    With `auto` and no report yet, one request per node is let through until the engines have said what they take.
    """

    def __init__(self, config: StageConfig) -> None:
        self._limit_per_node = config.limit_per_node

    def limit(self, load: StageLoad) -> int:
        if self._limit_per_node is not None:
            return self._limit_per_node * load.healthy_nodes
        if load.healthy_nodes and load.reported_limit is not None:
            return load.reported_limit
        return UNREPORTED_LIMIT_PER_NODE * load.healthy_nodes

    def saturation(self, now: float, load: StageLoad, band: BandConfig | None = None) -> float:
        limit = self.limit(load)
        return (load.running + load.announced) / limit if limit > 0 else inf

    def describe(self, load: StageLoad) -> str:
        return f"{load.requests}/{self.limit(load)}"


class TokenConcurrency(_Detector):
    """Tokens in the stage against `token_limit_per_node` times its healthy nodes, or against what the engines report.

    A request enters only if it fits; one that is larger than the whole limit enters an empty stage. With `auto` and no
    report yet, one request per node is let through.
    """

    per_request = True

    def __init__(self, config: StageConfig) -> None:
        self._limit_per_node = config.token_limit_per_node

    def token_limit(self, load: StageLoad) -> int | None:
        if self._limit_per_node is not None:
            return self._limit_per_node * load.healthy_nodes
        return load.reported_tokens

    def saturation(self, now: float, load: StageLoad, band: BandConfig | None = None) -> float:
        if load.healthy_nodes <= 0:
            return inf
        limit = self.token_limit(load)
        if limit is None:
            return load.requests / (UNREPORTED_LIMIT_PER_NODE * load.healthy_nodes)
        if limit > 0:
            return load.tokens / limit
        return inf if load.requests else 0.0

    def fits(self, load: StageLoad, waiting: Waiting) -> bool:
        limit = self.token_limit(load)
        return limit is None or load.requests == 0 or load.tokens + tokens_in(load.stage, waiting) <= limit

    def describe(self, load: StageLoad) -> str:
        return f"{load.tokens}/{self.token_limit(load)} tokens"


class HybridConcurrency(_Detector):
    """Requests and tokens: the scarcer decides."""

    per_request = True

    def __init__(self, config: StageConfig) -> None:
        self._requests = RequestConcurrency(config)
        self._tokens = TokenConcurrency(config)

    def limit(self, load: StageLoad) -> int:
        return self._requests.limit(load)

    def token_limit(self, load: StageLoad) -> int | None:
        return self._tokens.token_limit(load)

    def saturation(self, now: float, load: StageLoad, band: BandConfig | None = None) -> float:
        return max(self._requests.saturation(now, load), self._tokens.saturation(now, load))

    def fits(self, load: StageLoad, waiting: Waiting) -> bool:
        return self._tokens.fits(load, waiting)

    def describe(self, load: StageLoad) -> str:
        return f"{self._requests.describe(load)} and {self._tokens.describe(load)}"


class Utilization(_Detector):
    """The mean over the stage's nodes of how full each says it is, by waiting requests and by KV usage.

    A node without a report, or with one that is too old, counts as full; the others go on. Requests that were dispatched
    but that no node has reported yet count as waiting.
    """

    def __init__(self, config: StageConfig) -> None:
        self._config = config
        self._reports: dict[str, NodeReport] = {}

    def observe(self, event: NodeReport | PredictedTtft) -> None:
        if isinstance(event, NodeReport):
            self._reports[event.node] = event

    def saturation(self, now: float, load: StageLoad, band: BandConfig | None = None) -> float:
        if load.healthy_nodes <= 0:
            return inf
        names = load.nodes or tuple(self._reports)
        oldest = now - self._config.stale_after_s
        fresh = [r for r in map(self._reports.get, names) if r is not None and r.at >= oldest]
        unseen = load.requests - sum(report.queue_depth + report.running for report in fresh)
        full = max(0, load.healthy_nodes - len(fresh)) + fsum(map(self._score, fresh))
        if unseen > 0:
            full += unseen / self._config.queue_threshold
        return full / max(load.healthy_nodes, len(fresh))

    def _score(self, report: NodeReport) -> float:
        by_queue = report.queue_depth / self._config.queue_threshold
        return max(by_queue, report.kv_usage_ratio / self._config.kv_threshold)


class PredictedTtftGate(_Detector):
    """The best node's predicted TTFT against the band's budget.

    Each prediction lets one request through, since that request changes it. A stage that holds nothing takes one anyway:
    waiting would make nothing better.
    """

    per_band = True

    def __init__(self, config: StageConfig) -> None:
        self._budget_s = config.ttft_budget_s
        self._predicted_s: float | None = None
        self._used = True

    def observe(self, event: NodeReport | PredictedTtft) -> None:
        if isinstance(event, PredictedTtft):
            self._predicted_s = event.seconds
            self._used = False

    def dispatched(self) -> None:
        self._used = True

    def saturation(self, now: float, load: StageLoad, band: BandConfig | None = None) -> float:
        if load.healthy_nodes <= 0:
            return inf
        if load.requests == 0:
            return 0.0
        if self._predicted_s is None:
            return 1.0
        budget_s = self._budget_s if band is None or band.ttft_budget_s is None else band.ttft_budget_s
        saturation = self._predicted_s / budget_s
        return max(1.0, saturation) if self._used else saturation

    def describe(self, load: StageLoad) -> str:
        told = "unknown" if self._predicted_s is None else f"{self._predicted_s:.2f} s"
        return f"{load.requests} requests, predicted TTFT {told}"


class Off(_Detector):
    """No gate: everything is dispatched at once, as long as the stage has a node at all."""

    def saturation(self, now: float, load: StageLoad, band: BandConfig | None = None) -> float:
        return 0.0 if load.healthy_nodes > 0 else inf


_CONCURRENCY: dict[str, Callable[[StageConfig], SaturationDetector]] = {
    "requests": RequestConcurrency,
    "tokens": TokenConcurrency,
    "hybrid": HybridConcurrency,
}
_DETECTORS: dict[str, Callable[[StageConfig], SaturationDetector]] = {
    "concurrency": lambda config: _CONCURRENCY[config.mode](config),
    "utilization": Utilization,
    "predicted-ttft": PredictedTtftGate,
    "off": lambda config: Off(),
}


def make_detector(config: StageConfig) -> SaturationDetector:
    """The detector a stage's configuration names (checked when it was parsed)."""
    return _DETECTORS[config.detector](config)
