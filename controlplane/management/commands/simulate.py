"""`manage.py simulate`: what would this system do with this work on this cluster?"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from workers.harness.replay.sessions import SessionFileError, load_sessions
from workers.simulator.hardware import GLM, hardware
from workers.simulator.scenario import Cluster, Run, Settings, build
from workers.simulator.systems import SYSTEMS, system
from workers.simulator.workloads import generators, traces
from workers.simulator.workloads.mixes import ClosedLoop, OpenLoop, Population, generated, play_all
from workers.simulator.workloads.sessions import SessionScripts, block_tokens_of
from workers.simulator.workloads.statistics import beside_target, describe

TRACES = ("sessions", "mooncake", "azure")
BLOCK_TOKENS = 128
DESCRIBED_AGENTS = 30


class Command(BaseCommand):
    help = "Simulate a cluster and print what it measured as JSON."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--system", default="switchyard", help=f"one of {', '.join(SYSTEMS)}, perhaps with :xPyD")
        add("--workload", default="CC", help=f"a generator ({', '.join(generators.NAMES)}) or {', '.join(TRACES)}")
        add("--file", type=Path, default=None, help="recording or trace (sessions: the packaged excerpt by default)")
        add("--agents", type=int, default=90, help="agents active at the same time")
        add("--per-minute", type=float, default=0.0, help="agents that arrive a minute, instead of a fixed number")
        add("--rate", type=float, default=1.0, help="how many times as fast a trace is played")
        add("--limit", type=int, default=None, help="requests of a trace to play")
        add("--hardware", default=GLM, help="a profile of the hardware file")
        add("--nodes", type=int, default=9)
        add("--prefill-nodes", type=int, default=6)
        add("--warm-up", type=float, default=1800.0, help="seconds before anything counts")
        add("--seconds", type=float, default=3600.0, help="seconds that count")
        add("--seed", type=int, default=1)
        add("--describe", action="store_true", help="print the workload's own statistics beside their targets instead")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            if options["describe"]:
                self._describe(options)
                return
            self.stdout.write(json.dumps(self._simulate(options), indent=1))
        except (ValueError, OSError, SessionFileError) as problem:
            raise CommandError(str(problem)) from None

    def _simulate(self, options: dict[str, Any]) -> dict[str, Any]:
        name = options["workload"]
        block_tokens, attach = self._workload(name, options)
        cluster = Cluster(options["nodes"], options["prefill_nodes"], hardware(options["hardware"]))
        if not 0 < cluster.prefill_nodes < cluster.nodes:
            raise CommandError(f"--prefill-nodes: expected 1 to {cluster.nodes - 1}, got {cluster.prefill_nodes}")
        run = build(cluster, system(options["system"]), Settings(block_tokens=block_tokens, seed=options["seed"]))
        attach(run)
        return run.measure(options["warm_up"], options["seconds"])

    def _workload(self, name: str, options: dict[str, Any]) -> tuple[int, Any]:
        """(block size, what gives a run its work)."""
        seed = options["seed"]
        if name in generators.NAMES:
            maker = generated(name, seed, BLOCK_TOKENS)
            if options["per_minute"]:
                return BLOCK_TOKENS, lambda run: OpenLoop(run.partition, maker, name, options["per_minute"], seed)
            return BLOCK_TOKENS, self._closed(name, maker, options)
        if name == "sessions":
            sessions = load_sessions(options["file"])
            return block_tokens_of(sessions), self._closed(name, SessionScripts(sessions, seed), options)
        if name in TRACES:
            if options["file"] is None:
                raise CommandError(f"--file: expected the {name} trace to play")
            read = traces.read_mooncake if name == "mooncake" else traces.read_azure
            block_tokens = 512 if name == "mooncake" else BLOCK_TOKENS
            trace = traces.TraceScripts(read(options["file"], options["limit"]), block_tokens, options["rate"])
            return block_tokens, lambda run: play_all(run.partition, trace.scripts(), name)
        known = ", ".join((*generators.NAMES, *TRACES))
        raise CommandError(f"--workload: expected one of {known}, got {name!r}")

    def _closed(self, name: str, maker: Any, options: dict[str, Any]) -> Any:
        def attach(run: Run) -> None:
            ClosedLoop(run.partition, {name: maker}, [Population(0.0, {name: options["agents"]})], options["seed"])

        return attach

    def _describe(self, options: dict[str, Any]) -> None:
        name = options["workload"]
        if name not in generators.NAMES:
            raise CommandError(f"--describe: expected a generator ({', '.join(generators.NAMES)}), got {name!r}")
        scripts = (generators.agent(name, options["seed"], number, BLOCK_TOKENS) for number in range(DESCRIBED_AGENTS))
        figures = describe(scripts, BLOCK_TOKENS)
        for figure, value in figures.items():
            self.stdout.write(f"{figure}: {value:,.2f}")
        self.stdout.write("beside what it was fitted to:")
        for figure, target, value in beside_target(name, figures):
            self.stdout.write(f"{figure}: {value:,.2f}, target {target}")
