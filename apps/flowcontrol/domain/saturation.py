"""Is there room in a stage? A detector answers with a saturation: 1.0 is full, above 1.0 is too much.

Room is reserved at the moment of dispatch, so the load here never waits for a node's report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from apps.flowcontrol.domain.config import StageConfig
from apps.flowcontrol.domain.events import NodeReport, PredictedTtft, Stage

UNREPORTED_LIMIT_PER_NODE = 1


@dataclass(slots=True)
class StageLoad:
    """What one stage holds. `announced` requests are on their way to it and take up room like running ones."""

    stage: Stage
    healthy_nodes: int = 0
    reported_limit: int | None = None
    running: int = 0
    announced: int = 0

    @property
    def requests(self) -> int:
        return self.running + self.announced


class SaturationDetector(Protocol):
    """One stage's gate. It reads the shared `StageLoad` and keeps what else it needs from `observe`."""

    def observe(self, now: float, event: NodeReport | PredictedTtft) -> None: ...

    def saturation(self, load: StageLoad) -> float: ...

    def limit(self, load: StageLoad) -> int | None:
        """How many requests fit, where the detector counts requests; else None."""
        ...


class ConcurrencyDetector:
    """Requests in the stage against `limit_per_node` times its healthy nodes, or against what the engines report.

    With `auto` and no report yet, one request per node is let through until the engines have said what they take.
    """

    def __init__(self, config: StageConfig) -> None:
        self._limit_per_node = config.limit_per_node

    def observe(self, now: float, event: NodeReport | PredictedTtft) -> None:
        """Counts requests only."""

    def limit(self, load: StageLoad) -> int:
        if self._limit_per_node is not None:
            return self._limit_per_node * load.healthy_nodes
        if load.healthy_nodes and load.reported_limit is not None:
            return load.reported_limit
        return UNREPORTED_LIMIT_PER_NODE * load.healthy_nodes

    def saturation(self, load: StageLoad) -> float:
        limit = self.limit(load)
        return (load.running + load.announced) / limit if limit > 0 else inf


class OffDetector:
    """No gate: everything is dispatched at once, as long as the stage has a node at all."""

    def observe(self, now: float, event: NodeReport | PredictedTtft) -> None:
        """Looks at nothing."""

    def limit(self, load: StageLoad) -> None:
        return None

    def saturation(self, load: StageLoad) -> float:
        return 0.0 if load.healthy_nodes > 0 else inf


_DETECTORS: dict[str, Callable[[StageConfig], SaturationDetector]] = {
    "concurrency": ConcurrencyDetector,
    "off": lambda config: OffDetector(),
}


def make_detector(config: StageConfig) -> SaturationDetector:
    """The detector a stage's configuration names (checked when it was parsed)."""
    return _DETECTORS[config.detector](config)
