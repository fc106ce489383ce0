"""What flow control asks for: a request goes on, or it is refused with a reason its client can act on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request left flow control, named as in the metrics."""

    DISPATCHED = "Dispatched"
    REJECTED_CAPACITY = "RejectedCapacity"
    DISPLACED = "Displaced"
    EVICTED_TTL = "EvictedTTL"
    REJECTED_NO_ENDPOINTS = "RejectedNoEndpoints"
    EVICTED_NO_ENDPOINTS = "EvictedNoEndpoints"
    EVICTED_CONTEXT_CANCELLED = "EvictedContextCancelled"
    REJECTED_SHUTTING_DOWN = "RejectedShuttingDown"
    EVICTED_SHUTTING_DOWN = "EvictedShuttingDown"

    @property
    def http_status(self) -> int:
        """The status a client sees (499 is only logged: that client is gone)."""
        return _ANSWERS[self][0]

    @property
    def reason_code(self) -> str:
        """The value of `x-llm-d-request-dropped-reason` and of the error's code; empty for a dispatch."""
        return _ANSWERS[self][1]


_ANSWERS: dict[Outcome, tuple[int, str]] = {
    Outcome.DISPATCHED: (200, ""),
    Outcome.REJECTED_CAPACITY: (429, "rejected-saturated"),
    Outcome.DISPLACED: (429, "evicted-priority"),
    Outcome.EVICTED_TTL: (429, "rejected-ttl-expired"),
    Outcome.REJECTED_NO_ENDPOINTS: (503, "rejected-no-endpoints"),
    Outcome.EVICTED_NO_ENDPOINTS: (503, "rejected-no-endpoints"),
    Outcome.EVICTED_CONTEXT_CANCELLED: (499, "rejected-context-cancelled"),
    Outcome.REJECTED_SHUTTING_DOWN: (503, "rejected-shutting-down"),
    Outcome.EVICTED_SHUTTING_DOWN: (503, "rejected-shutting-down"),
}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The request may go: a prefill place is reserved and a decode place announced.

    `reason_code` is `highest-priority` or `min-share`; `reason` says the same to a person. `waited_s` counts from the
    moment the request arrived here.
    """

    request_id: str
    band: str
    flow_id: str
    waited_s: float
    reason_code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """The request is refused. `retry_after_s` (whole seconds) is None where a retry makes no sense."""

    request_id: str
    band: str
    flow_id: str
    waited_s: float
    outcome: Outcome
    http_status: int
    reason_code: str
    retry_after_s: int | None
    message: str


Command = Dispatch | Drop
