"""How long simulated work takes: the cost model's coefficients and the network, at a speed.

At speed S a node behaves like one whose every coefficient is S times smaller and whose network is S times faster, so what
it reports (busy seconds, timings) is real time, as with any engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from apps.planning.domain.cost_model import (
    DecodeCoefficients,
    NetworkProfile,
    PrefillCoefficients,
    decode_iteration_s,
    prefill_work_s,
)
from workers.agent.spec import NodeSpec, SpecError


@dataclass(frozen=True)
class Timing:
    """Real seconds of iterations and transfers of one node. `t_acc` tokens are accepted by a request in one iteration."""

    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    t_acc: float
    network: NetworkProfile
    speed: float = 1.0

    def prefill_s(self, t_uc: int, pairs: int, t_rst: int) -> float:
        """One prefill iteration."""
        return prefill_work_s(self.prefill, t_uc, pairs, t_rst) / self.speed

    def decode_s(self, batch: int) -> float:
        """One decode iteration of `batch` requests."""
        seconds = self._decode_table.get(batch)
        if seconds is None:
            seconds = self._decode_table[batch] = decode_iteration_s(self.decode, batch) / self.speed
        return seconds

    def transfer_s(self, tokens: int) -> float:
        """Moving the KV of `tokens` from one node's memory to another's over an idle link."""
        moved_bytes = tokens * self.network.kv_bytes_per_token
        return (self.network.latency_s + moved_bytes / self.network.peer_bandwidth_bytes_s) / self.speed

    @cached_property
    def _decode_table(self) -> dict[int, float]:
        return {}


def timing_of(spec: NodeSpec, speed: float) -> Timing:
    """The timing of a node. Raises SpecError naming the coefficient or network figure that is missing or impossible."""
    given = _Numbers(f"nodes.{spec.name}.coefficients", spec.coefficients)
    prefill = PrefillCoefficients(
        given.at_least_0("c0"), given.at_least_0("c1"), given.at_least_0("c2"), given.at_least_0("c3")
    )
    decode = DecodeCoefficients(
        given.at_least_0("d0"),
        given.at_least_0("d1"),
        given.at_least_0("d2"),
        int(given.at_least_0("experts", 0)),
        int(given.at_least_0("experts_per_token", 0)),
        given.positive("t_fwd", 1),
    )
    if prefill.c0 + prefill.c1 <= 0:
        raise SpecError(f"nodes.{spec.name}.coefficients.c1", "expected prefill to take time: c0 + c1 above 0")
    if decode_iteration_s(decode, 1) <= 0:
        raise SpecError(f"nodes.{spec.name}.coefficients.d0", "expected a decode iteration to take time")
    network = _Numbers(f"nodes.{spec.name}.network", spec.network)
    profile = NetworkProfile(
        network.positive("kv_bytes_per_token"),
        network.positive("peer_bandwidth_bytes_s"),
        network.positive("host_to_device_bytes_s"),
        network.at_least_0("latency_s", 0),
    )
    return Timing(prefill, decode, given.positive("t_acc", 1), profile, speed)


class _Numbers:
    def __init__(self, path: str, values: Mapping[str, float]) -> None:
        self._path = path
        self._values = values

    def at_least_0(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name, default)
        if value is None or not math.isfinite(value) or value < 0:
            raise SpecError(f"{self._path}.{name}", f"expected a number of at least 0, got {value}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.at_least_0(name, default)
        if value == 0:
            raise SpecError(f"{self._path}.{name}", "expected a number above 0, got 0")
        return value
