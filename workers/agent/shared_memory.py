"""The file of a host pool: fixed-size KV blocks in POSIX shared memory, readable by every process of the host.

    header 4096 bytes | one 64-byte record a slot | blocks, page-aligned

A record has the block's hash, its parent's, the checksum of its bytes, and a version that is odd while the slot is being
written. All of it lies in shared memory, so a pool outlives its process: peers go on reading it, and the node adopts it
when it comes back. Memory is taken slot by slot; where the host has none left, a write is refused instead of crashing.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
SHARED_MEMORY_DIR = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())  # noqa: S108
HASH_BYTES = 16
NO_PARENT = bytes(HASH_BYTES)
_MAGIC = b"SWYPOOL2"
_HEADER = struct.Struct("<8sIIIIQQ16s")
_HEADER_BYTES = 4096
_RECORD = np.dtype(
    [
        ("version", "<u8"),
        ("checksum", "<u8"),
        ("hash", "u1", (HASH_BYTES,)),
        ("parent", "u1", (HASH_BYTES,)),
        ("tokens", "<u4"),
        ("unused", "u1", (12,)),
    ]
)
_NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,200}$")


class PoolError(Exception):
    """A pool file that is not there, is of another model or shape, or cannot be made."""


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Shape of a block `[layers, 2, kv_heads, block_tokens, head_dim]` (float32) and the weights it belongs to."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    fingerprint: bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return 4 * int(np.prod(self.shape))


class Record(NamedTuple):
    """What a slot holds: `tokens` of them are valid."""

    block: bytes
    parent: bytes
    tokens: int
    checksum: int


def checksum(block: Floats | memoryview) -> int:
    """CRC-32 of the first half of a block's bytes, then of the second. It finds accidents, in a fifth of a digest's time."""
    data = block.data.cast("B") if isinstance(block, np.ndarray) else block
    half = len(data) // 2
    return crc32(data[:half]) << 32 | crc32(data[half:])


class PoolFile:
    """A mapped pool file. One process writes it, any may read it."""

    def __init__(self, path: Path, geometry: PoolGeometry, slots: int, writable: bool, descriptor: int) -> None:
        self.path = path
        self.name = path.name
        self.geometry = geometry
        self.slots = slots
        self._fd = descriptor
        self._data_at = _data_offset(slots)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(descriptor, _file_bytes(geometry, slots), access=access)
        self._records = np.frombuffer(self._map, dtype=_RECORD, count=slots, offset=_HEADER_BYTES)
        count = slots * geometry.block_bytes // 4
        data = np.frombuffer(self._map, dtype=np.float32, count=count, offset=self._data_at)
        self._blocks: Floats = data.reshape(slots, *geometry.shape)
        self._backed = self._records["version"] > 0

    # --- open and close ---------------------------------------------------------------------------------------

    @classmethod
    def create(cls, name: str, geometry: PoolGeometry, slots: int) -> PoolFile:
        """A new pool of `slots` blocks, readable by this user alone. Raises PoolError."""
        path = _path(name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(descriptor, _file_bytes(geometry, slots))
            if not _back(descriptor, 0, _data_offset(slots)):
                path.unlink()
                raise PoolError(f"pool: no shared memory left in {path.parent} for the index of {slots} blocks")
        except OSError as error:
            raise PoolError(f"pool: cannot make {path} ({error.strerror})") from None
        shape = (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.block_tokens)
        header = _HEADER.pack(_MAGIC, *shape, geometry.block_bytes, slots, geometry.fingerprint)
        pool = cls(path, geometry, slots, True, descriptor)
        pool._map[: len(header)] = header
        return pool

    @classmethod
    def open(cls, name: str, writable: bool = False) -> PoolFile:
        """Map a pool that is there. Raises PoolError, also for a file that is no whole pool."""
        path = _path(name)
        try:
            descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise PoolError(f"pool: cannot open {name} ({error.strerror})") from None
        try:
            header = os.pread(descriptor, _HEADER.size, 0)
            if len(header) < _HEADER.size:
                raise PoolError(f"pool: {name} is no pool of this version")
            magic, layers, kv_heads, head_dim, block_tokens, block_bytes, slots, fingerprint = _HEADER.unpack(header)
            geometry = PoolGeometry(layers, kv_heads, head_dim, block_tokens, fingerprint)
            whole = magic == _MAGIC and block_bytes == geometry.block_bytes
            if not whole or os.fstat(descriptor).st_size != _file_bytes(geometry, slots):
                raise PoolError(f"pool: {name} is no pool of this version")
            return cls(path, geometry, slots, writable, descriptor)
        except PoolError:
            os.close(descriptor)
            raise

    def close(self, unlink: bool = False) -> None:
        """Let go of the file; `unlink` also deletes it (its memory is freed when the last reader lets go)."""
        if unlink:
            self.path.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- reading ----------------------------------------------------------------------------------------------

    def record(self, slot: int) -> Record | None:
        """What `slot` holds, or None while it is empty or being written."""
        entry = self._records[slot]
        before = int(entry["version"])
        found = Record(entry["hash"].tobytes(), entry["parent"].tobytes(), int(entry["tokens"]), int(entry["checksum"]))
        if before == 0 or before % 2 or int(entry["version"]) != before or found.tokens == 0:
            return None
        return found

    def find(self, blocks: Iterable[bytes]) -> dict[bytes, int]:
        """Slots of those of `blocks` that are here, by one pass over the index."""
        wanted = set(blocks)
        table = self._records["hash"].tobytes()
        found = {}
        for slot in range(self.slots):
            block = table[slot * HASH_BYTES : (slot + 1) * HASH_BYTES]
            if block in wanted:
                found[block] = slot
        return found

    def block(self, slot: int) -> Floats:
        """View of a slot's block. What it shows is only sure after comparing its checksum with the record's."""
        view: Floats = self._blocks[slot]
        return view

    def all_blocks(self) -> Floats:
        """View of all slots' blocks, one after the other."""
        return self._blocks

    # --- writing ----------------------------------------------------------------------------------------------

    def begin(self, slot: int) -> Floats | None:
        """Mark `slot` as being written and answer its block, or None where the host has no memory left for it."""
        if not self._backed[slot]:
            block_bytes = self.geometry.block_bytes
            if not _back(self._fd, self._data_at + slot * block_bytes, block_bytes):
                return None
            self._backed[slot] = True
        self._mark(slot)
        return self.block(slot)

    def put(self, slot: int, data: Floats | memoryview) -> Floats | None:
        """As `begin`, with the whole block's bytes written: by the kernel, which then neither clears new memory first nor
        takes a fault a page, so this costs half as much as copying into the view of `begin`."""
        self._mark(slot)
        rest = data.data.cast("B") if isinstance(data, np.ndarray) else data
        at = self._data_at + slot * self.geometry.block_bytes
        while len(rest):
            try:
                count = os.pwrite(self._fd, rest, at)
            except OSError as error:
                if error.errno in _NO_MEMORY:
                    return None
                raise
            rest, at = rest[count:], at + count
        self._backed[slot] = True
        return self.block(slot)

    def _mark(self, slot: int) -> None:
        entry = self._records[slot]
        version = int(entry["version"])
        entry["version"] = version + 1 + version % 2

    def finish(self, slot: int, record: Record) -> None:
        """End a write begun on `slot`."""
        entry = self._records[slot]
        entry["hash"] = np.frombuffer(record.block, np.uint8)
        entry["parent"] = np.frombuffer(record.parent, np.uint8)
        entry["tokens"] = record.tokens
        entry["checksum"] = record.checksum
        entry["version"] = int(entry["version"]) + 1

    def wipe(self, slot: int) -> None:
        """Empty a slot: its block can no longer be found by peers."""
        self._mark(slot)
        self.finish(slot, Record(NO_PARENT, NO_PARENT, 0, 0))


def _path(name: str) -> Path:
    if not _NAME.match(name):
        raise PoolError("pool: expected a plain file name")
    return SHARED_MEMORY_DIR / name


def _data_offset(slots: int) -> int:
    return -(-(_HEADER_BYTES + slots * _RECORD.itemsize) // 4096) * 4096


def _file_bytes(geometry: PoolGeometry, slots: int) -> int:
    return _data_offset(slots) + slots * geometry.block_bytes


def _back(descriptor: int, offset: int, length: int) -> bool:
    """Take the memory behind a part of the file now; without it a write to a full shared memory kills the process."""
    if sys.platform != "linux":
        return True
    try:
        os.posix_fallocate(descriptor, offset, length)
    except OSError as error:
        if error.errno in _NO_MEMORY:
            return False
        raise
    return True
