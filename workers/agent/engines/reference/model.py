"""The forward pass: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, tied embedding, in float32.

One call computes any mix of prompt chunks and single decode steps as one batch of rows; only attention goes request by
request, because each has its own context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.agent.engines.reference.kv import BlockTable, DeviceKv
from workers.agent.engines.reference.weights import Floats, ModelConfig, Weights

_GEMM_ROWS = 4


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
        self._scale = np.float32(1.0 / np.sqrt(self.config.head_dim))

    def forward(self, kv: DeviceKv, parts: Sequence[Part]) -> Floats:
        """Write the parts' keys and values into `kv` and answer `[parts with logits, vocabulary]`, in order."""
        config, weights = self.config, self._weights
        ids = np.concatenate([np.asarray(part.ids, dtype=np.intp) for part in parts])
        positions = np.concatenate([np.arange(part.start, part.start + len(part.ids)) for part in parts])
        cos, sin = self._cos[positions], self._sin[positions]
        rotated = (config.heads + config.kv_heads) * config.head_dim
        rows = len(ids)
        x: Floats = weights.embedding[ids]
        for index, layer in enumerate(weights.layers):
            qkv = _matmul(_norm(x, layer.attention_norm, config.norm_epsilon), layer.qkv)
            qk = _rotate(qkv[:, :rotated].reshape(rows, -1, config.head_dim), cos, sin)
            values = qkv[:, rotated:].reshape(rows, config.kv_heads, config.head_dim)
            attended = self._attend(kv, index, parts, qk, values)
            x += _matmul(attended, layer.output)
            gate_up = _matmul(_norm(x, layer.mlp_norm, config.norm_epsilon), layer.gate_up)
            x += _matmul(_silu_product(gate_up, config.hidden), layer.down)
        last = np.cumsum([len(part.ids) for part in parts]) - 1
        wanted = last[[part.logits for part in parts]]
        if not len(wanted):
            return np.empty((0, config.vocabulary), np.float32)
        return _matmul(_norm(x[wanted], weights.norm, config.norm_epsilon), weights.head.T)

    def _attend(self, kv: DeviceKv, layer: int, parts: Sequence[Part], qk: Floats, values: Floats) -> Floats:
        config = self.config
        out = np.empty((len(qk), config.heads * config.head_dim), np.float32)
        groups = config.heads // config.kv_heads
        first = 0
        for part in parts:
            count = len(part.ids)
            rows = slice(first, first + count)
            first += count
            keys, held = kv.extend(layer, part.table, part.start, qk[rows, config.heads :], values[rows])
            by_row = qk[rows, : config.heads].reshape(count, config.kv_heads, groups, config.head_dim)
            queries = by_row.transpose(1, 2, 0, 3).reshape(config.kv_heads, groups * count, config.head_dim)
            scores = np.matmul(queries * self._scale, keys.transpose(0, 2, 1))
            if count > 1:
                scores.reshape(config.heads, count, -1)[:, :, part.start :] += _future(count)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            total = scores.sum(axis=-1, keepdims=True)
            mixed = np.matmul(scores, held)
            mixed /= total
            by_group = mixed.reshape(config.kv_heads, groups, count, config.head_dim)
            out[rows] = by_group.transpose(2, 0, 1, 3).reshape(count, -1)
        return out


def _matmul(rows: Floats, matrix: Floats) -> Floats:
    """`rows @ matrix`. BLAS is slow on two to seven rows: two go one by one, others are padded to a multiple of four."""
    count = len(rows)
    if count == 2:
        return np.stack([rows[0] @ matrix, rows[1] @ matrix])
    missing = -count % _GEMM_ROWS
    if 1 < count < 2 * _GEMM_ROWS and missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.float32)])
        return np.matmul(rows, matrix)[:count]
    result: Floats = np.matmul(rows, matrix)
    return result


def _norm(x: Floats, gain: Floats, epsilon: float) -> Floats:
    mean = np.einsum("ij,ij->i", x, x) / np.float32(x.shape[1])
    return x * (np.float32(1.0) / np.sqrt(mean + np.float32(epsilon)))[:, None] * gain


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
    product = gate * up
    product /= denominator
    return product


def _future(count: int) -> npt.NDArray[np.float32]:
    """Mask of a chunk's own keys: minus infinity where the key comes after the query."""
    mask: npt.NDArray[np.float32] = np.triu(np.full((count, count), -np.inf, np.float32), k=1)
    return mask
