"""Sends a prompt's context to its decode node while it is still being computed.

The engine's thread notes what it wrote to the pool, layer by layer; on the event loop the notes become frames (`push.py`),
which a transport carries. What the decode node has already is left out. A push that fails is no loss: the decode node then
fetches what it lacks, as it does without one.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from workers.agent.engines.reference.tasks import Task
from workers.agent.pool import KvPool, Missing
from workers.agent.push import END, LAYERS, NOTHING, SEAL, TAIL, Piece, Pieces, PushHead, PushTarget
from workers.agent.shared_memory import HASH_BYTES
from workers.agent.transport import TransportError, Transports

ALIVE_EVERY_S = 2.0
logger = structlog.get_logger("switchyard.agent")


class _Wrote(NamedTuple):
    layer: int
    blocks: Sequence[Missing]


class _Stored(NamedTuple):
    blocks: int


class _Finished(NamedTuple):
    tail: bytes | None
    tail_tokens: int


_Note = _Wrote | _Stored | _Finished


class Push:
    """One prompt's push. The engine's thread calls `wrote`, `stored` and `finish`; the event loop reads `pieces`."""

    def __init__(self, pool: KvPool, chain: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._chain = chain
        self._loop = loop
        self._notes: asyncio.Queue[_Note] = asyncio.Queue()
        self._layers = pool.file.geometry.layers
        self._sent_layers: Counter[int] = Counter()

    def wrote(self, layer: int, blocks: Sequence[Missing]) -> None:
        """`layer` of these blocks, which are still being written, is in the pool."""
        if blocks:
            self._note(_Wrote(layer, blocks))

    def stored(self, blocks: int) -> None:
        """The first `blocks` blocks of the chain can be read."""
        self._note(_Stored(blocks))

    def finish(self, tail: bytes | None, tail_tokens: int) -> None:
        """The prompt is computed; its partial block is in the pool as `tail`, if there is one."""
        self._note(_Finished(tail, tail_tokens))

    def _note(self, note: _Note) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._notes.put_nowait, note)

    async def pieces(self, held: int) -> Pieces:
        """What to send to a node that has the first `held` blocks, as it comes, to the end."""
        sealed, whole = held, True
        while True:
            try:
                note = await asyncio.wait_for(self._notes.get(), ALIVE_EVERY_S)
            except TimeoutError:
                yield Piece(NOTHING)
                continue
            if isinstance(note, _Finished):
                found = None if note.tail is None or not whole else self._pool.locate(note.tail)
                if found is not None:
                    yield Piece(TAIL, note.tail_tokens, 0, self._layers, *found)
                yield Piece(END)
                return
            if isinstance(note, _Wrote):
                for missing in note.blocks if whole else ():
                    if missing.index >= sealed:
                        self._sent_layers[missing.index] += 1
                        yield Piece(LAYERS, missing.index, note.layer, note.layer + 1, missing.slot)
                continue
            while whole and sealed < note.blocks:
                found = self._pool.locate(self._chain[sealed * HASH_BYTES : (sealed + 1) * HASH_BYTES])
                if found is None:
                    whole = False
                    break
                if self._sent_layers.pop(sealed, 0) != self._layers:
                    yield Piece(LAYERS, sealed, 0, self._layers, found[0])
                yield Piece(SEAL, sealed, 0, 0, *found)
                sealed += 1


class Pusher:
    """All pushes of one node. Lives on the event loop."""

    def __init__(self, pool: KvPool, transports: Transports, node: str, deadline_s: float) -> None:
        self.failed_pushes = 0
        self._pool = pool
        self._transports = transports
        self._node = node
        self._deadline_s = deadline_s
        self._running: dict[Push, asyncio.Task[None]] = {}

    @property
    def under_way(self) -> int:
        return len(self._running)

    def start(self, task: Task, target: PushTarget, owner: str) -> None:
        """Begin to push the task's context to `target`. Later call `done` or `cancel`."""
        loop = asyncio.get_running_loop()
        push = task.push = Push(self._pool, task.chain, loop)
        running = loop.create_task(self._run(push, task, target, owner))
        self._running[push] = running
        running.add_done_callback(lambda _: self._running.pop(push, None))

    def done(self, push: Push) -> None:
        """The prompt is answered: what is not sent within the deadline is left to the decode node to fetch."""
        running = self._running.get(push)
        if running is not None:
            asyncio.get_running_loop().call_later(self._deadline_s, running.cancel)

    def cancel(self, push: Push) -> None:
        """Nobody wants the context there any more; the receiver sees the connection close and lets go."""
        running = self._running.get(push)
        if running is not None:
            running.cancel()

    async def close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, push: Push, task: Task, target: PushTarget, owner: str) -> None:
        tail = None if task.tail_hash is None else b64encode(task.tail_hash).decode()
        head = PushHead(task.request_id, b64encode(task.chain).decode(), None, tail, owner)
        try:
            held = await self._transports.held(target, task.chain)
            await self._transports.push(target, head, push.pieces(held), self._pool.file)
        except TransportError as error:
            self.failed_pushes += 1
            text = "push failed; the decode node fetches the context"
            logger.info(text, node=self._node, request_id=task.request_id, why=str(error))
