"""The execution-time model: what a prefill, a decode iteration or a fetch costs in seconds.

Formulas and units follow the cost-model design: tokens in, seconds out. `t_uc` are uncached prompt tokens (computed),
`t_c` cached ones, `t_rst` those of the cached that are restored from host memory. Fitting the coefficients from
measurements lives in `fitting.py` beside this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCoefficients:
    """Seconds of one prefill iteration: `c0` each, `c1` a computed token, `c2` an attention pair, `c3` a restored token."""

    c0: float
    c1: float
    c2: float
    c3: float


@dataclass(frozen=True, slots=True)
class DecodeCoefficients:
    """Seconds of one decode iteration: `d0` each, `d1` for touching all experts, `d2` a running request.

    `experts` and `experts_per_token` describe a mixture-of-experts model (0 = dense, no `d1` term); `t_fwd` is the
    number of tokens a request forwards in one iteration (more than one with speculative decoding).
    """

    d0: float
    d1: float
    d2: float
    experts: int = 0
    experts_per_token: int = 0
    t_fwd: float = 1


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """How fast KV moves between nodes (`peer_bandwidth_bytes_s`, `latency_s`) and from host memory to the device."""

    kv_bytes_per_token: float
    peer_bandwidth_bytes_s: float
    host_to_device_bytes_s: float
    latency_s: float = 0.0


def pairs(t_uc: int, t_c: int) -> int:
    """Attention pairs of `t_uc` new tokens behind `t_c` cached ones: `A = t_uc*t_c + t_uc*(t_uc+1)/2`, exactly.

    Cutting a prompt into chunks does not change the sum over the chunks.
    """
    return t_uc * t_c + t_uc * (t_uc + 1) // 2


def prefill_work_s(
    coefficients: PrefillCoefficients, t_uc: float, pairs_sum: float, t_rst: float, iterations: float = 1
) -> float:
    """Seconds of `iterations` prefill iterations that together do the summed work."""
    c = coefficients
    return c.c0 * iterations + c.c1 * t_uc + c.c2 * pairs_sum + c.c3 * t_rst


def prefill_iteration_s(coefficients: PrefillCoefficients, requests: Iterable[tuple[int, int, int]]) -> float:
    """Seconds of one prefill iteration over `(t_uc, t_c, t_rst)` of each request in it: `c0` is paid once."""
    t_uc_sum = pairs_sum = t_rst_sum = 0
    for t_uc, t_c, t_rst in requests:
        t_uc_sum += t_uc
        pairs_sum += pairs(t_uc, t_c)
        t_rst_sum += t_rst
    return prefill_work_s(coefficients, t_uc_sum, pairs_sum, t_rst_sum)


def phi(batch: float, experts: int, experts_per_token: int, t_fwd: float = 1) -> float:
    """Expected share of a layer's experts that a decode batch touches: `1 - (1 - k/E)^(t_fwd*B)`; 0 for a dense model."""
    if experts <= 0 or experts_per_token <= 0:
        return 0.0
    missed_ratio = max(0.0, 1.0 - experts_per_token / experts)
    return float(1.0 - missed_ratio ** (t_fwd * batch))


def decode_iteration_s(coefficients: DecodeCoefficients, batch: float) -> float:
    """Seconds of one decode iteration with `batch` running requests: `d0 + d1*phi(B) + d2*B`."""
    d = coefficients
    return d.d0 + d.d1 * phi(batch, d.experts, d.experts_per_token, d.t_fwd) + d.d2 * batch


def fetch_s(miss_tokens: float, host_tokens: float, queued_tokens: float, network: NetworkProfile) -> float:
    """Seconds until a prefix is resident on the device.

    `miss_tokens` come from a peer, behind `queued_tokens` that are already queued on that link; `host_tokens` (the
    fetched ones and those already in this node's host memory) go from host memory to the device. Nothing to move costs
    nothing, whatever is queued.
    """
    seconds = 0.0
    if miss_tokens > 0:
        moved_bytes = (miss_tokens + queued_tokens) * network.kv_bytes_per_token
        seconds += network.latency_s + moved_bytes / network.peer_bandwidth_bytes_s
    if host_tokens > 0:
        seconds += host_tokens * network.kv_bytes_per_token / network.host_to_device_bytes_s
    return seconds
