"""What the KV directory and the hasher cost where a limit is set; each part in a process of its own, one JSON object each.

hashing    a turn of 1,000 new tokens on a known context of 100,000 tokens
memory     30 million blocks of contexts of 20k to 120k tokens, each on one of 9 nodes
decision   from a hashed context to its prefill node, with live branches that count on their homes
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
from array import array
from typing import Any

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.directory import Directory
from apps.kvcache.domain.hashing import HASH_BYTES, HashedPrompt, PromptHasher
from apps.kvcache.domain.machine import KvConfig, KvMachine, LeasePolicy
from apps.planning.domain.cost_model import DecodeCoefficients, NetworkProfile, PrefillCoefficients
from apps.routing.domain.loads import LoadBook
from apps.routing.domain.router import Router
from apps.routing.domain.views import NodeFacts, PrefillQuery, QueuedWork, RoutingPolicy

BLOCK_TOKENS = 64
MIN_BLOCKS, MAX_BLOCKS = 20_000 // BLOCK_TOKENS, 120_000 // BLOCK_TOKENS
FAMILIES, SHARED_BLOCKS, TURN_BLOCKS = 30, 300, 16
ROOT = bytes(HASH_BYTES)


def percentiles_us(times_ns: list[int]) -> dict[str, float]:
    ordered = sorted(times_ns)
    return {"p50": ordered[len(ordered) // 2] / 1000, "p99": ordered[int(len(ordered) * 0.99)] / 1000}


def hashing(contexts: int = 50) -> dict[str, Any]:
    """Microseconds a turn, for blocks of 64 and of 16 tokens."""
    rng = random.Random(7)
    found: dict[str, Any] = {}
    for block_tokens in (64, 16):
        hasher = PromptHasher("model", "bf16", block_tokens, block_tokens)
        known = [array("I", rng.randbytes(4 * 100_000)) for _ in range(contexts)]
        times: list[int] = []
        for number, ids in enumerate(known):
            hasher.hash("domain", ids, branch_id=str(number))
        for number, ids in enumerate(known):
            turn = ids + array("I", rng.randbytes(4 * 1000))
            started = time.thread_time_ns()
            hasher.hash("domain", turn, branch_id=str(number))
            times.append(time.thread_time_ns() - started)
        found[str(block_tokens)] = percentiles_us(times)
    return found


def memory(blocks: int = 30_000_000, nodes: int = 9) -> dict[str, Any]:
    """MiB that the process grew to hold `blocks` different blocks, stored in runs of one turn each."""
    rng = random.Random(7)
    directory = Directory(max_blocks=1 << 40)
    gc.collect()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    branches = 0
    while directory.tree.total_blocks < blocks:
        branches += 1
        node, parent, left = f"node-{branches % nodes}", None, rng.randint(MIN_BLOCKS, MAX_BLOCKS)
        while left > 0:
            run = rng.randbytes(HASH_BYTES * min(left, rng.randint(100, 500)))
            assert directory.stored(node, "host", parent, run, [])
            parent, left = run[-HASH_BYTES:], left - len(run) // HASH_BYTES
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {"blocks": directory.tree.total_blocks, "branches": branches, "mib": grown_kib / 1024}


class Cluster:
    """A KV machine with live branches on many nodes, and a router with loads."""

    def __init__(self, nodes: int, branches: int) -> None:
        self.rng = random.Random(7)
        self.names = [f"node-{number}" for number in range(nodes)]
        self.prefills = self.names[: max(1, nodes // 2)]
        self.decodes = self.names[len(self.prefills) :]
        never = LeasePolicy(floor_s=1e9, ceiling_s=1e9)
        self.machine = KvMachine(KvConfig(lease=never, max_blocks=1 << 40))
        self.times_ns: dict[str, list[int]] = {}
        self.sequences = dict.fromkeys(self.names, 0)
        self.held: dict[str, set[int]] = {name: set() for name in self.names}
        families = [self.rng.randbytes(HASH_BYTES * SHARED_BLOCKS) for _ in range(FAMILIES)]
        self.chains: list[bytes] = []
        for number in range(branches):
            length = self.rng.randint(MIN_BLOCKS, MAX_BLOCKS)
            rest = self.rng.randbytes(HASH_BYTES * max(0, length - SHARED_BLOCKS))
            self.chains.append((families[number % FAMILIES] + rest)[: HASH_BYTES * length])
            self.turn(number, self.chains[-1], number % FAMILIES)

    def handle(self, event: ev.Event) -> None:
        started = time.thread_time_ns()
        self.machine.handle(0.0, event)
        self.times_ns.setdefault(type(event).__name__, []).append(time.thread_time_ns() - started)

    def turn(self, number: int, chain: bytes, family: int) -> None:
        """One request of a branch: placed, computed and kept by both of its nodes."""
        branch, request = f"b{number}", f"r{number}"
        self.handle(ev.RequestSeen(request, ev.BranchSignal(branch, version=0), prompt_of(chain)))
        for phase, nodes in (("prefill", self.prefills), ("decode", self.decodes)):
            node = self.rng.choice(nodes)
            self.handle(ev.Homed(branch, phase, node))
            known = SHARED_BLOCKS if family in self.held[node] else 0
            self.held[node].add(family)
            parent = chain[(known - 1) * HASH_BYTES : known * HASH_BYTES] if known else None
            self.sequences[node] += 1
            self.handle(ev.BlocksStored(node, self.sequences[node], parent, chain[known * HASH_BYTES :]))
        self.handle(ev.RequestServed(request, node, 0, len(chain) // HASH_BYTES * BLOCK_TOKENS, 0))
        self.handle(ev.OutputStored(request, b""))


def prompt_of(chain: bytes) -> HashedPrompt:
    return HashedPrompt(len(chain) // HASH_BYTES * BLOCK_TOKENS + 7, BLOCK_TOKENS, ROOT, chain)


def decision(nodes: int, branches: int, decisions: int = 2000) -> dict[str, Any]:
    """Microseconds of the directory's match, of the whole decision, and of each event on the way. Each decision is counted,
    so the next one finds other loads."""
    cluster = Cluster(nodes, branches)
    network = NetworkProfile(70_000, 50e9, 50e9, 1e-5)
    router, loads = Router(RoutingPolicy("ttft", network)), LoadBook(network)
    prefill, decode = PrefillCoefficients(5e-3, 1e-5, 1e-10, 1e-7), DecodeCoefficients(5e-3, 1e-4, 0.0)
    facts = [
        NodeFacts(name, order, "prefill" if name in set(cluster.prefills) else "decode", prefill, decode)
        for order, name in enumerate(cluster.names)
    ]
    for number, node in enumerate(cluster.prefills):
        loads.placed_prefill(0.0, f"load-{number}", node, QueuedWork(1000 + number, 20_000, 20_000))
    matching: list[int] = []
    whole: list[int] = []
    gc.collect()
    for number in range(decisions):
        now = 1.0 + number / 1000
        chain = cluster.rng.choice(cluster.chains) + cluster.rng.randbytes(HASH_BYTES * TURN_BLOCKS)
        prompt = prompt_of(chain)
        started = time.thread_time_ns()
        held = cluster.machine.held(prompt)
        matched = time.thread_time_ns()
        query = PrefillQuery(f"r{number}", prompt.tokens, held, BLOCK_TOKENS)
        choice = router.decide_prefill(now, query, facts, loads)
        ended = time.thread_time_ns()
        assert choice.node is not None
        new_tokens = TURN_BLOCKS * BLOCK_TOKENS
        work = QueuedWork(new_tokens, prompt.tokens - new_tokens, prompt.tokens - new_tokens)
        loads.placed_prefill(now, query.request_id, choice.node, work)
        loads.finished_prefill(now, f"r{number - nodes}")
        matching.append(matched - started)
        whole.append(ended - started)
    events = {name: percentiles_us(times) for name, times in cluster.times_ns.items()}
    return {"match": percentiles_us(matching), "decision": percentiles_us(whole), "events": events}


def main() -> None:
    options = argparse.ArgumentParser(description="A part of `make bench-index`; prints one JSON object.")
    options.add_argument("part", choices=["hashing", "memory", "decision"])
    options.add_argument("--nodes", type=int, default=9)
    options.add_argument("--branches", type=int, default=10_000)
    chosen = options.parse_args()
    if chosen.part == "decision":
        found = decision(chosen.nodes, chosen.branches)
    else:
        found = hashing() if chosen.part == "hashing" else memory()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
