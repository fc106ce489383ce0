"""Flow control's speed on one core, each number beside a plain `heapq` loop that keeps the same order in the same run.

Times are CPU seconds of this process. The events a gateway hands in (an arrival, the end of a request) are made beforehand;
what is timed is the machine: admission, queueing, the gate, the choice, and the commands it answers. Every dispatch but
those of the backlog is made possible by the end of the request before, which is timed too.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Callable
from functools import partial

from apps.flowcontrol.domain.commands import Dispatch
from apps.flowcontrol.domain.config import FAIRNESS_POLICIES, BandConfig, FlowConfig, StageConfig
from apps.flowcontrol.domain.controller import FlowController
from apps.flowcontrol.domain.events import STAGES, Enqueue, FlowRequest, PoolChanged, Reconfigure, StageReleased
from bench.report import report

ROUNDS = 5
FEW, MANY = 10, 5000
PASSES = 20_000
BACKLOG = 10_000
IDLE_FLOWS = 20_000
ACTIVE_FLOWS = 10
IDLE_COSTS_AT_MOST = 1.5


def config(fairness: str = "round-robin", limit: int = 1) -> FlowConfig:
    """Three bands with every limit set, as in the default run."""
    bands = tuple(
        BandConfig(name, priority, fairness, max_requests=50_000, max_bytes=10**12, ttl_s=120.0)
        for name, priority in (("premium", 100), ("standard", 0), ("best-effort", -10))
    )
    return FlowConfig(
        bands=bands,
        prefill=StageConfig(limit_per_node=limit),
        decode=StageConfig(limit_per_node=10**6),
        max_requests=100_000,
        max_bytes=10**13,
        default_ttl_s=60.0,
    )


def controller(settings: FlowConfig) -> FlowController:
    made = FlowController(settings)
    for stage in STAGES:
        made.handle(0.0, PoolChanged(stage, 1, nodes=("node",)))
    return made


def arrivals(count: int, flows: int, first: int = 0) -> list[Enqueue]:
    bands = ("standard", "standard", "premium", "best-effort")
    return [
        Enqueue(
            FlowRequest(f"r{n}", bands[n % 4], f"flow-{n % flows}", 2000, 4000, 1000, 300, starts_branch=n % 2 == 0)
        )
        for n in range(first, first + count)
    ]


def steady(machine: FlowController, events: list[Enqueue], ends: dict[str, StageReleased], running: str) -> float:
    """Arrival, end, dispatch, over and over; CPU seconds."""
    handle, now, step = machine.handle, 1.0, 1e-5
    began = time.process_time()
    for event in events:
        now += step
        handle(now, event)
        command = handle(now, ends[running])[0]
        running = command.request_id
    spent = time.process_time() - began
    assert isinstance(command, Dispatch)
    return spent


def machine_passes_s(waiting: int, fairness: str = "round-robin", idle_flows: int = 0) -> float:
    """CPU seconds of `PASSES` arrivals and dispatches with `waiting` requests in the queue."""
    machine = controller(config(fairness))
    for n in range(idle_flows):
        name = f"idle-{n}"
        machine.handle(0.0, Enqueue(FlowRequest(name, "standard", name, 100, 100, 100, 10)))
        machine.handle(0.0, StageReleased(name, "decode", 5))
    events = arrivals(PASSES + waiting + 1, ACTIVE_FLOWS)
    ends = {e.request.request_id: StageReleased(e.request.request_id, "decode", 100) for e in events}
    for event in events[: waiting + 1]:
        machine.handle(0.5, event)
    return steady(machine, events[waiting + 1 :], ends, "r0")


def heap_passes_s(waiting: int) -> float:
    """The same by a bare heap of (priority, order, request)."""
    requests = [event.request for event in arrivals(PASSES + waiting, ACTIVE_FLOWS)]
    priority = {"premium": -100, "standard": 0, "best-effort": 10}
    heap: list[tuple[int, int, FlowRequest]] = []
    for order, request in enumerate(requests[:waiting]):
        heapq.heappush(heap, (priority[request.band], order, request))
    began = time.process_time()
    for order, request in enumerate(requests[waiting:], waiting):
        heapq.heappush(heap, (priority[request.band], order, request))
        heapq.heappop(heap)
    return time.process_time() - began


def machine_drain_s() -> float:
    """CPU seconds to dispatch a whole backlog in the one call that makes room for it."""
    machine = controller(config())
    for event in arrivals(BACKLOG + 1, ACTIVE_FLOWS):
        machine.handle(0.0, event)
    began = time.process_time()
    commands = machine.handle(1.0, Reconfigure(config(limit=10**6)))
    spent = time.process_time() - began
    assert len(commands) == BACKLOG, "the whole backlog goes in one pass"
    return spent


def heap_drain_s() -> float:
    heap = [(0, order, event.request) for order, event in enumerate(arrivals(BACKLOG, ACTIVE_FLOWS))]
    heapq.heapify(heap)
    began = time.process_time()
    while heap:
        heapq.heappop(heap)
    return time.process_time() - began


def best(measure: Callable[[], float]) -> float:
    """The fastest of `ROUNDS`: the one the other processes of the machine disturbed least."""
    spent = []
    for _ in range(ROUNDS):
        gc.collect()
        spent.append(measure())
    return min(spent)


def main() -> int:
    met = []
    for waiting, target in ((FEW, 60_000), (MANY, 40_000)):
        rate = PASSES / best(partial(machine_passes_s, waiting))
        plain = PASSES / best(partial(heap_passes_s, waiting))
        name = f"flow: enqueue and dispatch, {waiting} waiting"
        met.append(report(name, rate, "requests/s", target=target, baseline=plain))
    rate, plain = BACKLOG / best(machine_drain_s), BACKLOG / best(heap_drain_s)
    met.append(report(f"flow: draining {BACKLOG} waiting", rate, "requests/s", target=50_000, baseline=plain))
    to_us = 1e6 / PASSES
    plain_us = best(partial(heap_passes_s, FEW)) * to_us
    for fairness in FAIRNESS_POLICIES:
        if fairness == "global-strict":
            continue
        few_us = best(partial(machine_passes_s, FEW, fairness)) * to_us
        many_us = best(partial(machine_passes_s, FEW, fairness, IDLE_FLOWS)) * to_us
        name = "flow: cost of a dispatch with {} flows, " + fairness
        report(name.format(ACTIVE_FLOWS), few_us, "us", baseline=plain_us)
        name, target_us = name.format(f"{IDLE_FLOWS} more, idle"), IDLE_COSTS_AT_MOST * few_us
        met.append(report(name, many_us, "us", target=target_us, aim="at_most", baseline=plain_us))
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main())
