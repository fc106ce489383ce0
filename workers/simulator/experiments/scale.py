"""3,072 GPUs: eight partitions whose need of prefill swings, each at another time, against the best static split.

Every partition is a process's own (`workers.simulator.cluster`). The static splits have the same data plane, eviction and
routing as ours: what is compared is following the workload alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from workers.simulator.cluster import ClusterRun, Plan, Swing
from workers.simulator.experiments.report import Found, Report, Verdict
from workers.simulator.experiments.runs import Cancelled
from workers.simulator.experiments.shapes import COMMON_NOTE, published
from workers.simulator.hardware import KIMI

NAME = "scale-3072"
TARGET = 1.3
STATIC_SHARES = (0.35, 0.55, 0.75)
"""Shares of prefill nodes among which the best static split is looked for."""

QUICK_NOTE = (
    "The quick size has partitions of 9 nodes instead of 96, where one node is a ninth of the split, and the best static split is "
    "known beforehand. Where the published gain is lost is not known: the full size (four runs of 768 nodes and three hours, about "
    "25 minutes each on two cores) was not run."
)


@dataclass(frozen=True)
class Size:
    partitions: int = 8
    nodes: int = 96
    seconds: float = 10_800.0
    period_s: float = 7200.0


FULL, QUICK = Size(), Size(partitions=4, nodes=9)


def plan_of(size: Size, system: str, prefill: int, seed: int) -> Plan:
    """Agents in proportion to the nodes, as the published composition has them on nine."""
    agents = (round(288 * size.nodes / 9), round(144 * size.nodes / 9))
    return Plan(
        partitions=size.partitions, nodes=size.nodes, prefill_nodes=prefill, seconds=size.seconds, system=system,
        swing=Swing(agents=agents, period_s=size.period_s), hardware=KIMI, block_tokens=128, seed=seed, exchange=False,
    )  # fmt: skip


def run(size: Size, seed: int, processes: int, progress: Callable[[float, str], bool] | None = None) -> Report:
    """Raises Cancelled where `progress` answers False."""
    splits = sorted({min(size.nodes - 1, max(1, round(size.nodes * share))) for share in STATIC_SHARES})
    plans = [(f"static {p}P{size.nodes - p}D", plan_of(size, "switchyard-fixed", p, seed)) for p in splits]
    plans.append(("switchyard", replace(plan_of(size, "switchyard", splits[1], seed))))
    rates: dict[str, float] = {}
    requests = 0
    for number, (name, plan) in enumerate(plans):

        def told(share: float, number: int = number, name: str = name) -> bool:
            return progress is None or progress((number + share) / len(plans), name)

        result = ClusterRun(plan, processes, told).run()
        if result.epochs * 60.0 < plan.seconds - 1e-6:
            raise Cancelled
        rates[name] = result.throughput_rps
        requests += result.requests
    best = max((name for name in rates if name != "switchyard"), key=lambda name: rates[name])
    ratio = rates["switchyard"] / rates[best]
    theirs = published()["scale"]["simulated_3072_gpu"]["throughput_vs_static"]
    found = [Found(name, "throughput", "req/s", rate, None, None, None, 1) for name, rate in rates.items()]
    found.append(Found(f"switchyard over {best}", "throughput", "x", ratio, None, theirs, ratio / theirs, 1))
    verdict = Verdict("throughput over the best static split", ratio, TARGET, "at_least", ratio >= TARGET)
    title = f"{size.partitions} partitions of {size.nodes} nodes with swinging composition"
    notes = (COMMON_NOTE, QUICK_NOTE) if size == QUICK else (COMMON_NOTE,)
    configuration = {
        "seed": seed,
        "requests": requests,
        "size": {"partitions": size.partitions, "nodes": size.nodes, "seconds": size.seconds},
    }
    return Report(NAME, title, tuple(found), (verdict,), notes, configuration)
