"""A cluster, a system and a workload put together into a partition that can run, and what one run measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Any

from apps.kvcache.domain.events import ReuseTotals
from apps.planning.domain.baselines import InputLengthDemand, LoadThresholds
from apps.planning.domain.plan_types import PlannerPolicy
from workers.simulator.hardware import GLM, Hardware, hardware
from workers.simulator.node_parts import NodeSpec
from workers.simulator.partition import Partition, Signals
from workers.simulator.pausing import AgentPauses
from workers.simulator.planners import BaselineDriver, OrderDriver, OwnPlanner
from workers.simulator.recorder import summarise
from workers.simulator.systems import System
from workers.simulator.workloads.mixes import ONE_TENANT, TenantShare
from workers.yard.config import PartitionConfig

BANDS = (("premium", 100), ("standard", 0), ("best-effort", -10))


@dataclass(frozen=True)
class Cluster:
    """Nodes of one partition. `believed`: coefficients the router and the planner work with (None: the true ones).
    `prefill_hardware`: another class for the first nodes, which then only prefill well."""

    nodes: int = 9
    prefill_nodes: int = 6
    hardware: Hardware = field(default_factory=lambda: hardware(GLM))
    believed: Hardware | None = None
    name: str = "sim"

    def split(self, system: System) -> tuple[int, int]:
        """(prefill, decode) nodes at the start. Raises ValueError for a split of another number of nodes."""
        if system.split is None:
            return self.prefill_nodes, self.nodes - self.prefill_nodes
        if sum(system.split) != self.nodes:
            raise ValueError(f"system: expected a split of {self.nodes} nodes, got {system.split}")
        return system.split


@dataclass(frozen=True)
class Settings:
    """How a run is made. Times in seconds; `slo_ttft_s` is what the planner's guards hold to."""

    block_tokens: int = 128
    seed: int = 0
    slo_ttft_s: float | None = 15.0
    window_s: float = 600.0
    slices: int = 10
    cooldown_s: float = 120.0
    prefill_limit_per_node: int | None = 4
    signals: Signals = field(default_factory=Signals)
    tenants: Sequence[TenantShare] = ONE_TENANT
    flow: dict[str, Any] = field(default_factory=dict)
    fairness: str = "round-robin"
    failed_fetch_ratio: float = 0.0
    check_every: int = 0


@dataclass
class Run:
    """A partition with its planner, ready to be given a workload."""

    partition: Partition
    system: System
    orders: OrderDriver
    planner: OwnPlanner | BaselineDriver | None

    def measure(self, warm_up_s: float, scored_s: float) -> dict[str, Any]:
        """Run through both periods; the figures of the second."""
        began = process_time()
        self.partition.clock.run_until(warm_up_s)
        before = self.partition.yard.kv.reuse()
        self.partition.clock.run_until(warm_up_s + scored_s)
        figures = self.figures(warm_up_s, warm_up_s + scored_s, before)
        figures["cpu_s"] = process_time() - began
        return figures

    def figures(self, since: float, until: float, before: ReuseTotals) -> dict[str, Any]:
        partition = self.partition
        found = summarise(partition.recorder, since, until, before, partition.yard.kv.reuse())
        split = partition.yard.fleet.nodes.split()
        pauses, turns = partition.clients.pauses
        planner = self.planner
        return found | {
            "final_split": f"{split['prefill']}P{split['decode']}D",
            "pause_mean_s": pauses / turns if turns else 0.0,
            "prefetches": partition.recorder.prefetches,
            "rollbacks": len(planner.rollbacks) if isinstance(planner, OwnPlanner) else 0,
            "events": partition.clock.events,
            "all_requests": partition.answered,
        }


def build(cluster: Cluster, system: System, settings: Settings) -> Run:
    """Everything but the workload."""
    split = cluster.split(system)
    config = PartitionConfig.parse(_document(cluster, system, settings, split))
    routing = replace(
        config.routing,
        decode=system.decode_routing,
        fetch=system.fetch,
        holds_back=system.central_queue,
        prefetch_bytes=system.prefetch_bytes,
    )
    config = replace(config, routing=routing, moves_outputs=system.plane.moves_outputs)
    true = cluster.hardware
    specs = tuple(
        NodeSpec(
            name=name,
            order=order,
            phase="prefill" if order < split[0] else "decode",
            timing=true.timing,
            block_tokens=settings.block_tokens,
            pool_blocks=(true.host_pool_tokens if system.plane.host_pool else true.device_tokens)
            // settings.block_tokens,
            device_tokens=true.device_tokens,
            max_decode_batch=true.max_decode_batch,
            prefill_chunk_tokens=true.prefill_chunk_tokens,
            plane=system.plane,
        )
        for order, name in enumerate(config.nodes)
    )
    partition = Partition(
        config,
        specs,
        settings.seed,
        settings.signals,
        failed_fetch_ratio=settings.failed_fetch_ratio,
        check_every=settings.check_every,
    )
    if system.pauses:
        AgentPauses(partition)
    orders = OrderDriver(partition, system.plane.switch.drain_deadline_s, settings.cooldown_s)
    return Run(partition, system, orders, _planner(partition, cluster, system, settings, orders))


def _planner(
    partition: Partition, cluster: Cluster, system: System, settings: Settings, orders: OrderDriver
) -> OwnPlanner | BaselineDriver | None:
    believed = cluster.believed or cluster.hardware
    if system.planner == "own":
        guards = system.guards
        policy = PlannerPolicy(
            cooldown_s=settings.cooldown_s,
            window_s=settings.window_s,
            slo_ttft_s=settings.slo_ttft_s if guards else None,
            min_utilisation=PlannerPolicy().min_utilisation if guards else 0.0,
        )
        return OwnPlanner(partition, policy, orders, settings.slices, watch=guards)
    if system.planner == "load-thresholds":
        return BaselineDriver(partition, LoadThresholds(believed.context_tokens), orders)
    if system.planner == "input-length":
        return BaselineDriver(partition, InputLengthDemand(believed.prefill, believed.decode, believed.t_acc), orders)
    return None


def _document(cluster: Cluster, system: System, settings: Settings, split: tuple[int, int]) -> dict[str, Any]:
    """The configuration document that a gateway of this partition would be given."""
    believed = cluster.believed or cluster.hardware
    c, d, network = believed.prefill, believed.decode, believed.network
    limits: dict[str, Any] = {"prefill": {"detector": "off"}, "decode": {"detector": "off"}}
    if system.central_queue:
        limits = {
            "prefill": {"detector": "concurrency", "limit_per_node": settings.prefill_limit_per_node},
            "decode": {"detector": "concurrency", "limit_per_node": believed.max_decode_batch},
        }
    coefficients = {"c0": c.c0, "c1": c.c1, "c2": c.c2, "c3": c.c3, "d0": d.d0, "d1": d.d1, "d2": d.d2,
                    "experts": d.experts, "experts_per_token": d.experts_per_token, "t_fwd": d.t_fwd,
                    "t_acc": believed.t_acc}  # fmt: skip
    nodes = [
        {
            "name": f"n{order}", "order": order, "url": f"sim://n{order}", "engine": "simulated",
            "phase": "prefill" if order < split[0] else "decode", "generation": 0, "hardware_class": believed.name,
            "coefficients": coefficients, "decode_limit": believed.max_decode_batch,
        }
        for order in range(cluster.nodes)
    ]  # fmt: skip
    return {
        "version": 1,
        "partition": cluster.name,
        "model": {
            "name": believed.name, "served_names": [believed.name], "tokenizer": "symbolic", "dtype": "fp8",
            "block_tokens": settings.block_tokens, "ids_per_block": 1, "tokens_per_id": settings.block_tokens,
            "context_tokens": believed.context_tokens,
        },
        "network": {
            "kv_bytes_per_token": network.kv_bytes_per_token,
            "peer_bandwidth_bytes_s": network.peer_bandwidth_bytes_s,
            "host_to_device_bytes_s": network.host_to_device_bytes_s,
            "latency_s": network.latency_s,
        },
        "nodes": nodes,
        "tenants": [
            {"name": share.tenant, "sharing_domain": "simulated", "default_objective": share.objective}
            for share in settings.tenants
        ],
        "keys": [],
        "objectives": [{"name": name, "band": name} for name, _ in BANDS],
        "bands": [{"name": name, "priority": priority, "fairness": settings.fairness} for name, priority in BANDS],
        "flow": {**limits, **settings.flow},
        "routing": {"policy": system.routing},
        "slo": {"ttft_s": settings.slo_ttft_s},
    }  # fmt: skip


Workload = Callable[[Run], None]
