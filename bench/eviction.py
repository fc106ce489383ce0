"""Proof of the eviction order: `make proof-eviction`, or `python -m bench.eviction [--sessions FILE]`.

Recorded sessions are played through the KV machine and one node's index of its host memory, many at once: each session's requests follow
one another with its own pauses, its sub-agents run meanwhile, and it says which branch, version and end a request has. A
request is served in a time that does not depend on the cache, so every policy sees the same requests at the same moments.

For pools of several sizes it prints, for each policy, the share of the reusable prompt tokens that were lost because their
blocks had been evicted. Sizes are given as a share of the *need*: the most blocks that the contexts of live branches took
at any moment. A pool below 1 cannot keep what is alive whatever the policy, so what is below can only be shared out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.eviction import EvictionPolicy
from apps.kvcache.domain.hashing import HASH_BYTES, HashedPrompt
from apps.kvcache.domain.machine import KvConfig, KvMachine, LeasePolicy
from apps.kvcache.domain.run_index import RunIndex
from bench.report import report
from workers.harness.replay.blocks import Runs, is_rewrite
from workers.harness.replay.sessions import RecordedRequest, Session, SessionFileError, load_sessions

ROOT = bytes(HASH_BYTES)
NODE = "node"
SHARES_OF_NEED = (0.5, 0.7, 0.8, 0.9, 1.0)
JUDGED_SHARE, MOST_OF_LRU = 0.9, 0.25
POLICIES: tuple[EvictionPolicy, ...] = ("referenced", "lru", "ttl-pin")
ADMIT_S, TOKEN_S = 1.0, 0.01  # how long a request takes: until its first token, and for each token of output


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a branch, from `start_s` to `end_s`. `output`: the full blocks its output adds, as far as the branch's
    next prompt shows them. `last`: the branch ends with it."""

    start_s: float
    end_s: float
    branch_id: str
    version: int
    parent: str | None
    prompt_tokens: int
    block_tokens: int
    chain: bytes
    output: bytes
    last: bool


# ---- what happens when --------------------------------------------------------------------------------------------------


def chain_of(runs: Runs, session: int) -> bytes:
    """A chain for recorded block ids, which name content with all before it; no other session has these."""
    ids = np.concatenate([np.arange(first, first + count, dtype=np.uint64) for first, count in runs])
    words = np.empty((len(ids), 2), dtype="<u8")
    words[:, 0] = ids
    words[:, 1] = session + 1
    return words.tobytes()


def service_s(request: RecordedRequest) -> float:
    return ADMIT_S + TOKEN_S * request.output_tokens


def calls_of(session: Session, number: int, start_s: float) -> Iterator[Call]:
    """The requests of a session and its sub-agents; sub-agents start after the session's last answer and are waited for."""
    main: list[tuple[float, RecordedRequest]] = []
    now = start_s
    for index, turn in enumerate(session.turns):
        waited_until_s = now
        for place, subagent in enumerate(turn.subagents):
            at, timed = now + subagent.delay_s, []
            for request in subagent.requests:
                at += request.pause_s
                timed.append((at, request))
                at += service_s(request)
            waited_until_s = max(waited_until_s, at)
            yield from _branch(f"{number}.{index}.{place}", f"{number}", number, session.block_tokens, timed)
        if turn.request is not None:
            begun = waited_until_s + turn.request.pause_s
            main.append((begun, turn.request))
            now = begun + service_s(turn.request)
    yield from _branch(f"{number}", None, number, session.block_tokens, main)


def _branch(
    branch_id: str, parent: str | None, session: int, block_tokens: int, timed: list[tuple[float, RecordedRequest]]
) -> Iterator[Call]:
    chains = [chain_of(request.blocks, session) for _, request in timed]
    version = 0
    for at, (start_s, request) in enumerate(timed):
        if at and is_rewrite(timed[at - 1][1].blocks, request.blocks):
            version += 1
        chain, output = chains[at], b""
        if at + 1 < len(timed) and chains[at + 1].startswith(chain):
            made = (request.prompt_tokens + request.output_tokens) // block_tokens
            output = chains[at + 1][len(chain) : made * HASH_BYTES]
        yield Call(
            start_s=start_s,
            end_s=start_s + service_s(request),
            branch_id=branch_id,
            version=version,
            parent=parent,
            prompt_tokens=request.prompt_tokens,
            block_tokens=block_tokens,
            chain=chain,
            output=output,
            last=at == len(timed) - 1,
        )


def timeline(sessions: list[Session], at_once: int) -> list[Call]:
    """All calls by start. `at_once` sessions run at a time: as one ends, the next begins."""
    free: list[float] = [float(place) for place in range(at_once)]
    calls: list[Call] = []
    for number, session in enumerate(sessions):
        own = list(calls_of(session, number, heappop(free)))
        heappush(free, max((call.end_s for call in own), default=0.0))
        calls.extend(own)
    return sorted(calls, key=lambda call: (call.start_s, call.branch_id))


# ---- playing it -----------------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """One node's host memory, and the machine that knows of it; what one says, the other is told."""

    index: RunIndex
    machine: KvMachine
    seq: int = 0
    peak_referenced_blocks: int = 0
    running: list[tuple[float, int, Call, bytes]] = field(default_factory=list)

    def play(self, calls: list[Call]) -> None:
        for number, call in enumerate(calls):
            self._finish_until(call.start_s)
            self._start(call, number)
        self._finish_until(float("inf"))

    def _tell(self, now: float, event: ev.Event) -> None:
        for command in self.machine.handle(now, event):
            if isinstance(command, ev.RefsChanged):
                self.index.apply_refs(command.last, command.blocks, command.delta)
            elif isinstance(command, ev.RefsReset):
                self.index.reset_refs()
            assert not isinstance(command, ev.SnapshotNeeded), "the machine lost the thread"

    def _start(self, call: Call, number: int) -> None:
        now, name = call.start_s, str(number)
        prompt = HashedPrompt(call.prompt_tokens, call.block_tokens, ROOT, call.chain)
        relation: ev.Relation | None = None if call.parent is None else "subagent"
        signal = ev.BranchSignal(call.branch_id, call.version, call.parent, relation, end=call.last)
        self._tell(now, ev.RequestSeen(name, signal, prompt))
        self._tell(now, ev.Homed(call.branch_id, "prefill", NODE))
        held = self.index.lookup(call.chain)
        self._store(now, call.chain)
        cached = min(held * call.block_tokens, call.prompt_tokens - 1)
        self._tell(now, ev.RequestServed(name, NODE, cached, call.prompt_tokens - cached, 0))
        self._tell(now, ev.Homed(call.branch_id, "decode", NODE))
        read = self.index.pin(call.chain)
        self.peak_referenced_blocks = max(self.peak_referenced_blocks, self.index.referenced_blocks)
        heappush(self.running, (call.end_s, number, call, read))

    def _finish_until(self, now: float) -> None:
        while self.running and self.running[0][0] <= now:
            end_s, number, call, read = heappop(self.running)
            self.index.unpin(read)
            self._store(end_s, call.chain + call.output)
            self._tell(end_s, ev.OutputStored(str(number), call.output))

    def _store(self, now: float, chain: bytes) -> None:
        change = self.index.store(now, chain)
        if change.evicted:
            self.seq += 1
            self._tell(now, ev.BlocksRemoved(NODE, self.seq, change.evicted))
        if change.stored is not None:
            self.seq += 1
            self._tell(now, ev.BlocksStored(NODE, self.seq, *change.stored))


def play(calls: list[Call], capacity_blocks: int, policy: EvictionPolicy) -> Node:
    never = LeasePolicy(floor_s=1e9, ceiling_s=1e9)
    node = Node(RunIndex(capacity_blocks, policy), KvMachine(KvConfig(lease=never, max_blocks=1 << 40)))
    node.play(calls)
    return node


def need_blocks(calls: list[Call]) -> int:
    """The most blocks that live branches counted on at once, in a pool that holds everything."""
    return play(calls, all_blocks(calls), "referenced").peak_referenced_blocks


def lost_share(node: Node) -> float:
    """Tokens lost to eviction, of those that could have been reused."""
    reuse = node.machine.reuse()
    return reuse.lost["evicted"] / reuse.ideal_tokens


def all_blocks(calls: list[Call]) -> int:
    """How many different blocks the calls make, at most."""
    last = {}
    for call in calls:
        last[(call.branch_id, call.version)] = len(call.chain + call.output) // HASH_BYTES
    return sum(last.values())


def prove(calls: list[Call], shares: list[float]) -> bool:
    """Print every policy at every size; answers whether ours loses little enough at the judged one."""
    need = need_blocks(calls)
    report("eviction.requests", len(calls), "requests")
    report("eviction.need", need, "blocks")
    fine = True
    for share in shares:
        capacity = int(need * share)
        lost = {policy: lost_share(play(calls, capacity, policy)) for policy in POLICIES}
        for policy, value in lost.items():
            target = MOST_OF_LRU * lost["lru"] if policy == "referenced" and share == JUDGED_SHARE else None
            name = f"eviction.lost_share_at_{share:g}_of_need.{policy}"
            met = report(name, value, "ratio", target=target, aim="at_most", baseline=lost["lru"])
            fine = fine and met is not False
    return fine


def main() -> None:
    options = argparse.ArgumentParser(description="Reuse lost to eviction, by policy and size of the pool; JSON lines.")
    options.add_argument(
        "--sessions", type=Path, help="recorded sessions (JSON lines); the packaged excerpt by default"
    )
    options.add_argument("--at-once", type=int, default=16, help="sessions that run at a time")
    options.add_argument("--shares", type=float, nargs="+", default=SHARES_OF_NEED, help="pool sizes, of the need")
    chosen = options.parse_args()
    try:
        sessions = load_sessions(chosen.sessions)
    except (SessionFileError, OSError) as problem:
        sys.exit(f"--sessions: {problem}")
    if not prove(timeline(sessions, max(1, chosen.at_once)), list(chosen.shares)):
        sys.exit(1)


if __name__ == "__main__":
    main()
