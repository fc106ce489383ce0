"""Clusters, states and windows that planner tests start from."""

from dataclasses import replace

from apps.planning.domain.capacity import NodeCapacity, Workload
from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients
from apps.planning.domain.plan_types import PlannerNode, PlannerState, SliceView

PREFILL = PrefillCoefficients(0.015, 5e-5, 4e-10, 2e-7)
DECODE = DecodeCoefficients(0.005, 0.01713, 0.000358, 256, 8, 3)
CAPACITY = NodeCapacity(PREFILL, DECODE, 128)
HEAVY_PREFILL = Workload(5268, 804078546, 150000, 848, 2.15, 8192, 70)
LONG_ANSWERS = Workload(1000, 2e7, 20000, 4000, 2.15, 8192, 200)
NOW = 10_000.0


def node(index, phase, **changes):
    return PlannerNode(f"n{index}", index, phase, CAPACITY, **changes)


def cluster(prefill, decode):
    phases = ["prefill"] * prefill + ["decode"] * decode
    return tuple(node(index, phase) for index, phase in enumerate(phases, start=1))


def state(prefill=4, decode=5, **changes):
    return PlannerState(NOW, changes.pop("nodes", None) or cluster(prefill, decode), **changes)


def window(workload=HEAVY_PREFILL, slices=10, **changes):
    piece = SliceView(0, 60, workload, rate=4.0, prefill_utilisation=0.95, decode_utilisation=0.6)
    return [replace(piece, t0=60.0 * index, t1=60.0 * index + 60, **changes) for index in range(slices)]
