"""Reading KV blocks from a peer's pool: shared memory on the same host, framed HTTP from another one.

A transport hands each block to `deliver(hash, checksum, data)`, which copies it and compares the checksum. Blocks the peer
no longer has are left out. Cancelling a fetch ends it after the blocks being copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from workers.agent.pool import FRAME
from workers.agent.shared_memory import HASH_BYTES, Floats, PoolError, PoolFile, PoolGeometry

BLOCKS_AT_ONCE = 8
Deliver = Callable[[bytes, int, "Floats | memoryview"], bool]


class TransportError(Exception):
    """A peer that cannot be read: gone, of another model, or answering nonsense."""


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Where blocks are: node `node` of the agent at `url`, in the pool `pool`."""

    node: str
    url: str
    pool: str


class Transport(Protocol):
    """One way to read a peer's blocks."""

    name: str

    def reaches(self, source: BlockSource) -> bool:
        """Whether this way may lead to `source`."""

    async def fetch(self, source: BlockSource, hashes: bytes, deliver: Deliver) -> int:
        """Deliver those of `hashes` that the peer has; answers how many arrived sound. Raises TransportError."""


class SharedMemoryTransport:
    """Maps the peer's pool file; works also when the peer's process is dead."""

    name = "shared-memory"

    def __init__(self, geometry: PoolGeometry) -> None:
        self._geometry = geometry

    def reaches(self, source: BlockSource) -> bool:
        return _on_this_host(source.pool)

    async def fetch(self, source: BlockSource, hashes: bytes, deliver: Deliver) -> int:
        try:
            file = PoolFile.open(source.pool)
        except PoolError as error:
            raise TransportError(str(error)) from None
        try:
            if file.geometry != self._geometry:
                raise TransportError(f"pool: {source.pool} is of another model or shape")
            blocks = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
            slots = await asyncio.to_thread(file.find, blocks)
            present = [(block, slots[block]) for block in blocks if block in slots]
            arrived = 0
            for start in range(0, len(present), BLOCKS_AT_ONCE):
                some = present[start : start + BLOCKS_AT_ONCE]
                arrived += await _finished(asyncio.to_thread(_copy, file, some, deliver))
            return arrived
        finally:
            file.close()


def _copy(file: PoolFile, present: list[tuple[bytes, int]], deliver: Deliver) -> int:
    arrived = 0
    for block, slot in present:
        record = file.record(slot)
        if record is not None and record.block == block:
            arrived += deliver(block, record.checksum, file.block(slot))
    return arrived


class HttpTransport:
    """Asks the peer's agent (`POST /v1/kv/blocks`); frames are checked before anything is kept."""

    name = "http"

    def __init__(self, geometry: PoolGeometry, token: str, session: aiohttp.ClientSession) -> None:
        self._geometry = geometry
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session = session

    def reaches(self, source: BlockSource) -> bool:
        return True

    async def fetch(self, source: BlockSource, hashes: bytes, deliver: Deliver) -> int:
        url = f"{node_url(source)}/v1/kv/blocks"
        asked = {hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)}
        arrived = 0
        try:
            async with self._session.post(url, data=hashes, headers=self._headers) as answer:
                if answer.status != 200:
                    raise TransportError(f"{source.node}: answered {answer.status} for blocks")
                while True:
                    try:
                        head = await answer.content.readexactly(FRAME.size)
                    except asyncio.IncompleteReadError as end:
                        if end.partial:
                            raise TransportError(f"{source.node}: a frame ends early") from None
                        return arrived
                    length, block, value = FRAME.unpack(head)
                    if length != self._geometry.block_bytes or block not in asked:
                        raise TransportError(f"{source.node}: sent a frame that was not asked for")
                    asked.discard(block)
                    data = memoryview(await answer.content.readexactly(length))
                    arrived += await _finished(asyncio.to_thread(deliver, block, value, data))
        except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise TransportError(f"{source.node}: {type(error).__name__} while reading blocks") from None


async def _finished(copying: Coroutine[Any, Any, int]) -> int:
    """Await a copy to its end even when cancelled: its slot must not be given up under it."""
    task = asyncio.ensure_future(copying)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class Transports:
    """Takes the first of `ways` that reaches a peer. `fetched` counts blocks by way."""

    def __init__(self, ways: Sequence[Transport]) -> None:
        self._ways = ways
        self.fetched = {way.name: 0 for way in ways}

    async def fetch(self, source: BlockSource, hashes: bytes, deliver: Deliver) -> int:
        """As `Transport.fetch`."""
        way = next((way for way in self._ways if way.reaches(source)), None)
        if way is None:
            raise TransportError(f"{source.node}: none of this node's transports reaches its pool")
        arrived = await way.fetch(source, hashes, deliver)
        self.fetched[way.name] += arrived
        return arrived


def node_url(source: BlockSource) -> str:
    """Base address of the node's API, whether `url` names the agent or the node."""
    url = source.url.rstrip("/")
    suffix = f"/nodes/{source.node}"
    return url if url.endswith(suffix) else url + suffix


def _on_this_host(pool: str) -> bool:
    """Pool names are random, so a file of this name is the pool itself."""
    try:
        PoolFile.open(pool).close()
    except PoolError:
        return False
    return True
