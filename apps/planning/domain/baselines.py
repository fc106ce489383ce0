"""Published planners that ours is compared with: load thresholds (Dynamo) and input-length demand (Arrow).

Each looks at the same reports as ours and answers which node should change phase now, or nobody. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients, decode_iteration_s, pairs


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node as it last reported itself. `queued_tokens`: prompt tokens waiting for prefill, cached ones included;
    `kv_usage`: share of the device's KV that its requests need, those that wait for room included, so it can exceed 1."""

    name: str
    order: int
    phase: str
    queued_tokens: int
    kv_usage: float
    running: int
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrived since the last look, over `seconds`: requests, their whole input and the output of those that ended."""

    seconds: float
    requests: int
    input_tokens: int
    finished: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Flip:
    """Change `node` to `phase`, for `reason`."""

    node: str
    phase: Literal["prefill", "decode"]
    reason: str


class BaselinePlanner(Protocol):
    """`every_s`: how often it looks. `decide` is not called while one of its flips is under way."""

    every_s: float

    def decide(self, now: float, nodes: Sequence[NodeReport], demand: Demand) -> Flip | None: ...


def _least_busy(nodes: Sequence[NodeReport]) -> NodeReport:
    return min(nodes, key=lambda node: (node.queued_tokens, node.running, node.kv_usage, node.order))


@dataclass(slots=True)
class LoadThresholds:
    """Dynamo's load planner (1.6.1, target `throughput`) on a fixed number of nodes: each phase says what it wants for itself,
    one node more when one of its engines is over the upper threshold, one less when all are under the lower; with all GPUs in
    use only a wish for more that meets the other phase's wish for less is carried out.

    Prefill is measured in queued tokens over the model's context length, decode in KV of what runs and waits there over the
    KV that fits. A phase asks for less only where the rest would stay under the upper threshold.
    """

    context_tokens: int
    every_s: float = 5.0
    prefill_up: float = 1.0
    prefill_down: float = 0.1
    decode_up: float = 1.0
    decode_down: float = 0.6

    def decide(self, now: float, nodes: Sequence[NodeReport], demand: Demand) -> Flip | None:
        if not all(node.ready for node in nodes):
            return None
        prefill = [node for node in nodes if node.phase == "prefill"]
        decode = [node for node in nodes if node.phase == "decode"]
        queues = [node.queued_tokens / self.context_tokens for node in prefill]
        usages = [node.kv_usage for node in decode]
        more_prefill = max(queues, default=0.0) >= self.prefill_up
        more_decode = max(usages, default=0.0) > self.decode_up
        if more_prefill and _can_spare(usages, self.decode_down, self.decode_up):
            why = f"queued tokens at {max(queues):.2f} context lengths, KV usage at most {max(usages):.0%}"
            return Flip(_least_busy(decode).name, "prefill", why)
        if more_decode and _can_spare(queues, self.prefill_down, self.prefill_up):
            why = f"queued tokens at most {max(queues):.2f} context lengths, KV usage {max(usages):.0%}"
            return Flip(_least_busy(prefill).name, "decode", why)
        return None


def _can_spare(loads: Sequence[float], down: float, up: float) -> bool:
    """Whether a phase asks for a node less: all its engines are under `down`, and would not go over `up` without it."""
    rest = len(loads) - 1
    return rest >= 1 and max(loads) < down and max(loads) * len(loads) / rest < up


@dataclass(slots=True)
class InputLengthDemand:
    """Arrow: as many prefill nodes as the input needs, every input token counted as computed, cached or not.

    It looks often and follows every burst: the demand of the last look decides.
    """

    prefill: PrefillCoefficients
    decode: DecodeCoefficients
    t_acc: float
    every_s: float = 60.0
    batch: float = 32.0

    def decide(self, now: float, nodes: Sequence[NodeReport], demand: Demand) -> Flip | None:
        if not demand.requests or not all(node.ready for node in nodes):
            return None
        wanted = self.prefill_nodes(len(nodes), demand)
        prefill = [node for node in nodes if node.phase == "prefill"]
        decode = [node for node in nodes if node.phase == "decode"]
        why = f"{demand.input_tokens / demand.seconds:,.0f} input tokens a second ask for {wanted} prefill nodes"
        if wanted > len(prefill) and len(decode) > 1:
            return Flip(_least_busy(decode).name, "prefill", why)
        if wanted < len(prefill) and len(prefill) > 1:
            return Flip(_least_busy(prefill).name, "decode", why)
        return None

    def prefill_nodes(self, nodes: int, demand: Demand) -> int:
        """Nodes in proportion to the seconds of work that the input and the output are taken to be."""
        mean_input = demand.input_tokens / demand.requests
        c = self.prefill
        prefill_s = demand.requests * (c.c0 + c.c1 * mean_input + c.c2 * pairs(round(mean_input), 0))
        iterations = demand.output_tokens / self.t_acc
        decode_s = iterations * decode_iteration_s(self.decode, self.batch) / self.batch
        share = prefill_s / max(1e-9, prefill_s + decode_s)
        return min(nodes - 1, max(1, round(nodes * share)))
