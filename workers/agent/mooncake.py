"""Reading a peer's pool through Mooncake's transfer engine: RDMA where both hosts have it, its own TCP protocol elsewhere.

Optional: `pip install mooncake-transfer-engine-non-cuda` (or another build of it), whose library needs libibverbs.so.1 also where
there is no RDMA device. Each process has one engine; a pool is registered with it as a whole, and a reader asks the peer's agent
where its blocks lie (`POST /v1/kv/locate`), then copies them without the peer's doing anything. Contexts are not pushed this way.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from workers.agent.push import Pieces, PushHead
from workers.agent.shared_memory import HASH_BYTES, Floats, PoolFile, PoolGeometry
from workers.agent.transport import AgentCalls, BlockSource, Deliver, TransportError, finished, node_url

PROTOCOL_VARIABLE = "SWITCHYARD_MOONCAKE_PROTOCOL"
STAGED_BLOCKS = 16


class MooncakeMissing(Exception):
    """Mooncake's transfer engine cannot be used here; the message says what is missing."""


class MooncakeEngine:
    """This process's transfer engine at `host`. Blocking calls; safe from any thread."""

    _of_process: MooncakeEngine | None = None
    _lock = threading.Lock()

    def __init__(self, engine: Any, host: str) -> None:
        self._engine = engine
        self.endpoint = f"{host}:{engine.get_rpc_port()}"

    @classmethod
    def of_process(cls, host: str) -> MooncakeEngine:
        """The engine, started at the first call. Raises MooncakeMissing."""
        with cls._lock:
            if cls._of_process is None:
                cls._of_process = cls(_started(host), host)
            return cls._of_process

    def register(self, array: Floats) -> None:
        """Let `array` be read by peers, or be read into. Raises MooncakeMissing."""
        code = self._engine.register_memory(array.ctypes.data, array.nbytes)
        if code:
            raise MooncakeMissing(f"mooncake: the transfer engine refused {array.nbytes} bytes of memory (code {code})")

    def unregister(self, array: Floats) -> None:
        self._engine.unregister_memory(array.ctypes.data)

    def read(self, endpoint: str, buffers: list[int], addresses: list[int], length: int) -> bool:
        """Copy `length` bytes at each of the peer's `addresses` into each of `buffers`; False where that failed."""
        lengths = [length] * len(buffers)
        return not self._engine.batch_transfer_sync_read(endpoint, buffers, addresses, lengths)


def _started(host: str) -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise MooncakeMissing(
            f"mooncake: its transfer engine cannot be imported ({error}); expected the package"
            " mooncake-transfer-engine-non-cuda (or another build of it) and the system's libibverbs.so.1"
        ) from None
    engine = TransferEngine()
    protocol = os.environ.get(PROTOCOL_VARIABLE, "tcp")
    code = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
    if code:
        raise MooncakeMissing(f"mooncake: the transfer engine does not start with protocol {protocol} (code {code})")
    return engine


class MooncakeTransport:
    """One node's reads through the engine; also makes the node's own `pool` readable. Close it before the pool."""

    name = "mooncake"
    pushes = False

    def __init__(self, engine: MooncakeEngine, pool: PoolFile, calls: AgentCalls) -> None:
        self._engine = engine
        self._geometry: PoolGeometry = pool.geometry
        self._calls = calls
        self._pool: Floats = pool.all_blocks()
        self._staging: Floats = np.zeros((STAGED_BLOCKS, *pool.geometry.shape), np.float32)
        self._turn = asyncio.Lock()
        engine.register(self._pool)
        engine.register(self._staging)

    def close(self) -> None:
        self._engine.unregister(self._staging)
        self._engine.unregister(self._pool)

    def reaches(self, source: BlockSource) -> bool:
        return True

    def location(self, slot: int) -> int:
        """Address of a slot of the own pool, as peers ask for it."""
        return int(self._pool[slot].ctypes.data)

    @property
    def endpoint(self) -> str:
        return self._engine.endpoint

    async def fetch(self, source: BlockSource, hashes: bytes, deliver: Deliver) -> int:
        endpoint, found = await self._locate(source, hashes)
        arrived = 0
        for start in range(0, len(found), STAGED_BLOCKS):
            async with self._turn:
                some = found[start : start + STAGED_BLOCKS]
                arrived += await finished(asyncio.to_thread(self._copy, source, endpoint, some, deliver))
        return arrived

    async def push(self, target: BlockSource, head: PushHead, pieces: Pieces, pool: PoolFile) -> int:
        raise TransportError("mooncake: contexts are not pushed this way")

    async def _locate(self, source: BlockSource, hashes: bytes) -> tuple[str, list[tuple[bytes, int, int]]]:
        """The peer's endpoint, and (hash, address, checksum) of those of `hashes` that it has."""
        url = f"{node_url(source)}/v1/kv/locate"
        try:
            async with self._calls.session.post(url, data=hashes, headers=self._calls.headers) as answer:
                if answer.status != 200:
                    raise TransportError(f"{source.node}: answered {answer.status} when asked where its blocks lie")
                document = await answer.json()
            host = urlsplit(source.url).hostname or ""
            endpoint = f"{host}:{int(document['port'])}"
            blocks = [(bytes.fromhex(block), int(at), int(value)) for block, at, value in document["blocks"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransportError(f"{source.node}: {type(error).__name__} when asked where its blocks lie") from None
        except (KeyError, TypeError, ValueError):
            raise TransportError(f"{source.node}: where its blocks lie is not understood") from None
        asked = {hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)}
        return endpoint, [entry for entry in blocks if entry[0] in asked]

    def _copy(
        self, source: BlockSource, endpoint: str, found: Sequence[tuple[bytes, int, int]], deliver: Deliver
    ) -> int:
        buffers = [int(self._staging[place].ctypes.data) for place in range(len(found))]
        if not self._engine.read(endpoint, buffers, [address for _, address, _ in found], self._geometry.block_bytes):
            raise TransportError(f"{source.node}: mooncake could not read its memory")
        return sum(deliver(block, value, self._staging[place]) for place, (block, _, value) in enumerate(found))
