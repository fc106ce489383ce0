"""`make smoke`: the whole product once, end to end, on free ports and a temporary data folder.

Starts everything; asks the laptop cluster three real questions with the `openai` client; replays 20 recorded sessions on
gb300; while they run, forces a node from prefill to decode by REST and watches it happen on a websocket. Exit code 0 only
if no request failed, the switch was seen, and nothing was left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import websockets
from openai import OpenAI

ROOT = Path(__file__).resolve().parent.parent
READY_TIMEOUT_S = 120.0
REPLAY_TIMEOUT_S = 180.0
SWITCH_TIMEOUT_S = 60.0
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Name three colours of the rainbow.",
    "Why is the sky blue? Answer in two sentences.",
)
MODEL = "smollm2-135m-instruct"
PARTITION, NODE = "gb300", "gb300-1"


class SmokeFailed(RuntimeError):
    """Something that must work did not; the message says what."""


def say(text: str) -> None:
    print(f"[smoke {time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


STARTED = time.monotonic()


@contextlib.contextmanager
def running_yard(
    folder: Path, password: str, *options: str, ready_timeout_s: float = READY_TIMEOUT_S
) -> Iterator[dict[str, Any]]:
    """Everything under `manage.py up` with these options; yields the addresses; afterwards checks that it stopped clean."""
    ready_file, log = folder / "ready.json", folder / "up.log"
    environment = {**os.environ, "SWITCHYARD_DATA": str(folder / "data"), "SWITCHYARD_ADMIN_PASSWORD": password}
    for name in ("DATABASE_URL", "REDIS_URL", "DJANGO_SETTINGS_MODULE"):
        environment.pop(name, None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "up", "--free-ports", "--ready-file", str(ready_file), *options],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + ready_timeout_s
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SmokeFailed("it did not start")
            time.sleep(0.1)
        yield json.loads(ready_file.read_text())
    except BaseException:
        say("the last lines of its log:")
        print("\n".join(log.read_text(errors="replace").splitlines()[-80:]), flush=True)
        raise
    finally:
        children = _descendants(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise SmokeFailed(f"it stopped with exit code {process.returncode}")
    left = [child for child in children if _runs(child)]
    if left:
        raise SmokeFailed(f"processes were left running: {left}")
    say(f"stopped clean: none of its {len(children)} processes is left")


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            text = stat.read_text()
            parents.setdefault(int(text.rsplit(")", 1)[1].split()[1]), []).append(int(stat.parent.name))
    found, waiting = [], [root]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def _runs(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ask_questions(where: dict[str, Any], key: str) -> None:
    client = OpenAI(base_url=where["gateways"]["laptop"], api_key=key, max_retries=0, timeout=120)
    for question in QUESTIONS:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": question}], stream=True, max_tokens=48, temperature=0
        )
        prefill, decode = raw.headers.get("x-switchyard-prefill-node"), raw.headers.get("x-switchyard-decode-node")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in raw.parse() if chunk.choices)
        print(f"\n  Q: {question}\n  A: {text.strip()}\n     prefilled on {prefill}\n", flush=True)
        if not text.strip():
            raise SmokeFailed(f"no answer to {question!r}")
        if not prefill or prefill == decode:
            raise SmokeFailed(f"prefill node {prefill!r} and decode node {decode!r}: expected two different nodes")


class Operator:
    """A signed-in administrator with a browser's session."""

    def __init__(self, console: str, password: str) -> None:
        self.client = httpx.Client(base_url=console, timeout=30, trust_env=False, follow_redirects=True)
        self.console = console
        self.client.get("/login/")
        answer = self.client.post(
            "/login/",
            data={"username": "admin", "password": password, "csrfmiddlewaretoken": self.client.cookies["csrftoken"]},
            headers={"Referer": console},
        )
        if "sessionid" not in self.client.cookies:
            raise SmokeFailed(f"the administrator cannot sign in ({answer.status_code})")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self.client.request(
            method, f"/api/v1{path}", json=body,
            headers={"X-CSRFToken": self.client.cookies["csrftoken"], "Referer": self.console},
        )  # fmt: skip
        if answer.status_code >= 400:
            raise SmokeFailed(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        return answer.json() if answer.content else None

    async def until_node_is(self, node: str, phase: str) -> list[str]:
        """Watch the websocket until the node is ready in `phase`; returns the states seen on the way."""
        parts = urlsplit(self.console)
        seen: list[str] = []
        cookie = f"sessionid={self.client.cookies['sessionid']}"
        async with websockets.connect(
            f"ws://{parts.netloc}/ws/live/{PARTITION}/",
            additional_headers={"Cookie": cookie, "Origin": f"http://{parts.netloc}"},
        ) as socket:
            async with asyncio.timeout(SWITCH_TIMEOUT_S):
                async for message in socket:
                    frame = json.loads(message)
                    if frame["type"] != "snapshot":
                        continue
                    now = next(entry for entry in frame["data"]["nodes"] if entry["name"] == node)
                    state = f"{now['phase']} ({now['state']})"
                    if state not in seen[-1:]:
                        seen.append(state)
                        say(f"websocket: {node} is {state}, running {now['running_prefill']}+{now['running_decode']}")
                    if now["phase"] == phase and now["state"] == "ready":
                        return seen
        raise SmokeFailed("the websocket closed")


async def replay_and_switch(where: dict[str, Any], operator: Operator) -> None:
    gateway = where["gateways"][PARTITION].removesuffix("/v1")
    replay = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workers.harness.replay", "--gateway", gateway, "--model", "glm-5.2",
        "--key-file", where["keys_file"], "--agents", "20", "--sessions", "20", "--max-session-requests", "12",
        "--max-pause-s", "1", "--stagger-s", "3", "--give-up-s", "60", "--summary-s", "10", "--strict", cwd=ROOT,
    )  # fmt: skip
    try:
        await asyncio.sleep(8)  # well under way
        watching = asyncio.create_task(operator.until_node_is(NODE, "decode"))
        await asyncio.sleep(1)
        ordered = time.monotonic()
        await asyncio.to_thread(
            operator.call,
            "PUT",
            f"/nodes/{NODE}/phase",
            {"phase": "decode", "reason": "smoke test", "expires_in_s": 600},
        )
        seen = await watching
        if not seen[0].startswith("prefill"):
            raise SmokeFailed(f"{NODE} was {seen[0]} before the switch")
        say(f"{NODE} switched from prefill to decode in {time.monotonic() - ordered:.1f} s while requests ran")
        async with asyncio.timeout(REPLAY_TIMEOUT_S):
            code = await replay.wait()
        if code != 0:
            raise SmokeFailed(f"the replay ended with exit code {code}: requests failed")
    finally:
        if replay.returncode is None:
            replay.terminate()
            await replay.wait()


def check_no_request_failed(operator: Operator) -> None:
    for partition in ("laptop", PARTITION):
        counts = operator.call("GET", f"/partitions/{partition}/live")["requests"]
        say(f"{partition}: {counts['completed']} completed, {counts['failed']} failed, {counts['dropped']} dropped")
        if counts["failed"] or not counts["completed"]:
            raise SmokeFailed(f"{partition}: {counts}")


def main() -> int:
    password = secrets.token_urlsafe(12)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="switchyard-smoke-") as name,
            running_yard(Path(name), password, "--no-replay") as where,
        ):
            say(f"everything serves; console at {where['console']}")
            keys = json.loads(Path(where["keys_file"]).read_text())
            ask_questions(where, keys["demo"])
            operator = Operator(where["console"], password)
            asyncio.run(replay_and_switch(where, operator))
            time.sleep(1.5)
            check_no_request_failed(operator)
    except (SmokeFailed, TimeoutError) as error:
        say(f"FAILED: {error or 'timed out'}")
        return 1
    say("passed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
