"""What a split of nodes can carry: service time of a prefill, requests per second of each node, and of the whole.

A split is a set of prefill nodes P and a set of decode nodes D. Its capacity is Theta = min(sum of mu_P, sum of mu_D)
in requests per second. The batch a decode node runs at follows from q, the mean number of requests in flight in *both*
phases: with decode's own requests alone, Little's law makes decode capacity equal today's throughput and the planner
sticks where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, lgamma, log

from apps.planning.domain.cost_model import (
    DecodeCoefficients,
    PrefillCoefficients,
    decode_iteration_s,
    prefill_work_s,
)

# Halvings of the closed loop's two searches: far finer than anything measured.
RATE_HALVINGS = 32
BATCH_HALVINGS = 24


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The decode batch sizes a fit has seen; outside them its formula is a guess."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Averages of one slice, per request unless named otherwise.

    `pairs` is the mean of A (never A of the means); `u_tokens` are new tokens per prefill iteration; `t_acc` tokens
    accepted per decode iteration; `in_flight` is q, requests in queue, prefill and decode together (time average).
    """

    t_uc: float
    pairs: float
    t_rst: float
    t_out: float
    t_acc: float
    u_tokens: float
    in_flight: float

    @property
    def decode_iterations(self) -> float:
        """Decode iterations one request needs: at least one."""
        return max(1.0, self.t_out / self.t_acc)


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What capacity needs to know of one node. `batch_limit` is B_cap: engine limit, KV that fits, or the TPOT target."""

    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    batch_limit: float
    batch_range: BatchRange | None = None


def prefill_service_s(coefficients: PrefillCoefficients, workload: Workload) -> float:
    """Seconds of prefill one mean request costs: S_P = c0*t_uc/u + c1*t_uc + c2*mean(A) + c3*mean(t_rst)."""
    iterations = workload.t_uc / workload.u_tokens if workload.u_tokens > 0 else 1.0
    return prefill_work_s(coefficients, workload.t_uc, workload.pairs, workload.t_rst, iterations)


def prefill_rate(coefficients: PrefillCoefficients, workload: Workload) -> float:
    """mu_P: requests per second one node prefills."""
    service_s = prefill_service_s(coefficients, workload)
    return 1.0 / service_s if service_s > 0 else inf


def decode_rate(node: NodeCapacity, workload: Workload, batch: float) -> float:
    """mu_D at `batch` running requests: requests per second one node decodes.

    Outside the fitted range of B the estimate is clamped on the safe side: no more batch than was seen, and no faster
    iterations than were seen.
    """
    timed = batch
    if node.batch_range is not None:
        batch = min(batch, node.batch_range.high)
        timed = max(batch, node.batch_range.low)
    if batch <= 0:
        return 0.0
    seconds = workload.decode_iterations * decode_iteration_s(node.decode, timed)
    return batch / seconds if seconds > 0 else inf


@dataclass(frozen=True, slots=True)
class SplitCapacity:
    """Capacity of one split under one workload, requests per second, and the decode batch it is computed at."""

    theta: float
    prefill: float
    decode: float
    batch: float
    outside_fit: bool

    @property
    def bottleneck(self) -> str:
        return "prefill" if self.prefill <= self.decode else "decode"


def split_capacity(
    prefill_nodes: Sequence[NodeCapacity], decode_nodes: Sequence[NodeCapacity], workload: Workload
) -> SplitCapacity:
    """Theta of a split. A split with an empty phase carries nothing: Theta = 0."""
    mu_prefill = sum(prefill_rate(node.prefill, workload) for node in prefill_nodes)
    if not decode_nodes:
        return SplitCapacity(0.0, mu_prefill, 0.0, 0.0, False)
    share = workload.in_flight / len(decode_nodes)
    mu_decode, outside = 0.0, False
    for node in decode_nodes:
        batch = min(node.batch_limit, share)
        seen = node.batch_range
        outside = outside or (seen is not None and not seen.low <= batch <= seen.high)
        mu_decode += decode_rate(node, workload, batch)
    return SplitCapacity(min(mu_prefill, mu_decode), mu_prefill, mu_decode, share, outside)


def erlang_wait_ratio(servers: int, offered: float) -> float:
    """Erlang C: the share of arrivals that must wait for one of `servers` when `offered` (rate x service time) < servers."""
    if offered <= 0:
        return 0.0
    if offered >= servers:
        return 1.0
    log_terms = [k * log(offered) - lgamma(k + 1) for k in range(servers + 1)]
    waiting = exp(log_terms[servers]) * servers / (servers - offered)
    return waiting / (sum(exp(term) for term in log_terms[:servers]) + waiting)


def prefill_wait_s(servers: int, rate: float, mu_total: float, in_flight: float, quantile: float = 0.95) -> float:
    """Predicted wait for prefill, seconds, at `quantile`: M/M/n, and never more than all requests in flight need.

    `rate` are arrivals per second at prefill, `mu_total` the sum of mu_P of its `servers`. Agents wait for their
    answers, so even an overloaded stage cannot hold more than the `in_flight` requests there are.
    """
    if servers <= 0 or mu_total <= 0:
        return inf
    if rate <= 0:
        return 0.0
    most_s = in_flight / mu_total
    if rate >= mu_total:
        return most_s
    waits = erlang_wait_ratio(servers, servers * rate / mu_total)
    if waits <= 1 - quantile:
        return 0.0
    return min(most_s, log(waits / (1 - quantile)) / (mu_total - rate))


def mean_prefill_wait_s(servers: int, rate: float, mu_total: float) -> float:
    """Mean M/M/n wait for prefill, seconds; infinite at or over capacity."""
    if servers <= 0 or rate >= mu_total:
        return inf
    return erlang_wait_ratio(servers, servers * rate / mu_total) / (mu_total - rate)


def closed_loop_rate(
    prefill_nodes: Sequence[NodeCapacity],
    decode_nodes: Sequence[NodeCapacity],
    workload: Workload,
    agents: float,
    think_s: float,
) -> float:
    """Requests per second when `agents` each wait for an answer, think `think_s` and ask again.

    The fixed point X = N / (Z + R_P(X) + R_D(X)); the better estimate where think times are known.
    """
    if not prefill_nodes or not decode_nodes or agents <= 0:
        return 0.0
    rates = [prefill_rate(node.prefill, workload) for node in prefill_nodes]
    mu_prefill = sum(rates)
    if mu_prefill <= 0:
        return 0.0
    service_s = len(rates) / mu_prefill

    def answered_in_s(rate: float) -> float:
        wait_s = mean_prefill_wait_s(len(rates), rate, mu_prefill)
        return service_s + wait_s + _decode_response_s(decode_nodes, workload, rate)

    low, high = 0.0, mu_prefill
    for _ in range(RATE_HALVINGS):
        middle = (low + high) / 2
        response_s = answered_in_s(middle)
        if response_s < inf and middle * (think_s + response_s) < agents:
            low = middle
        else:
            high = middle
    return low


def _decode_response_s(nodes: Sequence[NodeCapacity], workload: Workload, rate: float) -> float:
    """Seconds in decode at `rate` requests per second spread evenly: the batch at which a node keeps up, by Little's law."""
    per_node = rate / len(nodes)
    slowest_s = 0.0
    for node in set(nodes):  # equal nodes answer alike
        if decode_rate(node, workload, node.batch_limit) < per_node:
            return inf
        low, high = 0.0, node.batch_limit
        for _ in range(BATCH_HALVINGS):
            middle = (low + high) / 2
            if decode_rate(node, workload, middle) < per_node:
                low = middle
            else:
                high = middle
        batch = max(1.0, high)
        slowest_s = max(slowest_s, workload.decode_iterations * decode_iteration_s(node.decode, batch))
    return slowest_s
