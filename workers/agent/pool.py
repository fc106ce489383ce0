"""A node's host pool (L2): `HostIndex` decides what is held and what goes, a `PoolFile` holds the bytes.

Full blocks of prompts and outputs are written through in both phases. A tail block (the tokens `[16k, n)` of a prompt
after its last full block) waits in one of a few extra slots for its hand-over and expires with it; it is never announced.
Every method is safe from any thread; bytes are copied outside the lock, on slots that are reserved or pinned.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from apps.kvcache.domain.eviction import HostIndex
from workers.agent.engines.base import EngineSink, RefChange, Segment
from workers.agent.shared_memory import (
    HASH_BYTES,
    NO_PARENT,
    Floats,
    PoolError,
    PoolFile,
    PoolGeometry,
    Record,
    checksum,
)

TAIL_SLOTS = 64
FRAME = struct.Struct("<I16sQ")


@dataclass(frozen=True, slots=True)
class Missing:
    """A reserved slot for `block`, number `index` of its chain; its owner fills or gives it up."""

    index: int
    block: bytes
    parent: bytes
    slot: int


@dataclass(slots=True)
class _Tail:
    slot: int
    tokens: int
    expires_at: float
    wanted_by: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Hold:
    """Blocks pinned for the hand-over of `request_id`."""

    expires_at: float
    pinned: bytes
    request_id: str


class KvPool:
    """One node's pool over `file`, whose last TAIL_SLOTS slots are for tails. `sink` hears of changes, in their order."""

    def __init__(self, file: PoolFile, policy: str, now: Callable[[], float], sink: EngineSink) -> None:
        self.file = file
        self.capacity_blocks = file.slots - TAIL_SLOTS
        self.checksum_failures = 0
        self.refused_writes = 0
        self.adopted_blocks = 0
        self._now = now
        self._sink = sink
        self._lock = threading.RLock()
        self._index = HostIndex(self.capacity_blocks, policy)  # type: ignore[arg-type]
        self._physical = list(range(self.capacity_blocks))
        self._tails: dict[bytes, _Tail] = {}
        self._free_tails = list(range(self.capacity_blocks, file.slots))
        self._held: list[_Hold] = []

    # --- numbers ----------------------------------------------------------------------------------------------

    @property
    def used_blocks(self) -> int:
        return self._index.used_blocks

    @property
    def referenced_blocks(self) -> int:
        return self._index.referenced_blocks

    def lookup(self, chain: bytes) -> int:
        """Leading blocks of `chain` that can be read."""
        with self._lock:
            return self._index.lookup(chain)

    def segments(self) -> list[Segment]:
        with self._lock:
            return [Segment(parent, chain) for parent, chain in self._index.segments()]

    def apply_refs(self, changes: Iterable[RefChange], reset: bool) -> None:
        with self._lock:
            if reset:
                self._index.reset_refs()
            for change in changes:
                self._index.apply_refs(change.last, change.blocks, change.delta)

    # --- protecting -------------------------------------------------------------------------------------------

    def acquire(self, chain: bytes) -> bytes:
        """Pin and touch the leading readable blocks of `chain`; answers them, for `release`."""
        with self._lock:
            pinned = chain[: HASH_BYTES * self._index.pin(chain)]
            self._index.touch(self._now(), pinned)
            return pinned

    def release(self, pinned: bytes) -> None:
        with self._lock:
            self._index.unpin(pinned)

    def hold_until(self, chain: bytes, expires_at: float, request_id: str = "") -> int:
        """Pin the leading readable blocks of `chain` until `expires_at` or the request's release; answers how many."""
        pinned = self.acquire(chain)
        with self._lock:
            self._held.append(_Hold(expires_at, pinned, request_id))
        return len(pinned) // HASH_BYTES

    def release_handoff(self, request_id: str) -> bool:
        """The request's hand-over needs nothing here any more: neither pinned blocks nor a tail. False if it had none."""
        with self._lock:
            released = self._let_go([hold for hold in self._held if hold.request_id == request_id])
            for block, tail in list(self._tails.items()):
                if request_id in tail.wanted_by:
                    released = True
                    tail.wanted_by.discard(request_id)
                    if not tail.wanted_by:
                        self._drop_tail(block)
            return released

    def _let_go(self, holds: list[_Hold]) -> bool:
        for hold in holds:
            self._held.remove(hold)
            self._index.unpin(hold.pinned)
        return bool(holds)

    def expire(self) -> None:
        """Let go of hand-overs whose time is up."""
        now = self._now()
        with self._lock:
            self._let_go([hold for hold in self._held if hold.expires_at <= now])
            for block, tail in list(self._tails.items()):
                if tail.expires_at <= now:
                    self._drop_tail(block)

    # --- writing ----------------------------------------------------------------------------------------------

    def store(self, chain: bytes, write: Callable[[int, Floats], None]) -> int:
        """Write those blocks of `chain` (from a prompt's start) that are missing, by `write(index in chain, block)`.
        Answers how many leading blocks can be read afterwards: fewer than asked where there is no room."""
        pending = self.reserve(chain)
        try:
            while pending:
                missing = pending[0]
                block = self.open(missing)
                if block is None:
                    break
                write(missing.index, block)
                self.seal(missing, block)
                pending.pop(0)
        finally:
            self.give_up(b"".join(missing.block for missing in pending))
        return self.lookup(chain)

    def reserve(self, chain: bytes) -> list[Missing]:
        """Slots for the missing blocks of `chain` (from a prompt's start), as many as find room."""
        with self._lock:
            reservation = self._index.reserve(self._now(), None, chain)
            if reservation.evicted:
                self._sink.removed(reservation.evicted)
            return [
                Missing(index, _at(chain, index), _at(chain, index - 1) if index else NO_PARENT, self._physical[slot])
                for index, slot in reservation.slots
            ]

    def open(self, missing: Missing) -> Floats | None:
        """The bytes of a reserved slot, to be written, or None, and counted, where the host has no memory left."""
        block = self.file.begin(missing.slot)
        if block is None:
            self.refused_writes += 1
        return block

    def seal(self, missing: Missing, block: Floats, expected: int | None = None) -> bool:
        """The opened `block` is written and can be read from now on. False, and counted, where its checksum is not
        `expected`; the caller then gives the slot up."""
        value = checksum(block)
        if expected is not None and value != expected:
            self.checksum_failures += 1
            return False
        self._finish(missing, value)
        return True

    def fill(self, missing: Missing, expected: int, data: Floats | memoryview) -> bool:
        """Copy a fetched block into its slot. False, and counted, where its checksum is not `expected` or the host has no
        memory left; the caller then gives the slot up."""
        block = self.file.put(missing.slot, data)
        if block is None:
            self.refused_writes += 1
            return False
        return self.seal(missing, block, expected)

    def give_up(self, blocks: bytes) -> None:
        """Drop blocks and all that follow them: reserved ones that were not written, or broken ones."""
        if not blocks:
            return
        with self._lock:
            removed = self._index.remove(blocks)
            if removed:
                self._sink.removed(removed)

    def _finish(self, missing: Missing, value: int) -> None:
        tokens = self.file.geometry.block_tokens
        self.file.finish(missing.slot, Record(missing.block, missing.parent, tokens, value))
        with self._lock:
            for parent, chain in self._index.commit(missing.block):
                self._sink.stored(parent, chain)

    # --- reading ----------------------------------------------------------------------------------------------

    def load(self, pinned: bytes, read: Callable[[int, Floats], None]) -> int:
        """Give the blocks of `pinned` in order to `read(index, block)`; answers how many were sound. A broken block is
        dropped with all that follow it, and counted."""
        for index in range(len(pinned) // HASH_BYTES):
            block = _at(pinned, index)
            with self._lock:
                slots = self._index.slots(block)
                slot = self._physical[slots[0]] if slots else None
            if slot is None or not self._sound(slot, block):
                return index
            read(index, self.file.block(slot))
        return len(pinned) // HASH_BYTES

    def _sound(self, slot: int, block: bytes) -> bool:
        record = self.file.record(slot)
        if record is not None and record.block == block and checksum(self.file.block(slot)) == record.checksum:
            return True
        self.checksum_failures += 1
        self.file.wipe(slot)
        self.give_up(block)
        self._shorten_holds(block)
        return False

    def _shorten_holds(self, broken: bytes) -> None:
        """Hand-overs no longer protect `broken` and what follows it, so that it can be stored anew."""
        with self._lock:
            for hold in self._held:
                blocks = [_at(hold.pinned, index) for index in range(len(hold.pinned) // HASH_BYTES)]
                if broken in blocks:
                    end = blocks.index(broken) * HASH_BYTES
                    self._index.unpin(hold.pinned[end:])
                    hold.pinned = hold.pinned[:end]

    def frame(self, block: bytes) -> bytes | None:
        """One block, full or tail, as `length, hash, checksum, bytes`; None where it is not here. The reader checks it."""
        with self._lock:
            tail = self._tails.get(block)
            pinned = b"" if tail is not None else block[: HASH_BYTES * self._index.pin(block)]
            if tail is None and not pinned:
                return None
            slot = tail.slot if tail is not None else self._physical[self._index.slots(block)[0]]
        try:
            record = self.file.record(slot)
            if record is None or record.block != block:
                return None
            data = self.file.block(slot).tobytes()
            return FRAME.pack(len(data), block, record.checksum) + data
        finally:
            if pinned:
                self.release(pinned)

    def locate(self, block: bytes) -> tuple[int, int] | None:
        """The file's slot of a full block or tail that can be read, and its checksum."""
        with self._lock:
            tail = self._tails.get(block)
            slots = [tail.slot] if tail is not None else [self._physical[slot] for slot in self._index.slots(block)]
        record = self.file.record(slots[0]) if slots else None
        return None if record is None or record.block != block else (slots[0], record.checksum)

    # --- tails ------------------------------------------------------------------------------------------------

    def put_tail(
        self,
        block: bytes,
        parent: bytes,
        tokens: int,
        write: Callable[[Floats], None],
        until: float,
        request_id: str = "",
        expected: int | None = None,
    ) -> bool:
        """Keep a partial block of `tokens` tokens until `until` or the release of all requests that want it; False where no
        tail slot is free, or where the checksum of what was written is not `expected` (counted)."""
        with self._lock:
            known = self._tails.get(block)
            if known is not None:
                known.expires_at = max(known.expires_at, until)
                known.wanted_by.add(request_id)
                return True
            self.expire()
            if not self._free_tails:
                return False
            slot = self._free_tails.pop()
        view = self.file.begin(slot)
        if view is None:
            self.refused_writes += 1
            with self._lock:
                self._free_tails.append(slot)
            return False
        write(view)
        value = checksum(view)
        if expected is not None and value != expected:
            self.checksum_failures += 1
            self.file.wipe(slot)
            with self._lock:
                self._free_tails.append(slot)
            return False
        self.file.finish(slot, Record(block, parent, tokens, value))
        with self._lock:
            twin = self._tails.get(block)
            if twin is not None:
                self._drop_tail(block)
                until, request_ids = max(until, twin.expires_at), twin.wanted_by | {request_id}
            else:
                request_ids = {request_id}
            self._tails[block] = _Tail(slot, tokens, until, request_ids)
        return True

    def tail(self, block: bytes) -> Floats | None:
        """A copy of a tail block, or None where it is gone or broken (then counted)."""
        with self._lock:
            entry = self._tails.get(block)
            if entry is None:
                return None
            copy = self.file.block(entry.slot).copy()
            record = self.file.record(entry.slot)
            if record is None or checksum(copy) != record.checksum:
                self.checksum_failures += 1
                self._drop_tail(block)
                return None
            return copy

    def _drop_tail(self, block: bytes) -> None:
        slot = self._tails.pop(block).slot
        self.file.wipe(slot)
        self._free_tails.append(slot)

    # --- coming back ------------------------------------------------------------------------------------------

    def adopt(self) -> int:
        """Take over what a former process left in the file; answers the blocks. Their bytes are checked when read."""
        found: dict[bytes, tuple[int, bytes]] = {}
        for slot in range(self.capacity_blocks):
            record = self.file.record(slot)
            if record is not None and record.tokens == self.file.geometry.block_tokens:
                found[record.block] = (slot, record.parent)
        for slot in range(self.capacity_blocks, self.file.slots):
            self.file.wipe(slot)
        children: dict[bytes, list[bytes]] = {}
        for block, (_, parent) in found.items():
            children.setdefault(parent, []).append(block)
        pending = [(block, b"") for block in children.get(NO_PARENT, [])]
        with self._lock:
            while pending:
                block, above = pending.pop()
                reserved = self._index.reserve(self._now(), above or None, block).slots
                if not reserved:
                    continue
                self._place(reserved[0][1], found[block][0])
                self._index.commit(block)
                self.adopted_blocks += 1
                pending.extend((child, block) for child in children.get(block, []))
        return self.adopted_blocks

    def _place(self, slot: int, physical: int) -> None:
        """Let the index's `slot` stand for the file's slot `physical`."""
        other = self._physical.index(physical)
        self._physical[slot], self._physical[other] = self._physical[other], self._physical[slot]

    def close(self, unlink: bool) -> None:
        self.file.close(unlink)

    def check_integrity(self, idle: bool = False) -> None:
        """Raises AssertionError where index, slots and records disagree; `idle`: nobody may be writing or reading."""
        with self._lock:
            self._index.check_integrity()
            assert sorted(self._physical) == list(range(self.capacity_blocks)), "slots: no permutation"
            used = sorted(tail.slot for tail in self._tails.values())
            assert sorted(used + self._free_tails) == list(range(self.capacity_blocks, self.file.slots)), "tail slots"
            held = 0
            for _, chain in self._index.segments():
                for index in range(len(chain) // HASH_BYTES):
                    block = _at(chain, index)
                    record = self.file.record(self._physical[self._index.slots(block)[0]])
                    assert record is not None and record.block == block, f"block {block.hex()}: wrong record"
                    held += 1
            if idle:
                assert held == self._index.used_blocks, "blocks reserved and never written or given up"


def open_pool(
    folder: Path,
    node: str,
    geometry: PoolGeometry,
    capacity_blocks: int,
    policy: str,
    now: Callable[[], float],
    sink: EngineSink,
) -> tuple[KvPool, TextIO]:
    """The pool of `node`, whose name is kept in `folder/pool.json`: adopted where a former process left one of this shape,
    else new. Answers it and an open lock file, to be closed after the pool. Raises PoolError, also while another process
    runs this node."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "pool.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise PoolError(f"nodes: {node} already runs with this data folder") from None
    slots = capacity_blocks + TAIL_SLOTS
    kept = folder / "pool.json"
    try:
        former = PoolFile.open(json.loads(kept.read_text())["name"], writable=True)
    except (OSError, ValueError, KeyError, TypeError, PoolError):
        former = None
    if former is not None and former.geometry == geometry and former.slots == slots:
        pool = KvPool(former, policy, now, sink)
        pool.adopt()
        return pool, lock
    if former is not None:
        former.close(unlink=True)
    try:
        file = PoolFile.create(f"switchyard-{node}-{secrets.token_hex(6)}", geometry, slots)
    except PoolError:
        lock.close()
        raise
    temporary = kept.with_suffix(f".{os.getpid()}.new")
    temporary.write_text(json.dumps({"name": file.name}))
    temporary.replace(kept)
    return KvPool(file, policy, now, sink), lock


def _at(chain: bytes, index: int) -> bytes:
    return chain[index * HASH_BYTES : (index + 1) * HASH_BYTES]
