"""The agent as a process: start, refusal of bad starts, clean stop, kill -9 and coming back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent.reference_support import TOKEN, b64, greedy, prefill_job, prompt
from workers.agent.shared_memory import SHARED_MEMORY_DIR

pytestmark = pytest.mark.processes


class Agent:
    """One real agent process with a prefill node `k1`."""

    def __init__(self, folder: Path, models_dir: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        node = {
            "name": "k1",
            "engine": "reference",
            "model": {"name": "tiny", "weights": "random", "context_tokens": 2048},
            "phase": "mixed",
            "pool_blocks": 64,
            "limits": {"kv_tokens": 4096, "prefill_chunk_tokens": 64},
        }
        document = {"port": self.port, "data_dir": str(folder / "data"), "models_dir": str(models_dir), "nodes": [node]}
        self.spec = folder / "spec.json"
        self.spec.write_text(json.dumps(document))
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}/nodes/k1/v1", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "SWITCHYARD_AGENT_TOKEN": TOKEN}
        command = [sys.executable, "-m", "workers.agent", "--spec", str(self.spec)]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
        for _ in range(600):
            try:
                if self.client.get("/status").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError("the agent did not start")

    def end(self, how: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        code = self.process.wait(20)
        if self.process.stderr is not None:
            self.process.stderr.close()
        self.process = None
        return code

    def prefill(self, seed: int) -> dict[str, Any]:
        job = prefill_job(prompt(70, seed))
        body = {
            "request_id": "r",
            "token_ids": job.token_ids.tolist(),
            "prompt_tokens": 70,
            "chain_b64": b64(job.chain),
            "sampling": {"ignore_eos": True},
        }
        answer = self.client.post("/prefill", json=body)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document


@pytest.fixture
def agent(tmp_path: Path, models_dir: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path, models_dir)
    yield agent
    if agent.process is not None:
        agent.end(signal.SIGKILL)
    agent.client.close()
    kept = tmp_path / "data" / "nodes" / "k1" / "pool.json"
    if kept.exists():
        (SHARED_MEMORY_DIR / json.loads(kept.read_text())["name"]).unlink(missing_ok=True)


def test_a_killed_node_comes_back_with_its_phase_generation_and_pool(agent: Agent, models_dir: Path) -> None:
    agent.start()
    first = agent.prefill(1)
    assert first["cached_tokens"] == 0
    agent.client.put("/phase", json={"phase": "prefill", "generation": 4}).raise_for_status()
    before = agent.client.get("/status").json()
    agent.end(signal.SIGKILL)
    agent.start()
    after = agent.client.get("/status").json()
    assert (after["phase"], after["generation"]) == ("prefill", 4)
    assert after["boot_id"] != before["boot_id"]
    assert after["pool"]["name"] == before["pool"]["name"]
    assert after["counters"]["adopted_blocks"] == 4
    assert after["event_seq"] > before["event_seq"]
    again = agent.prefill(1)
    assert again["cached_tokens"] == 64
    assert again["first_token_id"] == first["first_token_id"] == greedy(models_dir, prompt(70, 1), 1)[0]


def test_a_clean_stop_ends_with_0_and_leaves_no_shared_memory(agent: Agent) -> None:
    agent.start()
    name = agent.client.get("/status").json()["pool"]["name"]
    assert (SHARED_MEMORY_DIR / name).exists()
    assert agent.end(signal.SIGTERM) == 0
    assert not (SHARED_MEMORY_DIR / name).exists()


def test_a_start_that_cannot_work_says_why_in_one_line(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    command = [sys.executable, "-m", "workers.agent", "--spec", str(spec)]
    environment = {key: value for key, value in os.environ.items() if key != "SWITCHYARD_AGENT_TOKEN"}
    spec.write_text('{"data_dir": "d", "nodes": []}')
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "nodes" in ended.stderr
    spec.write_text(
        json.dumps({"data_dir": "d", "nodes": [{"name": "n", "engine": "reference", "model": {"name": "m"}}]})
    )
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "SWITCHYARD_AGENT_TOKEN" in ended.stderr
