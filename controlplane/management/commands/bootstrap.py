"""`manage.py bootstrap`: the first administrator, and rows for the described clusters. Safe to run at every start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane import bootstrap, clusters
from controlplane.errors import SwitchyardError


class Command(BaseCommand):
    help = "Creates what is missing of the described run; a second run changes addresses only."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--clusters", type=Path, default=clusters.DEFAULT_FILE, help="description of the run")
        parser.add_argument(
            "--ports",
            type=Path,
            help='JSON: {"gateway": {partition: port}, "agent": {node: port}}; else SWITCHYARD_PORTS',
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            described = clusters.load(options["clusters"])
            bootstrap.run(described, bootstrap.read_ports(described, options["ports"]), self.stdout.write)
        except (clusters.ClustersError, SwitchyardError, OSError) as error:
            raise CommandError(str(error)) from error
