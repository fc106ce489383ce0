"""Writes full blocks through to the host pool: whole ones after an iteration, or layer by layer during it.

Layer by layer is for prompts that are pushed to their decode node meanwhile: what is in the pool can be sent.
"""

from __future__ import annotations

from apps.kvcache.domain.hashing import extend_chain
from workers.agent.engines.reference.kv import DeviceKv
from workers.agent.engines.reference.tasks import Task
from workers.agent.pool import KvPool, Missing
from workers.agent.shared_memory import HASH_BYTES, Floats


class LayeredWrite:
    """The blocks of one task that one iteration fills. Call `layer` for each layer, then `finish`; or `give_up`."""

    def __init__(self, pool: KvPool, kv: DeviceKv, task: Task, full: int) -> None:
        self._pool = pool
        self._kv = kv
        self._task = task
        self._full = full
        self._open: list[tuple[Missing, Floats]] = []
        pending = pool.reserve(task.chain[: full * HASH_BYTES])
        for missing in pending:
            block = pool.open(missing)
            if block is None:
                break
            self._open.append((missing, block))
        pool.give_up(b"".join(missing.block for missing in pending[len(self._open) :]))

    def layer(self, layer: int) -> None:
        """Keys and values of `layer` are computed."""
        task = self._task
        assert task.table is not None and task.push is not None, "running without blocks"
        for missing, block in self._open:
            block[layer] = self._kv.block(task.table, missing.index)[layer]
        task.push.wrote(layer, [missing for missing, _ in self._open])

    def finish(self) -> None:
        """All layers are written: the blocks can be read from now on."""
        task = self._task
        assert task.push is not None
        while self._open:
            missing, block = self._open[0]
            self._pool.seal(missing, block)
            self._open.pop(0)
        task.stored_blocks = self._full
        task.push.stored(self._pool.lookup(task.chain[: self._full * HASH_BYTES]))

    def give_up(self) -> None:
        """Let go of what was not finished."""
        self._pool.give_up(b"".join(missing.block for missing, _ in self._open))
        self._open = []


class WriteThrough:
    """For the engine's thread."""

    def __init__(self, pool: KvPool, kv: DeviceKv) -> None:
        self._pool = pool
        self._kv = kv
        self._block_tokens = kv.block_tokens

    def layered(self, task: Task, end: int) -> LayeredWrite | None:
        """For a task that is pushed and is about to compute up to token `end`; None where that fills no block."""
        full = end // self._block_tokens
        if task.push is None or full <= task.stored_blocks:
            return None
        return LayeredWrite(self._pool, self._kv, task, full)

    def store(self, task: Task) -> None:
        """Write blocks that just became full; `[0, stored_blocks)` are there or found no room."""
        full = task.computed // self._block_tokens
        if full <= task.stored_blocks:
            return
        if full > task.blocks:
            parent = task.chain[-HASH_BYTES:] or task.root
            known = task.blocks * self._block_tokens
            task.chain += extend_chain(parent, task.ids[known : full * self._block_tokens], self._block_tokens)
        table = task.table
        assert table is not None, "running without blocks"

        def write(index: int, block: Floats) -> None:
            block[...] = self._kv.block(table, index)

        self._pool.store(task.chain[: full * HASH_BYTES], write)
        task.stored_blocks = full
