"""An experiment from its name to its report: the runs that are missing are made, all of them are evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from workers.simulator.experiments import scale
from workers.simulator.experiments.registry import EXPERIMENTS
from workers.simulator.experiments.report import Report, evaluate, read
from workers.simulator.experiments.runs import Store, make_all
from workers.simulator.experiments.shapes import FULL, QUICK, with_seeds

NAMES = (*EXPERIMENTS, scale.NAME)
Progress = Callable[[float, str], bool]


def make(
    name: str,
    folder: Path,
    *,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Report:
    """`progress(share, text)` may answer False to stop after the run that is being made. Raises Cancelled; the runs made so
    far are kept."""
    scope = QUICK if quick else FULL
    chosen = tuple(seeds or scope.seeds)
    if name == scale.NAME:
        # Runs of many partitions are kept as their report alone.
        return scale.run(scale.QUICK if quick else scale.FULL, chosen[0], processes, progress)
    experiment, store = EXPERIMENTS[name](scope), Store(folder / "runs")

    def told(done: int, of: int) -> bool:
        return progress is None or progress(done / max(1, of), f"{done}/{of} runs")

    make_all(with_seeds(experiment, chosen), store, processes, told)
    return evaluate(experiment, store, chosen)


def kept(name: str, folder: Path, *, quick: bool = False, seeds: Sequence[int] | None = None) -> Report | None:
    """What the runs that were made before say: the full ones, or, if `quick` or if not all of those were made, the quick
    ones. None where nothing is kept."""
    if name == scale.NAME:
        return read(folder / f"{scale.NAME}.json")
    store = Store(folder / "runs")
    if not quick:
        chosen = tuple(seeds or FULL.seeds)
        report = evaluate(EXPERIMENTS[name](FULL), store, chosen)
        if all(line.seeds == len(chosen) for line in report.found):
            return report
    return evaluate(EXPERIMENTS[name](QUICK), store, tuple(seeds or QUICK.seeds))
