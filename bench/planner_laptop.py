"""Real nodes follow a real load: long prompts become long answers, and the planner moves a node; throughput before, after.

Runs the laptop cluster (three processes of the reference engine, SmolLM2-135M) under `manage.py up` with windows of 75 s,
two nodes in prefill. Twelve clients ask closed-loop through the gateway: first long prompts with short answers,
then short prompts with long answers. Nobody touches the split. On one or two cores the nodes compete for the processor, so
the gain is smaller than on machines of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import random
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.report import report
from tools.smoke import MODEL, Operator, running_yard, say

CLIENTS = 12
WINDOW_S = 75.0
LEARN_S = 150.0
SWITCH_WITHIN_S = 420.0
SETTLE_S = 10.0
MEASURE_S = 45.0
WORDS = [
    "river",
    "stone",
    "cloud",
    "market",
    "window",
    "engine",
    "paper",
    "garden",
    "winter",
    "signal",
    "copper",
    "letter",
    "harbor",
    "planet",
    "bridge",
]


@dataclass
class Kind:
    """What the clients ask for: about so many words in, so many tokens out."""

    words: int
    tokens: int


LONG_PROMPTS, LONG_ANSWERS = Kind(160, 4), Kind(6, 24)


@dataclass
class Load:
    """Closed-loop clients; `kind` may change at any time. `finished` remembers when each request ended, and its tokens."""

    url: str
    key: str
    kind: Kind = field(default_factory=lambda: LONG_PROMPTS)
    finished: list[tuple[float, int]] = field(default_factory=list)
    failed: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.key}"}, timeout=aiohttp.ClientTimeout(300)
        )
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            kind = self.kind
            prompt = " ".join(rng.choice(WORDS) for _ in range(kind.words))
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": kind.tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            async with self._session.post(f"{self.url}/chat/completions", json=body) as answer:
                document = await answer.json()
            if answer.status == 200:
                self.finished.append((time.monotonic(), int(document["usage"]["completion_tokens"])))
            else:
                self.failed += 1
                await asyncio.sleep(1.0)

    async def tokens_per_s(self, seconds: float) -> float:
        """Output tokens per second over the next so many seconds."""
        began = time.monotonic()
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        return sum(tokens for at, tokens in self.finished if at >= began) / (ended - began)


async def measure(where: dict[str, Any], operator: Operator) -> dict[str, Any]:
    key = json.loads(Path(where["keys_file"]).read_text())["demo"]
    async with Load(where["gateways"]["laptop"], key) as load:
        say(f"{CLIENTS} clients with long prompts and short answers, for {LEARN_S:.0f} s")
        await asyncio.sleep(LEARN_S)
        before = await _split(operator)
        say(f"{_label(before)}: {_last(before)}")
        load.kind = LONG_ANSWERS
        began = time.monotonic()
        say("the load turns to short prompts and long answers")
        await asyncio.sleep(SETTLE_S)
        slow = await load.tokens_per_s(min(MEASURE_S, 15.0))
        split = before
        while time.monotonic() - began < SWITCH_WITHIN_S:
            split = await _split(operator)
            if len(split["current"]["decode"]) > len(before["current"]["decode"]) and not _moving(split):
                break
            await asyncio.sleep(1.0)
        else:
            say(f"no switch: {_last(split)}")
            return {"moved": False, "slow": slow, "failed": load.failed, "split": split, "before": before}
        took_s = time.monotonic() - began
        say(f"{_label(split)} after {took_s:.0f} s: {_last(split)}")
        await asyncio.sleep(SETTLE_S)
        fast = await load.tokens_per_s(MEASURE_S)
        return {
            "moved": True, "slow": slow, "fast": fast, "took_s": took_s, "failed": load.failed, "split": split,
            "before": before, "page": await asyncio.to_thread(_page, operator),
        }  # fmt: skip


async def _split(operator: Operator) -> dict[str, Any]:
    found = await asyncio.to_thread(operator.call, "GET", "/split/laptop")
    assert isinstance(found, dict)
    return found


def _page(operator: Operator) -> str:
    answer = operator.client.get("/p/laptop/split/")
    answer.raise_for_status()
    return html.unescape(answer.text)


def _moving(split: dict[str, Any]) -> bool:
    return any(order["state"] in ("ordered", "draining", "switching") for order in split["active_orders"])


def _label(split: dict[str, Any]) -> str:
    return f"{len(split['current']['prefill'])}P{len(split['current']['decode'])}D"


def _last(split: dict[str, Any]) -> str:
    decision = split["last_decision"]
    return f"{decision['rule']}: {decision['reason']} ({decision['source']})" if decision else "nothing decided yet"


def main() -> None:
    """Run it and print what was measured."""
    password = secrets.token_urlsafe(12)
    clusters = Path(__file__).with_suffix(".yaml")
    with (
        tempfile.TemporaryDirectory(prefix="switchyard-bench-") as folder,
        running_yard(Path(folder), password, "--no-replay", "--clusters", str(clusters), ready_timeout_s=600) as where,
    ):
        operator = Operator(where["console"], password)
        found = asyncio.run(measure(where, operator))
    report("laptop.node_moved", float(found["moved"]), "switches", target=1.0)
    report("laptop.requests_failed", float(found["failed"]), "requests", target=0.0, aim="at_most")
    fits = found["split"]["fits"]
    for phase in ("prefill", "decode") if fits else ():
        report(f"laptop.fit_error.{phase}", fits[0][f"{phase}_error_ratio"], "ratio", target=0.15, aim="at_most")
    if not found["moved"]:
        report("laptop.throughput_after_switch", None, "tokens/s", baseline=found["slow"])
        return
    order = (found["split"]["active_orders"] + found["split"]["history"])[0]
    report("laptop.seconds_until_moved", found["took_s"], "s", target=2 * WINDOW_S + 15.0, aim="at_most")
    with contextlib.suppress(TypeError):
        report("laptop.switch_s", max(step["switch_s"] for step in order["steps"]), "s", target=6.2, aim="at_most")
    report("laptop.throughput_after_switch", found["fast"], "tokens/s", target=found["slow"], baseline=found["slow"])
    shown = order["reason"] in found["page"]
    say(f"the Split page {'says' if shown else 'does not say'}: {order['reason']}")
    report("laptop.console_shows_why", float(shown), "pages", target=1.0)


if __name__ == "__main__":
    main()
