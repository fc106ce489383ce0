"""`manage.py experiment NAME|all [--quick]`: published tables and our own claims, measured in the simulator."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError

from controlplane import env
from workers.simulator.experiments import scale
from workers.simulator.experiments.registry import EXPERIMENTS, FULL, QUICK, Scope, with_seeds
from workers.simulator.experiments.report import HEADINGS, Report, document, evaluate, number, read, said, table, write
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
        parser.add_argument("--document", action="store_true", help="write docs/experiments.md and the README's table")
        parser.add_argument("--no-runs", action="store_true", help="make no runs: report what is kept")

    def handle(self, *args: Any, **options: Any) -> None:
        known = (*EXPERIMENTS, scale.NAME)
        names = known if options["name"] == "all" else (options["name"],)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise CommandError(f"name: expected one of {', '.join(known)} or all, got {unknown[0]!r}")
        if options["seeds"] is not None and options["seeds"] < 1:
            raise CommandError(f"--seeds: expected a whole number of at least 1, got {options['seeds']}")
        scope = QUICK if options["quick"] else FULL
        seeds = scope.seeds if options["seeds"] is None else tuple(range(1, options["seeds"] + 1))
        folder = options["out"] or env.data_folder() / "experiments"
        store = Store(folder / "runs")
        reports = []
        for name in names:
            if name == scale.NAME:
                report = self._scale(options, seeds[0], folder)
            else:
                report = self._one(name, scope, seeds, store, options)
            if report is not None:
                self._show(report)
                for path in write(report, folder):
                    self.stdout.write(f"wrote {path}")
                reports.append(report)
        if options["document"]:
            for path in document(reports, env.ROOT):
                self.stdout.write(f"wrote {path}")

    def _bar(self, name: str) -> Any:
        def progress(share: float, text: str) -> bool:
            filled = round(30 * share)
            self.stderr.write(f"\r{name}: [{'#' * filled}{'.' * (30 - filled)}] {text:<24}", ending="")
            return True

        return progress

    def _one(self, name: str, scope: Scope, seeds: tuple[int, ...], store: Store, options: dict[str, Any]) -> Report:
        experiment = EXPERIMENTS[name](scope)
        if not options["no_runs"]:
            bar = self._bar(name)
            try:
                make_all(
                    with_seeds(experiment, seeds),
                    store,
                    options["processes"],
                    lambda done, of: bool(bar(done / max(1, of), f"{done}/{of} runs")),
                )
            except (Cancelled, KeyboardInterrupt):
                self._stopped()
            self.stderr.write("")
        return evaluate(experiment, store, seeds)

    def _scale(self, options: dict[str, Any], seed: int, folder: Path) -> Report | None:
        """Runs of many partitions are kept as their report."""
        if options["no_runs"]:
            return read(folder / f"{scale.NAME}.json")
        size = scale.QUICK if options["quick"] else scale.FULL
        try:
            report = scale.run(size, seed, options["processes"], self._bar(scale.NAME))
        except (Cancelled, KeyboardInterrupt):
            self._stopped()
        self.stderr.write("")
        return report

    def _stopped(self) -> NoReturn:
        self.stderr.write("\nstopped; the runs made so far are kept")
        raise SystemExit(130)

    def _show(self, report: Report) -> None:
        rows = [HEADINGS, *table(report)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
        self.stdout.write(f"\n{report.title}")
        for row in rows:
            self.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        for verdict in report.verdicts:
            self.stdout.write(
                f"{verdict.text}: {number(verdict.value)}, target {number(verdict.target)}: {said(verdict).strip('*')}"
            )
