"""HostIndex: which KV blocks a node holds in host memory, where, and which goes first when room is needed.

Held blocks always form prefixes: a block is only here while its parent is. So questions about a chain are binary searches,
and only tails (blocks without children) are ever evicted. A tail's use counts for everything above it: a parent inherits
the use of an evicted child, so touching a context costs one step, not one a block.

A slot's life:  free -> writing -> written (waits for its parent) -> ready -> free.  Only ready blocks can be found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, TypeAlias, get_args

from apps.kvcache.domain.hashing import HASH_BYTES

EvictionPolicy: TypeAlias = Literal["referenced", "lru", "ttl-pin"]
Stopped: TypeAlias = Literal["full", "parent-missing", "busy"]
Run: TypeAlias = "tuple[bytes | None, bytes]"

_FREE, _WRITING, _WRITTEN, _READY = range(4)
_NO_SLOT = -1


def rank(policy: EvictionPolicy, refs: int, last_use: float) -> tuple[int, float]:
    """The order in which blocks go, lowest first: by band (`referenced`: those nobody counts on before the others), then
    oldest use."""
    return int(policy == "referenced" and refs > 0), last_use


def may_evict(policy: EvictionPolicy, now: float, last_use: float, ttl_s: float) -> bool:
    """Whether the block that goes first may go at all: `ttl-pin` keeps what was used within the last `ttl_s`."""
    return policy != "ttl-pin" or now - last_use >= ttl_s


@dataclass(frozen=True, slots=True)
class Reservation:
    """`slots`: (block's index in the chain, slot to write it to), a leading part of what was missing. `evicted`: hashes
    that had to go, in the order they went. `stopped`: why not all of the chain fits, or None when it does."""

    slots: list[tuple[int, int]]
    evicted: bytes
    stopped: Stopped | None


class HostIndex:
    """Index of `capacity_blocks` slots, 0 .. capacity - 1; it knows nothing of the bytes in them.

    Policies, each tail first and never what is being written or read:
    `referenced`: blocks no live branch counts on, then oldest use; `lru`: oldest use;
    `ttl-pin`: oldest use, but nothing used within the last `ttl_s` (a reservation then stops as `full`).
    """

    def __init__(self, capacity_blocks: int, policy: EvictionPolicy = "referenced", ttl_s: float = 60.0) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks: expected a positive number, got {capacity_blocks}")
        if policy not in get_args(EvictionPolicy):
            raise ValueError(f"policy: expected one of {', '.join(get_args(EvictionPolicy))}, got {policy!r}")
        self.capacity_blocks, self.policy, self.ttl_s = capacity_blocks, policy, ttl_s
        self.referenced_blocks = 0
        self._slot_of: dict[bytes, int] = {}
        self._roots: set[int] = set()
        self._free = list(range(capacity_blocks - 1, -1, -1))
        self._hash: list[bytes] = [b""] * capacity_blocks
        self._parent = [_NO_SLOT] * capacity_blocks
        self._kids: list[int | set[int] | None] = [None] * capacity_blocks
        self._state = [_FREE] * capacity_blocks
        self._refs = [0] * capacity_blocks
        self._readers = [0] * capacity_blocks
        self._last_use = [0.0] * capacity_blocks
        self._doomed: set[int] = set()  # given up; freed once nobody reads or writes them and their children are gone
        # Candidates (band, last use, order, slot). Later use is found out when popped; a lower key is pushed at once.
        self._heap: list[tuple[int, float, int, int]] = []
        self._queued: dict[int, tuple[int, float, int]] = {}
        self._order = 0
        # Parents of blocks lately gone, so that a count sent for a run whose tail just went still reaches the rest.
        self._gone: OrderedDict[bytes, bytes | None] = OrderedDict()
        self._max_gone = max(1024, capacity_blocks // 16)

    # ---- finding -------------------------------------------------------------------------------------------------

    @property
    def used_blocks(self) -> int:
        """Slots in use, those being written included."""
        return self.capacity_blocks - len(self._free)

    def lookup(self, chain: bytes) -> int:
        """How many leading blocks of `chain` can be read now."""
        return self._leading(chain, _READY)

    def slots(self, hashes: bytes) -> list[int]:
        """Slots of the leading readable blocks of `hashes`."""
        return [self._slot_of[block] for block in _blocks(hashes[: self.lookup(hashes) * HASH_BYTES])]

    def segments(self) -> list[Run]:
        """All readable blocks as (parent, chain) runs, parents before children."""
        runs: list[Run] = []
        pending = [slot for slot in self._roots if self._state[slot] == _READY]
        while pending:
            slot = pending.pop()
            above = self._parent[slot]
            parent = None if above == _NO_SLOT else self._hash[above]
            run = [self._hash[slot]]
            kids = self._ready_kids(slot)
            while len(kids) == 1:
                run.append(self._hash[kids[0]])
                kids = self._ready_kids(kids[0])
            runs.append((parent, b"".join(run)))
            pending.extend(kids)
        return runs

    def _leading(self, chain: bytes, least_state: int) -> int:
        """Leading blocks of `chain` in `least_state` or beyond; every prefix of such a run is one too."""
        low, high = 0, len(chain) // HASH_BYTES
        probe = high
        while low < high:
            slot = self._slot_of.get(chain[(probe - 1) * HASH_BYTES : probe * HASH_BYTES])
            if slot is not None and self._state[slot] >= least_state:
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(self, now: float, parent: bytes | None, chain: bytes) -> Reservation:
        """Take slots for those blocks of `chain` (which follows `parent`) that are not here, evicting what must go.

        The reserved blocks belong to the caller until it gives each to `commit` or, without having written it, to
        `remove`. Blocks that another caller is writing are left to it.
        """
        present = self._leading(chain, _WRITING)
        above = self._slot_of[chain[(present - 1) * HASH_BYTES : present * HASH_BYTES]] if present else _NO_SLOT
        if not present and parent is not None:
            above = self._slot_of.get(parent, _NO_SLOT)
            if above == _NO_SLOT:
                return Reservation([], b"", "parent-missing")
        if above in self._doomed:
            return Reservation([], b"", "busy")
        if above == _NO_SLOT:
            return self._fill(now, above, chain, 0)
        self._last_use[above] = max(self._last_use[above], now)
        self._readers[above] += 1
        try:
            return self._fill(now, above, chain, present)
        finally:
            self._release_reader(above)

    def _fill(self, now: float, above: int, chain: bytes, first: int) -> Reservation:
        slots: list[tuple[int, int]] = []
        evicted: list[bytes] = []
        stopped: Stopped | None = None
        for index in range(first, len(chain) // HASH_BYTES):
            if not self._free and not self._evict_one(now, evicted):
                stopped = "full"
                break
            slot = self._free.pop()
            block = chain[index * HASH_BYTES : (index + 1) * HASH_BYTES]
            self._slot_of[block] = slot
            self._hash[slot] = block
            self._state[slot] = _WRITING
            self._last_use[slot] = now
            self._link(slot, above)
            slots.append((index, slot))
            above = slot
        return Reservation(slots, b"".join(evicted), stopped)

    def commit(self, hashes: bytes) -> list[Run]:
        """The caller has written these blocks. Answers with what became readable by it, as (parent, chain) runs: a block
        becomes readable when it and all before it are written. Hashes that are not being written are left alone."""
        ready: list[int] = []
        for block in _blocks(hashes):
            slot = self._slot_of.get(block, _NO_SLOT)
            if slot == _NO_SLOT or self._state[slot] != _WRITING:
                continue
            self._state[slot] = _WRITTEN
            if slot in self._doomed:
                self._reap(slot)
            else:
                self._make_ready(slot, ready)
        return self._runs(ready)

    def _make_ready(self, slot: int, ready: list[int]) -> None:
        pending = [slot]
        while pending:
            slot = pending.pop()
            above = self._parent[slot]
            if self._state[slot] != _WRITTEN or (above != _NO_SLOT and self._state[above] != _READY):
                continue
            self._state[slot] = _READY
            ready.append(slot)
            pending.extend(self._each_kid(slot))
            self._offer(slot)

    def _runs(self, slots: list[int]) -> list[Run]:
        runs: list[Run] = []
        run: list[bytes] = []
        parent, last = None, _NO_SLOT
        for slot in slots:
            above = self._parent[slot]
            if run and above != last:
                runs.append((parent, b"".join(run)))
                run = []
            if not run:
                parent = None if above == _NO_SLOT else self._hash[above]
            run.append(self._hash[slot])
            last = slot
        if run:
            runs.append((parent, b"".join(run)))
        return runs

    # ---- use and references --------------------------------------------------------------------------------------

    def touch(self, now: float, hashes: bytes) -> None:
        """The run `hashes` (parents first) was used: its deepest held block, and with it all above, counts as used now."""
        held = self._leading(hashes, _WRITING)
        if held:
            slot = self._slot_of[hashes[(held - 1) * HASH_BYTES : held * HASH_BYTES]]
            self._last_use[slot] = max(self._last_use[slot], now)

    def pin(self, hashes: bytes) -> int:
        """Protect the leading readable blocks of `hashes` until `unpin`; answers how many. Unpin exactly those."""
        held = self.lookup(hashes)
        for block in _blocks(hashes[: held * HASH_BYTES]):
            self._readers[self._slot_of[block]] += 1
        return held

    def unpin(self, hashes: bytes) -> None:
        """Undo one `pin` of these blocks. Raises ValueError for a block that is not pinned."""
        for block in reversed(list(_blocks(hashes))):
            slot = self._slot_of.get(block, _NO_SLOT)
            if slot == _NO_SLOT or self._readers[slot] == 0:
                raise ValueError(f"hashes: block {block.hex()} is not pinned")
            self._release_reader(slot)

    def _release_reader(self, slot: int) -> None:
        self._readers[slot] -= 1
        if slot in self._doomed:
            self._reap(slot)
        else:
            self._offer(slot)

    def apply_refs(self, last: bytes, blocks: int, delta: int) -> int:
        """Add `delta` to the counts of `last` and the `blocks - 1` blocks above it (never below 0); answers how many of
        them are here. Blocks that just went are passed over, their counts went with them."""
        block: bytes | None = last
        while block is not None and block not in self._slot_of and blocks > 0:
            block = self._gone.get(block)
            blocks -= 1
        slot = self._slot_of.get(block, _NO_SLOT) if block is not None else _NO_SLOT
        changed = 0
        while slot != _NO_SLOT and changed < blocks:
            before = self._refs[slot]
            after = max(0, before + delta)
            self._refs[slot] = after
            if (before > 0) != (after > 0):
                self.referenced_blocks += 1 if after else -1
                self._offer(slot)
            changed += 1
            slot = self._parent[slot]
        return changed

    def reset_refs(self) -> None:
        """All counts become 0."""
        self._refs = [0] * self.capacity_blocks
        self.referenced_blocks = 0
        for slot in self._slot_of.values():
            self._offer(slot)

    def refs(self, block: bytes) -> int:
        """The count of one block; 0 when it is not here."""
        slot = self._slot_of.get(block)
        return 0 if slot is None else self._refs[slot]

    # ---- giving up -----------------------------------------------------------------------------------------------

    def remove(self, hashes: bytes) -> bytes:
        """Give up these blocks and all after them, whatever counts on them; answers the hashes that could be read before,
        tails first. A caller also gives up its own reservations so. Slots being read, or written by another caller, are
        freed when that ends; until then the same blocks cannot be reserved again (`busy`)."""
        removed: list[bytes] = []
        for block in _blocks(hashes):
            slot = self._slot_of.get(block, _NO_SLOT)
            if slot == _NO_SLOT:
                continue
            if self._state[slot] == _WRITING:
                self._state[slot] = _WRITTEN
            removed.extend(self._doom(slot))
        return b"".join(reversed(removed))

    def clear(self) -> None:
        """Give up everything, as `remove` does."""
        self.remove(b"".join(self._hash[slot] for slot in self._roots))

    def _doom(self, top: int) -> list[bytes]:
        below = [top]
        for slot in below:
            below.extend(self._each_kid(slot))
        found = [self._hash[slot] for slot in below if self._state[slot] == _READY]
        for slot in below:
            self._doomed.add(slot)
            if self._state[slot] == _READY:
                self._state[slot] = _WRITTEN
        for slot in reversed(below):
            self._reap(slot)
        return found

    def _reap(self, slot: int) -> None:
        while (
            slot in self._doomed
            and self._kids[slot] is None
            and self._state[slot] == _WRITTEN
            and not self._readers[slot]
        ):
            above = self._parent[slot]
            self._doomed.discard(slot)
            self._free_slot(slot)
            if above == _NO_SLOT:
                return
            self._offer(above)
            slot = above

    def _evict_one(self, now: float, evicted: list[bytes]) -> bool:
        while self._heap:
            band, used, order, slot = heappop(self._heap)
            if self._queued.get(slot) != (band, used, order):
                continue
            del self._queued[slot]
            if not self._evictable(slot):
                continue
            if self._key(slot) > (band, used):
                self._offer(slot)
                continue
            if not may_evict(self.policy, now, used, self.ttl_s):
                self._offer(slot)
                return False
            above = self._parent[slot]
            evicted.append(self._hash[slot])
            self._free_slot(slot)
            if above != _NO_SLOT:
                self._last_use[above] = max(self._last_use[above], used)
                self._offer(above)
            return True
        return False

    def _evictable(self, slot: int) -> bool:
        return (
            self._state[slot] == _READY
            and self._kids[slot] is None
            and not self._readers[slot]
            and slot not in self._doomed
        )

    def _key(self, slot: int) -> tuple[int, float]:
        return rank(self.policy, self._refs[slot], self._last_use[slot])

    def _offer(self, slot: int) -> None:
        """Queue `slot` as a candidate unless it is none, or is queued at this key or a lower one."""
        if not self._evictable(slot):
            return
        key = self._key(slot)
        queued = self._queued.get(slot)
        if queued is not None and queued[:2] <= key:
            return
        self._order += 1
        entry = (*key, self._order)
        self._queued[slot] = entry
        heappush(self._heap, (*entry, slot))
        if len(self._heap) > 2 * len(self._queued) + 1024:
            self._heap = [(*kept, candidate) for candidate, kept in self._queued.items()]
            heapify(self._heap)

    # ---- links ---------------------------------------------------------------------------------------------------

    def _link(self, slot: int, above: int) -> None:
        self._parent[slot] = above
        if above == _NO_SLOT:
            self._roots.add(slot)
            return
        kids = self._kids[above]
        if kids is None:
            self._kids[above] = slot
        elif isinstance(kids, int):
            self._kids[above] = {kids, slot}
        else:
            kids.add(slot)

    def _unlink(self, slot: int) -> None:
        above = self._parent[slot]
        if above == _NO_SLOT:
            self._roots.discard(slot)
            return
        kids = self._kids[above]
        if isinstance(kids, set):
            kids.discard(slot)
            if len(kids) == 1:
                self._kids[above] = kids.pop()
        else:
            self._kids[above] = None

    def _each_kid(self, slot: int) -> list[int]:
        kids = self._kids[slot]
        if kids is None:
            return []
        return [kids] if isinstance(kids, int) else sorted(kids)

    def _ready_kids(self, slot: int) -> list[int]:
        return [kid for kid in self._each_kid(slot) if self._state[kid] == _READY]

    def _free_slot(self, slot: int) -> None:
        above = self._parent[slot]
        block = self._hash[slot]
        self._gone[block] = None if above == _NO_SLOT else self._hash[above]
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)
        self._unlink(slot)
        del self._slot_of[block]
        self._queued.pop(slot, None)
        self.referenced_blocks -= self._refs[slot] > 0
        self._refs[slot] = 0
        self._state[slot] = _FREE
        self._hash[slot] = b""
        self._free.append(slot)

    # ---- proof ---------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError naming what is wrong, when links, counts or candidates do not agree."""
        assert len(self._slot_of) + len(self._free) == self.capacity_blocks, "slots lost or doubled"
        assert self.referenced_blocks == sum(self._refs[slot] > 0 for slot in self._slot_of.values()), (
            "referenced_blocks"
        )
        for block, slot in self._slot_of.items():
            above = self._parent[slot]
            assert self._hash[slot] == block and self._state[slot] != _FREE, f"slot {slot}: wrong block"
            assert self._readers[slot] >= 0, f"slot {slot}: negative readers"
            if above == _NO_SLOT:
                assert slot in self._roots, f"slot {slot}: not a root"
            else:
                assert slot in self._each_kid(above), f"slot {slot}: parent does not know it"
                assert self._state[slot] != _READY or self._state[above] == _READY, (
                    f"slot {slot}: readable before its parent"
                )
                assert above not in self._doomed or slot in self._doomed, f"slot {slot}: outlives its parent"
            if self._evictable(slot):
                assert slot in self._queued, f"slot {slot}: can be evicted but is not queued"


def _blocks(hashes: bytes) -> Iterator[bytes]:
    for start in range(0, len(hashes), HASH_BYTES):
        yield hashes[start : start + HASH_BYTES]
