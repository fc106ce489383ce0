"""Long random lives of branches and nodes, against models that keep one entry a block."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.machine import KvConfig, KvMachine, LeasePolicy
from tests.kvcache.kit import BLOCK_TOKENS, World, chain_of, each, prompt_of

NODES = ["a", "b", "c", "d"]
NEVER = KvConfig(lease=LeasePolicy(floor_s=1e9, ceiling_s=1e9))


@dataclass
class NaiveBranch:
    ids: list[int]
    version: int = 0
    sequence: int = 0
    homes: dict[str, str] = field(default_factory=dict)


class NaiveRun:
    """Random valid events, and block by block what must come of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(KvMachine(NEVER), check_every=7)
        self.branches: dict[str, NaiveBranch] = {}
        self.phases: dict[str, str] = {}
        self.produced: set[bytes] = set()
        self.gone_by: dict[bytes, str] = {}  # what took the last copy of a block, or one before it
        self.names = 0

    def ids_after(self, head: list[int], most: int) -> list[int]:
        return [*head, *(self.rng.randrange(3) for _ in range(self.rng.randrange(most)))][:24]

    def step(self) -> None:
        action = self.rng.choices(
            [self.request, self.evict, self.end, self.switch, self.clear, self.move, self.stale],
            [12, 5, 1.5, 0.3, 0.15, 1, 1],
        )[0]
        action()

    def request(self) -> None:
        rng, world = self.rng, self.world
        name, branch, signal = self._choose()
        branch.sequence += 1
        resolved = world.see(branch.ids, branch_id=name, version=branch.version, sequence=branch.sequence, **signal)
        assert resolved.branch_id == name and resolved.reason != "signal-stale"
        node = self.home(name, branch, "prefill")
        if rng.random() < 0.1:
            world.send(ev.RequestAborted(resolved.request_id))
            return
        self.serve(resolved.request_id, branch.ids, node)
        decode = self.home(name, branch, "decode")
        output = self.ids_after(branch.ids, 4)
        if rng.random() < 0.8:
            self.keep(decode, output[: rng.randrange(len(output) + 1)])
        world.send(ev.OutputStored(resolved.request_id, chain_of(output)[16 * len(branch.ids) :]))
        branch.ids = output
        self.produced |= set(each(chain_of(output)))

    def _choose(self) -> tuple[str, NaiveBranch, dict]:
        rng = self.rng
        if self.branches and rng.random() < 0.6:
            name = rng.choice(list(self.branches))
            branch = self.branches[name]
            if rng.random() < 0.15:
                branch.version += 1
                branch.ids = self.ids_after(branch.ids[: rng.randrange(len(branch.ids) + 1)], 5)
            else:
                branch.ids = self.ids_after(branch.ids, 4)
            return name, branch, {}
        self.names += 1
        name, signal, head = f"b{self.names}", {}, []
        if self.branches and rng.random() < 0.5:
            signal["parent"] = rng.choice(list(self.branches))
            signal["relation"] = rng.choice(["fork", "subagent"])
            head = self.branches[signal["parent"]].ids if signal["relation"] == "fork" else []
        self.branches[name] = NaiveBranch(self.ids_after(head, 8))
        return name, self.branches[name], signal

    def home(self, name: str, branch: NaiveBranch, phase: str) -> str:
        node = self.rng.choice(NODES)
        branch.homes[phase] = node
        self.world.send(ev.Homed(name, phase, node))
        return node

    def move(self) -> None:
        if self.branches:
            name = self.rng.choice(list(self.branches))
            self.home(name, self.branches[name], self.rng.choice(["prefill", "decode"]))

    def keep(self, node: str, ids: list[int]) -> None:
        self.world.store(node, ids)
        self.produced |= set(each(chain_of(ids)))

    def serve(self, request_id: str, ids: list[int], node: str) -> None:
        chain, blocks = each(chain_of(ids)), self.world.blocks
        here = self.leading(chain, blocks.get(node, {}))
        elsewhere = max((self.leading(chain, blocks.get(other, {})) for other in NODES if other != node), default=0)
        fetched = self.rng.randrange(max(0, elsewhere - here) + 1)
        failed = self.rng.randrange(max(0, elsewhere - here - fetched) + 1)
        ideal = self.leading(chain, self.produced)
        expected = Counter[str]()
        for index in range(here + fetched, ideal):
            if index < here + fetched + failed:
                expected["fetch-failed"] += BLOCK_TOKENS
            elif index < elsewhere:
                expected["routed"] += BLOCK_TOKENS
            elif chain[index] in self.gone_by:
                expected[self.gone_by[chain[index]]] += BLOCK_TOKENS
            else:
                expected["never-stored"] += BLOCK_TOKENS
        counted = self.world.serve(request_id, ids, node, fetched, failed)
        assert Counter(counted.lost) == expected
        assert counted.ideal_tokens == ideal * BLOCK_TOKENS
        assert counted.actual_tokens == (here + fetched) * BLOCK_TOKENS
        self.keep(node, ids)

    def evict(self) -> None:
        node = self.rng.choice(NODES)
        held = self.world.blocks.get(node, {})
        gone: list[bytes] = []
        for _ in range(self.rng.randrange(1, 12)):
            tails = sorted(set(held) - set(held.values()) - set(gone))
            if not tails:
                break
            gone.append(self.rng.choice(tails))
            del held[gone[-1]]
            self.gone_by[gone[-1]] = "evicted"
            self.world.refs.get(node, {}).pop(gone[-1], None)
        if gone:
            self.rng.shuffle(gone)
            self.world.send(ev.BlocksRemoved(node, self.world.next_seq(node), b"".join(gone)))

    def end(self) -> None:
        if self.branches:
            name = self.rng.choice(list(self.branches))
            del self.branches[name]
            assert ev.BranchClosed(name, "ended") in self.world.send(ev.BranchEnded(name))

    def stale(self) -> None:
        if self.branches:
            name, branch = self.rng.choice(list(self.branches.items()))
            if branch.sequence:
                resolved = self.world.see([5, 6, 7], branch_id=name, version=branch.version, sequence=branch.sequence)
                assert resolved.reason == "signal-stale"
                self.world.send(ev.RequestAborted(resolved.request_id))

    def switch(self) -> None:
        node, phase = self.rng.choice(NODES), self.rng.choice(["prefill", "decode", "mixed"])
        self.world.send(ev.NodePhaseChanged(node, phase, self.world.next_seq(node)))
        if phase == "prefill" and self.phases.get(node) == "decode":
            self.leave(node)
        if phase != "mixed":
            self.phases[node] = phase

    def clear(self) -> None:
        node = self.rng.choice(NODES)
        by_switch = self.rng.random() < 0.5
        self.gone_by.update(dict.fromkeys(self.world.blocks.get(node, {}), "switched" if by_switch else "evicted"))
        if by_switch:
            self.world.send(ev.NodeCleared(node, self.world.next_seq(node)))
        else:
            self.world.send(ev.NodeLost(node))
            self.world.seq[node] = 0
            self.phases.pop(node, None)
            self.leave(node)
        self.world.blocks.get(node, {}).clear()
        self.world.refs.get(node, {}).clear()

    def leave(self, node: str) -> None:
        for branch in self.branches.values():
            branch.homes = {phase: home for phase, home in branch.homes.items() if home != node}

    @staticmethod
    def leading(chain: list[bytes], known) -> int:
        return next((index for index, block in enumerate(chain) if block not in known), len(chain))

    def compare(self) -> None:
        machine, world = self.world.machine, self.world
        for node in NODES:
            expected: Counter[bytes] = Counter()
            held = world.blocks.get(node, {})
            for branch in self.branches.values():
                if node in branch.homes.values():
                    expected.update(block for block in each(chain_of(branch.ids)) if block in held)
            told = {block: count for block, count in world.refs.get(node, {}).items() if count}
            assert told == dict(expected), f"what {node} was told"
            assert machine.node_usage(node) == (len(held), len(expected))
        for branch in self.branches.values():
            prompt = prompt_of(self.ids_after(branch.ids[: self.rng.randrange(len(branch.ids) + 1)], 6))
            expected_match = {node: self.leading(each(prompt.chain), world.blocks.get(node, {})) for node in NODES}
            found = {match.node: match.blocks for match in machine.match(prompt)}
            assert found == {node: blocks for node, blocks in expected_match.items() if blocks}


@pytest.mark.parametrize("seed", range(4))
def test_counts_matches_and_reuse_agree_with_a_model_of_single_blocks(seed):
    run = NaiveRun(seed)
    while run.world.sent < 5000:
        run.step()
        if run.rng.random() < 0.1:
            run.compare()
    run.compare()
    for name in list(run.branches):
        run.world.send(ev.BranchEnded(name))
    run.world.machine.check_integrity()
    assert all(run.world.machine.node_usage(node)[1] == 0 for node in NODES)


@pytest.mark.parametrize("seed", range(4))
def test_duplicated_reordered_and_lost_events_end_in_the_truth(seed):
    """Nodes report through a wire that loses, doubles and swaps; what is asked for as a snapshot comes late."""
    rng = random.Random(seed)
    truth = NaiveRun(seed + 100)
    machine = KvMachine(NEVER)
    wire: list[ev.Event] = []
    now, asked = 0.0, {}

    def snapshot(node: str) -> ev.NodeSnapshot:
        runs = [(parent, block) for block, parent in truth.world.blocks.get(node, {}).items()]
        rng.shuffle(runs)
        return ev.NodeSnapshot(node, truth.world.seq.get(node, 0), runs)

    def deliver(event: ev.Event) -> None:
        nonlocal now
        now += 0.1
        for command in machine.handle(now, event):
            if isinstance(command, ev.SnapshotNeeded):
                asked[command.node] = now

    original = truth.world.send

    def record(event: ev.Event, after_s: float = 1.0):
        on_wire = isinstance(event, ev.BlocksStored | ev.BlocksRemoved | ev.NodeCleared | ev.NodePhaseChanged)
        if not on_wire:
            deliver(event)
        elif rng.random() > 0.03:
            wire.extend([event] * (2 if rng.random() < 0.05 else 1))
        return original(event, after_s)

    truth.world.send = record
    while truth.world.sent < 2500:
        truth.step()
        if wire and rng.random() < 0.1:
            at = rng.randrange(len(wire))
            wire.insert(rng.randrange(len(wire)), wire.pop(at))
        while wire and rng.random() < 0.8:
            deliver(wire.pop(0))
        for node in [node for node, since in asked.items() if now > since + 2.0]:
            del asked[node]
            deliver(snapshot(node))
        if truth.world.sent % 5 == 0:
            machine.check_integrity()
    for event in wire:
        deliver(event)
    for node in NODES:
        truth.world.send(ev.NodeSequence(node, truth.world.next_seq(node)))
        deliver(snapshot(node))
    machine.check_integrity()
    for branch in truth.branches.values():
        prompt = prompt_of(branch.ids)
        blocks = {node: truth.leading(each(prompt.chain), truth.world.blocks.get(node, {})) for node in NODES}
        assert {match.node: match.blocks for match in machine.match(prompt)} == {n: b for n, b in blocks.items() if b}
