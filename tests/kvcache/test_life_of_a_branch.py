"""The example life of one branch, told once with everything that takes part: ledger, directory, two nodes with small pools.

append -> fork -> sub-agent -> 359 s of silence -> resume -> compaction -> end
"""

from __future__ import annotations

from collections.abc import Iterable

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.eviction import HostIndex
from apps.kvcache.domain.machine import KvMachine
from tests.kvcache.kit import BLOCK_TOKENS, chain_of, each, prompt_of

POOL_BLOCKS = 60
SYSTEM, TASK = [1, 2, 3, 4], [10, 11, 12, 13]


class Node:
    """A node's pool, and its numbered events to the machine."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self.name, self.cluster, self.seq = name, cluster, 0
        self.pool = HostIndex(POOL_BLOCKS)

    def holds(self, ids: Iterable[int]) -> int:
        return self.pool.lookup(chain_of(ids))

    def refs(self, ids: Iterable[int]) -> list[int]:
        known = self.cluster.machine.node_usage(self.name)
        assert known[0] == self.pool.used_blocks and known[1] == self.pool.referenced_blocks
        return [self.cluster.counted[self.name].get(block, 0) for block in each(chain_of(ids))]

    def keep(self, ids: list[int]) -> None:
        """Stores the context's blocks, evicting others when there is no room, and reports both."""
        chain = chain_of(ids)
        reservation = self.pool.reserve(self.cluster.now, None, chain)
        assert reservation.stopped is None
        if reservation.evicted:
            self.seq += 1
            self.cluster.send(ev.BlocksRemoved(self.name, self.seq, reservation.evicted))
        for parent, run in self.pool.commit(b"".join(each(chain)[at] for at, _ in reservation.slots)):
            self.seq += 1
            self.cluster.send(ev.BlocksStored(self.name, self.seq, parent, run))
        self.pool.touch(self.cluster.now, chain)
        self.pool.check_integrity()


class Cluster:
    """One prefill node, one decode node, and the machine that tells them what is needed."""

    def __init__(self) -> None:
        self.machine, self.now, self.requests = KvMachine(), 0.0, 0
        self.p1, self.d1 = Node("p1", self), Node("d1", self)
        self.counted: dict[str, dict[bytes, int]] = {"p1": {}, "d1": {}}

    def send(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(self.now, event)
        for command in commands:
            if isinstance(command, ev.RefsChanged):
                self._count(command)
        self.machine.check_integrity()
        return commands

    def _count(self, change: ev.RefsChanged) -> None:
        pool = {"p1": self.p1, "d1": self.d1}[change.node].pool
        pool.apply_refs(change.last, change.blocks, change.delta)
        parents = {run[at : at + 16]: (run[at - 16 : at] if at else parent or b"")
                   for parent, run in pool.segments() for at in range(0, len(run), 16)}  # fmt: skip
        block = change.last
        for _ in range(change.blocks):
            counts = self.counted[change.node]
            counts[block] = counts.get(block, 0) + change.delta
            block = parents[block]

    def wait(self, seconds: float) -> list[ev.Command]:
        self.now += seconds
        return self.send(ev.Tick())

    def ask(self, prompt: list[int], output: list[int], **signal: object) -> tuple[ev.BranchResolved, ev.ReuseCounted]:
        """One request: computed on p1 with what p1 has, decoded on d1, kept by both."""
        self.requests += 1
        self.now += 1.0
        name, hashed = f"r{self.requests}", prompt_of(prompt)
        seen = self.send(ev.RequestSeen(name, ev.BranchSignal(**signal), hashed))  # type: ignore[arg-type]
        (resolved,) = (command for command in seen if isinstance(command, ev.BranchResolved))
        self.send(ev.Homed(resolved.branch_id, "prefill", "p1"))
        cached = self.p1.holds(prompt) * BLOCK_TOKENS
        (counted,) = self.send(ev.RequestServed(name, "p1", cached, hashed.tokens - cached, 0))
        self.p1.keep(prompt)
        self.send(ev.Homed(resolved.branch_id, "decode", "d1"))
        self.d1.keep([*prompt, *output])
        self.p1.keep([*prompt, *output])  # what was decoded is written through to the pool that prefills
        self.send(ev.OutputStored(name, chain_of([*prompt, *output])[16 * len(prompt) :]))
        assert isinstance(counted, ev.ReuseCounted)
        return resolved, counted


def test_the_life_of_a_branch() -> None:
    yard = Cluster()
    quiet = [500 + at for at in range(10)]
    yard.ask(quiet, [], branch_id="quiet")  # lives and says nothing, all the time

    # It begins: everything is computed, everything is counted once.
    first = [*SYSTEM, *TASK]
    resolved, reuse = yard.ask(first, [14, 15], branch_id="main", version=0)
    assert (resolved.kind, reuse.actual_tokens) == ("new", 0)
    assert yard.d1.refs([*first, 14, 15]) == [1] * 10

    # Append: a tool's result comes back; only that is computed, only that is newly counted.
    second = [*first, 14, 15, 20, 21]
    resolved, reuse = yard.ask(second, [22], branch_id="main", version=0)
    assert (resolved.kind, reuse.actual_tokens, reuse.lost) == ("continuation", 100, {})
    assert yard.d1.refs([*second, 22]) == [1] * 13

    # Fork: another branch tries a second way from the same context and counts on all of it.
    fork = [*second, 22, 30]
    resolved, reuse = yard.ask(fork, [31], branch_id="fork", parent="main", relation="fork")
    assert (resolved.kind, reuse.actual_tokens) == ("fork", 130)
    assert yard.d1.refs(fork) == [2] * 13 + [1]

    # Sub-agent: a context of its own; of its parent it counts on the system prompt that both run through.
    helper = [*SYSTEM, 40, 41]
    resolved, reuse = yard.ask(helper, [42], branch_id="helper", parent="main", relation="subagent")
    assert (resolved.kind, reuse.actual_tokens) == ("subagent", 40)
    assert yard.d1.refs(helper) == [3, 3, 3, 3, 1, 1]
    assert yard.d1.refs(second)[4:] == [2] * 8

    # The fork and the sub-agent end. Their own tails are nobody's any more; the rest stays.
    yard.send(ev.BranchEnded("helper"))
    yard.send(ev.BranchEnded("fork"))
    assert yard.d1.refs([*second, 22]) == [1] * 13
    assert yard.d1.refs(fork)[-1] == 0 and yard.d1.refs(helper)[-2:] == [0, 0]

    # 359 s of silence, in which a stranger fills both pools: what nobody counts on goes, the branch's context does not.
    yard.wait(200.0)
    for number in range(3):
        stranger = [1000 + 20 * number + at for at in range(18)]
        yard.ask(stranger, [], branch_id=f"stranger-{number}", end=True)
    commands = yard.wait(159.0 - 3.0)
    assert not [command for command in commands if isinstance(command, ev.BranchClosed)]
    assert yard.d1.holds(fork) == yard.p1.holds(fork) == 13, "the fork's own tail went"
    assert yard.d1.holds(helper) == 4, "and the sub-agent's"

    # Resume: it reuses everything it had.
    third = [*second, 22, 50]
    resolved, reuse = yard.ask(third, [51], branch_id="main", version=0)
    assert (resolved.kind, reuse.actual_tokens, reuse.ideal_tokens, reuse.lost) == ("continuation", 130, 130, {})

    # Compaction: the branch leaves its old context and counts on the new one only.
    compacted = [*SYSTEM, 90, 91]
    resolved, reuse = yard.ask(compacted, [92], branch_id="main", version=1)
    assert (resolved.kind, reuse.actual_tokens) == ("version", 40)
    assert yard.d1.refs([*third, 51]) == [1] * 4 + [0] * 11
    assert yard.d1.refs([*compacted, 92]) == [1] * 7

    # Room is needed once more: what the compaction replaced goes first, although the quiet branch was used long before it.
    yard.ask([*SYSTEM, 90, 91, 92, 93], [], branch_id="main", version=1)
    pressure = [3000 + at for at in range(42)]
    yard.ask(pressure, [], branch_id="pressure")
    assert yard.d1.holds(third) == 4, "of the replaced context only what the branch still shares is left"
    assert yard.d1.holds([*SYSTEM, 90, 91, 92, 93]) == 8
    assert yard.d1.holds(quiet) == 10

    # The end: nothing is counted any more.
    yard.send(ev.BranchEnded("pressure"))
    yard.send(ev.BranchEnded("quiet"))
    yard.ask([*SYSTEM, 90, 91, 92, 93, 94], [], branch_id="main", version=1, end=True)
    assert yard.machine.branches_live == 0
    assert yard.machine.node_usage("d1")[1] == 0 and yard.machine.node_usage("p1")[1] == 0
