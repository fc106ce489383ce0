"""Which embedded servers a data folder needs, where they are reached, and a plain way to run them (tests, one-off commands)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from controlplane.embedded.postgres import Postgres
from controlplane.embedded.valkey import Valkey

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


class EmbeddedServices:
    """The embedded servers of one data folder; those whose URL the environment gives are left out.

    Effects of `prepare`: folders, `services.json` (mode 0600) with the URLs, which `controlplane.env` reads.
    """

    def __init__(self, folder: Path, password: str, durable: bool = True, use_environment: bool = True) -> None:
        self.folder = folder
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:10]
        self.sockets = Path(tempfile.gettempdir()) / f"switchyard-{os.getuid()}-{digest}"
        given = os.environ if use_environment else {}
        self.postgres = (
            None if given.get("DATABASE_URL") else Postgres(folder / "postgres", self.sockets / "pg", password, durable)
        )
        self.valkey = None if given.get("REDIS_URL") else Valkey(folder / "valkey", self.sockets / "vk", durable)
        self.servers: list[Postgres | Valkey] = [server for server in (self.postgres, self.valkey) if server]
        self._processes: list[tuple[Postgres | Valkey, subprocess.Popen[bytes]]] = []

    def urls(self) -> dict[str, str]:
        urls = {}
        if self.postgres:
            urls["DATABASE_URL"] = self.postgres.url
        if self.valkey:
            urls["REDIS_URL"] = self.valkey.url
        return urls

    def prepare(self) -> None:
        self.sockets.mkdir(mode=0o755, exist_ok=True)
        if self.sockets.stat().st_uid != os.getuid():
            raise RuntimeError(
                f"{self.sockets} belongs to somebody else; remove it or set TMPDIR to a folder of your own"
            )
        self.sockets.chmod(0o755 if self.postgres and self.postgres.mode == "nobody" else 0o700)
        for name in ("pg", "vk"):
            (self.sockets / name).mkdir(mode=0o700, exist_ok=True)
        for server in self.servers:
            server.prepare()
        path = self.folder / "services.json"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
            json.dump(self.urls(), handle)

    def start(self) -> None:
        """Start all and wait until they answer. Raises RuntimeError with the server's last words."""
        self.prepare()
        for server in self.servers:
            log = open(self.folder / f"{server.name}.log", "ab")  # noqa: SIM115
            process = subprocess.Popen(
                server.command(), env=server.environment(), cwd="/", stdout=log, stderr=log, start_new_session=True
            )
            log.close()
            self._processes.append((server, process))
        deadline = time.monotonic() + START_TIMEOUT_S
        for server, process in self._processes:
            while not server.ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    words = (self.folder / f"{server.name}.log").read_text(errors="replace")[-2000:]
                    self.stop()
                    raise RuntimeError(f"{server.name} did not start: {words}")
                time.sleep(0.05)

    def stop(self) -> None:
        for server, process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(server.stop_signal)
        for _, process in reversed(self._processes):
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        for name in ("pg", "vk"):
            with contextlib.suppress(OSError):
                (self.sockets / name).rmdir()
        with contextlib.suppress(OSError):
            self.sockets.rmdir()
