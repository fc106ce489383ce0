"""Writes of telemetry: entries of the gateways' streams, exactly once, and their removal by age. Not audited."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db import models, transaction
from django.utils import timezone

from apps.telemetry import periods, samples
from apps.telemetry.models import Alert, CostWindow, Delivery, LoadWindow, RequestRecord, StreamCursor
from apps.topology.models import Partition

logger = logging.getLogger(__name__)
_DAY_S = 86400.0
_RENAMED = {"id": "request_id", "t": "at"}


@dataclass(frozen=True, slots=True)
class Stored:
    """How many rows of each kind one batch gave. `refused` says which entries could not be read, and why."""

    requests: int = 0
    cost_windows: int = 0
    load_windows: int = 0
    refused: tuple[str, ...] = ()
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Retention:
    """How long rows are kept, in seconds."""

    requests_s: float = 7 * _DAY_S
    cost_windows_s: float = 2 * _DAY_S
    load_windows_s: float = 7 * _DAY_S
    samples_s: float = 30 * _DAY_S
    alerts_s: float = 90 * _DAY_S
    deliveries_s: float = 7 * _DAY_S


def cursor_of(partition: Partition) -> str:
    """The stream id to read on from; `0-0` at the beginning."""
    return StreamCursor.objects.filter(partition=partition).values_list("last_id", flat=True).first() or "0-0"


def store_entries(partition: Partition, entries: Iterable[Mapping[str, Any]], last_id: str) -> Stored:
    """Stores decoded stream entries (docs/interfaces.md, section 10) and the cursor `last_id` in one transaction.

    A batch at or before the stored cursor changes nothing (`repeated`), so a worker that died after its commit may safely
    read the batch again. An entry that cannot be read is logged and passed over: it must not stop the stream.
    """
    position = _position(last_id)
    with transaction.atomic():
        StreamCursor.objects.get_or_create(partition=partition)
        cursor = StreamCursor.objects.select_for_update(of=("self",)).get(partition=partition)
        if position <= _position(cursor.last_id):
            return Stored(repeated=True)
        rows: dict[type[models.Model], list[models.Model]] = {RequestRecord: [], CostWindow: [], LoadWindow: []}
        refused = []
        for entry in entries:
            try:
                row = _row(partition, entry)
                rows[type(row)].append(row)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                refused.append(f"{entry.get('kind') if isinstance(entry, Mapping) else type(entry).__name__}: {error}")
        fresh = _not_yet_stored(partition, rows[RequestRecord])
        for model, found in rows.items():
            model._default_manager.bulk_create(found, ignore_conflicts=True, batch_size=500)
        periods.count_in(partition, fresh)
        cursor.last_id = last_id
        cursor.save()
    if refused:
        logger.warning("%s: %d telemetry entries passed over, first: %s", partition.name, len(refused), refused[0])
    return Stored(len(rows[RequestRecord]), len(rows[CostWindow]), len(rows[LoadWindow]), tuple(refused))


def _not_yet_stored(partition: Partition, rows: Iterable[models.Model]) -> list[RequestRecord]:
    """Each request once, without those of an id that is stored already: what the insert will keep."""
    by_id: dict[str, RequestRecord] = {}
    for row in rows:
        if isinstance(row, RequestRecord):
            by_id.setdefault(row.request_id, row)
    known = RequestRecord.objects.filter(partition=partition, request_id__in=by_id).values_list("request_id", flat=True)
    for request_id in known:
        del by_id[request_id]
    return list(by_id.values())


def prune(partition: Partition, retention: Retention | None = None, now: datetime | None = None) -> int:
    """Deletes rows past their age; returns how many."""
    keep = retention or Retention()
    now_s = (now or timezone.now()).timestamp()
    old_requests = _before(now_s, keep.requests_s)
    return sum(
        (
            RequestRecord.objects.filter(partition=partition, at__lt=old_requests).delete()[0],
            CostWindow.objects.filter(partition=partition, t1__lt=now_s - keep.cost_windows_s).delete()[0],
            LoadWindow.objects.filter(partition=partition, t1__lt=now_s - keep.load_windows_s).delete()[0],
            samples.prune(partition, now_s - keep.samples_s),
            periods.prune(partition, now_s),
            Alert.objects.filter(partition=partition, resolved_at__lt=_before(now_s, keep.alerts_s)).delete()[0],
            Delivery.objects.filter(created_at__lt=_before(now_s, keep.deliveries_s)).delete()[0],
        )
    )


def _before(now_s: float, age_s: float) -> datetime:
    return datetime.fromtimestamp(now_s - age_s, UTC)


def _position(stream_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def _row(partition: Partition, entry: Mapping[str, Any]) -> models.Model:
    kind = entry["kind"]
    clean = {_RENAMED.get(name, name) if kind == "request" else name: _storable(v) for name, v in entry.items()}
    if kind == "request":
        clean["at"] = datetime.fromtimestamp(float(entry["t"]), UTC)
        clean["detail"] = {name: _storable(value) for name, value in entry.items() if name != "kind"}
        return _filled(RequestRecord, partition, clean, required=("request_id", "at"))
    if kind == "cost-window":
        return _filled(CostWindow, partition, clean, required=("node", "t0", "t1"))
    if kind == "load":
        return _filled(LoadWindow, partition, clean, required=("t0", "t1"))
    raise ValueError(f"unknown kind {kind!r}")


def _filled(
    model: type[models.Model], partition: Partition, values: dict[str, Any], required: tuple[str, ...]
) -> models.Model:
    """A row of the values that the model has columns for; null where the entry says null and the column allows it."""
    for name in required:
        if values.get(name) is None:
            raise ValueError(f"{name} is missing")
    row = model(partition=partition)
    for field in model._meta.concrete_fields:
        value = values.get(field.name)
        if field.primary_key or field.name == "partition" or value is None:
            continue
        setattr(row, field.name, _converted(field, value))
    return row


def _converted(field: models.Field[Any, Any], value: Any) -> Any:
    if isinstance(field, models.CharField):
        return str(value)[: field.max_length]
    if isinstance(field, models.BooleanField):
        return bool(value)
    if isinstance(field, models.IntegerField):
        number = int(value)
        top = 2**31 - 1 if isinstance(field, models.PositiveIntegerField) else 2**63 - 1
        if not 0 <= number <= top:
            raise ValueError(f"{field.name} is {number}, outside of what is stored")
        return number
    return float(value) if isinstance(field, models.FloatField) else value


def _storable(value: Any) -> Any:
    """PostgreSQL's JSON has neither NaN nor NUL characters."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.replace("\x00", "")
    if isinstance(value, Mapping):
        return {_storable(str(name)): _storable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(inner) for inner in value]
    return value
