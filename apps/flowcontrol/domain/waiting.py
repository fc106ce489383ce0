"""One waiting (or dispatched) request as flow control keeps it."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(slots=True, eq=False)
class Waiting:
    """`order` counts arrivals and is unique; `deadline_at` is when waiting ends as long as the pool has nodes (`inf`: never).

    `ttl_s` is what its band lets it wait, `own_deadline_at` the end its client asked for. `output_tokens` is what it is
    expected to produce, which is at most what it may.
    """

    request: FlowRequest
    band: Band
    order: int
    enqueued_at: float
    output_tokens: int = 0
    ttl_s: float = inf
    own_deadline_at: float = inf
    deadline_at: float = inf
    place: Place = Place.WAITING
    withdrawn: bool = False

    @property
    def service_tokens(self) -> int:
        """The work it is expected to be: prompt tokens to compute and tokens to produce."""
        return self.request.uncached_tokens + self.output_tokens

    @property
    def context_tokens(self) -> int:
        """The KV it is expected to hold in decode."""
        return self.request.prompt_tokens + self.output_tokens
