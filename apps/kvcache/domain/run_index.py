"""RunIndex: what a node's host memory holds, run by run, for nodes that keep account of KV without having any bytes.

The same rules as `eviction.HostIndex` (held blocks form prefixes; only tails go; a parent inherits the use of an evicted
child; the same order of eviction, `eviction.rank`), but a run of blocks that share their fate is one entry. A context of
thousands of blocks costs as much as its forks, so simulated hours pass quickly and pools of millions of blocks stay small.
A test drives both with the same events and compares what they evict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from apps.kvcache.domain.eviction import EvictionPolicy, may_evict, rank
from apps.kvcache.domain.hashing import HASH_BYTES
from apps.kvcache.domain.segments import common_blocks

_MOST_GONE = _MOST_JOINED = 4096
_MOST_HEIRS = 8


class Run:
    """Blocks `[start, end)` of the contexts below it, all with the same count. `readers` protect all of it."""

    __slots__ = ("children", "hashes", "last_use", "parent", "queued", "readers", "refs", "start")

    def __init__(self, parent: Run | None, hashes: bytes, start: int, refs: int, last_use: float) -> None:
        self.parent = parent
        self.hashes = hashes
        self.start = start
        self.children: dict[bytes, Run] = {}
        self.refs = refs
        self.readers = 0
        self.last_use = last_use
        self.queued: tuple[int, float, int] | None = None

    @property
    def blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def end(self) -> int:
        return self.start + len(self.hashes) // HASH_BYTES


@dataclass(frozen=True, slots=True)
class Change:
    """What storing a chain did. `held`: its leading blocks that are here now; `evicted`: hashes that went, in the order they
    went; `stored`: the (parent, chain) run that came, if any."""

    held: int
    evicted: bytes
    stored: tuple[bytes | None, bytes] | None


class RunIndex:
    """Prefixes in `capacity_blocks` blocks of memory."""

    def __init__(self, capacity_blocks: int, policy: EvictionPolicy = "referenced", ttl_s: float = 60.0) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks: expected a positive number, got {capacity_blocks}")
        self.capacity_blocks, self.policy, self.ttl_s = capacity_blocks, policy, ttl_s
        self.used_blocks = self.referenced_blocks = 0
        self._root = Run(None, b"", 0, 0, 0.0)
        self._ends: dict[bytes, Run] = {}  # last block of each run
        self._heap: list[tuple[int, float, int, Run]] = []
        self._queued = 0
        self._order = 0
        # Where the end of an evicted tail lay: (last block that stayed above it, blocks that went). A count sent for a run
        # whose tail just went still reaches the rest.
        self._gone: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        # Which run took over the one that ended with this block: counts come a moment after the run has grown.
        self._joined: OrderedDict[bytes, Run] = OrderedDict()

    # ---- finding -------------------------------------------------------------------------------------------------

    def lookup(self, chain: bytes) -> int:
        """How many leading blocks of `chain` are here."""
        return self._descend(chain)[1]

    def segments(self) -> list[tuple[bytes | None, bytes]]:
        """All blocks as (parent, chain) runs, parents before children."""
        found: list[tuple[bytes | None, bytes]] = []
        pending = list(self._root.children.values())
        while pending:
            run = pending.pop()
            found.append((self._before(run), run.hashes))
            pending.extend(run.children.values())
        return found

    def _descend(self, chain: bytes) -> tuple[Run, int]:
        """The deepest run on the way of `chain`, and how many blocks of the chain are held; it may be held in part."""
        run, at, length = self._root, 0, len(chain) // HASH_BYTES
        while at < length:
            child = run.children.get(chain[at * HASH_BYTES : (at + 1) * HASH_BYTES])
            if child is None:
                break
            common = common_blocks(child.hashes, chain, at)
            run, at = child, at + common
            if common < child.blocks:
                break
        return run, at

    def _before(self, run: Run) -> bytes | None:
        parent = run.parent
        return None if parent is None or parent is self._root else parent.hashes[-HASH_BYTES:]

    # ---- storing -------------------------------------------------------------------------------------------------

    def store(self, now: float, chain: bytes) -> Change:
        """Keep the blocks of `chain`, evicting others where it must; as many leading ones as there is room for."""
        run, held = self._descend(chain)
        missing = len(chain) // HASH_BYTES - held
        if not missing:
            self._use(run, held, now)
            return Change(held, b"", None)
        if held < run.end:
            run = self._split(run, held - run.start)
        if run is not self._root:
            run.last_use = max(run.last_use, now)
        run.readers += 1
        evicted = self._make_room(now, missing)
        run.readers -= 1
        room = min(missing, self.capacity_blocks - self.used_blocks)
        if not room:
            self._offer(run)
            return Change(held, evicted, None)
        added = chain[held * HASH_BYTES : (held + room) * HASH_BYTES]
        if self._gone:
            for at in range(0, len(added), HASH_BYTES):
                self._gone.pop(added[at : at + HASH_BYTES], None)
        new = Run(run, added, held, 0, now)
        run.children[added[:HASH_BYTES]] = new
        self._ends[added[-HASH_BYTES:]] = new
        self.used_blocks += room
        parent = None if run is self._root else run.hashes[-HASH_BYTES:]
        self._offer(self._merged(new))
        return Change(held + room, evicted, (parent, added))

    def touch(self, now: float, chain: bytes) -> None:
        """The leading held blocks of `chain` were used."""
        run, held = self._descend(chain)
        self._use(run, held, now)

    def _use(self, run: Run, held: int, now: float) -> None:
        """Use of a part of a run is use of its head alone; the tail keeps its own time."""
        if run is self._root:
            return
        if held < run.end and run.last_use < now:
            run = self._split(run, held - run.start)
        run.last_use = max(run.last_use, now)

    # ---- counts and readers --------------------------------------------------------------------------------------

    def apply_refs(self, last: bytes, blocks: int, delta: int) -> int:
        """Add `delta` to the counts of `last` and the `blocks - 1` blocks above it (never below 0); answers how many of
        them are here."""
        while last not in self._ends and last in self._gone:
            last, gone = self._gone[last]
            blocks -= gone
        run = self._find(last) if blocks > 0 else None
        changed = 0
        counted: list[Run] = []
        while run is not None and run is not self._root and changed < blocks:
            if blocks - changed < run.blocks:
                self._split(run, run.blocks - (blocks - changed))
            changed += run.blocks
            self._set_refs(run, max(0, run.refs + delta))
            counted.append(run)
            run = run.parent
        for run in counted:
            if run.parent is not None:
                self._offer(self._merged(run))
        return changed

    def reset_refs(self) -> None:
        """All counts become 0."""
        for run in self._runs():
            self._set_refs(run, 0)
            self._offer(run)

    def pin(self, chain: bytes) -> bytes:
        """Protect the leading held blocks of `chain`; answers what `unpin` takes (nothing where none is held)."""
        run, held = self._descend(chain)
        if not held:
            return b""
        if held < run.end:
            run = self._split(run, held - run.start)
        run.readers += 1
        return run.hashes[-HASH_BYTES:]

    def unpin(self, pinned: bytes) -> None:
        """Undo one `pin`. Blocks that were cleared meanwhile are gone with their protection."""
        run = self._ends.get(pinned)
        if run is not None and run.readers:
            run.readers -= 1
            self._offer(self._merged(run))

    def clear(self) -> None:
        """Nothing is held any more, whatever counts on it or reads it."""
        self._root.children = {}
        self._ends.clear()
        self._gone.clear()
        self._joined.clear()
        self._heap.clear()
        self._queued = self.used_blocks = self.referenced_blocks = 0

    def _set_refs(self, run: Run, refs: int) -> None:
        if (run.refs > 0) != (refs > 0):
            self.referenced_blocks += run.blocks if refs else -run.blocks
        run.refs = refs

    def _find(self, block: bytes) -> Run | None:
        """The run that ends with `block`, cut there if need be; None where the block is not here."""
        found = self._ends.get(block)
        if found is not None or not block:
            return found
        heir = self._joined.get(block)
        for _ in range(_MOST_HEIRS):
            if heir is None or heir.parent is not None:
                break
            heir = self._joined.get(heir.hashes[-HASH_BYTES:])
        if heir is not None and heir.parent is not None:
            found = self._cut_after(heir, block)
        return found if found is not None else self._search(block)

    def _search(self, block: bytes) -> Run | None:
        for run in self._runs():
            found = self._cut_after(run, block)
            if found is not None:
                return found
        return None

    def _cut_after(self, run: Run, block: bytes) -> Run | None:
        """The part of a run that ends with `block`, if it has that."""
        at = run.hashes.find(block)
        while at >= 0 and at % HASH_BYTES:
            at = run.hashes.find(block, at + 1)
        if at < 0:
            return None
        blocks = at // HASH_BYTES + 1
        return run if blocks == run.blocks else self._split(run, blocks)

    # ---- eviction ------------------------------------------------------------------------------------------------

    def _make_room(self, now: float, blocks: int) -> bytes:
        gone: list[bytes] = []
        while self.capacity_blocks - self.used_blocks < blocks and self._heap:
            band, used, order, run = heappop(self._heap)
            if run.queued != (band, used, order):
                continue
            run.queued = None
            self._queued -= 1
            if run.children or run.readers:
                continue
            key = rank(self.policy, run.refs, run.last_use)
            if key > (band, used) or not may_evict(self.policy, now, used, self.ttl_s):
                self._offer(run)
                if key > (band, used):
                    continue
                break
            gone.append(self._drop_tail(run, blocks - (self.capacity_blocks - self.used_blocks)))
        return b"".join(gone)

    def _drop_tail(self, run: Run, most: int) -> bytes:
        """Take up to `most` blocks off the end of a leaf; answers their hashes, last one first."""
        dropped = min(most, run.blocks)
        kept = run.blocks - dropped
        tail = run.hashes[kept * HASH_BYTES :]
        above = run.hashes[(kept - 1) * HASH_BYTES : kept * HASH_BYTES] if kept else self._before(run) or b""
        self._gone[tail[-HASH_BYTES:]] = (above, dropped)
        if len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)
        self.used_blocks -= dropped
        if run.refs:
            self.referenced_blocks -= dropped
        del self._ends[run.hashes[-HASH_BYTES:]]
        if kept:
            run.hashes = run.hashes[: kept * HASH_BYTES]
            self._ends[run.hashes[-HASH_BYTES:]] = run
            self._offer(run)
        else:
            parent = run.parent
            assert parent is not None
            del parent.children[tail[:HASH_BYTES]]
            run.parent = None
            if parent is not self._root:
                parent.last_use = max(parent.last_use, run.last_use)
                self._offer(self._merged(parent))
        return b"".join(tail[at : at + HASH_BYTES] for at in range(len(tail) - HASH_BYTES, -1, -HASH_BYTES))

    def _offer(self, run: Run) -> None:
        """Queue a leaf as a candidate unless it is queued at this rank or a lower one."""
        if run is self._root or run.children or run.readers:
            return
        key = rank(self.policy, run.refs, run.last_use)
        if run.queued is not None:
            if run.queued[:2] <= key:
                return
            self._queued -= 1
        self._order += 1
        run.queued = (*key, self._order)
        self._queued += 1
        heappush(self._heap, (*run.queued, run))
        if len(self._heap) > 2 * self._queued + 1024:
            self._heap = [entry for entry in self._heap if entry[3].queued == entry[:3]]
            heapify(self._heap)

    # ---- shape ---------------------------------------------------------------------------------------------------

    def _split(self, run: Run, blocks: int) -> Run:
        """Cut a run after its first `blocks` blocks; it keeps its end. The new run before it is answered."""
        parent = run.parent
        assert parent is not None and 0 < blocks < run.blocks
        upper = Run(parent, run.hashes[: blocks * HASH_BYTES], run.start, run.refs, run.last_use)
        parent.children[upper.hashes[:HASH_BYTES]] = upper
        run.hashes, run.start, run.parent = run.hashes[blocks * HASH_BYTES :], run.start + blocks, upper
        upper.children[run.hashes[:HASH_BYTES]] = run
        self._ends[upper.hashes[-HASH_BYTES:]] = upper
        return upper

    def _merged(self, run: Run) -> Run:
        """Join a run with its parent and its only child where nothing tells them apart; answers the run that remains."""
        parent = run.parent
        if parent is not None and parent is not self._root and self._alike(parent, run):
            self._join(parent, run)
        if len(run.children) == 1:
            (child,) = run.children.values()
            if self._alike(run, child):
                self._join(run, child)
                return child
        return run

    @staticmethod
    def _alike(upper: Run, lower: Run) -> bool:
        return (
            upper.refs == lower.refs
            and not upper.readers
            and len(upper.children) == 1
            and upper.last_use <= lower.last_use
        )

    def _join(self, upper: Run, lower: Run) -> None:
        """`lower` takes over what `upper` has. Used no later than `lower`, it would go right after it."""
        grand = upper.parent
        assert grand is not None
        end = upper.hashes[-HASH_BYTES:]
        del self._ends[end]
        self._joined[end] = lower
        if len(self._joined) > _MOST_JOINED:
            self._joined.popitem(last=False)
        lower.hashes, lower.start, lower.parent = upper.hashes + lower.hashes, upper.start, grand
        grand.children[lower.hashes[:HASH_BYTES]] = lower
        upper.parent = None
        if upper.queued is not None:
            upper.queued = None
            self._queued -= 1

    def _runs(self) -> Iterator[Run]:
        pending = list(self._root.children.values())
        while pending:
            run = pending.pop()
            yield run
            pending.extend(run.children.values())

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is wrong, when links, counts or candidates do not agree."""
        used = referenced = runs = 0
        for run in self._runs():
            parent = run.parent
            name = f"run [{run.start}, {run.end})"
            assert parent is not None and parent.children.get(run.hashes[:HASH_BYTES]) is run, (
                f"{name}: not its parent's"
            )
            assert parent is self._root or parent.end == run.start, f"{name}: not after its parent"
            assert self._ends.get(run.hashes[-HASH_BYTES:]) is run, f"{name}: end not indexed"
            assert run.children or run.readers or run.queued is not None, f"{name}: can be evicted but is not queued"
            used, runs = used + run.blocks, runs + 1
            referenced += run.blocks if run.refs else 0
        assert used == self.used_blocks <= self.capacity_blocks, f"used: {self.used_blocks}, counted {used}"
        assert referenced == self.referenced_blocks, f"referenced: {self.referenced_blocks}, counted {referenced}"
        assert runs == len(self._ends), "ends left over"
