"""Telemetry rows as the gateway's records would fill them, and ticks of the planner over them."""

import numpy as np

from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients, decode_iteration_s, prefill_work_s
from apps.planning.models import PlannerPolicy
from apps.telemetry.models import CostWindow, LoadWindow
from apps.topology.models import Node
from tests.factories import COEFFICIENTS, make_partition
from workers.planner import tasks

SLICE_S, WINDOW_S = 12.0, 120.0
START = 120_000.0
END = START + WINDOW_S
PREFILL = PrefillCoefficients(*(COEFFICIENTS[name] for name in ("c0", "c1", "c2", "c3")))
DECODE = DecodeCoefficients(COEFFICIENTS["d0"], COEFFICIENTS["d1"], COEFFICIENTS["d2"], 256, 8, 4)


def make_watched_partition(**policy):
    """4P5D, automatic, windows of ten slices of 12 s."""
    partition = make_partition("gb300", ("prefill",) * 4 + ("decode",) * 5)
    values = {"mode": "automatic", "slice_s": SLICE_S, "slices_per_window": 10, "cooldown_s": 60, "slo_ttft_s": 5}
    PlannerPolicy.objects.create(partition=partition, **{**values, **policy})
    return partition


def load(partition, start=START, end=END, **changes):
    """Load windows of a workload that prefill limits: 4P5D carries about 6, 5P4D more."""
    rng = np.random.default_rng(7)
    rows = []
    for t0 in np.arange(start, end, 2.0):
        prefilled = int(rng.integers(11, 14))
        values = {
            "arrived": prefilled,
            "prefilled": prefilled,
            "t_uc": prefilled * 5268,
            "t_c": prefilled * 150_000,
            "pairs": prefilled * 804_078_546,
            "t_rst": prefilled * 150_000,
            "prefill_iterations": prefilled,
            "finished": prefilled,
            "t_out": prefilled * 848,
            "decode_iterations_of_finished": prefilled * 848 / 2.15,
            "in_flight_s": 240.0,
            "prefill_utilisation": 0.97,
            "decode_utilisation": 0.6,
            "prefill_waits_s": [1.0, 2.0],
            **changes,
        }
        rows.append(LoadWindow(partition=partition, t0=float(t0), t1=float(t0) + 2, **values))
    LoadWindow.objects.bulk_create(rows)


def run(partition, now=END + 5, start=START):
    """Tick as beat does, once a slice, so that every slice is closed."""
    moment = start + SLICE_S + 5
    while moment < now:
        tasks.tick(partition.name, now=moment)
        moment += SLICE_S
    return tasks.tick(partition.name, now=now)


def measure(partition, start, end, slower=1.0, noise=0.02, batches=(2, 60), slow_node=("", 1.0), chunk=None, **changes):
    """Cost windows as nodes would measure them, with the configured coefficients made `slower`."""
    rng = np.random.default_rng(11)
    rows = []
    nodes = list(Node.objects.filter(partition=partition))
    for t0 in np.arange(start, end, 5.0):
        for node in nodes:
            values = {"node": node.name, "t0": float(t0), "t1": float(t0) + 5, "boot_id": "b1", **changes}
            factor = slower * (1 + noise * rng.standard_normal()) * (slow_node[1] if node.name == slow_node[0] else 1)
            if node.desired_phase != "decode":
                iterations = int(rng.integers(3, 9))
                t_uc = iterations * chunk if chunk else int(rng.integers(5_000, 60_000))
                pairs, t_rst = t_uc * int(rng.integers(10_000, 200_000)), int(rng.integers(0, 1_000_000))
                busy = prefill_work_s(PREFILL, t_uc, pairs, t_rst, iterations)
                values |= {"prefill_iterations": iterations, "t_uc": t_uc, "pairs": pairs, "t_rst": t_rst}
                values["busy_prefill_s"] = busy * factor
            if node.desired_phase != "prefill":
                batch = int(rng.integers(*batches))
                busy = 80 * decode_iteration_s(DECODE, batch)
                values |= {"decode_iterations": 80, "batch_counts": {str(batch): 80}}
                values["busy_decode_s"] = busy * factor
            rows.append(CostWindow(partition=partition, **values))
    CostWindow.objects.bulk_create(rows)
