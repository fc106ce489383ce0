"""REST of topology: clusters, partitions, nodes, published configurations."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status

from apps.planning.services import forget_node
from apps.topology import selectors, services
from apps.topology.choices import Engine, Phase, RoutingPolicy
from apps.topology.models import Cluster, ConfigurationVersion, Partition
from controlplane import records
from controlplane.audit import MAX_REASON_CHARS
from controlplane.permissions import require
from controlplane.rest.etags import check_if_match, tagged
from controlplane.rest.paging import Page, PageQuery, page
from controlplane.rest.schemas import Body, Edit, Finite, Reason

router = Router(tags=["topology"])


class ClusterOut(Schema):
    name: str
    title: str
    partitions: list[str]

    @staticmethod
    def resolve_partitions(cluster: Any) -> list[str]:
        return [partition.name for partition in cluster.partitions.all()]


class PartitionOut(Schema):
    name: str
    cluster: str
    title: str
    model: dict[str, Any]
    network: dict[str, Any]
    gateway_url: str
    routing_policy: RoutingPolicy
    lease: dict[str, Any]

    @staticmethod
    def resolve_cluster(partition: Any) -> str:
        return str(partition.cluster)


class LeaseIn(Body):
    multiple: Finite
    ceiling_s: Finite
    floor_s: Finite


class PartitionEdit(Edit):
    title: str | None = None
    routing_policy: RoutingPolicy | None = None
    lease: LeaseIn | None = None


class KvEventsIn(Body):
    """Where an engine's KV events come from: `tcp://*:5557` is bound, `tcp://host:5557` connected to. `replay`: where lost
    ones can be had again."""

    endpoint: str
    replay: str | None = None
    topic: str = ""


class DirectIn(Body):
    """An existing engine. `token_env` names the environment variable (of gateway and planner) with its API key;
    `kv_tokens` is how much its device holds, where the engine does not tell; `bootstrap_port` an SGLang prefill server's."""

    bootstrap_port: int | None = None
    token_env: str | None = None
    kv_tokens: int | None = None
    kv_events: KvEventsIn | None = None


class NodeIn(Reason):
    """A node that joins. What is left out is as on the partition's first node of the hardware class."""

    name: str
    url: str
    engine: Engine
    phase: Phase
    direct: DirectIn | None = None
    hardware_class: str | None = None
    coefficients: dict[str, Finite] | None = None
    decode_limit: int | None = None


class NodeOut(Schema):
    """`desired_phase` and `generation` are decided; `observed_*` is what the node's agent, or the gateway of an existing
    engine (`direct`), last said."""

    name: str
    partition: str
    order: int
    url: str
    engine: Engine
    hardware_class: str
    coefficients: dict[str, Any]
    decode_limit: int
    direct: dict[str, Any] | None
    desired_phase: Phase
    generation: int
    draining: bool
    enabled: bool
    observed_phase: str
    observed_state: str
    observed_generation: int | None
    observed_at: datetime | None

    @staticmethod
    def resolve_partition(node: Any) -> str:
        return str(node.partition)


class NodeEditable(Schema):
    """What an ETag of a node covers: the observed part changes by itself."""

    url: str
    coefficients: dict[str, Any]
    decode_limit: int
    direct: dict[str, Any] | None
    desired_phase: Phase
    generation: int
    draining: bool
    enabled: bool


class NodeEdit(Edit):
    """`url` and `direct` (given whole) are the administrators'."""

    enabled: bool | None = None
    draining: bool | None = None
    decode_limit: int | None = None
    url: str | None = None
    direct: DirectIn | None = None


class ConfigurationOut(Schema):
    version: int
    author: str
    reason: str
    created_at: datetime


class ConfigurationDetail(ConfigurationOut):
    """The document as published, without the digests of keys."""

    document: dict[str, Any]

    @staticmethod
    def resolve_document(version: Any) -> dict[str, Any]:
        keys = [{k: v for k, v in key.items() if k != "sha256"} for key in version.document.get("keys", [])]
        return {**version.document, "keys": keys}


@router.get("/clusters", response=Page[ClusterOut])
def list_clusters(request: HttpRequest, query: Query[PageQuery]) -> Any:
    require(request, "viewer")
    return page(Cluster.objects.prefetch_related("partitions"), query, "name")


@router.get("/clusters/{name}", response=ClusterOut)
def get_cluster(request: HttpRequest, name: str) -> Any:
    require(request, "viewer")
    return selectors.cluster_named(name)


@router.get("/partitions", response=Page[PartitionOut])
def list_partitions(request: HttpRequest, query: Query[PageQuery]) -> Any:
    require(request, "viewer")
    return page(Partition.objects.select_related("cluster"), query, "name")


@router.get("/partitions/{partition}", response=PartitionOut)
def get_partition(request: HttpRequest, response: HttpResponse, partition: str) -> Any:
    require(request, "viewer")
    return tagged(response, PartitionOut.from_orm(selectors.partition_named(partition)))


@router.patch("/partitions/{partition}", response=PartitionOut)
def edit_partition(request: HttpRequest, response: HttpResponse, partition: str, payload: PartitionEdit) -> Any:
    actor = require(request, "administrator")
    with transaction.atomic():
        row = records.locked(selectors.partition_named(partition))
        check_if_match(request, PartitionOut.from_orm(row))
        row = services.update_partition(row, actor, payload.reason, **payload.changes())
    return tagged(response, PartitionOut.from_orm(row))


@router.get("/partitions/{partition}/nodes", response=Page[NodeOut])
def list_nodes(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    require(request, "viewer")
    return page(selectors.nodes_of(selectors.partition_named(partition)), query, "order")


@router.post("/partitions/{partition}/nodes", response={201: NodeOut})
def add_node(request: HttpRequest, partition: str, payload: NodeIn) -> Any:
    """For existing engines, and for agents that somebody else started."""
    actor = require(request, "administrator")
    given = {name: value for name, value in payload.dict().items() if value is not None and name != "reason"}
    name, engine, phase = given.pop("name"), given.pop("engine"), given.pop("phase")
    row = selectors.partition_named(partition)
    return Status(201, services.add_node(row, name, actor, payload.reason, engine=engine, phase=phase, **given))


@router.get("/nodes/{name}", response=NodeOut)
def get_node(request: HttpRequest, response: HttpResponse, name: str) -> Any:
    require(request, "viewer")
    node = selectors.node_named(name)
    tagged(response, NodeEditable.from_orm(node))
    return node


@router.patch("/nodes/{name}", response=NodeOut)
def edit_node(request: HttpRequest, response: HttpResponse, name: str, payload: NodeEdit) -> Any:
    """Refused (409 `last-of-phase`) when nobody would serve the node's phase any more."""
    actor = require(request, "operator")
    with transaction.atomic():
        node = selectors.node_named(name)
        # The partition first, as every service locks it, so that two edits never wait for each other crosswise.
        records.locked(node.partition)
        node = records.locked(node)
        check_if_match(request, NodeEditable.from_orm(node))
        node = services.update_node(node, actor, payload.reason, **payload.changes())
    tagged(response, NodeEditable.from_orm(node))
    return node


@router.delete("/nodes/{name}", response={204: None})
def delete_node(request: HttpRequest, name: str, reason: str = Query("", max_length=MAX_REASON_CHARS)) -> Any:
    """Forgets a node that is out of service: disable it first. 409 `node-in-service`, `switch-running`, `forced` or
    `last-node`."""
    actor = require(request, "administrator")
    with transaction.atomic():
        node = selectors.node_named(name)
        records.locked(node.partition)
        node = records.locked(node)
        check_if_match(request, NodeEditable.from_orm(node))
        forget_node(node, actor, reason)
    return Status(204, None)


@router.post("/nodes/{name}/drain", response=NodeOut)
def drain_node(request: HttpRequest, name: str, payload: Reason) -> Any:
    actor = require(request, "operator")
    return services.drain_node(selectors.node_named(name), actor, payload.reason)


@router.post("/nodes/{name}/undrain", response=NodeOut)
def undrain_node(request: HttpRequest, name: str, payload: Reason) -> Any:
    actor = require(request, "operator")
    return services.undrain_node(selectors.node_named(name), actor, payload.reason)


@router.get("/partitions/{partition}/configurations", response=Page[ConfigurationOut])
def list_configurations(request: HttpRequest, partition: str, query: Query[PageQuery]) -> Any:
    """Newest first."""
    require(request, "viewer")
    versions = ConfigurationVersion.objects.filter(partition=selectors.partition_named(partition)).defer("document")
    return page(versions, query, "-version")


@router.get("/partitions/{partition}/configurations/{version}", response=ConfigurationDetail)
def get_configuration(request: HttpRequest, partition: str, version: int) -> Any:
    require(request, "viewer")
    return selectors.configuration_numbered(selectors.partition_named(partition), version)
