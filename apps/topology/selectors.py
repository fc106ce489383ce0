"""Reads of topology, and its sections of the configuration document."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from apps.topology import configuration
from apps.topology.choices import Phase
from apps.topology.models import Cluster, ConfigurationVersion, Node, Partition
from controlplane.errors import NotFound


def cluster_named(name: str) -> Cluster:
    """Raises NotFound."""
    cluster = Cluster.objects.prefetch_related("partitions").filter(name=name).first()
    if cluster is None:
        raise NotFound("cluster", name)
    return cluster


def partition_named(name: str) -> Partition:
    """Raises NotFound."""
    partition = Partition.objects.select_related("cluster").filter(name=name).first()
    if partition is None:
        raise NotFound("partition", name)
    return partition


def node_named(name: str) -> Node:
    """Raises NotFound."""
    node = Node.objects.select_related("partition").filter(name=name).first()
    if node is None:
        raise NotFound("node", name)
    return node


def nodes_of(partition: Partition) -> QuerySet[Node]:
    """In node order; each one's `partition` is the object given, not a copy read with every row."""
    return partition.nodes.order_by("order")


def configuration_numbered(partition: Partition, version: int) -> ConfigurationVersion:
    """Raises NotFound."""
    found = (
        ConfigurationVersion.objects.select_related("partition").filter(partition=partition, version=version).first()
    )
    if found is None:
        raise NotFound("configuration version", version)
    return found


def serving(partition: Partition, phase: str) -> QuerySet[Node]:
    """Nodes that take new work of a phase: enabled, not draining, and of that phase or mixed."""
    return nodes_of(partition).filter(enabled=True, draining=False, desired_phase__in=(phase, Phase.MIXED))


def nodes_section(partition: Partition) -> list[dict[str, Any]]:
    nodes = [
        {
            "name": node.name,
            "order": node.order,
            "url": node.url,
            "engine": node.engine,
            "phase": node.desired_phase,
            "generation": node.generation,
            "draining": node.draining,
            "enabled": node.enabled,
            "hardware_class": node.hardware_class,
            "coefficients": node.coefficients,
            "decode_limit": node.decode_limit,
            "direct": node.direct,
        }
        for node in nodes_of(partition)
    ]
    return configuration.overlaid(partition, nodes)
