"""Hardware profiles of simulated nodes, from a file like `data/hardware.yaml`. Coefficients are inferred from published
tables: ratios between policies on the same work mean something, absolute times do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from apps.planning.domain.cost_model import DecodeCoefficients, NetworkProfile, PrefillCoefficients
from workers.agent.engines.simulated_timing import Timing

PROFILES = Path(__file__).with_name("data") / "hardware.yaml"
GLM, KIMI = "gb300x4_tp4_glm52", "gb300x4_tp4_kimi26"
PREFILL_NAMES, DECODE_NAMES = ("c0", "c1", "c2", "c3"), ("d0", "d1", "d2")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One class of nodes: how long work takes there, and how much fits. Tokens and seconds."""

    name: str
    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    t_acc: float
    network: NetworkProfile
    host_pool_tokens: int
    device_tokens: int
    max_decode_batch: int = 128
    prefill_chunk_tokens: int = 8192
    context_tokens: int = 1_000_000

    @property
    def timing(self) -> Timing:
        return Timing(self.prefill, self.decode, self.t_acc, self.network)

    def scaled(self, factors: Mapping[str, float]) -> Hardware:
        """With coefficients multiplied, by name (`c1`, `d2`, ...), or `prefill` and `decode` for all of a phase. Raises
        ValueError naming an unknown one."""
        known = {*PREFILL_NAMES, *DECODE_NAMES, "prefill", "decode"}
        unknown = sorted(set(factors) - known)
        if unknown:
            raise ValueError(f"coefficients: expected names among {', '.join(sorted(known))}, got {unknown[0]!r}")
        c, d = self.prefill, self.decode
        every_prefill, every_decode = factors.get("prefill", 1.0), factors.get("decode", 1.0)
        return replace(
            self,
            prefill=PrefillCoefficients(*(getattr(c, n) * every_prefill * factors.get(n, 1.0) for n in PREFILL_NAMES)),
            decode=replace(d, **{n: getattr(d, n) * every_decode * factors.get(n, 1.0) for n in DECODE_NAMES}),
        )


@cache
def _document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def hardware(name: str, path: Path = PROFILES) -> Hardware:
    """The profile called `name`. Raises ValueError naming what there is."""
    document = _document(path)
    found = document.get(name)
    if not isinstance(found, dict) or "c0" not in found:
        names = ", ".join(key for key, value in document.items() if isinstance(value, dict) and "c0" in value)
        raise ValueError(f"hardware: expected one of {names}, got {name!r}")
    network = document["network"]
    return Hardware(
        name=name,
        prefill=PrefillCoefficients(*(float(found[n]) for n in PREFILL_NAMES)),
        decode=DecodeCoefficients(
            d0=float(found["d0"]),
            d1=float(found["d1"]),
            d2=float(found["d2"]),
            experts=int(found["experts"]),
            experts_per_token=int(found["experts_per_token"]),
            t_fwd=float(found["t_fwd"]),
        ),
        t_acc=float(found["t_acc"]),
        network=NetworkProfile(
            kv_bytes_per_token=float(found["kv_bytes_per_token"]),
            peer_bandwidth_bytes_s=float(network["peer_bandwidth_bytes_s"]),
            host_to_device_bytes_s=float(network["host_to_device_bytes_s"]),
            latency_s=float(network["latency_s"]),
        ),
        host_pool_tokens=int(found["host_pool_tokens"]),
        device_tokens=int(found["device_tokens"]),
    )


def restart_seconds(path: Path = PROFILES) -> tuple[float, float]:
    """How long an engine takes that changes phase by restarting (low, high)."""
    low, high = _document(path)["restart_switch_s"]["range"]
    return float(low), float(high)
