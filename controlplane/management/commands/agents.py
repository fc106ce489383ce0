"""`manage.py agents`: the node agents of one cluster under one supervisor, for a container or a machine of their own."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane import clusters, env
from controlplane.yardmaster import Yardmaster


class Command(BaseCommand):
    help = "Run the node agents of one cluster until stopped. The control plane runs elsewhere."
    requires_system_checks: list[str] = []
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--cluster", required=True, help="name of the cluster in the description")
        parser.add_argument("--clusters", type=Path, default=clusters.DEFAULT_FILE, help="description of the clusters")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            described = clusters.load(options["clusters"])
        except (clusters.ClustersError, OSError) as error:
            raise CommandError(str(error)) from error
        chosen = [cluster for cluster in described.clusters if cluster.name == options["cluster"]]
        if not chosen:
            names = ", ".join(cluster.name for cluster in described.clusters)
            raise CommandError(f"--cluster is {options['cluster']!r}; expected one of {names}")
        described.clusters = chosen
        master = Yardmaster(described, clusters.default_ports(described, env.web_port()), options["clusters"])
        asyncio.run(master.run_agents())
        if master.failed:
            raise CommandError(master.failed)
