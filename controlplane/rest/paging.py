"""Cursor paging: a page starts after the last row of the one before, so rows that arrive meanwhile shift nothing."""

from __future__ import annotations

import base64
import binascii
import json
from datetime import datetime
from functools import reduce
from operator import and_
from typing import Any, Generic, TypeVar

from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Model, Q, QuerySet
from ninja import Schema
from pydantic import Field

from controlplane.errors import InvalidField
from controlplane.rest.schemas import Storable
from controlplane.validators import storable

Item = TypeVar("Item")
Row = TypeVar("Row", bound=Model)


class Page(Schema, Generic[Item]):
    """`next_cursor` is null on the last page."""

    items: list[Item]
    next_cursor: str | None = None


class PageQuery(Storable):
    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = Field(None, max_length=500)


def page(rows: QuerySet[Row], query: PageQuery, *order: str) -> dict[str, Any]:
    """One page of `rows` in `order` (fields, `-` for descending; together unique). Raises InvalidField for a bad cursor."""
    rows = rows.order_by(*order)
    if query.cursor:
        try:
            rows = rows.filter(_after(order, _decode(query.cursor, len(order))))
            found = list(rows[: query.limit + 1])
        except (ValueError, TypeError, OverflowError, ValidationError):
            raise InvalidField("cursor", "a cursor that an earlier page of this list gave") from None
    else:
        found = list(rows[: query.limit + 1])
    more = len(found) > query.limit
    found = found[: query.limit]
    return {"items": found, "next_cursor": _encode(found[-1], order) if more else None}


def _value(row: Model, name: str) -> Any:
    return reduce(getattr, name.lstrip("-").split("__"), row)


def _encode(row: Model, order: tuple[str, ...]) -> str:
    values = [_value(row, name) for name in order]
    text = json.dumps([v.isoformat() if isinstance(v, datetime) else v for v in values], cls=DjangoJSONEncoder)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode(cursor: str, length: int) -> list[Any]:
    try:
        values = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("not a cursor") from error
    if (
        not isinstance(values, list)
        or len(values) != length
        or not all(isinstance(v, str | int | float) for v in values)
    ):
        raise ValueError("not a cursor")
    if not storable(values):
        raise ValueError("not a cursor")
    return values


def _after(order: tuple[str, ...], values: list[Any]) -> Q:
    """Rows past `values`: equal in the first fields and beyond in the next, for each prefix."""
    past = Q(pk__in=[])
    for index, (name, value) in enumerate(zip(order, values, strict=True)):
        equal = [Q(**{order[i].lstrip("-"): values[i]}) for i in range(index)]
        beyond = Q(**{f"{name.lstrip('-')}__{'lt' if name.startswith('-') else 'gt'}": value})
        past |= reduce(and_, [*equal, beyond])
    return past
