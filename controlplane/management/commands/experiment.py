"""`manage.py experiment NAME|all [--quick]`: published tables and our own claims, measured in the simulator."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane import env
from workers.simulator.experiments.registry import EXPERIMENTS, FULL, QUICK, Scope, with_seeds
from workers.simulator.experiments.report import HEADINGS, evaluate, number, said, table, write
from workers.simulator.experiments.runs import Cancelled, Store, make_all


class Command(BaseCommand):
    help = "Run an experiment in the simulator; runs that were made before are kept and not made again."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help=f"one of {', '.join(EXPERIMENTS)}, or all")
        parser.add_argument("--quick", action="store_true", help="one seed and half of the scored time")
        parser.add_argument("--seeds", type=int, default=None, help="how many seeds (default: 3, quick: 1)")
        parser.add_argument("--processes", type=int, default=2, help="runs made at the same time (default: 2)")
        parser.add_argument("--out", type=Path, default=None, help="folder of the results (default: data/experiments)")
        parser.add_argument("--no-runs", action="store_true", help="make no runs: report what is kept")

    def handle(self, *args: Any, **options: Any) -> None:
        names = list(EXPERIMENTS) if options["name"] == "all" else [options["name"]]
        unknown = [name for name in names if name not in EXPERIMENTS]
        if unknown:
            raise CommandError(f"name: expected one of {', '.join(EXPERIMENTS)} or all, got {unknown[0]!r}")
        if options["seeds"] is not None and options["seeds"] < 1:
            raise CommandError(f"--seeds: expected a whole number of at least 1, got {options['seeds']}")
        scope = QUICK if options["quick"] else FULL
        seeds = scope.seeds if options["seeds"] is None else tuple(range(1, options["seeds"] + 1))
        folder = options["out"] or env.data_folder() / "experiments"
        store = Store(folder / "runs")
        for name in names:
            self._one(name, scope, seeds, folder, store, options)

    def _one(
        self, name: str, scope: Scope, seeds: tuple[int, ...], folder: Path, store: Store, options: dict[str, Any]
    ) -> None:
        experiment = EXPERIMENTS[name](scope)
        specs = with_seeds(experiment, seeds)

        def progress(done: int, of: int) -> bool:
            filled = round(30 * done / max(1, of))
            self.stderr.write(f"\r{name}: [{'#' * filled}{'.' * (30 - filled)}] {done}/{of} runs", ending="")
            return True

        if not options["no_runs"]:
            try:
                make_all(specs, store, options["processes"], progress)
            except (Cancelled, KeyboardInterrupt):
                self.stderr.write("\nstopped; the runs made so far are kept")
                raise SystemExit(130) from None
            self.stderr.write("")
        report = evaluate(experiment, store, seeds)
        rows = [HEADINGS, *table(report)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
        self.stdout.write(f"\n{report.title}")
        for row in rows:
            self.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for verdict in report.verdicts:
            self.stdout.write(
                f"{verdict.text}: {number(verdict.value)}, target {number(verdict.target)}: {said(verdict).strip('*')}"
            )
        for path in write(report, folder):
            self.stdout.write(f"wrote {path}")
