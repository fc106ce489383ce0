"""Fetches blocks for a task while it waits: into the node's own pool, from which the loop restores them.

A fetch that fails, is late, or brings a broken block leaves the rest to be recomputed, and that is counted. At most
`bytes_in_flight` are asked of one peer at a time; fetches take turns at that budget, piece by piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator

import numpy as np
import structlog

from workers.agent.engines.base import FetchSource, Handoff
from workers.agent.engines.reference.tasks import TailCopy, Task
from workers.agent.pool import KvPool, Missing
from workers.agent.shared_memory import HASH_BYTES, Floats, checksum
from workers.agent.transport import BlockSource, Deliver, TransportError, Transports

logger = structlog.get_logger("switchyard.agent")


class BlockBudget:
    """Blocks that may be in flight from one peer. First come, first served."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = blocks
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def taken(self, blocks: int) -> AsyncIterator[None]:
        """Hold room for `blocks` (at most the whole budget)."""
        await self._take(blocks)
        try:
            yield
        finally:
            self._give(blocks)

    async def _take(self, blocks: int) -> None:
        if not self._waiting and blocks <= self._free:
            self._free -= blocks
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (blocks, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(blocks)
            else:
                self._waiting.remove(entry)
                self._give(0)
            raise

    def _give(self, blocks: int) -> None:
        self._free += blocks
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, turn = self._waiting.popleft()
            self._free -= wanted
            turn.set_result(None)


class Fetcher:
    """Fills a task's missing blocks from a peer. Lives on the event loop; copies in worker threads."""

    def __init__(
        self, pool: KvPool, transports: Transports, node: str, deadline_s: float, bytes_in_flight: int
    ) -> None:
        self.failed_fetches = 0
        self._pool = pool
        self._transports = transports
        self._node = node
        self._deadline_s = deadline_s
        self._blocks_in_flight = max(1, bytes_in_flight // pool.file.geometry.block_bytes)
        self._peers: dict[str, BlockBudget] = {}

    async def for_prefill(self, task: Task, source: FetchSource) -> None:
        """Fetch the blocks before `source.to_block` that are not here."""
        await self._within_deadline(
            task, self._blocks(task, BlockSource(source.node, source.url, source.pool), source.to_block)
        )

    async def for_decode(self, task: Task, handoff: Handoff) -> None:
        """Fetch a handed-over context: its full blocks and its tail."""
        await self._within_deadline(task, self._context(task, handoff))

    async def _context(self, task: Task, handoff: Handoff) -> None:
        source = BlockSource(handoff.node, handoff.url, handoff.pool)
        if handoff.tail_hash is not None:
            await self._tail(task, source, handoff)
        await self._blocks(task, source, len(handoff.chain) // HASH_BYTES)

    async def _within_deadline(self, task: Task, work: object) -> None:
        began = time.monotonic()
        try:
            await asyncio.wait_for(work, self._deadline_s)  # type: ignore[arg-type]
        except TimeoutError:
            self._failed(task, f"not done within {self._deadline_s} s")
        except TransportError as error:
            self._failed(task, str(error))
        finally:
            task.fetch_s = time.monotonic() - began

    def _failed(self, task: Task, why: str) -> None:
        self.failed_fetches += 1
        logger.warning("fetch failed; the rest is recomputed", node=self._node, request_id=task.request_id, why=why)

    def _peer(self, source: BlockSource) -> BlockBudget:
        return self._peers.setdefault(source.pool, BlockBudget(self._blocks_in_flight))

    async def _read(self, source: BlockSource, blocks: list[bytes], deliver: Deliver) -> int:
        """Read `blocks` in order, in pieces of at most half the peer's budget, so that two fetches can take turns."""
        budget = self._peer(source)
        piece = max(1, budget.blocks // 2)
        arrived = 0
        for start in range(0, len(blocks), piece):
            some = blocks[start : start + piece]
            async with budget.taken(len(some)):
                arrived += await self._transports.fetch(source, b"".join(some), deliver)
        return arrived

    async def _blocks(self, task: Task, source: BlockSource, to_block: int) -> None:
        if source.node == self._node:
            return
        chain = task.chain[: to_block * HASH_BYTES]
        task.fetch_wanted_blocks = max(0, to_block - len(task.pinned) // HASH_BYTES)
        missing = {entry.block: entry for entry in self._pool.reserve(chain)}
        arrived: set[bytes] = set()

        def deliver(block: bytes, expected: int, data: Floats | memoryview) -> bool:
            entry: Missing | None = missing.get(block)
            if entry is None or not self._pool.fill(entry, expected, data):
                return False
            arrived.add(block)
            return True

        try:
            await self._read(source, list(missing), deliver)
        finally:
            left = [block for block in missing if block not in arrived]
            self._pool.give_up(b"".join(left))
            task.fetched_blocks = max(0, min(self._pool.lookup(chain), len(arrived)))
        if len(arrived) < len(missing):
            self._failed(task, f"{len(missing) - len(arrived)} of {len(missing)} blocks did not arrive sound")

    async def _tail(self, task: Task, source: BlockSource, handoff: Handoff) -> None:
        assert handoff.tail_hash is not None, "called without a tail"
        blocks = len(handoff.chain) // HASH_BYTES
        own = self._pool.tail(handoff.tail_hash)
        if own is not None:
            task.tail = TailCopy(blocks, handoff.tail_tokens, own)
        if own is not None or source.node == self._node:
            return
        copy: Floats = np.empty(self._pool.file.geometry.shape, np.float32)

        def deliver(_block: bytes, expected: int, data: Floats | memoryview) -> bool:
            if isinstance(data, memoryview):
                copy.data.cast("B")[:] = data
            else:
                copy[...] = data
            if checksum(copy) != expected:
                self._pool.checksum_failures += 1
                return False
            task.tail = TailCopy(blocks, handoff.tail_tokens, copy)
            return True

        if not await self._read(source, [handoff.tail_hash], deliver):
            self._failed(task, "the tail block did not arrive sound")
