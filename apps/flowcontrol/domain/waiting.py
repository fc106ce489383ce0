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
    """`order` counts arrivals and is unique; `deadline_at` is when waiting ends (`inf`: never)."""

    request: FlowRequest
    band: Band
    order: int
    enqueued_at: float
    deadline_at: float = inf
    place: Place = Place.WAITING
    withdrawn: bool = False
