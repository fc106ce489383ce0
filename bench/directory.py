"""Proof of the reference counts: `make proof-directory`, or `python -m bench.directory [--events 1000000]`.

Random lives of branches on nodes with real host indexes, which evict and obey what the KV machine tells them. Half of the
events come in order and at once: then every node's counts must be right at any moment. In the other half nodes report over
wires that lose, double and swap events and hand over late snapshots: then the machine must agree with itself at any moment,
and with the nodes once the wires are empty and their last gaps are healed.

What is right is counted block by block from the living branches: a block that a node holds has one count for each branch
whose context has the block and whose prefill or decode home is the node.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.eviction import HostIndex
from apps.kvcache.domain.hashing import HASH_BYTES, HashedPrompt, extend_chain, root_hash
from apps.kvcache.domain.machine import KvConfig, KvMachine, LeasePolicy
from bench.report import report

BLOCK_TOKENS = 16
MOST_BLOCKS, NEW_BLOCKS, DIFFERENT_IDS = 48, 8, 3
ROOTS = [root_hash("model", "bf16", domain) for domain in ("ours", "theirs")]
LOST, DOUBLED, SWAPPED = 0.01, 0.05, 0.1  # of the events on a wire


@dataclass
class Branch:
    """A living context. `chains`: one hash a block."""

    root: bytes
    blocks: list[bytes]
    version: int = 0
    sequence: int = 0
    homes: dict[str, str] = field(default_factory=dict)


@dataclass
class Node:
    """A node: what it holds, the number of its last event, and its events that have not arrived yet."""

    index: HostIndex
    phase: str
    generation: int = 1
    seq: int = 0
    wire: list[ev.Event] = field(default_factory=list)


def node_blocks(node: Node) -> list[bytes]:
    """Every block that the node holds."""
    return [run[at : at + HASH_BYTES] for _, run in node.index.segments() for at in range(0, len(run), HASH_BYTES)]


class Proof:
    """`wrong`: what did not agree, in words; empty at the end of a good run. `told`: events given to the machine."""

    def __init__(self, seed: int, nodes: int = 6, capacity_blocks: int = 400, branches: int = 80) -> None:
        self.rng = random.Random(seed)
        never = LeasePolicy(floor_s=1e9, ceiling_s=1e9)
        self.machine = KvMachine(
            KvConfig(lease=never, max_blocks=20 * capacity_blocks, snapshot_retry_s=50.0, recount_after_s=300.0)
        )
        self.nodes = {
            f"node-{number}": Node(HostIndex(capacity_blocks), "prefill" if number % 2 else "decode")
            for number in range(nodes)
        }
        self.most_branches = branches
        self.branches: dict[str, Branch] = {}
        self.faulty = False
        self.told = self.names = 0
        self.counted: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._snapshots: list[tuple[int, ev.NodeSnapshot]] = []

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self, events: int, check_every: int) -> None:
        """Until the machine was told so many events more; half of them over faulty wires, then everything is healed."""
        start, next_check = self.told, self.told + check_every
        for node in self.nodes.values():
            self._emit_phase(node)
        while self.told < start + events and not self.wrong:
            if not self.faulty and self.told >= start + events // 2:
                self.check("in order")
                self.faulty = True
            self._step()
            if self.told >= next_check:
                next_check += check_every
                self.machine.check_integrity()
                if not self.faulty:
                    self.check("in order")
        self.heal()
        self.check("after the wires")

    def _step(self) -> None:
        actions = [self._turn, self._end, self._move, self._switch, self._clear, self._restart, self._stale]
        self.rng.choices(actions, [12, 1.2, 1, 0.1, 0.03, 0.03, 0.5])[0]()
        if self.faulty:
            self._deliver_some()

    def tell(self, event: ev.Event) -> None:
        self.told += 1
        self.counted[type(event).__name__] += 1
        for command in self.machine.handle(float(self.told), event):
            if isinstance(command, ev.RefsChanged):
                self.nodes[command.node].index.apply_refs(command.last, command.blocks, command.delta)
            elif isinstance(command, ev.RefsReset):
                self.nodes[command.node].index.reset_refs()
                if command.reason == "switched-to-prefill":
                    self._leave(command.node)
            elif isinstance(command, ev.BranchClosed):
                del self.branches[command.branch_id]  # a branch that ends takes its sub-agents along
            elif isinstance(command, ev.SnapshotNeeded):
                self.counted["snapshots asked for"] += 1
                if not self.faulty:
                    self.wrong.append(f"{command.node}: a snapshot was asked for though nothing was lost")
                self._snapshots.append((self.told + self.rng.randrange(30), self._snapshot(command.node)))

    def _leave(self, name: str) -> None:
        for branch in self.branches.values():
            branch.homes = {phase: home for phase, home in branch.homes.items() if home != name}

    # ---- wires ---------------------------------------------------------------------------------------------------

    def _emit(self, node: Node, event: ev.Event) -> None:
        if not self.faulty:
            self.tell(event)
        elif self.rng.random() < LOST:
            self.counted["lost on a wire"] += 1
        else:
            node.wire.extend([event] * (2 if self.rng.random() < DOUBLED else 1))

    def _name(self, node: Node) -> str:
        return next(name for name, known in self.nodes.items() if known is node)

    def _emit_phase(self, node: Node) -> None:
        node.seq += 1
        self._emit(node, ev.NodePhaseChanged(self._name(node), node.phase, node.seq, node.generation))

    def _deliver_some(self) -> None:
        name = self.rng.choice(list(self.nodes))
        node, rng = self.nodes[name], self.rng
        if node.wire and rng.random() < SWAPPED:
            node.wire.insert(rng.randrange(len(node.wire)), node.wire.pop(rng.randrange(len(node.wire))))
        for _ in range(rng.randrange(2 * len(self.nodes))):
            if node.wire:
                self.tell(node.wire.pop(0))
        if rng.random() < 0.1:
            self.tell(ev.NodePhaseChanged(name, node.phase, None, node.generation))
        due = [snapshot for at, snapshot in self._snapshots if at <= self.told]
        self._snapshots = [(at, snapshot) for at, snapshot in self._snapshots if at > self.told]
        for snapshot in due:
            self.tell(snapshot)

    def _snapshot(self, name: str) -> ev.NodeSnapshot:
        runs = self.nodes[name].index.segments()
        self.rng.shuffle(runs)
        return ev.NodeSnapshot(name, self.nodes[name].seq, runs)

    def heal(self) -> None:
        """Everything on the wires arrives, every node says its last number and hands over a snapshot. What a node counts
        may be off until then: changes were on their way to blocks that had gone meanwhile, or come back."""
        self._snapshots = []
        for node in self.nodes.values():
            for event in node.wire:
                self.tell(event)
            node.wire = []
        self.counted["blocks off before healing"] = sum(len(self._off(name)) for name in self.nodes)
        for name, node in self.nodes.items():
            node.seq += 1
            self.tell(ev.NodeSequence(name, node.seq))
            self.tell(ev.NodePhaseChanged(name, node.phase, None, node.generation))
            self.tell(self._snapshot(name))

    # ---- what happens --------------------------------------------------------------------------------------------

    def _longer(self, root: bytes, head: list[bytes]) -> list[bytes]:
        count = min(self.rng.randrange(NEW_BLOCKS), MOST_BLOCKS - len(head))
        ids = array("I", [self.rng.randrange(DIFFERENT_IDS) for _ in range(max(0, count))])
        more = extend_chain(head[-1] if head else root, ids, 1)
        return [*head, *(more[at : at + HASH_BYTES] for at in range(0, len(more), HASH_BYTES))]

    def _turn(self) -> None:
        name, branch, parent, relation = self._who()
        branch.sequence += 1
        request, chain = f"r{self.told}", b"".join(branch.blocks)
        prompt = HashedPrompt(len(branch.blocks) * BLOCK_TOKENS + 3, BLOCK_TOKENS, branch.root, chain)
        signal = ev.BranchSignal(name, branch.version, parent, relation, sequence=branch.sequence)
        self.tell(ev.RequestSeen(request, signal, prompt))
        place = self._home(name, branch, "prefill")
        if self.rng.random() < 0.1:
            self.tell(ev.RequestAborted(request))
            return
        held = self.nodes[place].index.lookup(chain)
        self._keep(place, chain)
        self.tell(ev.RequestServed(request, place, held * BLOCK_TOKENS, 0, 0))
        place = self._home(name, branch, "decode")
        before = len(branch.blocks)
        branch.blocks = self._longer(branch.root, branch.blocks)
        self._keep(place, b"".join(branch.blocks))
        self.tell(ev.OutputStored(request, b"".join(branch.blocks[before:])))

    def _who(self) -> tuple[str, Branch, str | None, ev.Relation | None]:
        rng = self.rng
        if len(self.branches) >= self.most_branches or (self.branches and rng.random() < 0.7):
            name = rng.choice(list(self.branches))
            branch = self.branches[name]
            if rng.random() < 0.15:
                branch.version += 1
                branch.blocks = branch.blocks[: rng.randrange(len(branch.blocks) + 1)]
            branch.blocks = self._longer(branch.root, branch.blocks)
            return name, branch, None, None
        self.names += 1
        name, root = f"b{self.names}", rng.choice(ROOTS)
        head: list[bytes] = []
        parent: str | None = None
        relation: ev.Relation | None = None
        if self.branches and rng.random() < 0.5:
            parent = rng.choice(list(self.branches))
            relation = "fork" if rng.random() < 0.5 else "subagent"
            root = self.branches[parent].root
            head = self.branches[parent].blocks if relation == "fork" else []
        branch = self.branches[name] = Branch(root, self._longer(root, head))
        return name, branch, parent, relation

    def _home(self, name: str, branch: Branch, phase: str) -> str:
        node = self.rng.choice(list(self.nodes))
        branch.homes[phase] = node
        self.tell(ev.Homed(name, phase, node))
        return node

    def _keep(self, name: str, chain: bytes) -> None:
        node, index = self.nodes[name], self.nodes[name].index
        reservation = index.reserve(float(self.told), None, chain)
        if reservation.evicted:
            node.seq += 1
            self._emit(node, ev.BlocksRemoved(name, node.seq, reservation.evicted))
        new = b"".join(chain[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at, _ in reservation.slots)
        for parent, run in index.commit(new):
            node.seq += 1
            self._emit(node, ev.BlocksStored(name, node.seq, parent, run))
        index.touch(float(self.told), chain)

    def _end(self) -> None:
        if self.branches:
            name = self.rng.choice(list(self.branches))
            self.tell(ev.BranchEnded(name))
            self.tell(ev.BranchEnded(name))
            if name in self.branches:
                self.wrong.append(f"{name}: it has ended and lives")

    def _move(self) -> None:
        if self.branches:
            name = self.rng.choice(list(self.branches))
            self._home(name, self.branches[name], self.rng.choice(["prefill", "decode"]))

    def _stale(self) -> None:
        """An old request comes once more, with a context that must not count."""
        if self.branches:
            name, branch = self.rng.choice(list(self.branches.items()))
            if branch.sequence:
                signal = ev.BranchSignal(name, branch.version, sequence=branch.sequence)
                prompt = HashedPrompt(
                    BLOCK_TOKENS, BLOCK_TOKENS, branch.root, extend_chain(branch.root, array("I", [9]), 1)
                )
                self.tell(ev.RequestSeen(f"r{self.told}", signal, prompt))
                self.tell(ev.RequestAborted(f"r{self.told - 1}"))

    def _switch(self) -> None:
        node = self.rng.choice(list(self.nodes.values()))
        if node.phase == "mixed" or self.rng.random() < 0.8:
            node.generation += 1
            node.phase = "decode" if node.phase == "prefill" else "prefill"
            self._emit_phase(node)

    def _clear(self) -> None:
        name, node = self.rng.choice(list(self.nodes.items()))
        node.index.clear()
        node.seq += 1
        self._emit(node, ev.NodeCleared(name, node.seq))

    def _restart(self) -> None:
        """The node's process is another one: empty, and counting from one again."""
        name, node = self.rng.choice(list(self.nodes.items()))
        node.index.clear()
        node.wire, node.seq = [], 0
        self._snapshots = [(at, snapshot) for at, snapshot in self._snapshots if snapshot.node != name]
        self.tell(ev.NodeLost(name))
        self._leave(name)
        self._emit_phase(node)

    # ---- what must be true ---------------------------------------------------------------------------------------

    def _expected(self, name: str) -> Counter[bytes]:
        counted = (branch for branch in self.branches.values() if name in branch.homes.values())
        return Counter(block for branch in counted for block in branch.blocks)

    def _off(self, name: str) -> list[bytes]:
        """Blocks whose count on the node is not what the living branches make it."""
        node, expected = self.nodes[name], self._expected(name)
        return [block for block in node_blocks(node) if node.index.refs(block) != expected[block]]

    def check(self, when: str) -> None:
        self.machine.check_integrity()
        for name, node in self.nodes.items():
            node.index.check_integrity()
            wrong, expected = self._off(name), self._expected(name)
            if wrong:
                self.wrong.append(f"{name}: {len(wrong)} of {node.index.used_blocks} blocks have a wrong count {when}")
            held = node_blocks(node)
            usage = (len(held), sum(expected[block] > 0 for block in held))
            if self.machine.node_usage(name) != usage:
                self.wrong.append(f"{name}: the machine knows {self.machine.node_usage(name)}, it holds {usage} {when}")
        for branch in self.branches.values():
            chain = b"".join(branch.blocks)
            holds = {name: node.index.lookup(chain) for name, node in self.nodes.items()}
            prompt = HashedPrompt(len(branch.blocks) * BLOCK_TOKENS, BLOCK_TOKENS, branch.root, chain)
            if self.machine.held(prompt) != {name: blocks for name, blocks in holds.items() if blocks}:
                self.wrong.append(f"a match is wrong {when}")
        self.counted["checks"] += 1


def main() -> None:
    options = argparse.ArgumentParser(description="Random events, and whether every count is right; JSON lines.")
    options.add_argument("--events", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    proof = Proof(chosen.seed)
    started_s = time.process_time()
    proof.run(chosen.events, check_every=max(1, chosen.events // 100))
    report("directory.events", proof.told, "events", target=chosen.events)
    for name, count in sorted(proof.counted.items()):
        report(f"directory.{name.replace(' ', '_')}", count, "times")
    report("directory.wrong", len(proof.wrong), "findings", target=0, aim="at_most")
    report("directory.cpu_time", time.process_time() - started_s, "s")
    if proof.wrong:
        sys.exit("\n".join(proof.wrong))


if __name__ == "__main__":
    main()
