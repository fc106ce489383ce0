"""Which processes a run consists of, in which order they start, and how each shows that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import IO, Any

import httpx

from controlplane import env
from controlplane.celery import WORKER_ARGUMENTS
from controlplane.clusters import Cluster, Clusters, Ports, agent_specs
from controlplane.embedded import EmbeddedServices
from controlplane.supervisor import Child, ChildFailed, Supervisor

PYTHON = sys.executable
# Engines in numpy share the machine's cores: one BLAS thread each, or decode collapses.
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "BLIS", "VECLIB", "NUMEXPR")}


class AlreadyRunning(RuntimeError):
    """Another run holds the data folder."""


class Yardmaster:
    """One run over one data folder. `failed` says why it ended early, when it did."""

    def __init__(self, described: Clusters, ports: Ports, clusters_file: Path, replay: bool = True) -> None:
        self.described = described
        self.ports = ports
        self.clusters_file = clusters_file.resolve()
        self.replay = replay
        self.host = env.host()
        self.folder = env.data_folder()
        self.services = EmbeddedServices(self.folder, env.secret("database_password"))
        self.supervisor = Supervisor()
        self.failed = ""

    async def run(self, ready_file: Path | None = None) -> None:
        """Start everything, wait for SIGINT or SIGTERM, stop everything. Raises AlreadyRunning."""
        with self._lock("up.lock"):
            try:
                await self._until_stopped(self._start(ready_file))
            finally:
                if ready_file:
                    ready_file.unlink(missing_ok=True)

    async def run_agents(self) -> None:
        """Only the node agents, until SIGINT or SIGTERM. Raises AlreadyRunning."""

        async def start() -> None:
            await asyncio.gather(*(self.supervisor.start(child) for child in self._agents()))

        with self._lock("agents.lock"):
            await self._until_stopped(start())

    async def _until_stopped(self, start: Coroutine[Any, Any, None]) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        starting, waiting = asyncio.create_task(start), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await waiting
        except (ChildFailed, RuntimeError) as error:
            self.failed = str(error)
            self.supervisor.say(f"stopping: {error}")
        finally:
            for task in (starting, waiting):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ChildFailed, RuntimeError):
                    await task
            self.supervisor.say("stopping")
            await self.supervisor.stop()
            self.supervisor.say(f"stopped; the data stay in {self.folder}")

    @contextlib.contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        handle: IO[str] = open(self.folder / name, "w")  # noqa: SIM115
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            handle.close()
            raise AlreadyRunning(f"Switchyard already runs on {self.folder}; stop it first") from error
        with handle:
            yield

    async def _start(self, ready_file: Path | None) -> None:
        self._check_ports()
        await self._start_services()
        ports_file = self.folder / "ports.json"
        ports_file.write_text(json.dumps({"gateway": self.ports.gateways, "agent": self.ports.agents}))
        await self.supervisor.run_once(self._manage("migrate", "migrate", "--no-input", "-v", "0"))
        await self.supervisor.run_once(
            self._manage("bootstrap", "bootstrap", "--clusters", str(self.clusters_file), "--ports", str(ports_file))
        )
        await asyncio.gather(*(self.supervisor.start(child) for child in [self._web(), *self._agents()]))
        await asyncio.gather(*(self.supervisor.start(child) for child in self._gateways()))
        for child in [self._worker(), self._beat(), *self._replays()]:
            await self.supervisor.start(child)
        self._announce(ready_file)

    def _check_ports(self) -> None:
        taken = {"console": self.ports.web, **{f"gateway {name}": port for name, port in self.ports.gateways.items()}}
        taken |= {f"agent {name}": port for name, port in self.ports.agents.items()}
        for what, port in taken.items():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                except OSError as error:
                    raise RuntimeError(
                        f"port {port} ({what}) is in use: stop what holds it, or start with --free-ports"
                    ) from error

    async def _start_services(self) -> None:
        self.services.prepare()
        for server in self.services.servers:

            async def ready(server: Any = server) -> bool:
                return bool(await asyncio.to_thread(server.ready))

            prepare = _first_call_skipped(server.prepare)
            await self.supervisor.start(
                Child(
                    server.name,
                    server.command(),
                    server.environment(),
                    ready=ready,
                    ready_timeout_s=60,
                    stop_signal=server.stop_signal,
                    stop_timeout_s=20,
                    before_start=prepare,
                    folder="/",
                )
            )
        os.environ.update(self.services.urls())

    def _manage(self, name: str, *arguments: str) -> Child:
        return Child(name, [PYTHON, str(env.ROOT / "manage.py"), *arguments], self._environment(), folder=str(env.ROOT))

    def _module(self, name: str, *arguments: str, **more: Any) -> Child:
        extra = more.pop("environment", {})
        return Child(name, [PYTHON, "-m", *arguments], {**self._environment(), **extra}, folder=str(env.ROOT), **more)

    def _environment(self) -> dict[str, str]:
        return {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "SWITCHYARD_DATA": str(self.folder),
            "SWITCHYARD_AGENT_TOKEN": env.secret("agent_token"),
            "SWITCHYARD_SECRET_KEY": env.secret("secret_key"),
            **self.services.urls(),
        }

    def _web(self) -> Child:
        return self._module(
            "web", "uvicorn", "controlplane.asgi:application", "--host", self.host, "--port", str(self.ports.web),
            "--loop", "uvloop", "--http", "httptools", "--ws", "websockets-sansio", "--ws-per-message-deflate", "false",
            "--no-access-log", "--log-level", "warning", "--no-server-header", "--timeout-graceful-shutdown", "3",
            ready=_answers(f"http://{self.host}:{self.ports.web}/healthz"),
        )  # fmt: skip

    def _worker(self) -> Child:
        return self._module(
            "planner", "celery", "--quiet", "-A", "controlplane", "worker", *WORKER_ARGUMENTS, stop_timeout_s=20
        )

    def _beat(self) -> Child:
        schedule = self.folder / "beat-schedule"
        return self._module(
            "beat",
            "celery",
            "--quiet",
            "-A",
            "controlplane",
            "beat",
            "--loglevel",
            "WARNING",
            "--schedule",
            str(schedule),
            "--pidfile",
            "",
        )

    def _agents(self) -> list[Child]:
        children = []
        folder = self.folder / "agents"
        folder.mkdir(exist_ok=True)
        for cluster in self.described.clusters:
            for name, spec in agent_specs(self.described, cluster, self.ports, self.host, self.folder).items():
                path = folder / f"{name}.json"
                path.write_text(json.dumps(spec, indent=1))
                url = f"http://{self.host}:{spec['port']}/nodes/{spec['nodes'][0]['name']}/healthz"
                children.append(
                    self._module(
                        name, "workers.agent", "--spec", str(path),
                        environment=ONE_THREAD, ready=_answers(url), ready_timeout_s=180,
                    )
                )  # fmt: skip
        return children

    def _gateways(self) -> list[Child]:
        return [self._gateway(cluster) for cluster in self.described.clusters]

    def _gateway(self, cluster: Cluster) -> Child:
        port = self.ports.gateways[cluster.name]
        kept = self.folder / "gateway" / f"{cluster.name}.json"
        kept.parent.mkdir(exist_ok=True)
        return self._module(
            f"gateway-{cluster.name}", "workers.gateway", "--partition", cluster.name, "--host", self.host,
            "--port", str(port), "--config-file", str(kept),
            ready=_answers(f"http://{self.host}:{port}/healthz"),
        )  # fmt: skip

    def _replays(self) -> list[Child]:
        children = []
        for cluster in self.described.clusters:
            if not (cluster.replay and self.replay):
                continue
            shares = ",".join(f"{name}={share}" for name, share in cluster.replay.objective_shares.items())
            children.append(
                self._module(
                    f"replay-{cluster.name}", "workers.harness.replay",
                    "--gateway", f"http://{self.host}:{self.ports.gateways[cluster.name]}", "--model", cluster.model.name,
                    "--key-file", str(self.folder / "keys.json"), "--key-name", "replay",
                    "--agents", str(cluster.replay.agents), "--pause-scale", str(cluster.replay.pause_scale),
                    "--objectives", shares,
                )
            )  # fmt: skip
        return children

    def addresses(self) -> dict[str, Any]:
        return {
            "console": f"http://{self.host}:{self.ports.web}/",
            "gateways": {name: f"http://{self.host}:{port}/v1" for name, port in self.ports.gateways.items()},
            "keys_file": str(self.folder / "keys.json"),
            "process_id": os.getpid(),
        }

    def _announce(self, ready_file: Path | None) -> None:
        where = self.addresses()
        self.supervisor.say("everything serves. Ctrl-C stops it.")
        self.supervisor.say(f"console          {where['console']}")
        for name, url in where["gateways"].items():
            self.supervisor.say(f"gateway {name:<8} {url}")
        self.supervisor.say(f"API keys         {where['keys_file']} (mode 0600)")
        if ready_file:
            scratch = ready_file.with_suffix(".tmp")
            scratch.write_text(json.dumps(where))
            scratch.replace(ready_file)


def _answers(url: str) -> Callable[[], Awaitable[bool]]:
    async def ready() -> bool:
        try:
            async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
                return (await client.get(url)).status_code == 200
        except httpx.HTTPError:
            return False

    return ready


def _first_call_skipped(prepare: Callable[[], None]) -> Callable[[], None]:
    """The services were prepared together once; each restart prepares its own again."""
    calls = iter([lambda: None])
    return lambda: next(calls, prepare)()
