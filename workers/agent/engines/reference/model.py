"""The forward pass: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, in float32.

One call computes any mix of prompt chunks and single decode steps as one batch of rows; only attention goes request by
request, because each has its own context. A row's result is the same, bit for bit, whatever else is in the batch (`tiles`,
`attention`); everything between the products works element by element or along one row's features alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from workers.agent.engines.reference.attention import Attention, Queries
from workers.agent.engines.reference.kv import BlockTable, DeviceKv
from workers.agent.engines.reference.tiles import Operand, dense_tile, project, to_rows, to_tiles, whole_tiles
from workers.agent.engines.reference.weights import Floats, ModelConfig, Weights

LayerDone = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `[start, start + len(ids))` of one request, whose KV for `[0, start)` is in `table`. `logits`: whether the
    last of them needs logits."""

    table: BlockTable
    start: int
    ids: Sequence[int]
    logits: bool


class LlamaModel:
    """A model and its rotary tables. `forward` is for one thread."""

    def __init__(self, weights: Weights, context_tokens: int) -> None:
        self.config: ModelConfig = weights.config
        self._weights = weights
        half = self.config.head_dim // 2
        exponents = np.arange(0, half, dtype=np.float32) / np.float32(half)
        frequencies = (np.float32(1.0) / np.float32(self.config.rope_base) ** exponents) / weights.rope_factors
        angles = np.arange(context_tokens, dtype=np.float32)[:, None] * frequencies[None, :]
        self._cos: Floats = np.cos(angles)[:, None, :]
        self._sin: Floats = np.sin(angles)[:, None, :]
        self._attention = Attention(self.config)
        layer = weights.layers[0]
        operands = [Operand(layer.qkv), Operand(layer.output, rows_first=True), Operand(layer.gate_up)]
        self.tile_rows = dense_tile([*operands, Operand(layer.down), Operand(weights.head)])

    def forward(self, kv: DeviceKv, parts: Sequence[Part], layer_done: LayerDone | None = None) -> Floats:
        """Write the parts' keys and values into `kv` and answer `[parts with logits, vocabulary]`, in order.
        `layer_done(layer)` is called when a layer's keys and values are all written."""
        config, weights = self.config, self._weights
        count = sum(len(part.ids) for part in parts)
        tiles = whole_tiles(count, self.tile_rows)
        ids = np.zeros(tiles * self.tile_rows, np.intp)
        positions = np.zeros(len(ids), np.intp)
        ids[:count] = np.concatenate([np.asarray(part.ids, dtype=np.intp) for part in parts])
        positions[:count] = np.concatenate([np.arange(part.start, part.start + len(part.ids)) for part in parts])
        cos, sin = self._cos[positions], self._sin[positions]
        queries = [self._attention.cut(part.start, len(part.ids)) for part in parts]
        x = to_tiles(weights.embedding[ids], self.tile_rows)
        attended: Floats = np.zeros((len(ids), config.heads * config.head_dim), np.float32)
        as_tiles = attended.reshape(tiles, self.tile_rows, -1).transpose(0, 2, 1)
        for index, layer in enumerate(weights.layers):
            qkv = to_rows(project(layer.qkv, _norm(x, layer.attention_norm, config.norm_epsilon)))
            self._attend(kv, index, parts, queries, qkv, cos, sin, attended)
            if layer_done is not None:
                layer_done(index)
            x += project(layer.output, as_tiles)
            gate_up = project(layer.gate_up, _norm(x, layer.mlp_norm, config.norm_epsilon))
            x += project(layer.down, _silu_product(gate_up, config.hidden))
        return self._logits(parts, x)

    def _attend(
        self,
        kv: DeviceKv,
        layer: int,
        parts: Sequence[Part],
        queries: Sequence[Queries],
        qkv: Floats,
        cos: Floats,
        sin: Floats,
        out: Floats,
    ) -> None:
        config = self.config
        rotated = (config.heads + config.kv_heads) * config.head_dim
        qk = _rotate(qkv[:, :rotated].reshape(len(qkv), -1, config.head_dim), cos, sin)
        values = qkv[:, rotated:].reshape(len(qkv), config.kv_heads, config.head_dim)
        first = 0
        for part, cut in zip(parts, queries, strict=True):
            rows = slice(first, first + len(part.ids))
            first = rows.stop
            keys, held = kv.extend(layer, part.table, part.start, qk[rows, config.heads :], values[rows])
            self._attention.attend(cut, qk[rows, : config.heads], keys, held, out[rows])

    def _logits(self, parts: Sequence[Part], x: Floats) -> Floats:
        last = np.cumsum([len(part.ids) for part in parts]) - 1
        wanted = last[[part.logits for part in parts]]
        if not len(wanted):
            return np.empty((0, self.config.vocabulary), np.float32)
        size = self.tile_rows
        asked: Floats = np.zeros((whole_tiles(len(wanted), size) * size, self.config.width), np.float32)
        asked[: len(wanted)] = x[wanted // size, :, wanted % size]
        normed = _norm(to_tiles(asked, size), self._weights.norm, self.config.norm_epsilon)
        return to_rows(project(self._weights.head, normed))[: len(wanted)]


def _norm(x: Floats, gain: Floats, epsilon: float) -> Floats:
    """RMSNorm of `[tiles, features, rows]` along the features."""
    mean: Floats = np.add.reduce(x * x, axis=1, keepdims=True)
    mean /= np.float32(x.shape[1])
    scaled: Floats = x * (np.float32(1.0) / np.sqrt(mean + np.float32(epsilon)))
    scaled *= gain[:, None]
    return scaled


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = np.empty(x.shape, np.float32)
    np.subtract(first * cos, second * sin, out=out[..., :half])
    np.add(second * cos, first * sin, out=out[..., half:])
    return out


def _silu_product(gate_up: Floats, hidden: int) -> Floats:
    gate, up = gate_up[:, :hidden], gate_up[:, hidden:]
    with np.errstate(over="ignore"):
        denominator = np.exp(-gate)
    denominator += np.float32(1.0)
    product: Floats = gate * up
    product /= denominator
    return product
