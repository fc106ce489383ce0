"""One waiting (or dispatched) request as flow control keeps it."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import TYPE_CHECKING

from apps.flowcontrol.domain.events import FlowRequest

if TYPE_CHECKING:
    from apps.flowcontrol.domain.bands import Band


class Place(Enum):
    """Where a request stands. GONE ones are skipped wherever they are still referenced."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    GONE = "gone"


class Waiting:
    """`order` counts arrivals and is unique; `deadline_at` is when waiting ends as long as the pool has nodes (`inf`: never).

    `ttl_s` is what its band lets it wait, `own_deadline_at` the end its client asked for. `output_tokens` is what it is
    expected to produce, which is at most what it may.
    """

    __slots__ = (
        "band",
        "deadline_at",
        "enqueued_at",
        "order",
        "output_tokens",
        "own_deadline_at",
        "place",
        "request",
        "ttl_s",
        "withdrawn",
    )

    def __init__(
        self, request: FlowRequest, band: Band, order: int, enqueued_at: float, output_tokens: int = 0
    ) -> None:
        self.request = request
        self.band = band
        self.order = order
        self.enqueued_at = enqueued_at
        self.output_tokens = output_tokens
        self.ttl_s = self.own_deadline_at = self.deadline_at = inf
        self.place = Place.WAITING
        self.withdrawn = False

    @property
    def service_tokens(self) -> int:
        """The work it is expected to be: prompt tokens to compute and tokens to produce."""
        return self.request.uncached_tokens + self.output_tokens

    @property
    def context_tokens(self) -> int:
        """The KV it is expected to hold in decode."""
        return self.request.prompt_tokens + self.output_tokens
