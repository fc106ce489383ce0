"""Device KV: blocks of `block_tokens` tokens, handed to requests as block tables.

One array `[layers, 2 (key, value), kv_heads, tokens, head_dim]`, with room for a whole key tile after its last token. A
table whose blocks lie one after the other is read as a view; a scattered one is gathered for each layer. A table covers
tokens `[0, block_tokens * len(blocks))` of a request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.agent.engines.reference.attention import KEY_TILE, padded_tokens
from workers.agent.engines.reference.weights import Floats, ModelConfig


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Device blocks of one request, in the order of its tokens."""

    blocks: npt.NDArray[np.intp]
    contiguous: bool


class DeviceKv:
    """`capacity_tokens` of device KV. For the engine's thread; `free_blocks` may be read from any."""

    def __init__(self, config: ModelConfig, block_tokens: int, capacity_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_tokens // block_tokens
        tokens = self.capacity_blocks * block_tokens
        shape = (config.layers, 2, config.kv_heads, tokens + KEY_TILE, config.head_dim)
        self._data: Floats = np.zeros(shape, np.float32)
        in_blocks = (*shape[:3], self.capacity_blocks, block_tokens, config.head_dim)
        self._by_block = self._data[:, :, :, :tokens].reshape(in_blocks)
        self._free: list[int] = list(range(self.capacity_blocks))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def allocate(self, tokens: int) -> BlockTable | None:
        """A table for `tokens` tokens, of neighbouring blocks where there is such a run; None where too few are free."""
        count = self.blocks_for(tokens)
        if count > len(self._free):
            return None
        first = self._find_run(count)
        start = 0 if first is None else first
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return BlockTable(np.array(taken, dtype=np.intp), first is not None)

    def _find_run(self, count: int) -> int | None:
        for index in range(len(self._free) - count + 1):
            if self._free[index + count - 1] - self._free[index] == count - 1:
                return index
        return None

    def release(self, table: BlockTable) -> None:
        """Give back a table's blocks. Raises ValueError for blocks that are free already."""
        for block in table.blocks.tolist():
            at = bisect_left(self._free, block)
            if at < len(self._free) and self._free[at] == block:
                raise ValueError(f"device block {block} was released twice")
            insort(self._free, block)

    def extend(self, layer: int, table: BlockTable, start: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        """Write rows `[tokens, kv_heads, head_dim]` at `[start, start + tokens)`; answers keys and values of the context
        `[0, start + tokens)` as `[kv_heads, whole key tiles, head_dim]`. What follows the context is finite, no more."""
        end = start + len(keys)
        whole = padded_tokens(end)
        data = self._data[layer]
        if table.contiguous:
            origin = int(table.blocks[0]) * self.block_tokens
            data[0, :, origin + start : origin + end] = keys.transpose(1, 0, 2)
            data[1, :, origin + start : origin + end] = values.transpose(1, 0, 2)
            return data[0, :, origin : origin + whole], data[1, :, origin : origin + whole]
        positions = np.arange(start, end)
        slots = table.blocks[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens
        data[0][:, slots] = keys.transpose(1, 0, 2)
        data[1][:, slots] = values.transpose(1, 0, 2)
        gathered = self._by_block[layer][:, :, table.blocks[: self.blocks_for(end)]]
        flat = gathered.reshape(2, gathered.shape[1], -1, gathered.shape[-1])
        copy: Floats = np.zeros((2, flat.shape[1], whole, flat.shape[-1]), np.float32)
        copy[:, :, :end] = flat[:, :, :end]
        return copy[0], copy[1]

    def block(self, table: BlockTable, index: int) -> Floats:
        """View `[layers, 2, kv_heads, block_tokens, head_dim]` of the request's block `index`, to copy from or into."""
        view: Floats = self._by_block[:, :, :, table.blocks[index]]
        return view
