"""The audit trail: database triggers write every change of an operator-edited table, with who, why and which request.

Triggers see bulk updates and the admin site as well; `change` only adds the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pghistory
from django.db import transaction
from django.db.models import Model

from controlplane.actors import Actor
from controlplane.errors import InvalidField
from controlplane.permissions import require
from controlplane.validators import storable

MAX_REASON_CHARS = 500
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

    Raises Forbidden when the actor lacks `role`, InvalidField for a missing or overlong reason.
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
    with pghistory.context(**context), transaction.atomic():
        yield
