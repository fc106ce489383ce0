"""One simulated run as data: what is run, and its figures, kept on disk so that no run is made twice."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from workers.collecting import SIMULATED_YOUNG_OBJECTS, collect_seldom
from workers.simulator.hardware import GLM, KIMI, hardware
from workers.simulator.partition import Signals
from workers.simulator.recorder import Recorder
from workers.simulator.scenario import Cluster, Run, Settings, build
from workers.simulator.systems import system
from workers.simulator.workloads.mixes import ONE_TENANT, ClosedLoop, OpenLoop, Population, TenantShare, generated

MODEL = 4
"""Raised when the model changes so that kept runs no longer say what it gives."""
BLOCK_TOKENS = {"CC": 256, "Putnam": 64, "OSWorld": 128}
MIXED_BLOCK_TOKENS = 128
KIMI_PUTNAM_OUTPUT = 3.0


@dataclass(frozen=True)
class RunSpec:
    """Everything that a run follows from. `populations`: (from when, ((workload, agents), ...)); `arrivals_per_minute`
    instead makes agents of the first workload arrive at random. `scaled`: the true coefficients times these; the router and
    the planner go on believing the unscaled ones where `believes_unscaled`."""

    system: str
    populations: tuple[tuple[float, tuple[tuple[str, int], ...]], ...]
    seed: int = 1
    warm_up_s: float = 1800.0
    scored_s: float = 3600.0
    hardware: str = GLM
    nodes: int = 9
    prefill_nodes: int = 6
    arrivals_per_minute: float = 0.0
    harness_signals: bool = True
    tenants: tuple[tuple[str, str, float], ...] = ()
    fairness: str = "round-robin"
    flow: str = ""
    prefill_limit_per_node: int | None = 4
    slo_ttft_s: float | None = 15.0
    scaled: tuple[tuple[str, float], ...] = ()
    believes_unscaled: bool = False

    @property
    def key(self) -> str:
        text = json.dumps([MODEL, asdict(self)], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:16]

    @property
    def workloads(self) -> list[str]:
        return sorted({name for _, agents in self.populations for name, _ in agents})

    @property
    def block_tokens(self) -> int:
        names = self.workloads
        return BLOCK_TOKENS[names[0]] if len(names) == 1 else MIXED_BLOCK_TOKENS


def stationary(name: str, workload: str, agents: int, **changes: Any) -> RunSpec:
    """A fixed number of agents of one workload, on the hardware of its model."""
    machine = KIMI if workload == "OSWorld" else GLM
    return RunSpec(name, ((0.0, ((workload, agents),)),), **{"hardware": machine, **changes})


def execute(spec: RunSpec) -> dict[str, Any]:
    """Make the run."""
    collect_seldom(SIMULATED_YOUNG_OBJECTS)
    run, _ = prepare(spec)
    figures = run.measure(spec.warm_up_s, spec.scored_s)
    return _completed(spec, run, figures)


def prepare(spec: RunSpec) -> tuple[Run, ClosedLoop | OpenLoop]:
    """The run before its first moment."""
    true = hardware(spec.hardware)
    believed = true if spec.believes_unscaled else None
    true = true.scaled(dict(spec.scaled))
    tenants = tuple(TenantShare(*share) for share in spec.tenants) or ONE_TENANT
    settings = Settings(
        block_tokens=spec.block_tokens,
        seed=spec.seed,
        slo_ttft_s=spec.slo_ttft_s,
        prefill_limit_per_node=spec.prefill_limit_per_node,
        signals=Signals(harness=spec.harness_signals),
        fairness=spec.fairness,
        flow=json.loads(spec.flow) if spec.flow else {},
        tenants=tenants,
    )
    run = build(Cluster(spec.nodes, spec.prefill_nodes, true, believed), system(spec.system), settings)
    makers = {
        name: generated(
            name,
            spec.seed,
            spec.block_tokens,
            KIMI_PUTNAM_OUTPUT if name == "Putnam" and spec.hardware == KIMI else 1.0,
        )
        for name in spec.workloads
    }
    if spec.arrivals_per_minute:
        name = spec.workloads[0]
        until = spec.warm_up_s + spec.scored_s
        return run, OpenLoop(
            run.partition, makers[name], name, spec.arrivals_per_minute, spec.seed, until, settings.tenants
        )
    plan = [Population(at, dict(agents)) for at, agents in spec.populations]
    # As published: agents start with nothing and the warm-up lets them grow.
    return run, ClosedLoop(run.partition, makers, plan, spec.seed, settings.tenants, mature=False)


def _completed(spec: RunSpec, run: Run, figures: dict[str, Any]) -> dict[str, Any]:
    """What single experiments ask for besides: figures of each period of a changing mix, and of each tenant."""
    recorder = run.partition.recorder
    until = spec.warm_up_s + spec.scored_s
    moments = [at for at, _ in spec.populations] + [until]
    figures["periods_rps"] = [
        len(recorder.column("ttft_s", max(begin, spec.warm_up_s), end)) / max(1.0, end - max(begin, spec.warm_up_s))
        for begin, end in pairwise(moments)
        if end > spec.warm_up_s
    ]
    figures["tenants"] = {tenant: _tenant(recorder, tenant, spec.warm_up_s, until) for tenant, _, _ in spec.tenants}
    figures["switch_at_s"] = [round(at) for at, _ in recorder.switch_s]
    return figures


def _tenant(recorder: Recorder, tenant: str, since: float, until: float) -> dict[str, float]:
    ttft = recorder.of_kind("ttft_s", None, tenant, since, until)
    output = recorder.of_kind("output_tokens", None, tenant, since, until)
    p95 = float(np.percentile(ttft, 95)) if len(ttft) else 0.0
    return {"requests": len(ttft), "ttft_p95_s": p95, "output_tokens": float(output.sum())}


@dataclass
class Store:
    """Runs already made, one JSON file each."""

    folder: Path

    def path(self, spec: RunSpec) -> Path:
        return self.folder / f"{spec.key}.json"

    def get(self, spec: RunSpec) -> dict[str, Any] | None:
        try:
            document: dict[str, Any] = json.loads(self.path(spec).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        figures: dict[str, Any] = document["figures"]
        return figures

    def put(self, spec: RunSpec, figures: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"run": asdict(spec), "model": MODEL, "figures": figures}
        part = self.path(spec).with_suffix(".part")
        part.write_text(json.dumps(document, indent=1), encoding="utf-8")
        part.replace(self.path(spec))


Progress = Callable[[int, int], bool]


class Cancelled(Exception):
    """Somebody asked to stop; the runs made so far are kept."""


def make_all(specs: Sequence[RunSpec], store: Store, processes: int, progress: Progress | None = None) -> None:
    """Make the runs that are not kept yet. `progress(done, of)` may answer False to stop. Raises Cancelled."""
    missing = [spec for spec in dict.fromkeys(specs) if store.get(spec) is None]
    done, total = len(specs) - len(missing), len(specs)

    def told() -> None:
        if progress is not None and not progress(done, total):
            raise Cancelled

    told()
    if processes <= 1:
        for spec in missing:
            store.put(spec, execute(spec))
            done += 1
            told()
        return
    with multiprocessing.get_context("spawn").Pool(min(processes, max(1, len(missing)))) as pool:
        for spec, figures in pool.imap_unordered(_one, missing):
            store.put(spec, figures)
            done += 1
            told()


def _one(spec: RunSpec) -> tuple[RunSpec, dict[str, Any]]:
    return spec, execute(spec)
