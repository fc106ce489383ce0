"""What a run measured: one row a finished request in preallocated arrays, and counters. Only the scored period counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apps.kvcache.domain.events import LOST_CAUSES, ReuseTotals

FIELDS = ("finished_at", "ttft_s", "e2e_s", "queue_s", "prompt_tokens", "cached_tokens", "output_tokens", "kind")
ROWS_AT_ONCE = 1024
"""A row at a time into an array costs more than all the rest of recording it."""


@dataclass
class Recorder:
    """Rows of finished requests. `kinds` names what the last column counts (workload and tenant)."""

    capacity: int = 1 << 14
    rows: int = 0
    kinds: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    retried: int = 0
    prefetches: int = 0
    imbalance: list[tuple[float, float]] = field(default_factory=list)
    switch_s: list[tuple[float, float]] = field(default_factory=list)
    splits: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._data = np.empty((len(FIELDS), self.capacity), dtype=np.float64)
        self._newest: list[tuple[float, ...]] = []

    def finished(
        self,
        now: float,
        ttft_s: float,
        e2e_s: float,
        queue_s: float,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        kind: tuple[str, str],
    ) -> None:
        number = self.kinds.setdefault(kind, len(self.kinds))
        self._newest.append((now, ttft_s, e2e_s, queue_s, prompt_tokens, cached_tokens, output_tokens, number))
        self.rows += 1
        if len(self._newest) == ROWS_AT_ONCE:
            self._table()

    def _table(self) -> NDArray[np.float64]:
        """All rows, as columns."""
        if self._newest:
            begin, newest = self.rows - len(self._newest), np.array(self._newest, dtype=np.float64).T
            while self.rows > self._data.shape[1]:
                self._data = np.concatenate([self._data, np.empty_like(self._data)], axis=1)
            self._data[:, begin : self.rows] = newest
            self._newest.clear()
        return self._data[:, : self.rows]

    def column(self, name: str, since: float = 0.0, until: float = float("inf")) -> NDArray[np.float64]:
        """One column of the requests that finished in `[since, until)`."""
        table = self._table()
        return table[FIELDS.index(name)][(table[0] >= since) & (table[0] < until)]

    def latest(self, name: str, row: int) -> NDArray[np.float64]:
        """One column from a row on."""
        return self._table()[FIELDS.index(name), row:]

    def of_kind(
        self, name: str, workload: str | None, tenant: str | None, since: float, until: float
    ) -> NDArray[np.float64]:
        numbers = [
            number
            for (its_workload, its_tenant), number in self.kinds.items()
            if workload in (None, its_workload) and tenant in (None, its_tenant)
        ]
        mask = np.isin(self.column("kind", since, until), numbers)
        return self.column(name, since, until)[mask]


def summarise(
    recorder: Recorder, since: float, until: float, before: ReuseTotals, after: ReuseTotals
) -> dict[str, Any]:
    """The figures of one scored period. Times in seconds, shares in per cent."""
    ttft, e2e = recorder.column("ttft_s", since, until), recorder.column("e2e_s", since, until)
    output = recorder.column("output_tokens", since, until)
    queue = recorder.column("queue_s", since, until)
    span_s = max(1e-9, until - since)
    prompt = after.prompt_tokens - before.prompt_tokens
    ideal = after.ideal_tokens - before.ideal_tokens
    actual = after.actual_tokens - before.actual_tokens
    lost = {cause: after.lost[cause] - before.lost[cause] for cause in LOST_CAUSES}
    switches = [seconds for at, seconds in recorder.switch_s if since <= at < until]
    all_switches = [seconds for at, seconds in recorder.switch_s if at < until]
    imbalance = [ratio for at, ratio in recorder.imbalance if since <= at < until]
    tpot = (e2e - ttft)[output > 1] / (output[output > 1] - 1)
    return {
        "requests": len(ttft),
        "throughput_rps": len(ttft) / span_s,
        "ttft_mean_s": _mean(ttft),
        "ttft_p50_s": _percentile(ttft, 50),
        "ttft_p95_s": _percentile(ttft, 95),
        "e2e_mean_s": _mean(e2e),
        "e2e_p50_s": _percentile(e2e, 50),
        "e2e_p95_s": _percentile(e2e, 95),
        "queue_mean_s": _mean(queue),
        "queue_p95_s": _percentile(queue, 95),
        "tpot_ms": 1e3 * _mean(tpot),
        "kv_hit_pct": 100 * actual / prompt if prompt else 0.0,
        "kv_hit_ideal_pct": 100 * ideal / prompt if prompt else 0.0,
        "lost_reuse_pct": 100 * (ideal - actual) / ideal if ideal else 0.0,
        "lost_pct_by_cause": {cause: 100 * tokens / ideal if ideal else 0.0 for cause, tokens in lost.items()},
        "uncached_tokens": (prompt - actual) / max(1, len(ttft)),
        "prompt_tokens": prompt / max(1, len(ttft)),
        "output_tokens": _mean(output),
        "switches": len(switches),
        "switches_all": len(all_switches),
        "switch_mean_s": float(np.mean(all_switches)) if all_switches else None,
        "imbalance": float(np.mean(imbalance)) if imbalance else None,
        "refused": dict(recorder.refused),
        "failed": recorder.failed,
    }


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _percentile(values: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else 0.0
