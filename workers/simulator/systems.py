"""Which policies make which system. A system is data: everything it names exists in the product or in its baselines."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from workers.simulator.hardware import restart_seconds
from workers.simulator.node_parts import DataPlane, SwitchStyle

PlannerName = Literal["none", "own", "load-thresholds", "input-length"]

POOL = DataPlane()
NO_POOL = DataPlane(
    host_pool=False, moves_outputs=False, fetch_begins="at-start", decode_stores=False, eviction="lru",
    answers_from="decode",
)  # fmt: skip
POOL_AT_START = DataPlane(moves_outputs=False, fetch_begins="at-start", eviction="lru", answers_from="decode")
RESTART = SwitchStyle(keeps_kv=False, seconds=restart_seconds())
IN_PLACE = SwitchStyle(keeps_kv=False, seconds=(2.0, 4.0))


@dataclass(frozen=True, slots=True)
class System:
    """`routing`, `decode_routing`: policies of the router (None: the same). `fetch`: whether prefill nodes copy from peers
    (None: as the policy does). `central_queue`: requests wait in flow control; else each is dispatched at once.
    `prefetch_bytes`: what may be on its way to a node for requests that wait there. `pauses`: agents are paused while the KV
    of all would not fit."""

    name: str
    routing: str = "ttft"
    decode_routing: str | None = None
    fetch: bool | None = None
    central_queue: bool = True
    prefetch_bytes: float = 0.0
    plane: DataPlane = POOL
    planner: PlannerName = "none"
    guards: bool = True
    pauses: bool = False
    split: tuple[int, int] | None = None


SWITCHYARD = System("switchyard", planner="own")
FIXED = replace(SWITCHYARD, name="switchyard-fixed", planner="none")
STATIC = System("static", "cache-aware", "round-robin", central_queue=False, plane=NO_POOL)
DYNAMO = System(
    "dynamo", "dynamo-kv", central_queue=False, plane=replace(NO_POOL, switch=RESTART), planner="load-thresholds"
)
ARROW = System(
    "arrow", "cache-aware", "least-loaded", central_queue=False, plane=replace(NO_POOL, switch=IN_PLACE),
    planner="input-length",
)  # fmt: skip
CACHE_AWARE = replace(STATIC, name="cache-aware")
STICKY = replace(STATIC, name="sticky", routing="sticky", decode_routing=None)
KV_ROUTER = replace(STATIC, name="kv-router", routing="dynamo-kv", decode_routing=None)
KV_ROUTER_POOL = replace(KV_ROUTER, name="kv-router+pool", fetch=True, plane=POOL_AT_START)
THUNDERAGENT = replace(CACHE_AWARE, name="thunderagent", pauses=True)

# One step at a time, from the baseline to everything: the published ablation and its parts.
DATA_PLANE = replace(CACHE_AWARE, name="data-plane", fetch=True, plane=DataPlane(eviction="lru"))
EVICTION = replace(DATA_PLANE, name="data-plane+eviction", plane=POOL)
ROUTING = replace(FIXED, name="data-plane+eviction+routing")
PREFETCHING = replace(FIXED, name="switchyard+prefetch", prefetch_bytes=16e9)
PUBLISHED = replace(SWITCHYARD, name="published-rules", guards=False)

SYSTEMS = {
    system.name: system
    for system in (
        SWITCHYARD, FIXED, STATIC, DYNAMO, ARROW, CACHE_AWARE, STICKY, KV_ROUTER, KV_ROUTER_POOL, THUNDERAGENT,
        DATA_PLANE, EVICTION, ROUTING, PUBLISHED, PREFETCHING,
    )
}  # fmt: skip

_SPLIT = re.compile(r"^(?P<name>[a-z+-]+):(?P<prefill>\d+)P(?P<decode>\d+)D$")


def system(name: str) -> System:
    """A system by its name, with `:xPyD` after it where it is to start from another split. Raises ValueError."""
    found = _SPLIT.match(name)
    base = SYSTEMS.get(found["name"] if found else name)
    if base is None:
        raise ValueError(f"system: expected one of {', '.join(SYSTEMS)}, perhaps with :xPyD, got {name!r}")
    if found is None:
        return base
    split = (int(found["prefill"]), int(found["decode"]))
    if min(split) < 1:
        raise ValueError(f"system: expected a split with at least one node in each phase, got {name!r}")
    return replace(base, split=split)
