"""What the tests of branches and directory share: prompts from small ids, and nodes that obey commands."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.hashing import HashedPrompt, extend_chain, root_hash
from apps.kvcache.domain.machine import KvMachine

ROOT = root_hash("model", "f32", "tests")
BLOCK_TOKENS = 10


def chain_of(ids: Iterable[int], root: bytes = ROOT) -> bytes:
    return extend_chain(root, array("I", list(ids)), 1)


def prompt_of(ids: Iterable[int], tail_tokens: int = 5, root: bytes = ROOT) -> HashedPrompt:
    """A prompt of one block an id, and `tail_tokens` that fill no block."""
    chain = chain_of(ids, root)
    return HashedPrompt(len(chain) // 16 * BLOCK_TOKENS + tail_tokens, BLOCK_TOKENS, root, chain)


def each(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 16] for at in range(0, len(hashes), 16)]


class World:
    """A machine, and nodes that keep blocks and counts as told; time goes on by one second an event."""

    def __init__(self, machine: KvMachine | None = None, check_every: int = 1) -> None:
        self.machine = machine or KvMachine()
        self.check_every = check_every
        self.sent = 0
        self.now = 0.0
        self.seq: dict[str, int] = {}
        self.blocks: dict[str, dict[bytes, bytes | None]] = {}  # node -> block -> parent
        self.refs: dict[str, dict[bytes, int]] = {}
        self._requests = 0

    def send(self, event: ev.Event, after_s: float = 1.0) -> list[ev.Command]:
        self.now += after_s
        commands = self.machine.handle(self.now, event)
        for command in commands:
            self._obey(command)
        self.sent += 1
        if self.sent % self.check_every == 0:
            self.machine.check_integrity()
        return commands

    def _obey(self, command: ev.Command) -> None:
        if isinstance(command, ev.RefsReset):
            self.refs[command.node] = {}
        elif isinstance(command, ev.RefsChanged):
            refs = self.refs.setdefault(command.node, {})
            block: bytes | None = command.last
            for _ in range(command.blocks):
                assert block is not None, "counts reach above the first block"
                assert block in self.blocks[command.node], "a block that the node does not hold is counted"
                refs[block] = refs.get(block, 0) + command.delta
                block = self.blocks[command.node][block]

    # ---- requests ----

    def see(self, ids: Iterable[int], after_s: float = 1.0, request_id: str = "", **signal) -> ev.BranchResolved:
        self._requests += 1
        name = request_id or f"r{self._requests}"
        commands = self.send(ev.RequestSeen(name, ev.BranchSignal(**signal), prompt_of(ids)), after_s)
        (resolved,) = [command for command in commands if isinstance(command, ev.BranchResolved)]
        return resolved

    def turn(
        self, ids: list[int], output: Iterable[int] = (), prefill="p1", decode="d1", after_s: float = 1.0, **signal
    ):
        """One request from arrival to end: placed, computed, its KV kept by both nodes. Answers (resolved, reuse)."""
        resolved = self.see(ids, after_s, **signal)
        self.send(ev.Homed(resolved.branch_id, "prefill", prefill), 0.0)
        reuse = self.serve(resolved.request_id, ids, prefill)
        self.send(ev.Homed(resolved.branch_id, "decode", decode), 0.0)
        self.store(decode, ids)
        whole = [*ids, *output]
        self.store(decode, whole)
        self.send(ev.OutputStored(resolved.request_id, chain_of(whole)[16 * len(ids) :]), 0.0)
        return resolved, reuse

    def serve(self, request_id: str, ids: list[int], node: str, fetched: int = 0, failed: int = 0, **labels):
        """The prompt is computed on `node` with what that has, `fetched` blocks more from peers."""
        prompt = prompt_of(ids)
        cached = next((m.blocks for m in self.machine.match(prompt) if m.node == node), 0) * BLOCK_TOKENS
        fetched_tokens = fetched * BLOCK_TOKENS
        self.store(node, ids)
        served = ev.RequestServed(
            request_id,
            node,
            cached,
            prompt.tokens - cached - fetched_tokens,
            fetched_tokens,
            failed * BLOCK_TOKENS,
            **labels,
        )
        (counted,) = self.send(served, 0.0)
        assert isinstance(counted, ev.ReuseCounted)
        return counted

    # ---- nodes ----

    def next_seq(self, node: str) -> int:
        self.seq[node] = self.seq.get(node, 0) + 1
        return self.seq[node]

    def store(self, node: str, ids: Iterable[int]) -> list[ev.Command]:
        """The node keeps every block of the context `ids`; it reports those that are new to it."""
        held = self.blocks.setdefault(node, {})
        chain = each(chain_of(ids))
        known = sum(block in held for block in chain)
        parent = chain[known - 1] if known else None
        for index in range(known, len(chain)):
            held[chain[index]] = chain[index - 1] if index else None
        if known == len(chain):
            return []
        return self.send(ev.BlocksStored(node, self.next_seq(node), parent, b"".join(chain[known:])), 0.0)

    def drop(self, node: str, ids: list[int], keep: int) -> list[ev.Command]:
        """The node evicts the blocks of the context `ids` beyond the first `keep`, tail first."""
        gone = [block for block in reversed(each(chain_of(ids))[keep:]) if block in self.blocks[node]]
        for block in gone:
            del self.blocks[node][block]
            self.refs.get(node, {}).pop(block, None)
        return self.send(ev.BlocksRemoved(node, self.next_seq(node), b"".join(gone)), 0.0)

    def counts(self, node: str, ids: Iterable[int]) -> list[int]:
        """The node's own count of each block of the context `ids`."""
        return [self.refs.get(node, {}).get(block, 0) for block in each(chain_of(ids))]
