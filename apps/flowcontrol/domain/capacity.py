"""May one more request wait? Global bytes, global requests, band bytes, band requests, in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from apps.flowcontrol.domain.bands import Band
from apps.flowcontrol.domain.config import FlowConfig
from apps.flowcontrol.domain.events import FlowRequest
from apps.flowcontrol.domain.waiting import Waiting


@dataclass(frozen=True, slots=True)
class Admission:
    """`full` names the limit that refuses the request; with None it may wait once the `victims` have given way."""

    full: str | None = None
    victims: list[Waiting] = field(default_factory=list)


def admit(
    request: FlowRequest, band: Band, config: FlowConfig, bands: Sequence[Band], waiting: int, waiting_bytes: int
) -> Admission:
    """Decide on a request that wants to wait in `band`, with `waiting` requests waiting in all `bands` (highest first).

    Only a global limit is relieved by displacing lower bands, and nobody is displaced for a request that is refused.
    """
    victims: list[Waiting] = []
    full = _full("the queue", config.max_bytes, config.max_requests, waiting_bytes + request.bytes, waiting + 1)
    if full is not None:
        if config.displacement:
            victims = _victims(request, band, config, bands, waiting, waiting_bytes)
        if not victims:
            return Admission(full)
    limits = band.config
    full = _full(
        f"band {band.name}",
        limits.max_bytes,
        limits.max_requests,
        band.waiting_bytes + request.bytes,
        band.waiting_requests + 1,
    )
    return Admission(full) if full is not None else Admission(None, victims)


def _full(what: str, max_bytes: int | None, max_requests: int | None, would_bytes: int, would_wait: int) -> str | None:
    if max_bytes is not None and would_bytes > max_bytes:
        return f"{what} may hold {max_bytes} bytes and would hold {would_bytes}"
    if max_requests is not None and would_wait > max_requests:
        return f"{what} may hold {max_requests} requests and is full"
    return None


def _victims(
    request: FlowRequest, band: Band, config: FlowConfig, bands: Sequence[Band], waiting: int, waiting_bytes: int
) -> list[Waiting]:
    """Who gives way, lowest sheddable band first; empty when even that would not make the room."""
    need_requests = 0 if config.max_requests is None else waiting + 1 - config.max_requests
    need_bytes = 0 if config.max_bytes is None else waiting_bytes + request.bytes - config.max_bytes
    lower = [b for b in bands if b.config.sheddable and b.config.priority < band.config.priority]
    if sum(b.waiting_requests for b in lower) < need_requests or sum(b.waiting_bytes for b in lower) < need_bytes:
        return []
    victims: list[Waiting] = []
    for lower_band in reversed(lower):
        for victim in lower_band.shed_order():
            if need_requests <= 0 and need_bytes <= 0:
                return victims
            victims.append(victim)
            need_requests -= 1
            need_bytes -= victim.request.bytes
    return victims
