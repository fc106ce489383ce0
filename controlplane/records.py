"""How services change rows: checked assignments, with Django's validation turned into errors that name the field."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db.models import Model

from controlplane.errors import Conflict, InvalidField
from controlplane.validators import UNSTORABLE, storable

Row = TypeVar("Row", bound=Model)


def apply(row: Row, changes: dict[str, Any], editable: Collection[str]) -> bool:
    """Assigns `changes` and validates the row. True when something differs. Raises InvalidField or Conflict."""
    for name in changes:
        if name not in editable:
            raise InvalidField(name, f"cannot be edited here; expected one of {', '.join(sorted(editable))}")
    for name, value in changes.items():
        # Where blank is allowed, Django's own validation lets null pass, and the database would refuse it.
        if value is None and not row._meta.get_field(name).null:
            raise InvalidField(name, "expected a value, not null")
    columns = [row._meta.get_field(name).attname for name in changes]  # type: ignore[union-attr]
    before = [getattr(row, column) for column in columns]
    for name, value in changes.items():
        setattr(row, name, value)
    validate(row)
    return before != [getattr(row, column) for column in columns]


def validate(row: Model) -> None:
    """`full_clean`, with the first problem as InvalidField; a name that is taken is a Conflict."""
    for column in row._meta.concrete_fields:
        if not storable(getattr(row, column.attname)):
            raise InvalidField(column.name, UNSTORABLE)
    try:
        row.full_clean()
    except ValidationError as error:
        field, problems = next(iter(error.error_dict.items()))
        message = problems[0].messages[0]
        if problems[0].code in {"unique", "unique_together"} or field == NON_FIELD_ERRORS:
            raise Conflict(message, "already-exists") from None
        raise InvalidField(field, message) from None


def locked(row: Row) -> Row:
    """The same row as it is now, locked until the transaction ends; edits start from it."""
    manager: Any = type(row)._default_manager
    fresh: Row = manager.select_for_update(of=("self",)).get(pk=row.pk)
    return fresh
