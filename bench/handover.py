"""Hand-over of 1,000 tokens from prefill to decode node: `make bench-handover`, or `python -m bench.handover [--tiny]`.

Two agent processes with SmolLM2. Each prompt is new to both nodes; it is prefilled on one and decoded on the other, with its
context pushed while it is computed and without, through shared memory and through HTTP, in turns. Wall seconds from the
answer of the prefill to the first token of the decode node, and the part of them in which that waited for its context: medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.report import report
from tools.exact import Fleet, Prompt

PROMPT_TOKENS = 1000
WAYS = ("shared-memory", "http")


class HandOver(NamedTuple):
    """Seconds of one hand-over, and of them those spent waiting for the context."""

    first_token_s: float
    fetch_s: float
    prefill_s: float


async def hand_over(fleet: Fleet, nodes: tuple[str, str], number: int, push: bool) -> HandOver:
    """One new prompt from the first node to the second."""
    sender, receiver = nodes
    generator = np.random.default_rng(1000 + number)
    prompt = Prompt("bench", array("I", generator.integers(100, 49000, PROMPT_TOKENS).tolist()))
    body = prompt.body(f"h{number}")
    if push:
        target = await fleet.source(receiver)
        body["push"] = {key: target[key] for key in ("node", "url", "pool")}
    began = time.monotonic()
    result = await fleet.prefill(sender, body)
    prefilled = time.monotonic()
    rest = {"request_id": body["request_id"], "tokens": [result["first_token_id"]], "handoff": result["handoff"]}
    first_at: float | None = None
    done: dict[str, Any] = {}
    async for event in fleet.decode_events(receiver, prompt, rest):
        first_at = first_at or time.monotonic()
        done = event
    assert first_at is not None, "a stream has events"
    if done.get("recomputed_tokens") != 0:
        raise SystemExit(f"bench: the context did not arrive: {done}")
    return HandOver(first_at - prefilled, float(done["timings"]["fetch_s"]), prefilled - began)


async def measure(folder: Path, tiny: bool, repeats: int, port: int) -> bool:
    """All four kinds in turns; True where pushing was the faster one both ways."""
    fleet = Fleet(folder, tiny)
    found: dict[tuple[str, bool], list[HandOver]] = {}
    try:
        senders = {f"sender-{way}": {"phase": "prefill", "transports": [way]} for way in WAYS}
        receivers = {f"receiver-{way}": {"phase": "decode", "transports": [way]} for way in WAYS}
        await asyncio.gather(fleet.add(port, senders, 400), fleet.add(port + 1, receivers, 400))
        for number in range(4 * (repeats + 1)):
            way, push = WAYS[number % 2], bool(number // 2 % 2)
            took = await hand_over(fleet, (f"sender-{way}", f"receiver-{way}"), number, push)
            if number >= 4:  # the first of each kind takes memory for the first time
                found.setdefault((way, push), []).append(took)
                print(f"{way}, push {push}: {took}", file=sys.stderr, flush=True)
    finally:
        await fleet.close()
    met = []
    for way in WAYS:
        pushed, pulled = found[way, True], found[way, False]
        for name, field in (("first token", "first_token_s"), ("waiting for the context", "fetch_s")):
            with_push, without = (statistics.median(getattr(one, field) for one in kind) for kind in (pushed, pulled))
            title = f"handover: {name} after the prefill, pushed, {way}"
            met.append(report(title, with_push, "s", target=without, aim="at_most", baseline=without))
        prefills = (statistics.median(one.prefill_s for one in kind) for kind in (pushed, pulled))
        report(f"handover: prefill while pushing, {way}", next(prefills), "s", baseline=next(prefills))
    return all(met)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__.split("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="the small seeded model instead of SmolLM2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=18_780, help="the first of two free ports")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="switchyard-handover-") as folder:
        met = asyncio.run(measure(Path(folder), options.tiny, options.repeats, options.port))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
