"""`make bench-gateway [PEER=/path/to/smg]`: the gateway with its whole policy on, beside smg 1.13 on the same stand-ins.

Gateways run on CPU 0, stand-ins and clients on CPU 1. Rounds alternate between the gateways and the medians are compared:
CPU seconds a thousand requests and the best p50 of one client are stable, the rest is not and is printed without a target.
Authentication, flow control, branch ledger, KV directory, router and telemetry records are on.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apps
from bench.report import report
from tools.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-bench"
MOST_OF_PEER_CPU = 0.8
MOST_OF_PEER_P50 = 1.2
LONGEST_GAP_MS = 100.0
PLAIN = {"w1": "mixed", "w2": "mixed", "w3": "mixed", "w4": "mixed"}
PAIR = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
LOADS = {"small": (1500, 300), "big": (500, 120)}  # requests of 32 clients, of one
READY_S = 90.0
SETTLE_S = 3.0
NEW_STREAMS_A_SECOND = 200


def configuration(ports: dict[str, int], phases: dict[str, str]) -> dict[str, Any]:
    """The document of one partition of stand-ins."""
    coefficients = {"c0": 0.01, "c1": 5e-5, "c2": 1e-10, "c3": 1e-6, "d0": 2e-3, "d1": 0.0, "d2": 1e-4}
    nodes = [
        {
            "name": name, "order": order, "url": f"http://127.0.0.1:{ports[name]}", "engine": "sglang", "phase": phase,
            "coefficients": coefficients, "decode_limit": 1024, "direct": {"bootstrap_port": ports[name] + 100},
        }
        for order, (name, phase) in enumerate(phases.items())
    ]  # fmt: skip
    band = {"fairness": "round-robin", "ordering": "fcfs", "max_requests": 5000, "max_bytes": 10**10, "ttl_s": 60}
    stage = {"detector": "concurrency", "mode": "requests", "limit_per_node": 1024}
    return {
        "version": 1, "partition": "bench", "published_at": time.time(),
        "model": {
            "name": "bench", "served_names": ["bench"], "tokenizer": "text", "tokenizer_path": None, "dtype": "bf16",
            "block_tokens": 64, "ids_per_block": 64, "tokens_per_id": 1, "context_tokens": 131_072,
        },
        "network": {"kv_bytes_per_token": 5e4, "peer_bandwidth_bytes_s": 4e10, "host_to_device_bytes_s": 2e11, "latency_s": 0.002},
        "nodes": nodes,
        "tenants": [{"name": "bench", "sharing_domain": "bench", "weight": 1.0, "paused": False, "default_objective": "standard"}],
        "keys": [{"id": "k", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "bench", "trusted": True, "objectives": ["*"]}],
        "objectives": [{"name": "standard", "band": "standard", "slo_ttft_s": None, "ttl_s": None}],
        "bands": [{"name": "premium", "priority": 100} | band, {"name": "standard", "priority": 0} | band],
        "default_band": band,
        "flow": {"max_requests": 10_000, "max_bytes": 10**11, "default_ttl_s": 60, "empty_pool_ttl_s": 3, "displacement": True, "prefill": stage, "decode": stage},
        "routing": {"policy": "ttft"},
    }  # fmt: skip


class Bench:
    """Starts processes, ends exactly those, and measures."""

    def __init__(self, folder: Path, peer: str | None) -> None:
        self.folder = folder
        self.peer = peer
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, cpu: int, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{len(self._started)}.log").open("wb")
        process = subprocess.Popen(
            ["taskset", "-c", str(cpu), *command],
            cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._started.append(process)
        return process

    def stop(self) -> None:
        for process in self._started:
            process.terminate()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()

    def workers(self, phases: dict[str, str], *options: str) -> dict[str, int]:
        ports = {name: free_port() for name in phases}
        roles = {"prefill": ":prefill", "decode": ":decode"}
        places = ",".join(f"{ports[name]}{roles.get(phase, '')}" for name, phase in phases.items())
        self.start(1, sys.executable, "-m", "bench.gateway_workers", "--ports", places, *options)
        return ports

    def ours(self, ports: dict[str, int], phases: dict[str, str]) -> tuple[int, int]:
        """Port and process of our gateway."""
        port = free_port()
        file = self.folder / f"{port}.json"
        file.write_text(json.dumps(configuration(ports, phases)))
        command = ("-m", "workers.gateway", "--partition", "bench", "--port", str(port), "--config-file", str(file))
        environment = {"SWITCHYARD_AGENT_TOKEN": "unused", "REDIS_URL": "redis://127.0.0.1:1/0"}
        process = self.start(0, sys.executable, *command, **environment)
        return port, process.pid

    def theirs(self, ports: dict[str, int], phases: dict[str, str]) -> tuple[int, int] | None:
        if self.peer is None:
            return None
        port = free_port()
        urls = {name: f"http://127.0.0.1:{value}" for name, value in ports.items()}
        if "prefill" in phases.values():
            where = ["--pd-disaggregation"]
            for name, phase in phases.items():
                bootstrap = [str(ports[name] + 100)] if phase == "prefill" else []
                where += [f"--{phase}", urls[name], *bootstrap]
        else:
            where = ["--worker-urls", *urls.values()]
        process = self.start(
            0, self.peer, "launch", *where, "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1",
            "--prometheus-port", str(free_port()), "--log-level", "warn", "--policy", "cache_aware",
            "--worker-startup-check-interval", "1", "--health-check-interval-secs", "60",
        )  # fmt: skip
        return port, process.pid

    def ready(self, *gateways: tuple[int, int]) -> None:
        """Waits until each answers a completion. Raises RuntimeError after `READY_S`."""
        body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "ready?"}]}).encode()
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        deadline = time.monotonic() + READY_S
        for port, _ in gateways:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=5).read()
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the gateway on port {port} does not answer")
                time.sleep(0.5)
        time.sleep(SETTLE_S)

    def load(
        self, gateway: tuple[int, int], size: str, clients: int, requests: int, ramp_s: float = 0.0
    ) -> dict[str, float]:
        """What clients saw, and the gateway's CPU seconds a thousand requests."""
        port, pid = gateway
        before = cpu_s(pid)
        command = ["-m", "bench.gateway_load", "--port", str(port), "--size", size, "--clients", str(clients)]
        command += ["--ramp-s", str(ramp_s)]
        done = subprocess.run(
            ["taskset", "-c", "1", sys.executable, *command, "--requests", str(requests), "--key", KEY],
            cwd=ROOT, capture_output=True, check=True, timeout=600,
        )  # fmt: skip
        seen: dict[str, float] = json.loads(done.stdout)
        if seen["failed"] or seen["answered"] != requests:
            raise RuntimeError(f"{seen['failed']:.0f} clients failed, {seen['answered']:.0f} of {requests} answered")
        return seen | {"cpu_s": (cpu_s(pid) - before) / requests * 1000}


def cpu_s(pid: int) -> float:
    """Seconds that a process and its threads have run, to the nanosecond (`stat` counts in hundredths)."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


@contextlib.contextmanager
def bench(peer: str | None) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        running = Bench(Path(folder), peer)
        try:
            yield running
        finally:
            running.stop()


def compare(running: Bench, rounds: int) -> None:
    """Streaming, plain and with a hand-over, small and big bodies, beside the peer."""
    gateways: dict[str, dict[str, tuple[int, int]]] = {}
    for kind, phases in (("plain", PLAIN), ("pd", PAIR)):
        ports = running.workers(phases)
        time.sleep(1.0)
        both = {"ours": running.ours(ports, phases), "smg": running.theirs(ports, phases)}
        gateways[kind] = {name: gateway for name, gateway in both.items() if gateway is not None}
    running.ready(*(gateway for known in gateways.values() for gateway in known.values()))
    seen: dict[tuple[str, str, str], list[dict[str, float]]] = defaultdict(list)
    for _ in range(rounds):
        for size, (many, single) in LOADS.items():
            for kind, known in gateways.items():
                for name, gateway in known.items():
                    crowd = running.load(gateway, size, 32, many)
                    alone = running.load(gateway, size, 1, single)
                    seen[kind, size, name].append(crowd | {"alone_p50_ms": alone["p50_ms"]})
    for kind in gateways:
        for size in LOADS:
            _report(kind, size, seen[kind, size, "ours"], seen.get((kind, size, "smg"), []))


def _report(kind: str, size: str, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    name = f"gateway {kind} streaming, {size} bodies"
    value = statistics.median(entry["cpu_s"] for entry in ours)
    peer = statistics.median(entry["cpu_s"] for entry in theirs) if theirs else None
    target = None if peer is None else MOST_OF_PEER_CPU * peer
    report(f"{name}: CPU of 1000 requests", value, "s", target=target, aim="at_most", baseline=peer)
    best = min(entry["alone_p50_ms"] for entry in ours)
    peer_best = min(entry["alone_p50_ms"] for entry in theirs) if theirs else None
    target = None if peer_best is None else MOST_OF_PEER_P50 * peer_best
    report(f"{name}: best p50 of one client", best, "ms", target=target, aim="at_most", baseline=peer_best)


def many_streams(running: Bench, streams: int) -> None:
    """`streams` open at once, 20 tokens a second each, begun one after another: the longest pause, with and without us."""
    ramp_s = streams / NEW_STREAMS_A_SECOND
    ports = running.workers(PLAIN, "--itl-ms", "50", "--tokens", str(round(2 * ramp_s / 0.05)))
    gateway = running.ours(ports, PLAIN)
    running.ready(gateway)
    direct = running.load((ports["w1"], gateway[1]), "small", streams, streams, ramp_s)
    seen = running.load(gateway, "small", streams, streams, ramp_s)
    stall = seen["gap_p99_ms"] - 50.0
    report(
        f"{streams} open streams at 20 tokens/s: longest stall (p99 of streams)", stall, "ms",
        target=LONGEST_GAP_MS, aim="at_most", baseline=direct["gap_p99_ms"] - 50.0,
    )  # fmt: skip
    report(f"{streams} open streams: CPU of 1000 such answers", seen["cpu_s"], "s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="the smg executable (pip install smg==1.13.0 in an environment of its own)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"hot modules: {apps.RUNS}", file=sys.stderr)
    with bench(arguments.peer) as running:
        compare(running, arguments.rounds)
    with bench(arguments.peer) as running:
        many_streams(running, arguments.streams)


if __name__ == "__main__":
    main()
