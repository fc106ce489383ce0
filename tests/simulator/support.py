"""Small simulated partitions and scripts for tests. Blocks of 64 tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import HASH_BYTES
from workers.simulator.clients import Script, Turn
from workers.simulator.hardware import GLM, Hardware, hardware
from workers.simulator.scenario import Cluster, Run, Settings, build
from workers.simulator.systems import FIXED, System
from workers.simulator.workloads.blocks import content

BLOCK = 64


def small(**changes: Any) -> Hardware:
    """The GB300 profile with a pool that a test can fill."""
    return replace(hardware(GLM), **changes)


def make_run(
    system: System = FIXED,
    prefill: int = 2,
    decode: int = 2,
    hardware: Hardware | None = None,
    believed: Hardware | None = None,
    **settings: Any,
) -> Run:
    given = {"block_tokens": BLOCK, "check_every": 1, **settings}
    cluster = Cluster(prefill + decode, prefill, hardware or small(), believed)
    return build(cluster, system, Settings(**given))


def turns(
    name: str,
    sizes: Sequence[tuple[int, int]],
    pause_s: float = 1.0,
    ends: bool = True,
    head: bytes = b"",
) -> Iterator[Turn]:
    """A branch that grows by `(new blocks, output blocks)` each turn."""
    context = head
    for number, (new, output) in enumerate(sizes):
        context += content(f"{name}/{number}", new)
        answer = content(f"{name}/{number}/out", output)
        signal = BranchSignal(name, 0, None, None, ends and number == len(sizes) - 1, name, None, "")
        tokens = len(context) // HASH_BYTES * BLOCK
        yield Turn(pause_s if number else 0.0, context, tokens, max(1, output * BLOCK), signal, answer)
        context += answer


def play(run: Run, script: Script, at: float = 0.0, tenant: str = "agents", objective: str = "standard") -> list[float]:
    """Start a script; the list gets the moment it is over."""
    over: list[float] = []

    def begin(now: float, _: Any) -> None:
        run.partition.clients.start(now, script, "test", tenant, objective, lambda at_s, _player: over.append(at_s))

    run.partition.clock.at(at, 2, begin)
    return over
