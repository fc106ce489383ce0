"""The configuration document (docs/interfaces.md, section 8): built of sections, stored as a version, sent to the gateway.

Every app registers its sections in `ready()`; a section's name is its key in the document.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import redis
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction
from django.utils import timezone

from apps.topology.models import ConfigurationVersion, Partition
from controlplane import redis_client
from controlplane.actors import Actor

logger = logging.getLogger(__name__)
SectionBuilder = Callable[[Partition], Any]
NodeOverlay = Callable[[Partition], Mapping[str, Mapping[str, Any]]]
_sections: dict[str, SectionBuilder] = {}
_node_overlays: list[NodeOverlay] = []
_ENVELOPE = ("version", "published_at")
# Within `one_version`: the partitions to publish at its end, each with the actor and the reason of its first edit.
_held: ContextVar[dict[int, tuple[Partition, Actor, str]] | None] = ContextVar("held", default=None)


def register_section(name: str, builder: SectionBuilder) -> None:
    """Makes `builder(partition)` the value of the document's key `name`. Raises ValueError when another one has it."""
    known = _sections.get(name)
    if name in _ENVELOPE or (known is not None and known is not builder):
        raise ValueError(f"section {name!r} of the configuration document is already taken")
    _sections[name] = builder


def register_node_overlay(overlay: NodeOverlay) -> None:
    """Makes `overlay(partition)`, {node name: {field: value}}, replace those fields of the document's nodes.

    For what another app knows better than the node's row for a time: learned coefficients, the limits of a warm-up.
    """
    if overlay not in _node_overlays:
        _node_overlays.append(overlay)


def overlaid(partition: Partition, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The nodes with what the overlays say of them."""
    for overlay in _node_overlays:
        changes = overlay(partition)
        nodes = [{**node, **changes.get(node["name"], {})} for node in nodes]
    return nodes


def build_document(partition: Partition) -> dict[str, Any]:
    """The document as the database has it now, without `version` and `published_at`."""
    return {"partition": partition.name} | {name: build(partition) for name, build in _sections.items()}


def latest(partition: Partition) -> ConfigurationVersion | None:
    return ConfigurationVersion.objects.filter(partition=partition).order_by("-version").first()


@contextmanager
def one_version() -> Iterator[None]:
    """One transaction whose edits, however many, are published together at its end: one version a partition, and none
    when anything in it fails. Inside another one it is part of that."""
    if _held.get() is not None:
        yield
        return
    with transaction.atomic():
        held: dict[int, tuple[Partition, Actor, str]] = {}
        token = _held.set(held)
        try:
            yield
        finally:
            _held.reset(token)
        for partition, actor, reason in sorted(held.values(), key=lambda each: each[0].name):
            publish(partition, actor, reason)


def publish(partition: Partition, actor: Actor, reason: str) -> ConfigurationVersion | None:
    """Stores a new version and, once committed, sends it. An unchanged document keeps its version and is sent again.

    None within `one_version`, which publishes later, and while the partition has no nodes: it is still being described,
    and a gateway could do nothing with it.
    Redis being away does not undo the edit: the version stays, `republish` sends it later, and until then the gateway's
    snapshot shows the older `config_version`.
    """
    held = _held.get()
    if held is not None:
        held.setdefault(partition.pk, (partition, actor, reason))
        return None
    with transaction.atomic():
        locked = Partition.objects.select_for_update().get(pk=partition.pk)
        if not locked.nodes.exists():
            return None
        last = latest(locked)
        # A round trip through JSON, so that what is compared is what was stored.
        content = json.loads(json.dumps(build_document(locked)))
        if last is not None and _content(last.document) == content:
            current = last
        else:
            version = last.version + 1 if last else 1
            now = timezone.now()
            document = {"version": version, "published_at": now.timestamp()} | content
            current = ConfigurationVersion.objects.create(
                partition=locked, version=version, document=document, author=str(actor), reason=reason, created_at=now
            )
        transaction.on_commit(lambda: _send(current, announce=current is not last))
    return current


def publish_all(actor: Actor, reason: str) -> None:
    """For edits that concern every partition: tenants and keys."""
    for partition in Partition.objects.order_by("name"):
        publish(partition, actor, reason)


def republish(partition: Partition) -> bool:
    """Sends the latest version again when Redis lacks it (flushed, restarted, or away at the time). True when sent."""
    current = latest(partition)
    if current is None:
        return False
    held = redis_client.read_json(redis_client.config_key(partition.name))
    if held is not None and held.get("version") == current.version:
        return False
    return _send(current, announce=False)


def _content(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in _ENVELOPE}


def _send(version: ConfigurationVersion, *, announce: bool) -> bool:
    name = version.partition.name
    try:
        pipe = redis_client.client().pipeline(transaction=True)
        pipe.set(redis_client.config_key(name), json.dumps(version.document))
        pipe.publish(redis_client.config_channel(name), str(version.version))
        pipe.execute()
        if announce:
            event = {"version": version.version, "author": version.author, "reason": version.reason}
            send_live_event(name, "config", **event)
    except (redis.RedisError, OSError) as error:
        logger.warning("configuration %s of %s is stored but not sent: %s", version.version, name, error)
        return False
    return True


def send_live_event(partition_name: str, kind: str, **data: Any) -> None:
    """One event to the browsers that watch a partition (docs/interfaces.md, section 9). Raises when Redis is away.

    The channel layer waits for as long as it takes (its subscriptions must), so the time is bounded here.
    """
    message = {"type": "live.event", "data": {"kind": kind, "t": timezone.now().timestamp(), **data}}
    group, answers = redis_client.live_group(partition_name), redis_client.answers()

    async def send() -> None:
        await asyncio.wait_for(get_channel_layer().group_send(group, message), redis_client.ANSWER_WITHIN_S)

    answers.expected()
    try:
        async_to_sync(send)()
    except TimeoutError as error:
        answers.missed()
        raise redis.TimeoutError("Redis did not take a live event") from error
