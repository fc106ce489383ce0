"""The rules of reference counts, one by one, against a model that keeps a count for each block and node.

The model follows the rules as they are written: it adds and takes away what each event says, and never counts again from
the start. What the nodes were told must agree with it after every step, and so must a recount from the living branches.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.machine import KvConfig, KvMachine, LeasePolicy
from tests.kvcache.kit import World, chain_of, each, prompt_of

NODES = ["n0", "n1", "n2"]
MOST_BLOCKS = 16

nodes = st.sampled_from(NODES)
phases = st.sampled_from(["prefill", "decode"])
ids = st.lists(st.integers(0, 2), max_size=6)
pick = st.integers(0, 1000)
"""Chooses among what there is at the moment, by its remainder."""


class Modelled:
    """A living branch as the model sees it."""

    def __init__(self, context: list[int]) -> None:
        self.context = context
        self.version = self.sequence = 0
        self.homes: dict[str, str] = {}


class CountingRules(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        never = LeasePolicy(floor_s=1e9, ceiling_s=1e9)
        self.world = World(KvMachine(KvConfig(lease=never, max_blocks=60)))
        self.branches: dict[str, Modelled] = {}
        self.counts: dict[str, Counter[bytes]] = {node: Counter() for node in NODES}
        self.phases = dict.fromkeys(NODES, "")
        self.names = 0
        self.last_event: ev.Event | None = None

    # ---- the rules as they are written ---------------------------------------------------------------------------

    def add(self, node: str, blocks: list[bytes], delta: int) -> None:
        for block in blocks:
            self.counts[node][block] += delta

    def becomes(self, branch: Modelled, context: list[int]) -> None:
        """-1 on what the context left, +1 on what it added, at each home."""
        before, after = each(chain_of(branch.context)), each(chain_of(context))
        for node in set(branch.homes.values()):
            self.add(node, [block for block in before if block not in after], -1)
            self.add(node, [block for block in after if block not in before], 1)
        branch.context = context

    def ends(self, name: str) -> None:
        branch = self.branches.pop(name)
        for node in set(branch.homes.values()):
            self.add(node, each(chain_of(branch.context)), -1)

    def loses_home(self, node: str) -> None:
        self.counts[node].clear()
        for branch in self.branches.values():
            branch.homes = {phase: home for phase, home in branch.homes.items() if home != node}

    # ---- branches ------------------------------------------------------------------------------------------------

    def some_branch(self, which: int) -> str:
        return list(self.branches)[which % len(self.branches)]

    def request(self, name: str, parent: str | None = None, relation: ev.Relation | None = None) -> None:
        branch = self.branches[name]
        branch.sequence += 1
        resolved = self.world.see(
            branch.context,
            branch_id=name,
            version=branch.version,
            sequence=branch.sequence,
            parent=parent,
            relation=relation,
        )
        assert (resolved.branch_id, resolved.version) == (name, branch.version)
        self.world.send(ev.OutputStored(resolved.request_id, b""))

    @rule(context=ids)
    def a_branch_starts(self, context: list[int]) -> None:
        self.names += 1
        name = f"b{self.names}"
        self.branches[name] = Modelled(context)
        self.request(name)

    @precondition(lambda self: self.branches)
    @rule(which=pick, more=ids, relation=st.sampled_from(["fork", "subagent"]))
    def a_branch_forks_or_spawns(self, which: int, more: list[int], relation: ev.Relation) -> None:
        parent = self.some_branch(which)
        self.names += 1
        head = self.branches[parent].context if relation == "fork" else []
        self.branches[f"b{self.names}"] = Modelled([*head, *more][:MOST_BLOCKS])
        self.request(f"b{self.names}", parent, relation)

    @precondition(lambda self: self.branches)
    @rule(which=pick, more=ids)
    def a_branch_goes_on(self, which: int, more: list[int]) -> None:
        name = self.some_branch(which)
        self.becomes(self.branches[name], [*self.branches[name].context, *more][:MOST_BLOCKS])
        self.request(name)

    @precondition(lambda self: self.branches)
    @rule(which=pick, kept=pick, more=ids)
    def a_branch_is_rewritten(self, which: int, kept: int, more: list[int]) -> None:
        name = self.some_branch(which)
        branch = self.branches[name]
        branch.version += 1
        self.becomes(branch, [*branch.context[: kept % (len(branch.context) + 1)], *more][:MOST_BLOCKS])
        self.request(name)

    @precondition(lambda self: self.branches)
    @rule(which=pick, context=ids, older=st.booleans())
    def an_old_request_comes_again(self, which: int, context: list[int], older: bool) -> None:
        name = self.some_branch(which)
        branch = self.branches[name]
        version = branch.version - 1 if older else branch.version
        sequence = branch.sequence + 5 if older else branch.sequence
        resolved = self.world.see(context, branch_id=name, version=version, sequence=sequence)
        assert resolved.reason == "signal-stale"
        self.world.send(ev.OutputStored(resolved.request_id, b""))

    @precondition(lambda self: self.branches)
    @rule(which=pick, phase=phases, node=nodes)
    def a_branch_is_placed_or_moved(self, which: int, phase: str, node: str) -> None:
        """Within a phase the count moves along; the other phase's stays. One copy counts once, whatever it is home for."""
        name = self.some_branch(which)
        branch = self.branches[name]
        before = set(branch.homes.values())
        branch.homes[phase] = node
        after = set(branch.homes.values())
        blocks = each(chain_of(branch.context))
        for left in before - after:
            self.add(left, blocks, -1)
        for gained in after - before:
            self.add(gained, blocks, 1)
        self.world.send(ev.Homed(name, phase, node))

    @precondition(lambda self: self.branches)
    @rule(which=pick)
    def a_branch_ends(self, which: int) -> None:
        name = self.some_branch(which)
        commands = self.world.send(ev.BranchEnded(name))
        closed = [command.branch_id for command in commands if isinstance(command, ev.BranchClosed)]
        assert name in closed
        for gone in closed:
            self.ends(gone)
        assert self.world.send(ev.BranchEnded(name)) == []

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def held(self, node: str) -> dict[bytes, bytes | None]:
        return self.world.blocks.setdefault(node, {})

    def tails(self, node: str) -> list[bytes]:
        held = self.held(node)
        return sorted(set(held) - set(held.values()))

    @precondition(lambda self: self.branches)
    @rule(which=pick, node=nodes, most=st.integers(0, MOST_BLOCKS))
    def a_node_keeps_a_context(self, which: int, node: str, most: int) -> None:
        self.world.store(node, self.branches[self.some_branch(which)].context[:most])

    @rule(node=nodes, context=ids)
    def a_node_keeps_anything(self, node: str, context: list[int]) -> None:
        self.world.store(node, context)

    @rule(node=nodes, count=st.integers(1, 8), which=pick)
    def a_node_evicts_tails(self, node: str, count: int, which: int) -> None:
        gone: list[bytes] = []
        for _ in range(count):
            tails = self.tails(node)
            if tails:
                gone.append(tails[which % len(tails)])
                del self.held(node)[gone[-1]]
                self.world.refs.get(node, {}).pop(gone[-1], None)
        if gone:
            self.last_event = ev.BlocksRemoved(node, self.world.next_seq(node), b"".join(gone))
            self.world.send(self.last_event)

    @rule(node=nodes, context=ids)
    def an_event_is_lost_and_a_snapshot_heals(self, node: str, context: list[int]) -> None:
        deliver = self.world.send
        lost: list[ev.Event] = []
        self.world.send = lambda event, after_s=1.0: lost.append(event) or []  # type: ignore[method-assign]
        self.world.store(node, context)
        self.world.send = deliver  # type: ignore[method-assign]
        commands = self.world.send(ev.NodeSequence(node, self.world.next_seq(node)))
        asked = [command.reason for command in commands if isinstance(command, ev.SnapshotNeeded)]
        assert asked == (["gap"] if lost else [])
        if lost:
            self.snapshot(node)

    @rule(node=nodes)
    def a_snapshot_comes(self, node: str) -> None:
        self.snapshot(node)

    def snapshot(self, node: str) -> None:
        runs = [(parent, block) for block, parent in reversed(self.held(node).items())]
        self.world.send(ev.NodeSnapshot(node, self.world.seq.get(node, 0), runs))

    @rule(node=nodes, first=ids, second=ids)
    def two_events_come_in_the_wrong_order(self, node: str, first: list[int], second: list[int]) -> None:
        deliver = self.world.send
        late: list[ev.Event] = []
        self.world.send = lambda event, after_s=1.0: late.append(event) or []  # type: ignore[method-assign]
        self.world.store(node, first)
        self.world.store(node, second)
        self.world.send = deliver  # type: ignore[method-assign]
        for event in reversed(late):
            self.world.send(event)

    @precondition(lambda self: self.last_event is not None)
    @rule()
    def an_event_comes_twice(self) -> None:
        assert self.last_event is not None
        node = self.last_event.node  # type: ignore[union-attr]
        if self.world.seq.get(node, 0) >= self.last_event.seq:  # type: ignore[union-attr,operator]
            assert self.world.send(self.last_event) == []

    @rule(node=nodes, phase=st.sampled_from(["prefill", "decode", "mixed"]), by_status=st.booleans())
    def a_node_changes_phase(self, node: str, phase: str, by_status: bool) -> None:
        """Decode to prefill: its counts become 0. Prefill to decode: they stay. `mixed` is no phase of its own."""
        seq = None if by_status else self.world.next_seq(node)
        self.world.send(ev.NodePhaseChanged(node, phase, seq))
        if self.phases[node] == "decode" and phase == "prefill":
            self.loses_home(node)
        if phase != "mixed":
            self.phases[node] = phase

    @rule(node=nodes)
    def a_node_drops_everything(self, node: str) -> None:
        self.world.send(ev.NodeCleared(node, self.world.next_seq(node)))
        self.held(node).clear()
        self.world.refs.pop(node, None)

    @rule(node=nodes)
    def a_node_starts_anew(self, node: str) -> None:
        self.world.send(ev.NodeLost(node))
        self.world.seq[node] = 0
        self.last_event = None
        self.held(node).clear()
        self.world.refs.pop(node, None)
        self.phases[node] = ""
        self.loses_home(node)

    # ---- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def nodes_were_told_what_the_rules_say(self) -> None:
        for node in NODES:
            held = self.held(node)
            expected = {block: count for block, count in self.counts[node].items() if count and block in held}
            told = {block: count for block, count in self.world.refs.get(node, {}).items() if count}
            assert told == expected
            assert self.world.machine.node_usage(node) == (len(held), len(expected))

    @invariant()
    def matches_are_the_longest_held_heads(self) -> None:
        for branch in self.branches.values():
            blocks = each(chain_of(branch.context))
            expected = {}
            for node in NODES:
                held = self.held(node)
                count = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
                if count:
                    expected[node] = count
            assert self.world.machine.held(prompt_of(branch.context)) == expected

    def teardown(self) -> None:
        for name in list(self.branches):
            self.world.send(ev.BranchEnded(name))
        assert all(self.world.machine.node_usage(node)[1] == 0 for node in NODES)


CountingRules.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None, database=None)
TestCountingRules = CountingRules.TestCase
