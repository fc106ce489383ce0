"""From the description of a run's clusters to database rows. Adds what is missing, keeps what people have changed since.

Only addresses follow the run: they are taken from its ports each time.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from django.contrib.auth.models import Group, User

from apps.flowcontrol import services as flowcontrol
from apps.flowcontrol.models import Band
from apps.planning import services as planning
from apps.tenancy import services as tenancy
from apps.tenancy.models import ApiKey, Tenant
from apps.topology import configuration
from apps.topology import services as topology
from apps.topology.models import Cluster, Node, Partition
from controlplane import clusters, env
from controlplane.actors import SYSTEM
from controlplane.errors import SwitchyardError
from controlplane.permissions import Role

ADMINISTRATOR = "admin"
REASON = "first start"
_WHOLE = ("experts", "experts_per_token")


def run(described: clusters.Clusters, ports: clusters.Ports, say: Callable[[str], None]) -> None:
    """All of it in one transaction, and at most one new version a partition. `say` gets each line a person must see;
    secrets among them, once.

    Raises ClustersError (naming the field) when the description holds what the services refuse.
    """
    shown: list[str] = []
    with configuration.one_version():
        _ensure_groups()
        shown += _ensure_administrator()
        for cluster in described.clusters:
            _ensure_partition(described, cluster, ports)
        for tenant in described.tenants:
            if not Tenant.objects.filter(name=tenant.name).exists():
                with _within(f"tenants.{tenant.name}"):
                    tenancy.create_tenant(actor=SYSTEM, reason=REASON, **tenant.given())
        shown += _ensure_keys(described.keys)
        for cluster in described.clusters:
            _ensure_nodes(described, cluster, ports)
            configuration.publish(Partition.objects.get(name=cluster.name), SYSTEM, REASON)
    for line in shown:
        say(line)


def keys_file() -> Path:
    """Plain texts of the keys made at the first start, for the replay and for the person at this machine. Mode 0600."""
    return env.data_folder() / "keys.json"


def read_ports(described: clusters.Clusters, file: Path | None) -> clusters.Ports:
    """The description's ports, overridden by `file` or else by the JSON in SWITCHYARD_PORTS.

    Its form: `{"gateway": {partition: port}, "agent": {node: port}}`; either may be left out. Raises ClustersError.
    """
    ports = clusters.default_ports(described, env.web_port())
    text = file.read_text() if file else env.text("SWITCHYARD_PORTS")
    if not text:
        return ports
    source = str(file) if file else "SWITCHYARD_PORTS"
    try:
        given = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.DecodeError as error:
        raise clusters.ClustersError(f"{source}: {error}") from error
    for name, target in (("gateway", ports.gateways), ("agent", ports.agents)):
        for key, port in given.pop(name, {}).items():
            if key not in target:
                raise clusters.ClustersError(f"{source}: {name}.{key} is unknown; expected one of {', '.join(target)}")
            if not 0 < port < 65536:
                raise clusters.ClustersError(f"{source}: {name}.{key} is {port}; expected a port from 1 to 65535")
            target[key] = port
    if given:
        raise clusters.ClustersError(f"{source}: {next(iter(given))} is unknown; expected gateway or agent")
    return ports


def _ensure_groups() -> None:
    for role in Role:
        Group.objects.get_or_create(name=role.value)


def _ensure_administrator() -> list[str]:
    if User.objects.filter(username=ADMINISTRATOR).exists():
        return []
    given = env.text("SWITCHYARD_ADMIN_PASSWORD")
    password = given or secrets.token_urlsafe(12)
    user = User.objects.create_superuser(ADMINISTRATOR, password=password)
    user.groups.add(Group.objects.get(name=Role.ADMINISTRATOR))
    if given:
        return [f"console login    {ADMINISTRATOR}, with the password of SWITCHYARD_ADMIN_PASSWORD"]
    return [f"console login    {ADMINISTRATOR} / {password}   (shown this once)"]


def _ensure_partition(described: clusters.Clusters, cluster: clusters.Cluster, ports: clusters.Ports) -> None:
    gateway_url = f"http://127.0.0.1:{ports.gateways[cluster.name]}"
    partition = Partition.objects.filter(name=cluster.name).first()
    if partition is not None:
        topology.update_partition(partition, SYSTEM, "addresses of this run", gateway_url=gateway_url)
        return
    with _within(f"clusters.{cluster.name}"):
        owner = Cluster.objects.filter(name=cluster.name).first() or topology.create_cluster(
            cluster.name, SYSTEM, REASON, title=cluster.title
        )
        partition = topology.create_partition(
            owner,
            cluster.name,
            SYSTEM,
            REASON,
            title=cluster.title,
            model=msgspec.to_builtins(cluster.model),
            network=described.network(cluster),
            gateway_url=gateway_url,
        )
    _describe_flow(partition, cluster)
    _describe_planner(partition, cluster)


def _describe_flow(partition: Partition, cluster: clusters.Cluster) -> None:
    at = f"clusters.{cluster.name}"
    bands: dict[str, Band] = {}
    for band in cluster.bands:
        with _within(f"{at}.bands.{band.name}"):
            bands[band.name] = flowcontrol.create_band(partition, actor=SYSTEM, reason=REASON, **band.given())
    for objective in cluster.objectives:
        fields = {**objective.given(), "band": bands[objective.band]}
        with _within(f"{at}.objectives.{objective.name}"):
            flowcontrol.create_objective(partition, actor=SYSTEM, reason=REASON, **fields)
    with _within(f"{at}.limits"):
        flowcontrol.update_flow_settings(
            partition,
            SYSTEM,
            REASON,
            prefill_limit_per_node=cluster.limits.prefill_limit_per_node,
            decode_limit_per_node=cluster.limits.decode_limit_per_node,
        )


def _describe_planner(partition: Partition, cluster: clusters.Cluster) -> None:
    fields = cluster.planner.given()
    mode = fields.pop("mode")
    with _within(f"clusters.{cluster.name}.planner"):
        planning.update_policy(partition, SYSTEM, REASON, **fields)
        planning.set_mode(partition, mode, SYSTEM, REASON)


@contextmanager
def _within(place: str) -> Iterator[None]:
    """Says where in the description a value stands that a service refuses."""
    try:
        yield
    except SwitchyardError as error:
        raise clusters.ClustersError(f"{place}: {error.message}") from error


def _ensure_nodes(described: clusters.Clusters, cluster: clusters.Cluster, ports: clusters.Ports) -> None:
    partition = Partition.objects.get(name=cluster.name)
    known = {node.name: node for node in Node.objects.filter(partition=partition)}
    coefficients = {
        name: int(value) if name in _WHOLE else value for name, value in described.coefficients(cluster).items()
    }
    directs = cluster.directs()
    for order, (name, phase) in enumerate(cluster.phases().items()):
        where: dict[str, Any] = {}
        if name in directs:
            where = {"url": directs[name].url, "direct": directs[name].settings()}
        else:
            where = {"url": f"http://{cluster.agent_host}:{ports.agents[name]}/nodes/{name}"}
        with _within(f"clusters.{cluster.name}.nodes.{name}"):
            if name in known:
                topology.update_node(known[name], SYSTEM, "addresses of this run", **where)
                continue
            topology.create_node(
                partition,
                name,
                SYSTEM,
                REASON,
                order=order,
                engine=cluster.engine,
                phase=phase,
                **where,
                hardware_class=cluster.hardware,
                coefficients=coefficients,
                decode_limit=cluster.limits.max_decode_batch,
            )


def _ensure_keys(described: list[clusters.Key]) -> list[str]:
    """Issues keys that do not exist yet. Their texts are on disk before the rows are committed, so none can be lost."""
    path = keys_file()
    kept: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    shown = []
    for key in described:
        fields = {**key.given(), "tenant": Tenant.objects.get(name=key.tenant)}
        if ApiKey.objects.filter(tenant=fields["tenant"], name=key.name).exists():
            if key.name not in kept:
                shown.append(
                    f"key {key.name:<12} exists, but its text is not in {path.name}; rotate it to get a new one"
                )
            continue
        with _within(f"keys.{key.name}"):
            issued = tenancy.issue_key(actor=SYSTEM, reason=REASON, **fields)
        kept[key.name] = issued.plain_text
        if key.name != "replay":
            shown.append(f"API key {key.name:<8} {issued.plain_text}   (also in {path.name} of the data folder)")
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
        json.dump(kept, handle, indent=1)
    scratch.replace(path)
    return shown
