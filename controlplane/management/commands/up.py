"""`manage.py up`: everything of a run under one supervisor, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane import clusters, env
from controlplane.yardmaster import AlreadyRunning, Yardmaster


class Command(BaseCommand):
    help = "Run everything: databases, console, planner, gateways, node agents, replay. Ctrl-C stops all of it."
    requires_system_checks: list[str] = []
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--free-ports", action="store_true", help="take free ports instead of the described ones")
        parser.add_argument("--clusters", type=Path, default=clusters.DEFAULT_FILE, help="description of the clusters")
        parser.add_argument("--ready-file", type=Path, help="write the addresses here as JSON once everything serves")
        parser.add_argument("--no-replay", action="store_true", help="do not replay recorded sessions")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            described = clusters.load(options["clusters"])
        except (clusters.ClustersError, OSError) as error:
            raise CommandError(str(error)) from error
        if missing := clusters.missing_tokens(described, os.environ):
            raise CommandError("; ".join(missing))
        ports = (
            clusters.free_ports(described)
            if options["free_ports"]
            else clusters.default_ports(described, env.web_port())
        )
        master = Yardmaster(described, ports, options["clusters"], replay=not options["no_replay"])
        try:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(master.run(options["ready_file"]))
        except AlreadyRunning as error:
            raise CommandError(str(error)) from error
        if master.failed:
            raise CommandError(master.failed)
