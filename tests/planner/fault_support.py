"""Real processes to break: node agents, Celery workers with beat, and a gatekeeper that holds phase orders up on the wire."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx
from django.conf import settings
from django.db import connection

from controlplane.env import ROOT
from tests.factories import COEFFICIENTS, MODEL, NETWORK
from tools.ports import free_port


def kill(process: subprocess.Popen[bytes]) -> None:
    """The process with all it started, at once; safe to repeat."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class AgentHost:
    """`python -m workers.agent` with simulated nodes `gb300-1`.. in these phases; survives being killed and restarted."""

    def __init__(self, folder: Path, phases: tuple[str, ...]) -> None:
        self.folder, self.port = folder, free_port()
        self.data = folder / "data"
        folder.mkdir(parents=True)
        spec = {
            "host": "127.0.0.1",
            "port": self.port,
            "data_dir": str(self.data),
            "speed": 20.0,
            "nodes": [
                {
                    "name": f"gb300-{index}",
                    "engine": "simulated",
                    "model": MODEL,
                    "phase": phase,
                    "generation": 0,
                    "pool_blocks": 1000,
                    "limits": {"max_decode_batch": 16, "kv_tokens": 1_000_000, "prefill_chunk_tokens": 8192},
                    "coefficients": COEFFICIENTS,
                    "network": NETWORK,
                }
                for index, phase in enumerate(phases, start=1)
            ],
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "SWITCHYARD_AGENT_TOKEN": settings.AGENT_TOKEN}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers.agent", "--spec", str(self.folder / "spec.json")],
                env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + 20
        while True:
            try:
                self.status("gb300-1")
                return
            except httpx.HTTPError:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
                time.sleep(0.1)

    def kill(self) -> None:
        if self.process is not None:
            kill(self.process)
            self.process = None

    def remember(self) -> None:
        """Keep a copy of what the agents have stored, as a backup would."""
        shutil.copytree(self.data, self.folder / "backup", dirs_exist_ok=True)

    def restore(self) -> None:
        """Put the copy back; only while the process is dead."""
        assert self.process is None
        shutil.rmtree(self.data)
        shutil.copytree(self.folder / "backup", self.data)

    def url(self, node: str) -> str:
        return f"http://127.0.0.1:{self.port}/nodes/{node}"

    def status(self, node: str) -> dict[str, object]:
        headers = {"Authorization": f"Bearer {settings.AGENT_TOKEN}"}
        answer = httpx.get(f"{self.url(node)}/v1/status", headers=headers, trust_env=False, timeout=5)
        answer.raise_for_status()
        return dict(answer.json())

    def order(self, node: str, phase: str, generation: int) -> httpx.Response:
        """A phase order straight to the agent, as a late one would come."""
        headers = {"Authorization": f"Bearer {settings.AGENT_TOKEN}"}
        body = {"phase": phase, "generation": generation}
        return httpx.put(f"{self.url(node)}/v1/phase", json=body, headers=headers, trust_env=False, timeout=5)

    def phase(self, node: str) -> str:
        return str(self.status(node)["phase"])


class Gatekeeper:
    """A proxy before the agents. `hold` says where phase orders get stuck: None, "before" the agent hears, or "after".

    `stuck` is set while one is held; a held order stays so until `release` or until whoever sent it is gone.
    """

    def __init__(self, agents: AgentHost) -> None:
        self.hold: str | None = None
        self.stuck, self._go_on = threading.Event(), threading.Event()
        keeper = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._forward("GET", None)

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                held = keeper.hold
                if held == "before":
                    keeper._wait()
                    return
                answer = self._ask("PUT", body)
                if held == "after":
                    keeper._wait()
                    return
                self._answer(answer)

            def _ask(self, method: str, body: bytes | None) -> httpx.Response:
                headers = {
                    "Authorization": self.headers.get("Authorization", ""),
                    "content-type": self.headers.get("content-type", "application/json"),
                }
                address = f"http://127.0.0.1:{agents.port}{self.path}"
                return httpx.request(method, address, content=body, headers=headers, trust_env=False, timeout=10)

            def _forward(self, method: str, body: bytes | None) -> None:
                try:
                    self._answer(self._ask(method, body))
                except httpx.HTTPError:
                    self.send_error(502)

            def _answer(self, answer: httpx.Response) -> None:
                self.send_response(answer.status_code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self.stuck.set()
        self._go_on.wait(60)

    def release(self) -> None:
        self.hold = None
        self._go_on.set()

    def url(self, node: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/nodes/{node}"

    def close(self) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()


class Workers:
    """Celery workers on the test's database and Redis. `start(beat=False)` leaves the clock out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        parts = urlsplit(os.environ["DATABASE_URL"])
        database = urlunsplit(parts._replace(path=f"/{connection.settings_dict['NAME']}"))
        self._environment = {
            **os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "DATABASE_URL": database,
        }  # fmt: skip
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *, beat: bool = True) -> subprocess.Popen[bytes]:
        number = len(self.running)
        command = ["-m", "celery", "-A", "controlplane", "worker", "--concurrency", "2", "--loglevel", "WARNING"]
        command += ["--queues", "switchyard.planner", "--without-gossip", "--without-mingle"]
        command += ["--hostname", f"worker-{number}@localhost"]
        if beat:
            command += ["--beat", "--schedule", str(self._folder / f"beat-{number}")]
        with (self._folder / f"worker-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=self._environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def close(self) -> None:
        for process in self.running:
            kill(process)
        for path in sorted(self._folder.glob("worker-*.log")):
            print(path.read_text()[-2000:])
