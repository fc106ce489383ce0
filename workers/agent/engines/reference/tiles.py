"""Matrix products whose rows do not depend on their batch: rows are computed in tiles of fixed size.

BLAS adds a row's terms in an order that may depend on how many rows stand in the product and on where the row stands, so
the same token computed alone, in a chunk or in a batch would come out with other last bits, and now and then with another
greedy token. A product of one fixed shape is always computed in the same order. So every product is cut into products of
one shape, rows are padded to whole tiles, and it is tried out, when the model is loaded, that a row comes out the same
wherever it stands in its tile. Activations lie as `[tiles, features, rows of a tile]`, weights as `[outputs, inputs]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.agent.blas import SMALL_PRODUCT_KERNELS, kernel_name

Floats = npt.NDArray[np.float32]
DENSE_TILE = 8
_ATTENTION_TILES = (8, 16, 32)
_SMALL_PRODUCT = 1_000_000
_MOST_OUTPUTS = 192


def whole_tiles(rows: int, size: int) -> int:
    """How many tiles of `size` hold `rows` rows."""
    return -(-rows // size)


class Operand(NamedTuple):
    """One product of the model: `matrix @ tile`. `rows_first`: the tile is a transposed view of rows, as it will be."""

    matrix: Floats
    rows_first: bool = False


def dense_tile(operands: Sequence[Operand]) -> int:
    """Rows of a tile for the model's weights: DENSE_TILE with kernels that read small products in place, else 1.

    Other kernels first copy the weight into their own layout, which costs more than a few rows gain: row by row, each piece
    of the weight staying in the cache for all rows, is then faster for one row, for eight and for a chunk."""
    if kernel_name() not in SMALL_PRODUCT_KERNELS:
        return 1
    return DENSE_TILE if all(_row_of(operand, DENSE_TILE) is not None for operand in operands) else 1


def attention_tile(operands: Sequence[Operand]) -> int:
    """Rows of a tile for products with a request's own keys: the smallest that treats its rows alike."""
    for size in _ATTENTION_TILES:
        if all(_row_of(operand, size) is not None for operand in operands):
            return size
    return 1


def project(weight: Floats, tiles: Floats) -> Floats:
    """`weight @ tile` for each of `[tiles, inputs, size]`: `[tiles, outputs, size]`.

    A few outputs at a time, so few that OpenBLAS takes its kernels for small products, which read the weight in place, and
    that this piece of it stays in the cache while all tiles use it."""
    outputs, inputs = weight.shape
    count, _, size = tiles.shape
    step = max(16, min(_MOST_OUTPUTS, _SMALL_PRODUCT // (inputs * DENSE_TILE)) // 16 * 16)
    steps, rest = divmod(outputs, step)
    out: Floats = np.empty((count, outputs, size), np.float32)
    if steps:
        pieces = np.matmul(weight[: steps * step].reshape(steps, 1, step, inputs), tiles[None])
        whole = out[:, : steps * step].reshape(count, steps, step, size)
        whole[...] = pieces.transpose(1, 0, 2, 3)
    if rest:
        np.matmul(weight[steps * step :], tiles, out=out[:, steps * step :])
    return out


def _row_of(operand: Operand, size: int) -> Floats | None:
    """What a row becomes in a tile of `size` rows, or None where that depends on its place."""
    generator = np.random.Generator(np.random.PCG64(0))
    row: Floats = generator.standard_normal((1, operand.matrix.shape[1]), dtype=np.float32)
    rows = np.repeat(row, size, axis=0)
    tile = rows.T if operand.rows_first else np.ascontiguousarray(rows.T)
    product: Floats = project(operand.matrix, tile[None])[0]
    first: Floats = product[:, 0].copy()
    return first if bool((product == first[:, None]).all()) else None


def to_tiles(rows: Floats, size: int) -> Floats:
    """`[tiles, features, size]` (contiguous) of `[tiles * size, features]`."""
    return np.ascontiguousarray(rows.reshape(-1, size, rows.shape[1]).transpose(0, 2, 1))


def to_rows(tiles: Floats) -> Floats:
    """`[tiles * size, features]` (contiguous) of `[tiles, features, size]`."""
    return np.ascontiguousarray(tiles.transpose(0, 2, 1)).reshape(-1, tiles.shape[1])
