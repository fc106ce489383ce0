"""Speed of the simulator: `python -m bench.sim` (or `make bench-sim`); `--profile` says where the time goes.

Requests a CPU second at 9 nodes with the full policies and a closed loop of CC agents; and 768 nodes in 8 partitions, three
hours of virtual time, on two processes: wall seconds and memory. The large run takes long: `--scale 0.02` runs that share of
the three hours and reports what the whole would take at that rate.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import sys
from time import perf_counter, process_time

import apps
from bench.report import report
from workers.collecting import SIMULATED_YOUNG_OBJECTS, collect_seldom
from workers.simulator.cluster import ClusterRun, Plan
from workers.simulator.scenario import Cluster, Settings, build
from workers.simulator.systems import SWITCHYARD
from workers.simulator.workloads.mixes import ClosedLoop, Population, generated

BLOCK_TOKENS = 256
REQUESTS_TARGET = 15_000
WALL_TARGET_S = 600.0
MEMORY_TARGET_GIB = 4.0


def nine_nodes(agents: int, warm_up_s: float, timed_s: float, profile: bool) -> float:
    """Requests a CPU second in the steady state."""
    collect_seldom(SIMULATED_YOUNG_OBJECTS)
    run = build(Cluster(9, 3), SWITCHYARD, Settings(block_tokens=BLOCK_TOKENS, seed=1))
    ClosedLoop(
        run.partition,
        {"CC": generated("CC", 1, BLOCK_TOKENS)},
        [Population(0.0, {"CC": agents})],
        seed=1,
        mature=False,
    )
    clock = run.partition.clock
    clock.run_until(warm_up_s)
    before, events = run.partition.answered, clock.events
    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    began = process_time()
    clock.run_until(warm_up_s + timed_s)
    spent_s = process_time() - began
    if profiler is not None:
        profiler.disable()
        print(f"{run.partition.answered - before} requests, {clock.events - events} events, {spent_s:.1f} CPU s")
        statistics = pstats.Stats(profiler)
        statistics.sort_stats("tottime").print_stats(40)
        statistics.sort_stats("cumulative").print_stats(60)
    return (run.partition.answered - before) / spent_s


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__)
    parser.add_argument("--profile", action="store_true", help="profile the nine nodes and stop")
    parser.add_argument("--agents", type=int, default=108)
    parser.add_argument("--seconds", type=float, default=600.0, help="timed virtual seconds of the nine nodes")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the large run's three hours; 0 leaves it out"
    )
    options = parser.parse_args(arguments)
    print(f"hot modules: {apps.RUNS}", file=sys.stderr)
    rate = nine_nodes(options.agents, 900.0, options.seconds, options.profile)
    if options.profile:
        return 0
    met = [
        report(
            "simulated requests a CPU second, 9 nodes, full policies",
            rate,
            "requests/CPU s",
            target=REQUESTS_TARGET,
        )
    ]
    if options.scale > 0:
        met += _large(options.scale)
    return 0 if all(met) else 1


def _large(scale: float) -> list[bool | None]:
    seconds = 3 * 3600 * scale
    plan = Plan(
        partitions=8, nodes=96, prefill_nodes=40, agents=1120, block_tokens=BLOCK_TOKENS, seed=1, seconds=seconds
    )
    began = perf_counter()
    result = ClusterRun(plan, processes=2).run()
    wall_s = (perf_counter() - began) / scale
    own_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gib = (result.memory_mib + own_mib) / 1024
    part = "" if scale == 1.0 else f" (from {scale:g} of them)"
    grown = None if scale < 1.0 else MEMORY_TARGET_GIB
    return [
        report(f"768 nodes, 3 h{part}: requests", result.requests / scale, "requests", target=5_000_000),
        report(f"768 nodes, 3 h{part}: wall time", wall_s, "s", target=WALL_TARGET_S, aim="at_most"),
        # Pools go on filling: the memory of a part says nothing of the whole.
        report(f"768 nodes, 3 h{part}: memory", gib, "GiB", target=grown, aim="at_most"),
    ]


if __name__ == "__main__":
    sys.exit(main())
