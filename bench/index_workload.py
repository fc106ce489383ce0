"""The same index operations for ours and a peer's KV index, one run in a process of its own; prints one JSON object.

Contexts like those of agents: families that share a head of `SHARED_BLOCKS` blocks (harness, tools), 20k to 120k tokens in
blocks of 64, each on one worker, every fifth on a second. Then turns that append 1 to 32 blocks, look-ups of whole
contexts, of a known head with an unknown rest and of nothing known, compactions (the tail after the head is dropped, 60
blocks come), and whole workers that go away.

Timed from what comes over the wire to the index being changed: the peer's events are JSON with two numbers a block, ours
JSON with base64 hashes, and both are decoded within the time. Look-ups take what each side's router holds: a list of
numbers there, a chain of hashes here. The peer's index is driven by its Python binding: the numbers are that binding's.

Only the standard library, so that the peer's own environment can run it.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import os
import random
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

MIN_TOKENS, MAX_TOKENS, BLOCK_TOKENS = 20_000, 120_000, 64
FAMILIES, SHARED_BLOCKS, SUMMARY_BLOCKS = 30, 300, 60
MOST_TURN_BLOCKS, SECOND_COPY_SHARE, LOST_WORKERS = 32, 0.2, 3

Numbers: TypeAlias = "array[int]"  # 64-bit numbers, one a block


class Index(Protocol):
    """One side of the comparison. `wire_*` and `query` prepare and are not timed; the others are."""

    def wire_store(self, event: int, parent: int | None, blocks: Numbers) -> bytes: ...
    def wire_remove(self, event: int, blocks: Numbers) -> bytes: ...
    def query(self, blocks: Numbers) -> Any: ...
    def apply(self, worker: int, wire: bytes) -> None: ...
    def find(self, query: Any) -> Any: ...
    def lose(self, worker: int) -> None: ...
    def held(self, found: Any, worker: int) -> int: ...


class Ours:
    """The KV directory, fed as the gateway feeds it."""

    def __init__(self) -> None:
        from apps.kvcache.domain.directory import Directory

        self._directory = Directory(max_blocks=1 << 40)

    def query(self, blocks: Numbers) -> bytes:
        pairs = array("Q", bytes(16 * len(blocks)))
        pairs[0::2] = blocks
        pairs[1::2] = blocks
        return pairs.tobytes()

    def wire_store(self, event: int, parent: int | None, blocks: Numbers) -> bytes:
        above = None if parent is None else _base64(self.query(array("Q", [parent])))
        line = {"seq": event, "type": "stored", "parent_b64": above, "chain_b64": _base64(self.query(blocks))}
        return json.dumps(line).encode()

    def wire_remove(self, event: int, blocks: Numbers) -> bytes:
        return json.dumps({"seq": event, "type": "removed", "hashes_b64": _base64(self.query(blocks))}).encode()

    def apply(self, worker: int, wire: bytes) -> None:
        event = json.loads(wire)
        if event["type"] == "removed":
            known = self._directory.removed(f"node-{worker}", "host", base64.b64decode(event["hashes_b64"]))
        else:
            above = event["parent_b64"]
            parent = None if above is None else base64.b64decode(above)
            chain = base64.b64decode(event["chain_b64"])
            known = self._directory.stored(f"node-{worker}", "host", parent, chain, [])
        assert known, "an event that the directory did not understand"

    def find(self, query: bytes) -> dict[str, int]:
        return self._directory.held(query)

    def lose(self, worker: int) -> None:
        self._directory.cleared(f"node-{worker}", "evicted")

    def held(self, found: dict[str, int], worker: int) -> int:
        return found.get(f"node-{worker}", 0)


class Dynamo:
    """ai-dynamo-runtime's radix tree, by its Python binding."""

    def __init__(self) -> None:
        from dynamo.llm import RadixTree  # only in the peer's environment

        self._tree = RadixTree()

    def query(self, blocks: Numbers) -> list[int]:
        return blocks.tolist()

    def wire_store(self, event: int, parent: int | None, blocks: Numbers) -> bytes:
        above = "null" if parent is None else str(parent)
        rows = ",".join([f'{{"block_hash":{block},"tokens_hash":{block}}}' for block in blocks])
        return self._wire(event, f'{{"stored":{{"parent_hash":{above},"blocks":[{rows}]}}}}')

    def wire_remove(self, event: int, blocks: Numbers) -> bytes:
        return self._wire(event, f'{{"removed":{{"block_hashes":[{",".join(map(str, blocks))}]}}}}')

    @staticmethod
    def _wire(event: int, data: str) -> bytes:
        return f'{{"event_id":{event},"dp_rank":0,"data":{data}}}'.encode()

    def apply(self, worker: int, wire: bytes) -> None:
        self._tree.apply_event(worker, wire)

    def find(self, query: list[int]) -> Any:
        return self._tree.find_matches(query).scores

    def lose(self, worker: int) -> None:
        self._tree.remove_worker(worker)
        self._tree.find_matches([1])  # it works in the background: wait for it

    def held(self, found: Any, worker: int) -> int:
        return int(found.get((worker, 0), found.get(worker, 0)))


class Run:
    """The workload. `times_ns`: what each operation took; `wrong`: look-ups that did not find the whole context."""

    def __init__(self, index: Index, branches: int, workers: int, finds: int, seed: int = 7) -> None:
        self.index, self.workers, self.finds = index, workers, finds
        self.rng = random.Random(seed)
        self.times_ns: dict[str, list[int]] = {}
        self.wrong = self.residencies = self._event = 0
        families = [self._numbers(SHARED_BLOCKS) for _ in range(FAMILIES)]
        self.chains = [self._context(families[number % FAMILIES]) for number in range(branches)]
        self.owners = [self.rng.randrange(workers) for _ in range(branches)]

    def _numbers(self, count: int) -> Numbers:
        return array("Q", self.rng.randbytes(8 * count))

    def _context(self, head: Numbers) -> Numbers:
        length = self.rng.randint(MIN_TOKENS, MAX_TOKENS) // BLOCK_TOKENS
        return head[:length] + self._numbers(max(0, length - len(head)))

    def _timed(self, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter_ns()
        answer = action(*arguments)
        self.times_ns.setdefault(name, []).append(time.perf_counter_ns() - started)
        return answer

    def _store(self, name: str, worker: int, parent: int | None, blocks: Numbers) -> None:
        self._event += 1
        wire = self.index.wire_store(self._event, parent, blocks)
        self._timed(name, self.index.apply, worker, wire)
        self.residencies += len(blocks)

    def store_contexts(self) -> float:
        """Answers by how many MiB the process grew."""
        gc.collect()
        before = _resident_mib()
        for chain, owner in zip(self.chains, self.owners, strict=True):
            copies = 2 if self.rng.random() < SECOND_COPY_SHARE else 1
            for copy in range(copies):
                self._store("store_context", (owner + copy) % self.workers, None, chain)
        gc.collect()
        return _resident_mib() - before

    def store_turns(self) -> None:
        for _ in range(2 * len(self.chains)):
            at = self.rng.randrange(len(self.chains))
            new = self._numbers(self.rng.randint(1, MOST_TURN_BLOCKS))
            self._store("store_turn", self.owners[at], self.chains[at][-1], new)
            self.chains[at].extend(new)

    def find_all(self) -> None:
        for _ in range(self.finds):
            at = self.rng.randrange(len(self.chains))
            chain = self.chains[at]
            query = self.index.query(chain)
            found = self._timed("find_whole_context", self.index.find, query)
            self.wrong += self.index.held(found, self.owners[at]) != len(chain)
            rest = self._numbers(max(0, len(chain) - SHARED_BLOCKS))
            query = self.index.query(chain[:SHARED_BLOCKS] + rest)
            self._timed("find_head_only", self.index.find, query)
            query = self.index.query(self._numbers(len(chain)))
            self._timed("find_nothing", self.index.find, query)

    def compact(self) -> None:
        for _ in range(len(self.chains) // 10):
            at = self.rng.randrange(len(self.chains))
            chain, owner = self.chains[at], self.owners[at]
            keep = min(SHARED_BLOCKS, len(chain) - 1)
            self._event += 1
            wire = self.index.wire_remove(self._event, chain[: keep - 1 : -1])
            self._timed("compaction_remove_tail", self.index.apply, owner, wire)
            summary = self._numbers(SUMMARY_BLOCKS)
            self._store("compaction_store_summary", owner, chain[keep - 1], summary)
            self.chains[at] = chain[:keep] + summary

    def lose_workers(self) -> None:
        for worker in range(min(LOST_WORKERS, self.workers)):
            self._timed("remove_worker", self.index.lose, worker)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _percentile_us(times_ns: list[int], share: float) -> float:
    ordered = sorted(times_ns)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1000


def main() -> None:
    options = argparse.ArgumentParser(description="One side of `make bench-index`; prints one JSON object.")
    options.add_argument("--index", choices=["ours", "dynamo"], required=True)
    options.add_argument("--branches", type=int, default=10_000)
    options.add_argument("--workers", type=int, default=9)
    options.add_argument("--finds", type=int, default=2000)
    chosen = options.parse_args()
    run = Run(Ours() if chosen.index == "ours" else Dynamo(), chosen.branches, chosen.workers, chosen.finds)
    memory_mib = run.store_contexts()
    residencies = run.residencies
    run.store_turns()
    run.find_all()
    run.compact()
    run.lose_workers()
    answer = {
        "residencies": residencies,
        "memory_mib": memory_mib,
        "wrong": run.wrong,
        "p50_us": {name: _percentile_us(times, 0.5) for name, times in run.times_ns.items()},
        "p99_us": {name: _percentile_us(times, 0.99) for name, times in run.times_ns.items()},
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
