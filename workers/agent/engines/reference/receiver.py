"""Takes in contexts that prefill nodes push to this node, into its own pool, where its decodes find them.

A block is reserved when its first layer comes and can be read once all its layers are there and its checksum is the sender's.
At most `bytes_in_flight` may be reserved and unfinished; a push that stays silent for `deadline_s` ends. A finished push is
pinned, like a hand-over, until its request is decoded or given up.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from dataclasses import dataclass, field

import numpy as np

from workers.agent.engines.base import HANDOFF_PIN_S, EngineError, PushReceived
from workers.agent.pool import KvPool, Missing
from workers.agent.push import END, FRAME, LAYERS, NOTHING, SEAL, TAIL, ByteStream, Piece, PushHead
from workers.agent.shared_memory import HASH_BYTES, NO_PARENT, Floats, PoolError, PoolFile
from workers.agent.transport import finished


@dataclass(slots=True)
class _OpenBlock:
    missing: Missing
    block: Floats
    layers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Incoming:
    """One push under way. `source` is the sender's pool where it can be mapped."""

    request_id: str
    chain: bytes
    tail_hash: bytes | None
    source: PoolFile | None
    open: dict[int, _OpenBlock] = field(default_factory=dict)
    sealed: int = 0
    tail: bool = False

    def block(self, index: int) -> bytes:
        return self.chain[index * HASH_BYTES : (index + 1) * HASH_BYTES]


class PushReceiver:
    """Lives on the event loop; checksums are computed in worker threads."""

    def __init__(self, pool: KvPool, deadline_s: float, bytes_in_flight: int) -> None:
        self.received_blocks = 0
        self.broken_pushes = 0
        self._pool = pool
        self._deadline_s = deadline_s
        self._open_blocks = 0
        self._most_open_blocks = max(1, bytes_in_flight // pool.file.geometry.block_bytes)
        self._under_way: dict[str, asyncio.Task[None]] = {}

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    async def receive(self, head: PushHead, stream: ByteStream) -> PushReceived:
        """Take in one push to its end. Raises EngineError for one that breaks off, contradicts itself or finds no room."""
        if head.request_id in self._under_way:
            raise EngineError(409, "duplicate-request", "this request is already being pushed", "request_id")
        incoming = self._incoming(head)
        taking = asyncio.get_running_loop().create_task(self._take(incoming, stream))
        self._under_way[head.request_id] = taking
        try:
            await taking
        except asyncio.CancelledError:
            self.broken_pushes += 1
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                taking.cancel()
                await asyncio.wait({taking})
                raise
            raise EngineError(409, "aborted", "the request was aborted") from None
        except EngineError:
            self.broken_pushes += 1
            raise
        finally:
            del self._under_way[head.request_id]
            if incoming.tail and (taking.cancelled() or taking.exception() is not None):
                self._pool.release_handoff(head.request_id)
        expires_at = time.time() + HANDOFF_PIN_S
        held = self._pool.hold_until(incoming.chain, expires_at, head.request_id)
        return PushReceived(held, incoming.tail, expires_at)

    async def settled(self, request_id: str) -> None:
        """Wait until no push of the request is under way."""
        taking = self._under_way.get(request_id)
        if taking is not None:
            await asyncio.wait({taking})

    def is_coming(self, request_id: str) -> bool:
        return request_id in self._under_way

    def drop(self, request_id: str) -> bool:
        """Nobody wants it any more. False where none was under way."""
        taking = self._under_way.get(request_id)
        if taking is None:
            return False
        taking.cancel()
        return True

    def _incoming(self, head: PushHead) -> _Incoming:
        try:
            chain = b64decode(head.chain_b64, validate=True)
            tail_hash = None if head.tail_hash_b64 is None else b64decode(head.tail_hash_b64, validate=True)
        except ValueError:
            raise EngineError(400, "bad-field", "expected base64", "chain_b64") from None
        if len(chain) % HASH_BYTES or (tail_hash is not None and len(tail_hash) != HASH_BYTES):
            raise EngineError(400, "bad-field", "expected 16 bytes a block", "chain_b64")
        source = None
        if head.pool is not None:
            try:
                source = PoolFile.open(head.pool)
            except PoolError as error:
                raise EngineError(400, "bad-field", str(error), "pool") from None
            if source.geometry != self._pool.file.geometry:
                source.close()
                raise EngineError(400, "bad-field", "expected a pool of the same model and shape", "pool")
        return _Incoming(head.request_id, chain, tail_hash, source)

    async def _take(self, incoming: _Incoming, stream: ByteStream) -> None:
        try:
            while True:
                async with asyncio.timeout(self._deadline_s):
                    *fields, length = FRAME.unpack(await stream.readexactly(FRAME.size))
                    piece = Piece(*fields)
                    self._check(incoming, piece, length)
                    data = await stream.readexactly(length) if length else b""
                if piece.kind == LAYERS:
                    self._layers(incoming, piece, data)
                elif piece.kind == SEAL:
                    await self._seal(incoming, piece)
                elif piece.kind == TAIL:
                    incoming.tail = await finished(asyncio.to_thread(self._tail, incoming, piece, data))
                elif piece.kind == END:
                    return
        except TimeoutError:
            raise EngineError(408, "push-silent", f"nothing came for {self._deadline_s} s") from None
        except asyncio.IncompleteReadError:
            raise EngineError(400, "push-cut", "the body ended before the push did") from None
        finally:
            self._open_blocks -= len(incoming.open)
            self._pool.give_up(b"".join(entry.missing.block for entry in incoming.open.values()))
            if incoming.source is not None:
                incoming.source.close()

    def _check(self, incoming: _Incoming, piece: Piece, length: int) -> None:
        """Raises EngineError for a frame that cannot be."""
        geometry = self._pool.file.geometry
        blocks = len(incoming.chain) // HASH_BYTES
        layers = piece.end_layer - piece.first_layer
        if piece.kind == LAYERS:
            sound = piece.number < blocks and layers > 0 and piece.end_layer <= geometry.layers
        elif piece.kind == SEAL:
            sound = piece.number < blocks and layers == 0
        elif piece.kind == TAIL:
            sound = 0 < piece.number < geometry.block_tokens and incoming.tail_hash is not None and not incoming.tail
            sound = sound and (piece.first_layer, piece.end_layer) == (0, geometry.layers)
        else:
            sound = piece.kind in (END, NOTHING) and layers == 0
        source = incoming.source
        if source is None:
            sound = sound and length == layers * (geometry.block_bytes // geometry.layers)
        else:
            sound = sound and length == 0 and (layers == 0 or piece.slot < source.slots)
        if not sound:
            raise EngineError(400, "bad-frame", "expected frames of blocks and layers of this chain", "body")

    def _bytes(self, incoming: _Incoming, piece: Piece, data: bytes) -> Floats:
        layers = slice(piece.first_layer, piece.end_layer)
        if incoming.source is not None:
            view: Floats = incoming.source.block(piece.slot)[layers]
            return view
        shape = self._pool.file.geometry.shape
        return np.frombuffer(data, np.float32).reshape(piece.end_layer - piece.first_layer, *shape[1:])

    def _layers(self, incoming: _Incoming, piece: Piece, data: bytes) -> None:
        entry = self._opened(incoming, piece.number)
        if entry is not None:
            entry.block[piece.first_layer : piece.end_layer] = self._bytes(incoming, piece, data)
            entry.layers.update(range(piece.first_layer, piece.end_layer))

    def _opened(self, incoming: _Incoming, index: int) -> _OpenBlock | None:
        """The block's slot, or None where the node has the block already."""
        known = incoming.open.get(index)
        if known is not None:
            return known
        chain = incoming.chain[: (index + 1) * HASH_BYTES]
        if self._pool.lookup(chain) > index:
            return None
        if self._open_blocks >= self._most_open_blocks:
            raise EngineError(429, "push-budget", "too many unfinished blocks are being pushed here")
        reserved = self._pool.reserve(chain)
        if [missing.index for missing in reserved] != [index]:
            self._pool.give_up(b"".join(missing.block for missing in reserved))
            raise EngineError(409, "push-refused", "the pool has no room, or lacks a block before this one")
        block = self._pool.open(reserved[0])
        if block is None:
            self._pool.give_up(reserved[0].block)
            raise EngineError(409, "push-refused", "the host has no memory left")
        self._open_blocks += 1
        entry = incoming.open[index] = _OpenBlock(reserved[0], block)
        return entry

    async def _seal(self, incoming: _Incoming, piece: Piece) -> None:
        entry = incoming.open.get(piece.number)
        if entry is None:
            return
        if len(entry.layers) < self._pool.file.geometry.layers:
            raise EngineError(400, "bad-frame", "expected all layers of a block before its seal", "body")
        if not await finished(asyncio.to_thread(self._pool.seal, entry.missing, entry.block, piece.checksum)):
            raise EngineError(400, "checksum", "a block's bytes are not what its checksum says", "body")
        del incoming.open[piece.number]
        self._open_blocks -= 1
        self.received_blocks += 1

    def _tail(self, incoming: _Incoming, piece: Piece, data: bytes) -> bool:
        assert incoming.tail_hash is not None, "checked before"

        def write(block: Floats) -> None:
            block[...] = self._bytes(incoming, piece, data)

        parent = incoming.chain[-HASH_BYTES:] or NO_PARENT
        until = time.time() + HANDOFF_PIN_S
        return self._pool.put_tail(
            incoming.tail_hash, parent, piece.number, write, until, incoming.request_id, piece.checksum
        )
