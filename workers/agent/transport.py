"""Moving KV blocks between pools: shared memory on the same host, framed HTTP from and to another one.

Fetching, a transport hands each block to `deliver(hash, checksum, data)`, which copies it and compares the checksum. Blocks
the peer no longer has are left out. Cancelling a fetch ends it after the blocks being copied.

Pushing, it sends the frames of `push.py` to the peer's agent as they come: through HTTP with their bytes, through shared memory
only where they lie, for the peer copies them out of this node's pool. Cancelling a push closes its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from workers.agent.pool import FRAME
from workers.agent.push import LENGTH, Pieces, PushHead, PushTarget, encode
from workers.agent.shared_memory import HASH_BYTES, Floats, PoolError, PoolFile, PoolGeometry

BLOCKS_AT_ONCE = 8
HELD_TIMEOUT_S = 5.0
T = TypeVar("T")
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
    """One way to read a peer's blocks, and to push blocks to it. `pushes`: whether it can do the latter."""

    name: str
    pushes: bool

    def reaches(self, source: BlockSource) -> bool:
        """Whether this way may lead to `source`."""

    async def fetch(self, source: BlockSource, hashes: bytes, deliver: Deliver) -> int:
        """Deliver those of `hashes` that the peer has; answers how many arrived sound. Raises TransportError."""

    async def push(self, target: BlockSource, head: PushHead, pieces: Pieces, pool: PoolFile) -> int:
        """Send `pieces`, which lie in `pool`, as they come; answers how many blocks `target` then holds for the request.
        Raises TransportError."""


class AgentCalls:
    """Calls to other nodes' agents, with this node's token."""

    def __init__(self, token: str, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.headers = {"Authorization": f"Bearer {token}"}

    async def held(self, target: BlockSource, chain: bytes) -> int:
        """How many leading blocks of `chain` the target has. Raises TransportError where it is gone or takes no push now."""
        timeout = aiohttp.ClientTimeout(total=HELD_TIMEOUT_S)
        return await self._blocks_answer(target, "held", chain, timeout)

    async def push(self, target: BlockSource, frames: AsyncIterator[bytes]) -> int:
        """Stream `frames` to the target. Raises TransportError where it refuses them."""
        return await self._blocks_answer(target, "push", frames, aiohttp.ClientTimeout(total=None, sock_connect=5.0))

    async def _blocks_answer(
        self, target: BlockSource, call: str, body: bytes | AsyncIterator[bytes], timeout: aiohttp.ClientTimeout
    ) -> int:
        url = f"{node_url(target)}/v1/kv/{call}"
        try:
            async with self.session.post(url, data=body, headers=self.headers, timeout=timeout) as answer:
                if answer.status != 200:
                    text = (await answer.text())[:300]
                    raise TransportError(f"{target.node}: answered {answer.status} to a push: {text}")
                return int((await answer.json())["blocks"])
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise TransportError(f"{target.node}: {type(error).__name__} while pushing blocks") from None
        except (ValueError, KeyError, TypeError):
            raise TransportError(f"{target.node}: its answer to a push is not understood") from None


class SharedMemoryTransport:
    """Maps the peer's pool file; works also when the peer's process is dead. A push tells the peer what to copy."""

    name = "shared-memory"
    pushes = True

    def __init__(self, geometry: PoolGeometry, calls: AgentCalls) -> None:
        self._geometry = geometry
        self._calls = calls

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
                arrived += await finished(asyncio.to_thread(_copy, file, some, deliver))
            return arrived
        finally:
            file.close()

    async def push(self, target: BlockSource, head: PushHead, pieces: Pieces, pool: PoolFile) -> int:
        async def frames() -> AsyncIterator[bytes]:
            yield _encode_head(msgspec.structs.replace(head, pool=pool.name))
            async for piece in pieces:
                yield encode(piece, b"")

        return await self._calls.push(target, frames())


def _encode_head(head: PushHead) -> bytes:
    data = msgspec.json.encode(head)
    return LENGTH.pack(len(data)) + data


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
    pushes = True

    def __init__(self, geometry: PoolGeometry, calls: AgentCalls) -> None:
        self._geometry = geometry
        self._calls = calls

    def reaches(self, source: BlockSource) -> bool:
        return True

    async def fetch(self, source: BlockSource, hashes: bytes, deliver: Deliver) -> int:
        url = f"{node_url(source)}/v1/kv/blocks"
        asked = {hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)}
        arrived = 0
        try:
            async with self._calls.session.post(url, data=hashes, headers=self._calls.headers) as answer:
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
                    arrived += await finished(asyncio.to_thread(deliver, block, value, data))
        except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise TransportError(f"{source.node}: {type(error).__name__} while reading blocks") from None

    async def push(self, target: BlockSource, head: PushHead, pieces: Pieces, pool: PoolFile) -> int:
        async def frames() -> AsyncIterator[bytes]:
            yield _encode_head(head)
            async for piece in pieces:
                layers = slice(piece.first_layer, piece.end_layer)
                yield encode(piece, pool.block(piece.slot)[layers].tobytes() if piece.end_layer else b"")

        return await self._calls.push(target, frames())


async def finished(copying: Coroutine[Any, Any, T]) -> T:
    """Await a copy to its end even when cancelled: its slot must not be given up under it."""
    task = asyncio.ensure_future(copying)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class Transports:
    """Takes the first of `ways` that reaches a peer. `fetched` and `pushed` count blocks by way."""

    def __init__(self, ways: Sequence[Transport], calls: AgentCalls) -> None:
        self._ways = ways
        self._calls = calls
        self.fetched = {way.name: 0 for way in ways}
        self.pushed = {way.name: 0 for way in ways if way.pushes}

    async def fetch(self, source: BlockSource, hashes: bytes, deliver: Deliver) -> int:
        """As `Transport.fetch`."""
        way = self._first(source, self._ways)
        arrived = await way.fetch(source, hashes, deliver)
        self.fetched[way.name] += arrived
        return arrived

    async def held(self, target: PushTarget, chain: bytes) -> int:
        """How many leading blocks of `chain` the target of a push has already. Raises TransportError."""
        return await self._calls.held(BlockSource(*target), chain)

    async def push(self, target: PushTarget, head: PushHead, pieces: Pieces, pool: PoolFile) -> int:
        """As `Transport.push`; what counts as pushed is what the target then holds."""
        source = BlockSource(*target)
        way = self._first(source, [way for way in self._ways if way.pushes])
        held = await way.push(source, head, pieces, pool)
        self.pushed[way.name] += held
        return held

    @staticmethod
    def _first(source: BlockSource, ways: Sequence[Transport]) -> Transport:
        for way in ways:
            if way.reaches(source):
                return way
        raise TransportError(f"{source.node}: none of this node's transports reaches its pool")


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
