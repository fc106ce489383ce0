"""Every experiment by its name."""

from __future__ import annotations

from collections.abc import Callable

from workers.simulator.experiments.other_loads import (
    adaptation_cost,
    best_static,
    components,
    fixed_split,
    initial_split,
    motivation,
    open_loop,
    scale_256,
    shifting,
    tp8,
)  # fmt: skip
from workers.simulator.experiments.own_claims import bands, fairness, guards, no_signals, prefetch, sensitivity
from workers.simulator.experiments.shapes import Experiment, Scope
from workers.simulator.experiments.stationary_load import balance_table, stationary_table, switches_table

EXPERIMENTS: dict[str, Callable[[Scope], Experiment]] = {
    "stationary": stationary_table,
    "switches": switches_table,
    "balance": balance_table,
    "shifting": shifting,
    "best-static": best_static,
    "open-loop": open_loop,
    "tp8-adp8": tp8,
    "fixed-4P5D": fixed_split,
    "components": components,
    "initial-split": initial_split,
    "adaptation-cost": adaptation_cost,
    "motivation": motivation,
    "scale-256": scale_256,
    "guards": guards,
    "no-signals": no_signals,
    "prefetch": prefetch,
    "bands": bands,
    "fairness": fairness,
    "sensitivity": sensitivity,
}
