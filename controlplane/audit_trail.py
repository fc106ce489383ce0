"""Reads of the audit trail: what was changed, by whom, why, and in which request; before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any
from uuid import UUID

import pghistory.models
from django.apps import apps
from django.db.models import CharField, ForeignKey, Model, OuterRef, Q, QuerySet, Subquery, Value

from apps.topology.models import Partition
from controlplane.errors import InvalidField

PAGE = 50
_MEANINGLESS = frozenset({"id", "pgh_id", "pgh_created_at", "pgh_label", "pgh_obj", "pgh_context"})
_SUBJECTS = ("name", "subject", "rule", "node", "actor", "key", "username")
_DONE = {"insert_insert": "created", "update_update": "changed", "delete_delete": "removed",
         "insert": "created", "update": "changed", "delete": "removed"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One field's value before and after; `before` is None where the row was created, `after` where it was removed."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the trail. `cause` is shared by everything that one action changed; `request_id` is the HTTP request's.

    `person` is whose key acted, empty where a person did, or nobody's key.
    """

    table: str
    kind: str
    subject: str
    done: str
    at: datetime
    number: int
    actor: str
    actor_kind: str
    person: str
    reason: str
    request_id: str
    cause: str
    changes: tuple[Change, ...] = field(default=())


@cache
def tables() -> dict[str, type[Model]]:
    """Name of each audited table to its event model: `band`, `apikey`, `plannerpolicy`, ..."""
    found = {}
    for model in apps.get_models():
        if issubclass(model, pghistory.models.Event) and model is not pghistory.models.Event and model._meta.managed:
            found[_tracked(model)._meta.model_name] = model
    return {str(name): found[name] for name in sorted(found)}


def _tracked(model: type[Any]) -> Any:
    """The audited table behind an event model."""
    return model._meta.get_field("pgh_obj").related_model


def title(table: str) -> str:
    return str(_tracked(tables()[table])._meta.verbose_name)


@dataclass(frozen=True, slots=True)
class Narrow:
    """What the trail is narrowed to; empty means any.

    `before` continues a page. One edit of many rows gives them all the same time, so `skip` says how many rows of exactly
    that time were shown already; the rest of them come first.
    """

    table: str = ""
    actor: str = ""
    cause: str = ""
    request_id: str = ""
    text: str = ""
    since: datetime | None = None
    before: datetime | None = None
    skip: int = 0


def trail(partition: Partition | None, narrow: Narrow, limit: int = PAGE) -> tuple[list[Entry], bool]:
    """Newest first: rows of the partition and of what belongs to none; and whether there are more. Raises InvalidField for
    a table that is not audited."""
    if narrow.table and narrow.table not in tables():
        raise InvalidField("table", f"expected one of {', '.join(sorted(tables()))}")
    if narrow.cause and not _is_uuid(narrow.cause):
        return [], False
    chosen = {narrow.table: tables()[narrow.table]} if narrow.table else tables()
    newest = [
        _narrowed(model, partition, narrow)
        .annotate(table=Value(table, CharField()))
        .values_list("pgh_created_at", "table", "pgh_id")[: narrow.skip + limit + 1]
        for table, model in chosen.items()
    ]
    keys = newest[0]
    if len(newest) > 1:
        keys = keys.union(*newest[1:], all=True).order_by("-pgh_created_at", "-pgh_id", "table")
    shown = list(keys[narrow.skip : narrow.skip + limit + 1])
    rows = _with_earlier((table, number) for _, table, number in shown[:limit])
    return [_entry(table, *rows[table, number]) for _, table, number in shown[:limit]], len(shown) > limit


def last_changes(row: Model, limit: int = 3) -> list[Entry]:
    """The newest changes of one audited row."""
    table = str(row._meta.model_name)
    events: Any = row.events  # type: ignore[attr-defined]
    rows = list(events.select_related("pgh_context").order_by("-pgh_id")[: limit + 1])
    return [_entry(table, now, rows[i + 1] if i + 1 < len(rows) else None) for i, now in enumerate(rows[:limit])]


def _narrowed(model: type[Model], partition: Partition | None, narrow: Narrow) -> QuerySet[Any]:
    rows = model._default_manager.select_related("pgh_context").order_by("-pgh_id")
    names = {column.name for column in model._meta.get_fields()}
    if partition is not None and "partition" in names:
        rows = rows.filter(partition=partition)
    if partition is not None and "proposal" in names:
        rows = rows.filter(proposal__partition=partition)
    if narrow.actor:
        by_key = Q(pgh_context__metadata__person=narrow.actor)
        rows = rows.filter(Q(pgh_context__metadata__actor=narrow.actor) | by_key)
    if narrow.request_id:
        rows = rows.filter(pgh_context__metadata__request_id=narrow.request_id)
    if narrow.cause:
        rows = rows.filter(pgh_context_id=narrow.cause)
    if narrow.since:
        rows = rows.filter(pgh_created_at__gte=narrow.since)
    if narrow.before:
        within = "lte" if narrow.skip else "lt"
        rows = rows.filter(**{f"pgh_created_at__{within}": narrow.before})
    if narrow.text:
        anywhere = Q(pgh_context__metadata__reason__icontains=narrow.text)
        for name in _SUBJECTS:
            if name in names:
                anywhere |= Q(**{f"{name}__icontains": narrow.text})
        rows = rows.filter(anywhere)
    return rows


def _is_uuid(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _with_earlier(keys: Iterable[tuple[str, int]]) -> dict[tuple[str, int], tuple[Any, Any | None]]:
    """Each row, and with one of a change the row of the same object before it; two queries a table."""
    by_table: dict[str, list[int]] = {}
    for table, number in keys:
        by_table.setdefault(table, []).append(number)
    found: dict[tuple[str, int], tuple[Any, Any | None]] = {}
    for table, numbers in by_table.items():
        events = tables()[table]._default_manager
        same = events.filter(pgh_obj_id=OuterRef("pgh_obj_id"), pgh_id__lt=OuterRef("pgh_id")).order_by("-pgh_id")
        rows = events.select_related("pgh_context").filter(pgh_id__in=numbers)
        rows = rows.annotate(previous=Subquery(same.values("pgh_id")[:1]))
        changed = {row.pgh_id: row.previous for row in rows if "update" in row.pgh_label}
        before = events.in_bulk([previous for previous in changed.values() if previous is not None])
        found |= {(table, row.pgh_id): (row, before.get(changed.get(row.pgh_id))) for row in rows}
    return found


def _entry(table: str, row: Any, before: Any | None) -> Entry:
    context = row.pgh_context
    metadata = context.metadata if context is not None else {}
    return Entry(
        table=table,
        kind=title(table),
        subject=_subject(row),
        done=_DONE.get(row.pgh_label, row.pgh_label),
        at=row.pgh_created_at,
        number=row.pgh_id,
        actor=str(metadata.get("actor") or metadata.get("user") or "the database"),
        actor_kind=str(metadata.get("actor_kind") or ""),
        person=str(metadata.get("person") or ""),
        reason=str(metadata.get("reason") or ""),
        request_id=str(metadata.get("request_id") or ""),
        cause=str(row.pgh_context_id or ""),
        changes=_changes(row, before),
    )


def _subject(row: Any) -> str:
    for name in _SUBJECTS:
        value = getattr(row, name, None)
        if value:
            return str(value)
    return f"#{row.pgh_obj_id}"


def _changes(row: Any, before: Any | None) -> tuple[Change, ...]:
    """Of a change: what differs. Of a creation or removal: everything that is not empty."""
    found = []
    for column in row._meta.concrete_fields:
        if column.name in _MEANINGLESS:
            continue
        name = column.attname if isinstance(column, ForeignKey) else column.name
        now = getattr(row, name)
        if before is not None:
            was = getattr(before, name)
            if was != now:
                found.append(Change(column.name, was, now))
        elif now not in (None, "", [], {}):
            removed = "delete" in row.pgh_label
            found.append(Change(column.name, now if removed else None, None if removed else now))
    return tuple(found)
