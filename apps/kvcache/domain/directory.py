"""Directory: which node holds which blocks, and how many live branches count on each copy.

A branch counts once on each node in its homes, on every block of its context; the node is told of those blocks that it is
known to hold. When a node stores more of a counted context it is told then; counts of a removed block vanish with it.
Only host copies are counted; device copies can be matched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from apps.kvcache.domain.events import LostCause, NodeMatch, RefsChanged, Tier
from apps.kvcache.domain.hashing import HASH_BYTES
from apps.kvcache.domain.segments import Segment, SegmentTree, common_blocks, mirrored


@dataclass(frozen=True, slots=True)
class PrefixFacts:
    """What is known about a prompt's blocks at one moment. `held`: leading blocks each node has; `produced`: leading blocks
    that were ever computed; `fates`: (up to block, cause) runs that say why a block is nowhere, were it so."""

    held: dict[str, int]
    produced: int
    fates: tuple[tuple[int, LostCause], ...]


class Directory:
    """`max_blocks` bounds the tree's memory of blocks that nobody holds any more (held and counted ones always stay)."""

    def __init__(self, max_blocks: int) -> None:
        self.tree = SegmentTree(max_blocks)
        self._holders: list[tuple[str, Tier]] = []
        self._holder_of: dict[tuple[str, Tier], int] = {}
        self._nodes: list[str] = []  # of each holder
        self._one_tier = True
        self.unsure: set[str] = set()  # nodes that let go of counted blocks since somebody last looked here
        self._roots: set[bytes] = set()

    def add_root(self, root: bytes) -> None:
        """Blocks reported with this parent start a context."""
        self._roots.add(root)

    def holder(self, node: str, tier: Tier = "host") -> int:
        key = (node, tier)
        found = self._holder_of.get(key)
        if found is None:
            found = self._holder_of[key] = self.tree.add_holder()
            self._holders.append(key)
            self._nodes.append(node)
            self._one_tier = self._one_tier and tier == "host"
        return found

    # ---- queries -------------------------------------------------------------------------------------------------

    def match(self, chain: bytes) -> list[NodeMatch]:
        """For each node that has any, how many leading blocks of `chain` it holds (the better of its tiers)."""
        best: dict[str, NodeMatch] = {}
        for holder, blocks in self._reach(list(self.tree.walk(chain))).items():
            node, tier = self._holders[holder]
            if node not in best or blocks > best[node].blocks:
                best[node] = NodeMatch(node, blocks, tier)
        return list(best.values())

    def held(self, chain: bytes) -> dict[str, int]:
        """As `match`, without the tiers: the router asks this for every request."""
        return self._by_node(self._reach(list(self.tree.walk(chain))))

    def survey(self, chain: bytes) -> PrefixFacts:
        """Everything that reuse accounting asks about `chain`."""
        steps = list(self.tree.walk(chain))
        held = self._by_node(self._reach(steps))
        produced, at = 0, 0
        fates: list[tuple[int, LostCause]] = []
        for segment, common in steps:
            if produced == at:
                produced += min(segment.produced, common)
            stored = min(segment.stored, common)
            if stored:
                fates.append((at + stored, segment.loss))
            at += common
            if stored < common:
                fates.append((at, "never-stored"))
        return PrefixFacts(held, produced, tuple(fates))

    def usage(self, node: str) -> tuple[int, int]:
        """(blocks the node's host memory is known to hold, those of them that a live branch counts on)."""
        holder = self._holder_of.get((node, "host"))
        if holder is None:
            return 0, 0
        return self.tree.held_blocks[holder], self.tree.referenced_blocks[holder]

    @staticmethod
    def _reach(steps: list[tuple[Segment, int]]) -> dict[int, int]:
        """Leading blocks by holder. From the deepest segment up: who holds one holds all above it, so each segment adds
        only the holders that go no further, and is passed over where there is none."""
        reach: dict[int, int] = {}
        for segment, common in reversed(steps):
            if len(segment.held) == len(reach):
                continue
            until = segment.start + common
            if common == segment.blocks:
                reach = segment.held | reach
            else:
                reach = {holder: min(held, until) for holder, held in segment.held.items()}
        return reach

    def _by_node(self, reach: dict[int, int]) -> dict[str, int]:
        nodes = self._nodes
        if self._one_tier:
            return {nodes[holder]: blocks for holder, blocks in reach.items()}
        held: dict[str, int] = {}
        for holder, blocks in reach.items():
            held[nodes[holder]] = max(held.get(nodes[holder], 0), blocks)
        return held

    # ---- what nodes report ---------------------------------------------------------------------------------------

    def stored(self, node: str, tier: Tier, parent: bytes | None, chain: bytes, out: list[RefsChanged]) -> bool:
        """`node` holds `chain` after `parent`. False when it cannot be so: the parent is unknown, or not held there."""
        holder = self.holder(node, tier)
        position = self._position(parent, holder)
        if position is None:
            return False
        segment, offset = position
        if segment is not self.tree.root and segment.held_blocks(holder) < offset:
            return False
        at, length = 0, len(chain) // HASH_BYTES
        if offset < segment.blocks:
            same = common_blocks(segment.hashes[offset * HASH_BYTES :], chain, 0)
            self._hold(segment, holder, offset + same, out)
            if same == length:
                return True
            at = same
            if offset + same < segment.blocks:
                segment = self.tree.split(segment, offset + same)
        while at < length:
            child = segment.children.get(chain[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            if child is None:
                if self.tree.extend(segment, holder, chain[at * HASH_BYTES :]):
                    return True
                child = self.tree.grow(segment, chain[at * HASH_BYTES :])
            common = child.common(chain, at)
            if common < child.blocks and at + common < length:
                child = self.tree.split(child, common)
            self._hold(child, holder, common, out)
            segment, at = child, at + common
        return True

    def removed(self, node: str, tier: Tier, hashes: bytes, cause: LostCause = "evicted") -> bool:
        """`node` dropped these blocks. False when some were not known as its tails, or it kept blocks after them."""
        holder = self.holder(node, tier)
        touched: list[Segment] = []
        done = self._lose_tails(holder, hashes, cause, touched)
        known = done == len(hashes) or self._lose_any_order(holder, hashes, done, cause, touched)
        orphans = [child for segment in touched for child in segment.children.values() if holder in child.held]
        while orphans:
            known = False
            orphan = orphans.pop()
            orphan = self._lose(orphan, holder, 0, cause)
            touched.append(orphan)
            orphans.extend(child for child in orphan.children.values() if holder in child.held)
        for segment in touched:
            self.tree.settle(segment)
        return known

    def _lose_tails(self, holder: int, hashes: bytes, cause: LostCause, touched: list[Segment]) -> int:
        """Drop what stands in eviction order (each run from its tail up), whole runs at a time; answers the bytes done."""
        frontier = self.tree.frontier(holder)
        at = 0
        while at < len(hashes):
            segment = frontier.get(hashes[at : at + HASH_BYTES])
            if segment is None:
                break
            held = segment.held_blocks(holder)
            most = min(held, (len(hashes) - at) // HASH_BYTES)
            tail = segment.hashes[(held - most) * HASH_BYTES : held * HASH_BYTES]
            gone = common_blocks(mirrored(tail), hashes, at // HASH_BYTES)
            touched.append(self._lose(segment, holder, held - gone, cause))
            at += gone * HASH_BYTES
        return at

    def _lose_any_order(self, holder: int, hashes: bytes, done: int, cause: LostCause, touched: list[Segment]) -> bool:
        """Drop the blocks from byte `done` on, in whatever order; False when some are not among the holder's tails."""
        frontier = self.tree.frontier(holder)
        blocks = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        first = done // HASH_BYTES
        pending = set(blocks[first:]).difference(blocks[:first])
        for block in blocks[first:]:
            segment = frontier.get(block)
            if segment is None or block not in pending:
                continue
            held = segment.held_blocks(holder)
            while held and segment.block(held - 1) in pending:
                pending.discard(segment.block(held - 1))
                held -= 1
            touched.append(self._lose(segment, holder, held, cause))
        return not pending

    def cleared(self, node: str, cause: LostCause) -> None:
        """`node` holds nothing any more, in any tier."""
        for (name, _), holder in self._holder_of.items():
            if name == node:
                for segment in self._emptied(holder, cause):
                    self.tree.settle(segment)

    def replaced(self, node: str, runs: list[tuple[bytes | None, bytes]]) -> int:
        """`node` holds exactly these runs in host memory; answers how many runs had no parent among them (left out)."""
        holder = self.holder(node)
        before = self._emptied(holder, "evicted")
        pending, progress = runs, True
        while pending and progress:
            left = [run for run in pending if not self.stored(node, "host", run[0], run[1], [])]
            progress = len(left) < len(pending)
            pending = left
        for segment in before:
            self.tree.settle(segment)
        return len(pending)

    def _emptied(self, holder: int, cause: LostCause) -> list[Segment]:
        if self.tree.referenced_blocks[holder]:
            self.unsure.add(self._nodes[holder])
        for segment in list(self.tree.frontier(holder).values()):
            self._blame(segment, cause)
        return self.tree.clear_holder(holder)

    def _position(self, parent: bytes | None, holder: int) -> tuple[Segment, int] | None:
        if parent is None or parent in self._roots:
            return self.tree.root, 0
        return self.tree.find(parent, holder)

    def _hold(self, segment: Segment, holder: int, blocks: int, out: list[RefsChanged]) -> None:
        before = segment.held_blocks(holder)
        if blocks <= before:
            return
        self.tree.set_held(segment, holder, blocks)
        count = segment.counts.get(holder)
        if count:
            out.append(RefsChanged(self._holders[holder][0], segment.block(blocks - 1), blocks - before, count))

    def _lose(self, segment: Segment, holder: int, held: int, cause: LostCause) -> Segment:
        """`holder` has only `held` blocks of the segment left; answers the segment that these are in now."""
        segment = self._blame(segment, cause)
        self.tree.set_held(segment, holder, held)
        if holder in segment.counts:
            self.unsure.add(self._nodes[holder])
        return segment

    def _blame(self, segment: Segment, cause: LostCause) -> Segment:
        """What goes from `segment` from now on goes by `cause`; what nobody held any more keeps its own, cut off for that.
        Answers the segment with what is held."""
        if segment.loss == cause:
            return segment
        held = max(segment.held.values()) - segment.start
        if held < segment.stored:
            segment = self.tree.split(segment, held)
        segment.loss = cause
        return segment

    # ---- what branches count on ----------------------------------------------------------------------------------

    def move_branch(
        self, branch_id: str, old: Segment | None, new: Segment | None, nodes: Iterable[str], out: list[RefsChanged]
    ) -> None:
        """The branch's context ended at `old` (None: there was none) and now ends at `new` (None: it is gone)."""
        if old is new:
            return
        left, gained = _difference(old or self.tree.root, new or self.tree.root)
        for segment in left:
            segment.live -= 1
        for segment in gained:
            segment.live += 1
        for node in nodes:
            self._count(left, node, -1, out)
            self._count(gained, node, 1, out)
        if new is not None:
            new.enders = (new.enders or set()) | {branch_id}
            self.tree.settle(new)
        if old is not None:
            assert old.enders is not None
            old.enders.discard(branch_id)
            old.enders = old.enders or None
            self.tree.settle(old)

    def count_context(self, end: Segment, node: str, delta: int, out: list[RefsChanged]) -> None:
        """Add `delta` to the node's count on every segment of the context that ends at `end`."""
        self._count(end.path(), node, delta, out)

    def counted_runs(self, node: str) -> list[RefsChanged]:
        """Everything that is counted on the node's copies, as changes from zero."""
        holder = self.holder(node)
        runs = []
        for segment in self.tree.frontier(holder).values():
            count = segment.counts.get(holder)
            if count:
                held = segment.held_blocks(holder)
                runs.append(RefsChanged(node, segment.block(held - 1), held, count))
        return runs

    def _count(self, segments: list[Segment], node: str, delta: int, out: list[RefsChanged]) -> None:
        """Count on a downward run of segments; one change for what the node holds of it."""
        holder = self.holder(node)
        blocks, last, whole = 0, b"", True
        for segment in segments:
            self.tree.add_count(segment, holder, delta)
            held = segment.held_blocks(holder)
            if whole and held:
                blocks, last = blocks + held, segment.block(held - 1)
            whole = whole and held == segment.blocks
        if blocks:
            out.append(RefsChanged(node, last, blocks, delta))

    def check_integrity(self, branches: Iterable[tuple[str, Segment, Iterable[str]]]) -> None:
        """Recompute every count from (branch, end, nodes it counts on) of the live branches and compare.

        Raises AssertionError naming the first segment that differs.
        """
        self.tree.check_integrity()
        live: dict[Segment, int] = {}
        counts: dict[Segment, dict[int, int]] = {}
        enders: dict[Segment, set[str]] = {}
        for branch_id, end, nodes in branches:
            holders = {self.holder(node) for node in nodes}
            enders.setdefault(end, set()).add(branch_id)
            for segment in end.path():
                live[segment] = live.get(segment, 0) + 1
                counted = counts.setdefault(segment, {})
                for holder in holders:
                    counted[holder] = counted.get(holder, 0) + 1
        for segment in (self.tree.root, *self.tree.segments()):
            name = f"segment {segment.block(0).hex()} [{segment.start}, {segment.end})"
            assert segment.enders is None or segment.enders == enders.get(segment), f"{name}: branches that end here"
            assert segment.live == live.pop(segment, 0), f"{name}: live branches"
            assert segment.counts == counts.get(segment, {}), f"{name}: reference counts"
        assert not live, "a branch ends at a segment that is not in the tree"


def _difference(old: Segment, new: Segment) -> tuple[list[Segment], list[Segment]]:
    """Segments of the context ending at `old` and not of the one ending at `new`, and the reverse, each downward."""
    left: list[Segment] = []
    gained: list[Segment] = []
    while old is not new:
        if old.end >= new.end and old.parent is not None:
            left.append(old)
            old = old.parent
        else:
            assert new.parent is not None
            gained.append(new)
            new = new.parent
    left.reverse()
    gained.reverse()
    return left, gained
