"""Reads of telemetry: request records, and the gateway's live snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import redis
from django.db.models import Q, QuerySet

from apps.telemetry.models import Channel, RequestRecord
from apps.topology.models import Partition
from controlplane import redis_client
from controlplane.errors import NotFound, Unavailable


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """What a list of requests is narrowed to; empty means any."""

    tenant: str = ""
    band: str = ""
    branch: str = ""
    node: str = ""
    outcome: str = ""
    since: datetime | None = None
    until: datetime | None = None
    tenants: frozenset[str] | None = None


def requests_of(partition: Partition, narrow: RequestFilter | None = None) -> QuerySet[RequestRecord]:
    """Newest first, without the bulky `detail`."""
    narrow = narrow or RequestFilter()
    rows = RequestRecord.objects.filter(partition=partition).defer("detail").order_by("-at", "-id")
    exact = {"tenant": narrow.tenant, "band": narrow.band, "branch": narrow.branch, "outcome": narrow.outcome}
    rows = rows.filter(**{name: value for name, value in exact.items() if value})
    if narrow.node:
        rows = rows.filter(Q(prefill_node=narrow.node) | Q(decode_node=narrow.node))
    if narrow.since:
        rows = rows.filter(at__gte=narrow.since)
    if narrow.until:
        rows = rows.filter(at__lt=narrow.until)
    if narrow.tenants is not None:
        rows = rows.filter(tenant__in=narrow.tenants)
    return rows


def request_record(partition: Partition, request_id: str) -> RequestRecord:
    """Raises NotFound."""
    record = RequestRecord.objects.filter(partition=partition, request_id=request_id).first()
    if record is None:
        raise NotFound(f"request of {partition.name}", request_id)
    return record


# What a tenant user is not told of a request: where it ran, and how the nodes stood that were weighed for it.
_OPERATORS_ONLY = ("prefill_node", "decode_node", "reason")
_TOLD_OF_DETAIL = (
    "id", "t", "arrived_at", "band", "branch", "branch_kind", "tenant", "flow_id", "outcome", "flow_outcome", "drop_code",
    "prompt_tokens", "cached_tokens", "computed_tokens", "fetched_tokens", "output_tokens", "queue_s", "ttft_s",
    "predicted_ttft_s", "e2e_s", "age_s", "lost", "timings", "stage",
)  # fmt: skip


def own_request(entry: dict[str, Any]) -> dict[str, Any]:
    """A request's columns, or a living request, as a user of its tenant may see it."""
    return entry | {name: "" for name in _OPERATORS_ONLY if name in entry}


def own_detail(detail: dict[str, Any]) -> dict[str, Any]:
    """The gateway's record of a request as a user of its tenant may see it: the moves and their times, not their reasons."""
    told = {name: detail[name] for name in _TOLD_OF_DETAIL if name in detail}
    if "story" in detail:
        told["story"] = [[*move[:3], ""] for move in detail["story"] if not isinstance(move, str)]
    return told


def own_record(record: RequestRecord, whole: bool = False) -> RequestRecord:
    """The row itself, not to be saved, as a user of its tenant may see it; `whole`: its `detail` too."""
    for name in _OPERATORS_ONLY:
        setattr(record, name, "")
    if whole:
        record.detail = own_detail(record.detail)
    return record


def own_branch(row: dict[str, Any]) -> dict[str, Any]:
    """A live branch as a user of its tenant may see it: how many copies of its blocks there are, not where."""
    copies = sorted(row["held"].values(), reverse=True)
    return row | {"homes": {}, "held": {f"copy {i}": blocks for i, blocks in enumerate(copies, 1)}}


def live_snapshot(partition: Partition) -> dict[str, Any]:
    """The gateway's last snapshot (docs/interfaces.md, section 9). Raises Unavailable when there is none or Redis is away."""
    try:
        snapshot = redis_client.read_json(redis_client.live_key(partition.name))
    except (redis.RedisError, OSError) as error:
        raise Unavailable("Redis does not answer, so there are no live numbers", "redis-away") from error
    except ValueError:
        snapshot = {}
    if snapshot is None:
        raise Unavailable(f"the gateway of {partition.name} has sent no snapshot for ten seconds", "no-live-snapshot")
    if not _readable(snapshot):
        raise Unavailable(f"the live snapshot of {partition.name} cannot be read", "no-live-snapshot")
    return snapshot


def _readable(snapshot: Any) -> bool:
    """Whether it has the members that everybody reads, in their types."""
    types = {"partition": str, "t": int | float, "bands": list, "stages": dict}
    return isinstance(snapshot, dict) and all(isinstance(snapshot.get(name), kind) for name, kind in types.items())


def channels() -> QuerySet[Channel]:
    return Channel.objects.order_by("name")


def channel_named(name: str) -> Channel:
    """Raises NotFound."""
    found = Channel.objects.filter(name=name).first()
    if found is None:
        raise NotFound("channel", name)
    return found
