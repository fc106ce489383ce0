"""Learning the cost model from measurements: non-negative least squares over 5 s windows.

A window and node give one row per phase: how many iterations ran, the sums of what they worked on, and the busy seconds.
Rows are weighted by 1/busy (so the *relative* error is minimised), columns are scaled to unit length, a quarter of the
rows is held out to measure the error. Columns that move together cannot be told apart: they are merged in the proportion of the
coefficients believed so far, and the report says so. The fitted range of B is kept; outside it the fit is a guess.
Nodes of one hardware class share a fit; the residuals tell how far each of them is from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from apps.planning.domain.capacity import BatchRange
from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients, phi

ROWS_PER_COLUMN = 5
HOLD_OUT_RATIO = 0.25
_GOLDEN_RATIO = 0.6180339887498949
MAX_CONDITION = 1e3
WARN_ERROR_RATIO = 0.07
REFUSE_ERROR_RATIO = 0.15
MIN_BUSY_S = 0.05
# A node this far from its class, over this many rows, is named and planned with at its own speed.
ODD_NODE_RATIO = 0.10
ODD_NODE_ROWS = 10

PREFILL_COLUMNS = ("c0", "c1", "c2", "c3")
DECODE_COLUMNS = ("d0", "d1", "d2")

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitWindow:
    """Measurements of one node over one window (about 5 s). Sums over its iterations; busy seconds per phase.

    `t0` is the window's begin in unix seconds.
    """

    prefill_iterations: float = 0
    t_uc: float = 0
    pairs: float = 0
    t_rst: float = 0
    busy_prefill_s: float = 0
    decode_iterations: float = 0
    batch_counts: tuple[tuple[int, float], ...] = ()
    busy_decode_s: float = 0
    node: str = ""
    t0: float = 0.0


@dataclass(frozen=True, slots=True)
class Residual:
    """One row as measured and as the fit predicts it, busy seconds. Of a held-out row the fit of the others predicts."""

    node: str
    t0: float
    measured_s: float
    predicted_s: float
    held_out: bool

    @property
    def slowness(self) -> float:
        """Measured over predicted: 1.1 is ten percent slower than the fit says."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Spread:
    """What a column's rows held per iteration: the range in which the fit has been tested."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted part of the model. `error_ratio` is the mean error on held-out rows, `condition` that of the scaled columns.

    `unidentified` columns were never exercised and keep what was believed before; `merged` ones always moved together.
    """

    coefficients: dict[str, float]
    rows: int
    error_ratio: float
    condition: float
    merged: tuple[tuple[str, ...], ...] = ()
    unidentified: tuple[str, ...] = ()
    batch_range: BatchRange | None = None
    residuals: tuple[Residual, ...] = ()
    columns: dict[str, Spread] = field(default_factory=dict)

    @property
    def deviation(self) -> float:
        """Standard deviation of log(measured/predicted) over all rows: how much a single window scatters."""
        logs = [np.log(max(residual.slowness, 1e-6)) for residual in self.residuals]
        return float(np.std(logs)) if logs else 0.0

    @property
    def odd_nodes(self) -> dict[str, float]:
        """Nodes that are clearly slower (over 1) or faster than the class, by the median of their rows."""
        by_node: dict[str, list[float]] = {}
        for residual in self.residuals:
            by_node.setdefault(residual.node, []).append(residual.slowness)
        if len(by_node) < 2:
            return {}
        found = {name: float(np.median(values)) for name, values in by_node.items() if len(values) >= ODD_NODE_ROWS}
        return {name: ratio for name, ratio in sorted(found.items()) if abs(ratio - 1.0) > ODD_NODE_RATIO}

    @property
    def usable(self) -> bool:
        return self.error_ratio <= REFUSE_ERROR_RATIO

    @property
    def warnings(self) -> tuple[str, ...]:
        found = []
        if self.error_ratio > REFUSE_ERROR_RATIO:
            found.append(f"mean error {self.error_ratio:.1%} is over {REFUSE_ERROR_RATIO:.0%}: not used for planning")
        elif self.error_ratio > WARN_ERROR_RATIO:
            found.append(f"mean error {self.error_ratio:.1%} is over {WARN_ERROR_RATIO:.0%}")
        found += [f"{' and '.join(group)} always moved together and are fitted as one" for group in self.merged]
        found += [
            f"{name} is {abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'} than its class"
            for name, ratio in self.odd_nodes.items()
        ]
        if self.unidentified:
            found.append(f"{', '.join(self.unidentified)} was not exercised and keeps its previous value")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class NotEnough:
    """Too little was measured to fit: what there is and what is needed."""

    rows: int
    needed: int

    @property
    def reason(self) -> str:
        return f"{self.rows} usable windows, {self.needed} are needed"


@dataclass(slots=True)
class _Columns:
    """Named columns under work: groups of original columns, each group standing for one unknown."""

    names: tuple[str, ...]
    matrix: Matrix
    believed: Matrix
    groups: list[list[int]] = field(default_factory=list)

    def merged_matrix(self) -> Matrix:
        return np.column_stack([self._group(indices) for indices in self.groups])

    def _group(self, indices: list[int]) -> Matrix:
        return self.matrix[:, indices] @ self.proportions(indices)

    def proportions(self, indices: list[int]) -> Matrix:
        """How one unknown spreads over its columns: as believed before, else equal shares of the time."""
        if len(indices) == 1:
            return np.ones(1)
        believed = self.believed[indices]
        if believed.sum() > 0:
            return believed
        lengths = np.linalg.norm(self.matrix[:, indices], axis=0)
        return np.asarray(1.0 / np.where(lengths > 0, lengths, 1.0), dtype=float)


def fit_prefill(windows: Sequence[FitWindow], believed: PrefillCoefficients | None = None) -> Fit | NotEnough:
    """Fit c0..c3 from the windows in which the node prefilled. `believed` fills what the windows cannot tell."""
    used = [w for w in windows if w.busy_prefill_s >= MIN_BUSY_S and w.prefill_iterations > 0]
    matrix = np.array([[w.prefill_iterations, w.t_uc, w.pairs, w.t_rst] for w in used], dtype=float).reshape(-1, 4)
    busy = np.array([w.busy_prefill_s for w in used], dtype=float)
    prior = [believed.c0, believed.c1, believed.c2, believed.c3] if believed else [0.0] * 4
    return _fit(PREFILL_COLUMNS, matrix, busy, np.array(prior, dtype=float), used)


def fit_decode(windows: Sequence[FitWindow], shape: DecodeCoefficients) -> Fit | NotEnough:
    """Fit d0..d2 from the windows in which the node decoded.

    `shape` says how many experts the model has (0: dense, d1 stays 0) and fills what the windows cannot tell.
    """
    rows, busy, used = [], [], []
    batches: set[int] = set()
    for window in windows:
        iterations = sum(count for _, count in window.batch_counts)
        if window.busy_decode_s < MIN_BUSY_S or iterations <= 0:
            continue
        touched = sum(
            count * phi(batch, shape.experts, shape.experts_per_token, shape.t_fwd)
            for batch, count in window.batch_counts
        )
        rows.append([iterations, touched, sum(count * batch for batch, count in window.batch_counts)])
        busy.append(window.busy_decode_s)
        used.append(window)
        batches.update(batch for batch, count in window.batch_counts if count > 0)
    matrix = np.array(rows, dtype=float).reshape(-1, 3)
    fit = _fit(DECODE_COLUMNS, matrix, np.array(busy), np.array([shape.d0, shape.d1, shape.d2], dtype=float), used)
    if isinstance(fit, NotEnough):
        return fit
    return replace(fit, batch_range=BatchRange(float(min(batches)), float(max(batches))))


def _fit(
    names: tuple[str, ...], matrix: Matrix, busy: Matrix, believed: Matrix, windows: Sequence[FitWindow]
) -> Fit | NotEnough:
    live = [index for index in range(len(names)) if matrix.size and matrix[:, index].any()]
    needed = ROWS_PER_COLUMN * max(1, len(live))
    if len(busy) < needed:
        return NotEnough(len(busy), needed)
    columns = _Columns(names, matrix / busy[:, None], believed, [[index] for index in live])
    condition = _condition(columns.merged_matrix())
    while len(columns.groups) > 1 and _condition(columns.merged_matrix()) > MAX_CONDITION:
        _merge_most_alike(columns)

    held_out = _held_out(len(busy))
    trained = _solve(columns, ~held_out)
    error_ratio = float(np.abs(columns.matrix[held_out] @ trained - 1.0).mean())

    everything = _solve(columns, np.ones(len(busy), dtype=bool))
    predicted = np.where(held_out, matrix @ trained, matrix @ everything)
    coefficients = {
        name: float(everything[index] if index in live else believed[index]) for index, name in enumerate(names)
    }
    return Fit(
        coefficients,
        len(busy),
        error_ratio,
        condition,
        tuple(tuple(names[index] for index in group) for group in columns.groups if len(group) > 1),
        tuple(name for index, name in enumerate(names) if index not in live and _matters(name, believed[index])),
        residuals=tuple(
            Residual(window.node, window.t0, float(busy[row]), float(predicted[row]), bool(held_out[row]))
            for row, window in enumerate(windows)
        ),
        columns={name: _spread(matrix, index) for index, name in enumerate(names) if index in live},
    )


def _held_out(rows: int) -> NDArray[np.bool_]:
    """A fixed quarter of the rows, spread by the golden ratio: every fourth row could always be the same node's."""
    return np.asarray((np.arange(1, rows + 1) * _GOLDEN_RATIO) % 1.0 < HOLD_OUT_RATIO, dtype=bool)


def _spread(matrix: Matrix, index: int) -> Spread:
    """A column per iteration; of the iterations themselves, how many a window had."""
    values = matrix[:, index] if index == 0 else matrix[:, index] / np.maximum(matrix[:, 0], 1.0)
    return Spread(float(values.min()), float(values.mean()), float(values.max()))


def _matters(name: str, believed: float) -> bool:
    """A dense model has no d1; saying that it was not exercised would only confuse."""
    return name != "d1" or believed > 0


def _scaled(matrix: Matrix) -> Matrix:
    return np.asarray(matrix / np.linalg.norm(matrix, axis=0), dtype=float)


def _condition(matrix: Matrix) -> float:
    return float(np.linalg.cond(_scaled(matrix)))


def _merge_most_alike(columns: _Columns) -> None:
    """Merge the two groups that take part most in the direction the rows cannot tell apart."""
    _, _, directions = np.linalg.svd(_scaled(columns.merged_matrix()), full_matrices=False)
    first, second = sorted(np.argsort(-np.abs(directions[-1]))[:2].tolist())
    columns.groups[first] = sorted(columns.groups[first] + columns.groups.pop(second))


def _solve(columns: _Columns, rows: NDArray[np.bool_]) -> Matrix:
    """Coefficients of all original columns (dead ones 0). The matrix is already divided by busy seconds: the target is 1."""
    merged = columns.merged_matrix()[rows]
    lengths = np.linalg.norm(merged, axis=0)
    lengths = np.where(lengths > 0, lengths, 1.0)
    unknowns, _ = nnls(merged / lengths, np.ones(len(merged)))
    solution = np.zeros(len(columns.names))
    for group, unknown in zip(columns.groups, unknowns / lengths, strict=True):
        solution[group] = unknown * columns.proportions(group)
    return solution
