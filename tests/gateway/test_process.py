"""`python -m workers.gateway` and `python -m workers.agent` as processes: start, serve, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import AGENT_TOKEN, KEY, NOBODY_REDIS, PHASES, agent_spec, document, node, prompt
from tools.ports import free_port

ROOT = Path(__file__).parents[2]


def call(url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, str], dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, dict(response.headers), json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), json.loads(error.read())
    except OSError:
        return 0, {}, {}


def until_served(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while call(url)[0] != 200:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    environment = os.environ | {"SWITCHYARD_AGENT_TOKEN": AGENT_TOKEN, "REDIS_URL": NOBODY_REDIS}
    agent_port, port = free_port(), free_port()
    (tmp_path / "agent.json").write_text(json.dumps(agent_spec(tmp_path / "agent", PHASES) | {"port": agent_port}))
    url = f"http://127.0.0.1:{agent_port}"
    nodes = [node(name, order, phase, url) for order, (name, phase) in enumerate(PHASES.items())]
    (tmp_path / "config.json").write_text(json.dumps(document(nodes)))
    start = [sys.executable, "-m"]
    agent = subprocess.Popen(
        [*start, "workers.agent", "--spec", str(tmp_path / "agent.json")], cwd=ROOT, env=environment
    )
    options = ["--partition", "test", "--port", str(port), "--config-file", str(tmp_path / "config.json")]
    process = subprocess.Popen([*start, "workers.gateway", *options], cwd=ROOT, env=environment)
    try:
        until_served(url + "/healthz", agent)
        until_served(f"http://127.0.0.1:{port}/v1/models", process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        for running in (process, agent):
            running.terminate()
            running.wait(15)


@pytest.mark.processes
def test_processes_serve_a_completion_and_stop_on_sigterm(gateway: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = gateway
    status, headers, answer = call(url + "/v1/completions", prompt())
    assert status == 200, answer
    assert answer["choices"][0]["text"] == "." * 20 and headers["x-switchyard-prefill-node"] == "n1"
    assert call(url + "/healthz")[2]["config_version"] == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0


@pytest.mark.processes
def test_without_the_agents_token_the_gateway_says_what_is_missing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SWITCHYARD_AGENT_TOKEN"}
    options = ["--partition", "test", "--port", "1", "--config-file", str(tmp_path / "c.json")]
    command = [sys.executable, "-m", "workers.gateway", *options]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "SWITCHYARD_AGENT_TOKEN" in run.stderr and "Traceback" not in run.stderr
