"""Rows that database tests start from, made by the product's own services."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import Group, User

from apps.flowcontrol import services as flowcontrol
from apps.tenancy import services as tenancy
from apps.tenancy.models import Tenant
from apps.topology import configuration
from apps.topology import services as topology
from apps.topology.models import Partition
from controlplane.actors import SYSTEM, Actor

COEFFICIENTS = {
    "c0": 0.05,
    "c1": 4e-5,
    "c2": 2e-10,
    "c3": 6e-7,
    "d0": 2e-3,
    "d1": 0.02,
    "d2": 4e-4,
    "experts": 256,
    "experts_per_token": 8,
    "t_fwd": 4,
    "t_acc": 2.2,
}
MODEL = {
    "name": "glm-5.2",
    "served_names": ["glm-5.2"],
    "tokenizer": "symbolic",
    "tokenizer_path": None,
    "dtype": "fp8",
    "block_tokens": 64,
    "ids_per_block": 1,
    "tokens_per_id": 64,
    "context_tokens": 1_000_000,
}
NETWORK = {"kv_bytes_per_token": 5e4, "peer_bandwidth_bytes_s": 4e10, "host_to_device_bytes_s": 2e11, "latency_s": 2e-3}


def make_partition(name: str = "gb300", phases: tuple[str, ...] = ("prefill", "decode", "decode")) -> Partition:
    """A published partition with bands and objectives premium (100) and standard (0), and nodes `<name>-1`..."""
    cluster = topology.create_cluster(name, SYSTEM)
    partition = topology.create_partition(
        cluster, name, SYSTEM, model=MODEL, network=NETWORK, gateway_url="http://127.0.0.1:8101", title=name
    )
    for band, priority in (("premium", 100), ("standard", 0)):
        row = flowcontrol.create_band(partition, band, priority, SYSTEM)
        flowcontrol.create_objective(partition, band, row, SYSTEM)
    for order, phase in enumerate(phases):
        make_node(partition, f"{name}-{order + 1}", order, phase)
    configuration.publish(partition, SYSTEM, "made for a test")
    return partition


def make_node(partition: Partition, name: str, order: int, phase: str) -> Any:
    return topology.create_node(
        partition,
        name,
        SYSTEM,
        order=order,
        engine="simulated",
        phase=phase,
        url=f"http://127.0.0.1:8210/nodes/{name}",
        hardware_class="gb300",
        coefficients=COEFFICIENTS,
        decode_limit=128,
    )


def make_tenant(name: str = "acme", **fields: Any) -> Tenant:
    return tenancy.create_tenant(name, SYSTEM, **fields)


def make_user(name: str, *roles: str) -> User:
    user = User.objects.create_user(name, password="a long enough password")
    user.groups.set([Group.objects.get_or_create(name=role)[0] for role in roles])
    return user


def actor_with(role: str, name: str = "robin") -> Actor:
    """An actor outside of the database."""
    return Actor("person", name, None, frozenset({role}))
