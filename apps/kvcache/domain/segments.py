"""A path-compressed tree of block chains: which runs of blocks exist, who holds how much of each, who counts on them.

A segment is a run of blocks `[start, end)` of the contexts below it. Every live branch's context ends at a segment's end
(inserting a chain splits a segment there), so a branch always counts on whole segments. Each holder (a number that the
directory gives to a node's tier) holds a leading part `[0, held)` of a segment, and all of the segments above it.
Segments that nothing tells apart any more are merged, so a branch of many turns stays one or two segments.

Segments that nobody holds or counts on are kept as memory of what was produced, up to `max_blocks` in the whole tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from apps.kvcache.domain.events import LostCause
from apps.kvcache.domain.hashing import HASH_BYTES

_BLOCK = np.dtype((np.void, HASH_BYTES))


def common_blocks(hashes: bytes, chain: bytes, at: int) -> int:
    """How many leading blocks of `hashes` `chain` has at block `at`; compares runs, not blocks."""
    offset = at * HASH_BYTES
    if chain.startswith(hashes, offset):
        return len(hashes) // HASH_BYTES
    low, high = 0, min(len(hashes), len(chain) - offset) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if chain.startswith(hashes[: middle * HASH_BYTES], offset):
            low = middle
        else:
            high = middle - 1
    return low


def mirrored(hashes: bytes) -> bytes:
    """The same blocks, last one first."""
    return np.frombuffer(hashes, dtype=_BLOCK)[::-1].tobytes()


class Segment:
    """A run of blocks. `live`: branches whose context runs through its end; `counts`: for each holder, those of them that
    count on its copy; `held`: for each holder that has some of it, where in the context that ends (so `start < held <= end`);
    `produced` and `stored`: the leading blocks that some request computed, some node ever held; `loss`: why those that
    nobody holds any more went (the same for all of them)."""

    __slots__ = (
        "children",
        "counts",
        "enders",
        "hashes",
        "held",
        "live",
        "loss",
        "parent",
        "produced",
        "start",
        "stored",
    )

    def __init__(self, parent: Segment | None, hashes: bytes, start: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.start = start
        self.children: dict[bytes, Segment] = {}
        self.held: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.enders: set[str] | None = None
        self.live = 0
        self.produced = 0
        self.stored = 0
        self.loss: LostCause = "evicted"

    @property
    def blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def end(self) -> int:
        """Blocks of the context up to and with this segment."""
        return self.start + len(self.hashes) // HASH_BYTES

    def held_blocks(self, holder: int) -> int:
        """How many leading blocks of this segment `holder` has."""
        return self.held.get(holder, self.start) - self.start

    def block(self, index: int) -> bytes:
        return self.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]

    def common(self, chain: bytes, at: int) -> int:
        """How many leading blocks of this segment `chain` has at block `at`."""
        return common_blocks(self.hashes, chain, at)

    def path(self) -> list[Segment]:
        """The segments of the context that ends here, from the first to this one."""
        found: list[Segment] = []
        segment: Segment = self
        while segment.parent is not None:
            found.append(segment)
            segment = segment.parent
        found.reverse()
        return found


class SegmentTree:
    """See the module. `frontier(holder)` maps the last block that a holder has of each segment to that segment."""

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 0:
            raise ValueError(f"max_blocks: expected 0 or more, got {max_blocks}")
        self.root = Segment(None, b"", 0)
        self.max_blocks = max_blocks
        self.total_blocks = 0
        self.held_blocks: list[int] = []
        self.referenced_blocks: list[int] = []
        self._ends: dict[bytes, Segment] = {}
        self._frontiers: list[dict[bytes, Segment]] = []
        self._unused: OrderedDict[Segment, None] = OrderedDict()  # leaves nobody needs, longest unused first

    def add_holder(self) -> int:
        self._frontiers.append({})
        self.held_blocks.append(0)
        self.referenced_blocks.append(0)
        return len(self._frontiers) - 1

    def frontier(self, holder: int) -> dict[bytes, Segment]:
        return self._frontiers[holder]

    # ---- walking -------------------------------------------------------------------------------------------------

    def walk(self, chain: bytes) -> Iterator[tuple[Segment, int]]:
        """The segments along `chain` with how many of their blocks it has; only the last can be partial."""
        segment, at, length = self.root, 0, len(chain) // HASH_BYTES
        while at < length:
            child = segment.children.get(chain[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            if child is None:
                return
            common = child.common(chain, at)
            yield child, common
            if common < child.blocks:
                return
            segment, at = child, at + common

    def insert(self, chain: bytes) -> Segment:
        """The segment that ends where `chain` ends; segments are added and split as needed."""
        return self.grow(self.root, chain)

    def grow(self, segment: Segment, chain: bytes) -> Segment:
        """As `insert`, for a `chain` that follows the end of `segment`."""
        at, length = 0, len(chain) // HASH_BYTES
        while at < length:
            child = segment.children.get(chain[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            if child is None:
                return self._add(segment, chain[at * HASH_BYTES :])
            common = child.common(chain, at)
            segment = child if common == child.blocks else self.split(child, common)
            at += common
        return segment

    def find(self, block: bytes, holder: int) -> tuple[Segment, int] | None:
        """(segment, blocks of it up to and with `block`), or None when `block` is unknown here.

        At once where `block` ends a segment or what `holder` has of one; else the holder's segments are searched.
        """
        ends = self._ends.get(block)
        if ends is not None and ends.held_blocks(holder) == ends.blocks:
            return ends, ends.blocks
        frontier = self._frontiers[holder]
        segment = frontier.get(block)
        if segment is not None:
            return segment, segment.held_blocks(holder)
        if ends is not None:
            return ends, ends.blocks
        for segment in frontier.values():
            at = segment.hashes.find(block)
            while at >= 0:
                if at % HASH_BYTES == 0:
                    return segment, at // HASH_BYTES + 1
                at = segment.hashes.find(block, at + 1)
        return None

    def stray(self, chain: bytes) -> bytes | None:
        """The first block of `chain` that cannot be where it is: it is there twice, or ends a segment somewhere else. A block's
        hash includes its parent's, so a sound chain has none. Only blocks that are new on this path are looked at."""
        known = sum(common for _, common in self.walk(chain))
        for at in range(known * HASH_BYTES, len(chain), HASH_BYTES):
            block = chain[at : at + HASH_BYTES]
            first = chain.find(block)
            while first % HASH_BYTES:
                first = chain.find(block, first + 1)
            if first < at or block in self._ends:
                return block
        return None

    # ---- changing what is held and counted -----------------------------------------------------------------------

    def set_held(self, segment: Segment, holder: int, blocks: int) -> None:
        """`holder` has the first `blocks` blocks of `segment`. Call `settle` after it has become 0."""
        before = segment.held_blocks(holder)
        if blocks == before:
            return
        frontier = self._frontiers[holder]
        if before:
            del frontier[segment.block(before - 1)]
        if blocks:
            frontier[segment.block(blocks - 1)] = segment
            segment.held[holder] = segment.start + blocks
            if blocks >= segment.stored:
                segment.stored, segment.loss = blocks, "evicted"
            segment.produced = max(segment.produced, blocks)
            self._unused.pop(segment, None)
        else:
            del segment.held[holder]
        self.held_blocks[holder] += blocks - before
        if holder in segment.counts:
            self.referenced_blocks[holder] += blocks - before

    def extend(self, segment: Segment, holder: int, hashes: bytes) -> bool:
        """`hashes` follow `segment`, and `holder` has them too. Done in place where nothing else could tell them apart;
        False, and nothing done, where it could."""
        end = segment.end
        if segment.children or segment.live or segment.counts or segment.stored < segment.blocks:
            return False
        if len(segment.held) != 1 or segment.held.get(holder) != end:
            return False
        self._unindex(segment)
        segment.hashes += hashes
        self._ends[segment.hashes[-HASH_BYTES:]] = segment
        blocks = segment.blocks
        self.total_blocks += segment.end - end
        self.set_held(segment, holder, blocks)
        return True

    def clear_holder(self, holder: int) -> list[Segment]:
        """`holder` has nothing any more; answers the segments it had some of. Call `settle` for each."""
        touched = list(self._frontiers[holder].values())
        self._frontiers[holder] = {}
        self.held_blocks[holder] = self.referenced_blocks[holder] = 0
        for segment in touched:
            del segment.held[holder]
        return touched

    def add_count(self, segment: Segment, holder: int, delta: int) -> None:
        before = segment.counts.get(holder, 0)
        after = before + delta
        if after:
            segment.counts[holder] = after
        else:
            segment.counts.pop(holder, None)
        if (before == 0) != (after == 0):
            held = segment.held_blocks(holder)
            self.referenced_blocks[holder] += held if after else -held

    def mark_produced(self, end: Segment) -> None:
        """Some request computed the whole context that ends at `end`."""
        segment: Segment = end
        while segment.parent is not None and segment.produced < segment.blocks:
            segment.produced = segment.blocks
            segment = segment.parent

    # ---- shape ---------------------------------------------------------------------------------------------------

    def split(self, segment: Segment, blocks: int) -> Segment:
        """Cut `segment` after its first `blocks` blocks. It keeps its end; the new segment before it is returned."""
        parent = segment.parent
        assert parent is not None and 0 < blocks < segment.blocks
        upper = Segment(parent, segment.hashes[: blocks * HASH_BYTES], segment.start)
        parent.children[upper.block(0)] = upper
        segment.hashes = segment.hashes[blocks * HASH_BYTES :]
        segment.parent, segment.start = upper, segment.start + blocks
        upper.children[segment.block(0)] = segment
        upper.counts, upper.live, upper.loss = dict(segment.counts), segment.live, segment.loss
        upper.produced, segment.produced = min(segment.produced, blocks), max(0, segment.produced - blocks)
        upper.stored, segment.stored = min(segment.stored, blocks), max(0, segment.stored - blocks)
        cut, last = segment.start, upper.hashes[-HASH_BYTES:]
        upper.held = {holder: min(held, cut) for holder, held in segment.held.items()}
        segment.held = {holder: held for holder, held in segment.held.items() if held > cut}
        for holder, held in upper.held.items():
            block = last if held == cut else upper.block(held - upper.start - 1)
            self._frontiers[holder][block] = upper
        self._ends[last] = upper
        self._retire(segment)
        return upper

    def settle(self, segment: Segment) -> None:
        """Tidy up after `segment` lost a branch, a holder or a child: forget it, keep it as memory, or merge it."""
        while segment.parent is not None:
            parent = segment.parent
            if not self._retire(segment):
                self._unused.pop(segment, None)
                self._merge_down(segment)
                break
            if segment in self._unused:
                self._unused.move_to_end(segment)
                break
            segment = parent
        while self.total_blocks > self.max_blocks and self._unused:
            self._forget_oldest()

    def _retire(self, segment: Segment) -> bool:
        """Whether nobody needs `segment`: then only what was produced of it is kept, as memory, or nothing."""
        if segment.children or segment.live or segment.held:
            return False
        if segment.produced:
            self._cut(segment, segment.produced)
            self._unused.setdefault(segment, None)
        else:
            self._drop(segment)
        return True

    def _add(self, parent: Segment, hashes: bytes) -> Segment:
        segment = Segment(parent, hashes, parent.end)
        parent.children[segment.block(0)] = segment
        self._unused.pop(parent, None)
        self._ends[hashes[-HASH_BYTES:]] = segment
        self.total_blocks += segment.blocks
        return segment

    def _unindex(self, segment: Segment) -> None:
        last = segment.hashes[-HASH_BYTES:]
        if self._ends.get(last) is segment:
            del self._ends[last]

    def _drop(self, segment: Segment) -> None:
        parent = segment.parent
        assert parent is not None
        del parent.children[segment.block(0)]
        self._unindex(segment)
        self._unused.pop(segment, None)
        self.total_blocks -= segment.blocks
        segment.parent = None

    def _cut(self, segment: Segment, blocks: int) -> None:
        """Forget the blocks of a leaf from `blocks` on."""
        if blocks == segment.blocks:
            return
        self._unindex(segment)
        self.total_blocks -= segment.blocks - blocks
        segment.hashes = segment.hashes[: blocks * HASH_BYTES]
        self._ends[segment.hashes[-HASH_BYTES:]] = segment

    def _forget_oldest(self) -> None:
        segment = next(iter(self._unused))
        parent = segment.parent
        self._drop(segment)
        if parent is None or parent.parent is None:
            return
        if parent.children or parent.live or parent.held:
            self._merge_down(parent)
            return
        self._unused[parent] = None
        self._unused.move_to_end(parent, last=False)

    def _merge_down(self, upper: Segment) -> None:
        """Make `upper` and its only child one segment, when nothing tells them apart. The child stays, `upper` goes.
        What is only remembered stays apart from what is held, so that it can be forgotten."""
        if upper.enders or len(upper.children) != 1:
            return
        (lower,) = upper.children.values()
        if upper.held and not lower.held and not lower.live:
            return
        whole, cut = upper.blocks, upper.end
        if (
            lower.live != upper.live
            or lower.counts != upper.counts
            or any(upper.held.get(holder) != cut for holder in lower.held)
            or (lower.produced and upper.produced < whole)
            or (lower.stored and (upper.stored < whole or upper.loss != lower.loss))
        ):
            return
        parent = upper.parent
        assert parent is not None
        for holder, held in upper.held.items():
            frontier = self._frontiers[holder]
            block = upper.block(held - upper.start - 1)
            if holder in lower.held:
                del frontier[block]
            else:
                frontier[block] = lower
                lower.held[holder] = held
        self._unindex(upper)
        parent.children[upper.block(0)] = lower
        lower.parent, lower.start, lower.hashes = parent, upper.start, upper.hashes + lower.hashes
        lower.produced += upper.produced
        lower.stored += upper.stored
        lower.loss = upper.loss
        upper.parent = None
        upper.children = {}

    # ---- proof ---------------------------------------------------------------------------------------------------

    def segments(self) -> Iterator[Segment]:
        """Every segment but the root, parents first."""
        pending = list(self.root.children.values())
        while pending:
            segment = pending.pop()
            yield segment
            pending.extend(segment.children.values())

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is wrong with the tree's shape or indexes."""
        total, ends = 0, 0
        held = [0] * len(self._frontiers)
        referenced = [0] * len(self._frontiers)
        frontier_entries = [0] * len(self._frontiers)
        for segment in self.segments():
            name = f"segment {segment.block(0).hex()} [{segment.start}, {segment.end})"
            parent = segment.parent
            assert parent is not None and parent.end == segment.start, f"{name}: not after its parent"
            assert parent.children.get(segment.block(0)) is segment, f"{name}: parent does not know it"
            assert self._ends.get(segment.hashes[-HASH_BYTES:]) is segment, f"{name}: end not indexed"
            assert 0 <= segment.stored <= segment.produced <= segment.blocks, (
                f"{name}: stored, produced, blocks disagree"
            )
            total, ends = total + segment.blocks, ends + 1
            needed = segment.children or segment.live or segment.held
            assert bool(needed) != (segment in self._unused), f"{name}: wrong place in the memory of unused segments"
            for holder, until in segment.held.items():
                blocks = until - segment.start
                assert 0 < blocks <= segment.blocks, f"{name}: holder {holder} has {blocks} blocks"
                assert parent is self.root or parent.held.get(holder) == parent.end, f"{name}: held without its parent"
                assert self._frontiers[holder].get(segment.block(blocks - 1)) is segment, (
                    f"{name}: frontier of {holder}"
                )
                frontier_entries[holder] += 1
                held[holder] += blocks
                referenced[holder] += blocks if holder in segment.counts else 0
        assert total == self.total_blocks and ends == len(self._ends), "blocks or ends miscounted"
        assert held == self.held_blocks, "held blocks miscounted"
        assert referenced == self.referenced_blocks, "referenced blocks miscounted"
        assert frontier_entries == [len(frontier) for frontier in self._frontiers], "frontier entries left over"
