"""The audit trail: database triggers write every change of an operator-edited table, with who, why and which request.

Triggers see bulk updates and the admin site as well; `change` only adds the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pghistory
from django.db import IntegrityError, transaction
from django.db.models import Model
from psycopg.errors import UniqueViolation

from controlplane.actors import Actor
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import require
from controlplane.validators import storable

MAX_REASON_CHARS = 500
TAKEN = "somebody else has just taken this name or place; look again"
ModelType = TypeVar("ModelType", bound=type[Model])


def audited(*exclude: str) -> Callable[[ModelType], ModelType]:
    """Class decorator for a table people edit; changes of the `exclude`d fields alone leave no row."""

    def decorate(model: ModelType) -> ModelType:
        events = (pghistory.InsertEvent(), pghistory.UpdateEvent(), pghistory.DeleteEvent())
        options: dict[str, Any] = {"exclude": list(exclude)} if exclude else {}
        return pghistory.track(*events, **options)(model)  # type: ignore[return-value]

    return decorate


@contextmanager
def change(actor: Actor, reason: str, *, role: str | None = None, needs_reason: bool = False) -> Iterator[None]:
    """One transaction whose audit rows say who did it and why.

    Raises Forbidden when the actor lacks `role`, InvalidField for a missing or overlong reason, Conflict when somebody else
    has taken the same name at the same moment.
    """
    if role is not None:
        require(actor, role)
    reason = reason.strip()
    if needs_reason and not reason:
        raise InvalidField("reason", "say why; this needs a reason")
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidField("reason", f"at most {MAX_REASON_CHARS} characters")
    if not storable(reason):
        raise InvalidField("reason", "expected text without NUL characters")
    context = {"actor": actor.name, "actor_kind": actor.kind, "reason": reason, "request_id": actor.request_id}
    if actor.kind == "key":
        context["person"] = actor.voice
    try:
        with pghistory.context(**context), transaction.atomic():
            yield
    except IntegrityError as error:
        # Each had looked before it wrote, and neither saw the other's row yet.
        if is_taken(error):
            raise Conflict(TAKEN, "already-exists") from None
        raise


def is_taken(error: IntegrityError) -> bool:
    """Whether the database refused a value because another row has it."""
    return isinstance(error.__cause__, UniqueViolation)
