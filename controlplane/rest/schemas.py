"""Base classes of what REST takes in: unknown fields are refused by name, every write may say why."""

from __future__ import annotations

from typing import Annotated, Any

from ninja import Schema
from pydantic import ConfigDict, Field, field_validator

from controlplane.audit import MAX_REASON_CHARS
from controlplane.validators import UNSTORABLE, storable

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Storable(Schema):
    """What comes from outside: texts the database cannot hold are refused, by the field's name."""

    @field_validator("*")
    @classmethod
    def _texts_can_be_stored(cls, value: Any) -> Any:
        if not storable(value):
            raise ValueError(UNSTORABLE)
        return value


class Body(Storable):
    model_config = ConfigDict(extra="forbid")


class Reason(Body):
    """Why; ends in the audit trail."""

    reason: str = Field("", max_length=MAX_REASON_CHARS)


class Edit(Reason):
    """A partial edit: only what is given changes."""

    def changes(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True, exclude={"reason"})
