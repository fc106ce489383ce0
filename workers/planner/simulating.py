"""A dry run: two splits of the live partition in the simulator, under the workload of its newest window.

The cluster is the published configuration (nodes, learned coefficients, network, limits) with what the agents say of their
pools; the workload is what the newest window measured: so many agents with such pauses, prompts and answers. Both splits get
exactly the same work. What comes out is a comparison, not a promise: the agents are alike, and no day is like the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from time import process_time
from typing import Any, cast

from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import HASH_BYTES
from apps.planning.domain.capacity import Workload
from workers.agent.engines.simulated_timing import Timing
from workers.agent.phase import PhaseName
from workers.simulator.clients import Turn
from workers.simulator.node_parts import NodeSpec
from workers.simulator.partition import Partition
from workers.simulator.recorder import summarise
from workers.simulator.workloads.blocks import content, whole_blocks
from workers.yard.config import PartitionConfig

WARM_UP_REQUESTS, SCORED_REQUESTS = 300, 900
SHORTEST_S, LONGEST_S = 60.0, 900.0
MOST_AGENTS = 4000
DEFAULT_THINK_S = 1.0
FIGURES = ("requests", "throughput_rps", "ttft_mean_s", "ttft_p95_s", "e2e_mean_s", "e2e_p95_s", "kv_hit_pct")


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """What a node's agent says it has."""

    pool_blocks: int
    kv_tokens: int
    prefill_chunk_tokens: int


@dataclass(frozen=True, slots=True)
class LiveState:
    """What both runs start from. `t_c` are the cached tokens of a mean prompt; `rate` is today's, requests per second."""

    document: Mapping[str, Any]
    limits: Mapping[str, NodeLimits]
    workload: Workload
    t_c: float
    rate: float
    think_s: float | None


def compare(state: LiveState, current: Sequence[str], candidate: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """Simulate the present prefill nodes and the candidate's; plain values for storage. Takes CPU seconds, no I/O.

    Raises ConfigError for a configuration that the yard would refuse.
    """
    began = process_time()
    think_s = state.think_s if state.think_s is not None else DEFAULT_THINK_S
    agents = max(1, min(MOST_AGENTS, round(state.workload.in_flight + state.rate * think_s)))
    rate = max(state.rate, 1e-3)
    warm_up_s = min(LONGEST_S, max(SHORTEST_S, WARM_UP_REQUESTS / rate))
    scored_s = min(LONGEST_S, max(SHORTEST_S, SCORED_REQUESTS / rate))
    figures = {
        name: _run(state, prefill, agents, think_s, warm_up_s, scored_s, seed)
        for name, prefill in (("current", current), ("candidate", candidate))
    }
    before, after = figures["current"]["throughput_rps"], figures["candidate"]["throughput_rps"]
    return {
        **figures,
        "gain_rps": after - before,
        "gain_ratio": after / before - 1 if before else None,
        "agents": agents,
        "think_s": think_s,
        "think_measured": state.think_s is not None,
        "simulated_s": warm_up_s + scored_s,
        "scored_s": scored_s,
        "cpu_s": round(process_time() - began, 3),
    }


def _run(
    state: LiveState,
    prefill: Sequence[str],
    agents: int,
    think_s: float,
    warm_up_s: float,
    scored_s: float,
    seed: int,
) -> dict[str, float]:
    partition = Partition(_config(state, prefill), _specs(state, prefill), seed)
    _Agents(partition, state, think_s, Random(f"{seed}:agents")).start(agents)
    partition.clock.run_until(warm_up_s)
    before = partition.yard.kv.reuse()
    partition.clock.run_until(warm_up_s + scored_s)
    found = summarise(partition.recorder, warm_up_s, warm_up_s + scored_s, before, partition.yard.kv.reuse())
    return {name: float(found[name]) for name in FIGURES}


def _phase(name: str, prefill: Sequence[str]) -> PhaseName:
    return cast(PhaseName, "prefill" if name in prefill else "decode")


def _config(state: LiveState, prefill: Sequence[str]) -> PartitionConfig:
    """The published configuration with these nodes in prefill and all other enabled ones in decode."""
    nodes = [
        {**node, "phase": _phase(node["name"], prefill), "draining": False, "url": f"sim://{node['name']}"}
        for node in state.document["nodes"]
        if node["enabled"] and node["name"] in state.limits
    ]
    return PartitionConfig.parse({**state.document, "nodes": nodes, "keys": []})


def _specs(state: LiveState, prefill: Sequence[str]) -> tuple[NodeSpec, ...]:
    config = _config(state, prefill)
    return tuple(
        NodeSpec(
            name=node.name,
            order=node.order,
            phase=_phase(node.name, prefill),
            timing=Timing(node.prefill, node.decode, node.t_acc, config.network),
            block_tokens=config.model.block_tokens,
            pool_blocks=state.limits[node.name].pool_blocks,
            device_tokens=state.limits[node.name].kv_tokens,
            max_decode_batch=node.decode_limit,
            prefill_chunk_tokens=state.limits[node.name].prefill_chunk_tokens,
        )
        for node in config.nodes.values()
    )


class _Agents:
    """Agents that are all alike: a context of the measured length, and in each turn the measured new tokens on top."""

    def __init__(self, partition: Partition, state: LiveState, think_s: float, rng: Random) -> None:
        self._partition, self._load, self._t_c = partition, state.workload, state.t_c
        self._think_s, self._rng = think_s, rng
        config = partition.config
        self._block_tokens = config.model.block_tokens
        tenant = next(iter(config.tenants.values()))
        self._tenant = tenant.name
        self._objective = tenant.default_objective

    def start(self, agents: int) -> None:
        for number in range(agents):
            self._partition.clients.start(
                0.0, self._script(number), "live", self._tenant, self._objective, lambda now, player: None
            )

    def _script(self, number: int) -> Iterator[Turn]:
        name, load, rng = f"agent-{number}", self._load, self._rng
        base = content(name, whole_blocks(rng, self._t_c, self._block_tokens))
        signal = BranchSignal(name, 0, None, None, False, name, None, "")
        turn = 0
        # They do not begin together, and not all of them with a cold context.
        pause_s = rng.random() * max(self._think_s, self._block_tokens * 1e-3, SHORTEST_S / 2)
        while True:
            turn += 1
            new = content(f"{name}/{turn}", whole_blocks(rng, load.t_uc, self._block_tokens, least=1))
            chain = base + new
            tokens = len(chain) // HASH_BYTES * self._block_tokens
            output_tokens = max(1, round(rng.expovariate(1 / load.t_out)))
            yield Turn(pause_s, chain, tokens, output_tokens, replace(signal, version=turn))
            pause_s = rng.expovariate(1 / self._think_s) if self._think_s > 0 else 0.0
