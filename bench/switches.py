"""Ten switches under load: `make bench-switches`, or `python -m bench.switches [--switches N] [--clients N]`.

Starts the whole product with the laptop cluster as it is shipped (SmolLM2 on three nodes, one process each), lets agents
talk to it, and meanwhile gives one node the other phase again and again, by REST, as an operator would. Then, without any
switch, every request is asked once more and the answers are compared.

Each switch is ordered at a moment when the node works. Prints: requests lost, requests whose answer changed, mean and worst
time of a switch (from the order's call until the node is ready in its new phase), the same without load, the share of
reusable prompt tokens lost, and the longest silence inside a stream. Exit code 0 only if nothing was lost or changed and
every target was met.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.report import report
from controlplane.clusters import DEFAULT_FILE
from tools.smoke import MODEL, Operator, running_yard

PARTITION, NODE = "laptop", "laptop-3"
BETWEEN_SWITCHES_S = 2.0
BUSY_WITHIN_S = 30.0
SWITCH_TIMEOUT_S = 90.0
TURNS = 3
TOPICS = ("the sea", "bread", "a bridge", "winter", "the violin", "a lighthouse", "bees", "chess")
SYSTEM = "You are a careful assistant. You answer in plain words, briefly, and you keep to what was asked. " * 3


@dataclass(slots=True)
class Asked:
    """One request and what came of it. `why_lost` is None for a whole answer."""

    messages: list[dict[str, str]]
    text: str = ""
    why_lost: str | None = None
    times: list[float] = field(default_factory=list)

    @property
    def longest_silence_s(self) -> float:
        return max((later - earlier for earlier, later in itertools.pairwise(self.times)), default=0.0)


class Clients:
    """Agents in a closed loop: each holds conversations of a few turns, each turn carrying all that was said before."""

    def __init__(self, url: str, key: str, count: int, max_tokens: int) -> None:
        self.asked: list[Asked] = []
        self._count = count
        self._max_tokens = max_tokens
        self._stopping = asyncio.Event()
        self._http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=180, trust_env=False
        )

    async def run(self) -> None:
        """Until `stop`; conversations under way are brought to the end of their turn."""
        await asyncio.gather(*(self._agent(number) for number in range(self._count)))

    def stop(self) -> None:
        self._stopping.set()

    async def _agent(self, number: int) -> None:
        for conversation in itertools.count():
            branch = f"agent-{number}-{conversation}"
            messages = [{"role": "system", "content": SYSTEM}]
            for turn in range(TURNS):
                if self._stopping.is_set():
                    return
                topic = TOPICS[(number + conversation + turn) % len(TOPICS)]
                text = f"Agent {number}, talk {conversation}, turn {turn}: tell me something about {topic}."
                messages = [*messages, {"role": "user", "content": text}]
                answer = await self.ask(messages, branch, last=turn == TURNS - 1)
                self.asked.append(answer)
                messages = [*messages, {"role": "assistant", "content": answer.text}]

    async def ask(self, messages: list[dict[str, str]], branch: str, last: bool) -> Asked:
        """One streamed completion, read to its end."""
        asked = Asked(messages)
        body = {"model": MODEL, "messages": messages, "max_tokens": self._max_tokens, "temperature": 0, "stream": True}
        headers = {"x-switchyard-branch": branch} | ({"x-switchyard-branch-end": "true"} if last else {})
        done = False
        try:
            async with self._http.stream("POST", "/chat/completions", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    asked.why_lost = f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
                    return asked
                async for line in answer.aiter_lines():
                    done = done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        self._take(asked, json.loads(line[6:]))
        except httpx.HTTPError as error:
            asked.why_lost = f"{type(error).__name__}: {error}"
        if not done and asked.why_lost is None:
            asked.why_lost = "the stream ended before the answer"
        return asked

    @staticmethod
    def _take(asked: Asked, event: dict[str, Any]) -> None:
        asked.times.append(time.monotonic())
        if "error" in event:
            asked.why_lost = str(event["error"]["message"])
        for choice in event.get("choices") or ():
            asked.text += choice["delta"].get("content") or ""

    async def close(self) -> None:
        await self._http.aclose()


class Switching:
    """Gives the node its other phase and measures how long that took."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._phase = "decode"

    async def once(self) -> float:
        """One switch; seconds from the call until the node was ready, by its own clock, which is this machine's."""
        self._phase = "prefill" if self._phase == "decode" else "decode"
        order = {"phase": self._phase, "reason": "bench of switches", "expires_in_s": 3600}
        began = time.time()
        await asyncio.to_thread(self._operator.call, "PUT", f"/nodes/{NODE}/phase", order)
        async with asyncio.timeout(SWITCH_TIMEOUT_S):
            while True:
                node = await self.node()
                last = node["last_switch"]
                if last and last["finished_at"] > began and (node["phase"], node["state"]) == (self._phase, "ready"):
                    return float(last["finished_at"]) - began
                await asyncio.sleep(0.2)

    async def until_busy(self) -> bool:
        """Waits until the node works, a while at most; answers whether it does."""
        deadline = time.monotonic() + BUSY_WITHIN_S
        while time.monotonic() < deadline:
            node = await self.node()
            if node["running_prefill"] + node["running_decode"] + node["announced_decode"]:
                return True
            await asyncio.sleep(0.1)
        return False

    async def node(self) -> dict[str, Any]:
        return next(node for node in (await self.live())["nodes"] if node["name"] == NODE)

    async def live(self) -> dict[str, Any]:
        return dict(await asyncio.to_thread(self._operator.call, "GET", f"/partitions/{PARTITION}/live"))


@dataclass(slots=True)
class Outcome:
    """What one run showed; times in seconds."""

    loaded_s: list[float]
    busy: int
    idle_s: list[float]
    asked: list[Asked]
    changed: list[Asked]
    reuse_before: dict[str, Any]
    reuse_after: dict[str, Any]


async def run(where: dict[str, Any], password: str, options: argparse.Namespace) -> Outcome:
    key = json.loads(Path(where["keys_file"]).read_text())["demo"]
    switching = Switching(Operator(where["console"], password))
    clients = Clients(where["gateways"][PARTITION], key, options.clients, options.max_tokens)
    before = (await switching.live())["reuse"]
    load = asyncio.create_task(clients.run())
    await _until_answered(clients, options.clients, load)
    loaded_s, busy = [], 0
    for number in range(options.switches):
        busy += await switching.until_busy()
        loaded_s.append(await switching.once())
        say(f"switch {number + 1}: {loaded_s[-1]:.2f} s, {len(clients.asked)} requests so far")
        await asyncio.sleep(BETWEEN_SWITCHES_S)
    clients.stop()
    await load
    after = (await switching.live())["reuse"]
    idle_s = [await switching.once() for _ in range(options.idle_switches)]
    changed = await _asked_again(clients, options)
    await clients.close()
    return Outcome(loaded_s, busy, idle_s, clients.asked, changed, before, after)


async def _until_answered(clients: Clients, count: int, load: asyncio.Task[None]) -> None:
    while len(clients.asked) < count and not load.done():
        await asyncio.sleep(0.1)


async def _asked_again(clients: Clients, options: argparse.Namespace) -> list[Asked]:
    """Asks every request again while nothing switches; answers those whose text is another one now."""
    places = asyncio.Semaphore(options.clients)

    async def differs(number: int, asked: Asked) -> bool:
        async with places:
            again = await clients.ask(asked.messages, f"again-{number}", last=True)
            if again.why_lost is not None:
                raise RuntimeError(f"the check itself lost a request: {again.why_lost}")
            return again.text != asked.text

    whole = [asked for asked in clients.asked if asked.why_lost is None]
    differ = await asyncio.gather(*(differs(number, asked) for number, asked in enumerate(whole)))
    say(f"{len(whole)} requests asked again without switches, {sum(differ)} answered differently")
    return [asked for asked, changed in zip(whole, differ, strict=True) if changed]


def show(outcome: Outcome) -> bool:
    """Prints the measurements; True when all targets were met."""
    lost = [asked for asked in outcome.asked if asked.why_lost is not None]
    for asked in lost:
        say(f"lost: {asked.why_lost}")
    ideal, actual, by_switch = (_gained(outcome, name) for name in ("ideal_tokens", "actual_tokens", "switched"))
    silence_s = max((asked.longest_silence_s for asked in outcome.asked), default=0.0)
    met = [
        report("switch_requests_lost", len(lost), "requests", target=0, aim="at_most"),
        report("switch_answers_changed", len(outcome.changed), "requests", target=0, aim="at_most"),
        report("switch_mean_s", _mean(outcome.loaded_s), "s", target=6.2, aim="at_most"),
        report("switch_worst_s", max(outcome.loaded_s), "s"),
        report("switch_idle_mean_s", _mean(outcome.idle_s), "s", target=0.7, aim="at_most"),
        report("switch_idle_worst_s", max(outcome.idle_s), "s"),
        report("switch_reuse_lost_ratio", by_switch / max(1, ideal), "ratio", target=0.003, aim="at_most"),
        report("all_reuse_lost_ratio", (ideal - actual) / max(1, ideal), "ratio"),
        report("switch_requests", len(outcome.asked), "requests"),
        report("switch_reusable_tokens", ideal, "tokens"),
        report("switches", len(outcome.loaded_s), "switches"),
        report("switches_of_a_working_node", outcome.busy, "switches"),
        report("stream_longest_silence_s", silence_s, "s"),
        report("machine_load_average", os.getloadavg()[0], "processes"),
        report("machine_cores", os.cpu_count() or 0, "cores"),
    ]
    return False not in met


def _gained(outcome: Outcome, name: str) -> int:
    def read(reuse: dict[str, Any]) -> int:
        return int(reuse["lost"][name] if name in reuse["lost"] else reuse[name])

    return read(outcome.reuse_after) - read(outcome.reuse_before)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def laptop_alone(folder: Path) -> Path:
    """The shipped description of the run with the laptop cluster alone."""
    document = yaml.safe_load(DEFAULT_FILE.read_text())
    document["clusters"] = [cluster for cluster in document["clusters"] if cluster["name"] == PARTITION]
    file = folder / "laptop.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


@contextlib.contextmanager
def laptop_yard(folder: Path, password: str) -> Iterator[dict[str, Any]]:
    """The running product; what its start and end have to say goes to stderr, for stdout is for measurements."""
    yard = running_yard(folder, password, "--clusters", str(laptop_alone(folder)))
    with contextlib.redirect_stdout(sys.stderr):
        where = yard.__enter__()
    try:
        yield where
    except BaseException:
        with contextlib.redirect_stdout(sys.stderr):
            yard.__exit__(*sys.exc_info())
        raise
    with contextlib.redirect_stdout(sys.stderr):
        yard.__exit__(None, None, None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.switches", description=__doc__.split("\n\n")[0])
    parser.add_argument("--switches", type=int, default=10)
    parser.add_argument("--idle-switches", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    password = secrets.token_urlsafe(12)
    with (
        tempfile.TemporaryDirectory(prefix="switchyard-switches-") as name,
        laptop_yard(Path(name), password) as where,
    ):
        outcome = asyncio.run(run(where, password, options))
    return 0 if show(outcome) else 1


if __name__ == "__main__":
    raise SystemExit(main())
