"""Causal grouped-query attention of one request, exact in any chunking: keys in fixed tiles, queries in verified ones.

A query at position p attends keys `[0, p]`, cut at multiples of KEY_TILE into tiles `[0, 128) [128, 256) ..`. Each tile is
one product of fixed shape, and tiles are added in order; keys after p weigh exactly nothing. So neither the chunk a query is
computed in, nor what follows it, changes a bit of its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workers.agent.engines.reference.tiles import Floats, Operand, attention_tile, whole_tiles
from workers.agent.engines.reference.weights import ModelConfig

KEY_TILE = 128
_SCORES_AT_ONCE = 1 << 19
_FOLD = 16


@dataclass(frozen=True, slots=True)
class _Slice:
    """Lanes (query, head of the group) `[first, first + tiles * size)`; `key_tiles` is how many they attend, and `mask`
    `[tiles, key tiles from `masked_from` on, KEY_TILE, size]` hides the keys after each query."""

    first: int
    tiles: int
    size: int
    key_tiles: int
    masked_from: int
    mask: Floats

    @property
    def end(self) -> int:
        return self.first + self.tiles * self.size


@dataclass(frozen=True, slots=True)
class Queries:
    """How the queries `[start, start + count)` of a request are cut; the same for every layer."""

    start: int
    count: int
    lanes: int
    slices: tuple[_Slice, ...]

    @property
    def key_tiles(self) -> int:
        return self.slices[-1].key_tiles


class Attention:
    """Attention of one model's shape."""

    def __init__(self, config: ModelConfig) -> None:
        self._kv_heads = config.kv_heads
        self._groups = config.heads // config.kv_heads
        self._head_dim = config.head_dim
        self._scale = np.float32(1.0 / np.sqrt(config.head_dim))
        self._ones: Floats = np.ones((8, KEY_TILE), np.float32)
        generator = np.random.Generator(np.random.PCG64(1))
        tile = generator.standard_normal((KEY_TILE, config.head_dim), dtype=np.float32)
        self._size = attention_tile([Operand(tile, rows_first=True), Operand(tile.T), Operand(self._ones)])

    def cut(self, start: int, count: int) -> Queries:
        """Plan the queries `[start, start + count)`."""
        lanes = count * self._groups
        slices = tuple(self._slices(start, lanes))
        return Queries(start, count, slices[-1].end, slices)

    def _slices(self, start: int, lanes: int) -> Iterator[_Slice]:
        key_tiles = (start + (lanes - 1) // self._groups) // KEY_TILE + 1
        step = max(1, _SCORES_AT_ONCE // (self._kv_heads * key_tiles * KEY_TILE * self._size))
        tiles = whole_tiles(lanes, self._size)
        for tile in range(0, tiles, step):
            yield self._slice(start, lanes, tile * self._size, min(step, tiles - tile))

    def _slice(self, start: int, lanes: int, first: int, tiles: int) -> _Slice:
        size = self._size
        lane = np.minimum(np.arange(first, first + tiles * size), lanes - 1)
        position = start + lane // self._groups
        key_tiles = int(position[-1]) // KEY_TILE + 1
        masked_from = int(position[0]) // KEY_TILE
        keys = np.arange(masked_from * KEY_TILE, key_tiles * KEY_TILE).reshape(1, -1, KEY_TILE, 1)
        hidden = keys > position.reshape(tiles, 1, 1, size)
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))
        return _Slice(first, tiles, size, key_tiles, masked_from, mask)

    def attend(self, queries: Queries, rows: Floats, keys: Floats, values: Floats, out: Floats) -> None:
        """From `rows` `[count, heads, head_dim]` and the context's `[kv_heads, key tiles * KEY_TILE, head_dim]` to `out`
        `[count, heads * head_dim]`. Keys after the context may be anything finite."""
        count, kv_heads, groups, head_dim = queries.count, self._kv_heads, self._groups, self._head_dim
        lanes: Floats = np.zeros((kv_heads, queries.lanes, head_dim), np.float32)
        real = lanes[:, : count * groups].reshape(kv_heads, count, groups, head_dim)
        np.multiply(rows.reshape(count, kv_heads, groups, head_dim).transpose(1, 0, 2, 3), self._scale, out=real)
        mixed: Floats = np.empty((kv_heads, queries.lanes, head_dim), np.float32)
        tiled = (kv_heads, -1, KEY_TILE, head_dim)
        key_tiles, value_tiles = keys.reshape(tiled), values.reshape(tiled).transpose(0, 1, 3, 2)
        for part in queries.slices:
            shape = (kv_heads, part.tiles, part.size, head_dim)
            asked = lanes[:, part.first : part.end].reshape(shape).transpose(0, 1, 3, 2)
            weights = self._weights(asked, key_tiles[:, : part.key_tiles], part)
            sums = np.add.reduce(np.matmul(self._ones, weights)[..., 0, :], axis=2)
            total = np.add.reduce(np.matmul(value_tiles[:, None, : part.key_tiles], weights), axis=2)
            total /= sums[:, :, None, :]
            mixed[:, part.first : part.end].reshape(shape)[...] = total.transpose(0, 1, 3, 2)
        real = mixed[:, : count * groups].reshape(kv_heads, count, groups, head_dim)
        out.reshape(count, kv_heads, groups, head_dim)[...] = real.transpose(1, 0, 2, 3)

    def _weights(self, asked: Floats, keys: Floats, part: _Slice) -> Floats:
        """Not yet normalised weights `[kv_heads, tiles, key tiles, KEY_TILE, size]`."""
        scores: Floats = np.matmul(keys[:, None], asked[:, :, None])
        scores[:, :, part.masked_from :] += part.mask
        # A maximum is the same in any order; folding keys makes its inner loops long.
        folded = scores.reshape(self._kv_heads, part.tiles, -1, _FOLD * part.size).max(axis=2)
        highest = folded.reshape(self._kv_heads, part.tiles, _FOLD, part.size).max(axis=2)
        scores -= highest[:, :, None, None, :]
        np.exp(scores, out=scores)
        return scores


def padded_tokens(tokens: int) -> int:
    """`tokens` rounded up to whole key tiles."""
    return -(-tokens // KEY_TILE) * KEY_TILE
