"""Running sums that become telemetry: the load of the partition each 2 s, the work of each node each 5 s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LOAD_WINDOW_S = 2.0
COST_WINDOW_S = 5.0


class LoadAccount:
    """What the planner needs of the last `LOAD_WINDOW_S` (docs/interfaces.md, section 10, `load`)."""

    def __init__(self, now: float) -> None:
        self._in_flight = 0
        self._since = now
        self._begin(now)

    def _begin(self, now: float) -> None:
        self.t0 = now
        self.arrived = self.prefilled = self.finished = 0
        self.t_uc = self.t_c = self.pairs = self.t_rst = self.t_out = 0
        self.prefill_iterations = 0
        self.decode_iterations_of_finished = 0.0
        self.prefill_busy_s = self.decode_busy_s = 0.0
        self.prefill_waits_s: list[float] = []
        self._in_flight_s = 0.0

    @property
    def due_at(self) -> float:
        return self.t0 + LOAD_WINDOW_S

    def arrived_one(self, now: float) -> None:
        self.arrived += 1
        self.in_flight(now, +1)

    def in_flight(self, now: float, change: int) -> None:
        """One more (or one less) request is in queue, prefill or decode."""
        self._in_flight_s += self._in_flight * (now - self._since)
        self._since = now
        self._in_flight += change

    def prefill_done(self, computed: int, cached: int, pairs: int, wait_s: float) -> None:
        self.prefilled += 1
        self.t_uc += computed
        self.t_c += cached
        self.pairs += pairs
        self.prefill_waits_s.append(round(wait_s, 4))

    def finished_one(self, output_tokens: int, t_acc: float) -> None:
        self.finished += 1
        self.t_out += output_tokens
        self.decode_iterations_of_finished += max(1.0, output_tokens / t_acc)

    def iterations(self, rows: Sequence[Sequence[Any]]) -> None:
        for phase, _, _, t_rst, _, busy_s, _, *many in rows:
            if phase == "prefill":
                self.prefill_iterations += many[0] if many else 1
                self.prefill_busy_s += busy_s
                self.t_rst += t_rst
            else:
                self.decode_busy_s += busy_s

    def close(self, now: float, split: dict[str, int], stale_ratio: float) -> dict[str, Any]:
        """The finished window's record; the next one begins at `now`. Utilisation is busy time over the stage's nodes' time."""
        self.in_flight(now, 0)
        span_s = max(now - self.t0, 1e-9)
        prefill_nodes = split["prefill"] + split["mixed"]
        decode_nodes = split["decode"] + split["mixed"]
        record = {
            "kind": "load",
            "t0": self.t0,
            "t1": now,
            "arrived": self.arrived,
            "prefilled": self.prefilled,
            "t_uc": self.t_uc,
            "t_c": self.t_c,
            "pairs": self.pairs,
            "t_rst": self.t_rst,
            "prefill_iterations": self.prefill_iterations,
            "finished": self.finished,
            "t_out": self.t_out,
            "decode_iterations_of_finished": round(self.decode_iterations_of_finished, 3),
            "in_flight_s": round(self._in_flight_s, 6),
            "prefill_utilisation": round(self.prefill_busy_s / (span_s * max(1, prefill_nodes)), 4),
            "decode_utilisation": round(self.decode_busy_s / (span_s * max(1, decode_nodes)), 4),
            "prefill_waits_s": self.prefill_waits_s,
            "stale_reports_ratio": round(stale_ratio, 4),
            "split": {"prefill": prefill_nodes, "decode": decode_nodes},
        }
        self._begin(now)
        return record


@dataclass(slots=True)
class CostAccount:
    """One node's iterations of the last `COST_WINDOW_S` (`cost-window`)."""

    node: str
    boot_id: str
    t0: float
    switching: bool = False
    prefill_iterations: int = 0
    t_uc: int = 0
    pairs: float = 0
    t_rst: int = 0
    requests_prefilled: int = 0
    decode_iterations: int = 0
    batch_counts: dict[int, int] = field(default_factory=dict)
    busy_prefill_s: float = 0.0
    busy_decode_s: float = 0.0

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Adds iterations `[phase, t_uc, pairs, t_rst, batch, busy_s, requests]`; an eighth value says of how many iterations
        with that batch the row is the sum."""
        for phase, t_uc, pairs, t_rst, batch, busy_s, requests, *many in rows:
            count = many[0] if many else 1
            if phase == "prefill":
                self.prefill_iterations += count
                self.t_uc += t_uc
                self.pairs += pairs
                self.t_rst += t_rst
                self.requests_prefilled += requests
                self.busy_prefill_s += busy_s
            else:
                self.decode_iterations += count
                self.batch_counts[batch] = self.batch_counts.get(batch, 0) + count
                self.busy_decode_s += busy_s

    @property
    def empty(self) -> bool:
        return self.prefill_iterations == 0 and self.decode_iterations == 0

    def record(self, now: float) -> dict[str, Any]:
        batches = sorted(self.batch_counts)
        return {
            "kind": "cost-window",
            "node": self.node,
            "t0": self.t0,
            "t1": now,
            "boot_id": self.boot_id,
            "prefill_iterations": self.prefill_iterations,
            "t_uc": self.t_uc,
            "pairs": self.pairs,
            "t_rst": self.t_rst,
            "requests_prefilled": self.requests_prefilled,
            "decode_iterations": self.decode_iterations,
            "batch_sum": sum(batch * count for batch, count in self.batch_counts.items()),
            "batch_min": batches[0] if batches else 0,
            "batch_max": batches[-1] if batches else 0,
            "batch_counts": {str(batch): self.batch_counts[batch] for batch in batches},
            "busy_prefill_s": round(self.busy_prefill_s, 6),
            "busy_decode_s": round(self.busy_decode_s, 6),
            "switching": self.switching,
        }
