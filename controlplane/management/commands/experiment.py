"""`manage.py experiment NAME|all [--quick]`: published tables and our own claims, measured in the simulator."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError

from controlplane import env
from workers.simulator.experiments.making import NAMES, kept, make
from workers.simulator.experiments.report import HEADINGS, Report, document, number, said, table, write
from workers.simulator.experiments.runs import Cancelled


class Command(BaseCommand):
    help = "Run an experiment in the simulator; runs that were made before are kept and not made again."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help=f"one of {', '.join(NAMES)}, or all")
        parser.add_argument("--quick", action="store_true", help="one seed and half of the scored time")
        parser.add_argument("--seeds", type=int, default=None, help="how many seeds (default: 3, quick: 1)")
        parser.add_argument("--processes", type=int, default=2, help="runs made at the same time (default: 2)")
        parser.add_argument("--out", type=Path, default=None, help="folder of the results (default: data/experiments)")
        parser.add_argument("--document", action="store_true", help="write docs/experiments.md and the README's table")
        parser.add_argument(
            "--no-runs",
            action="store_true",
            help="make no runs: report what is kept, the quick runs where not all full ones are",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        known = NAMES
        names = known if options["name"] == "all" else (options["name"],)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise CommandError(f"name: expected one of {', '.join(known)} or all, got {unknown[0]!r}")
        if options["seeds"] is not None and options["seeds"] < 1:
            raise CommandError(f"--seeds: expected a whole number of at least 1, got {options['seeds']}")
        folder = options["out"] or env.data_folder() / "experiments"
        reports = []
        for name in names:
            report = self._report(name, folder, options)
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

    def _report(self, name: str, folder: Path, options: dict[str, Any]) -> Report | None:
        seeds = None if options["seeds"] is None else range(1, options["seeds"] + 1)
        if options["no_runs"]:
            return kept(name, folder, quick=options["quick"], seeds=seeds)
        try:
            report = make(
                name,
                folder,
                quick=options["quick"],
                seeds=seeds,
                processes=options["processes"],
                progress=self._bar(name),
            )
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
