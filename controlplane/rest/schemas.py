"""Base classes of what REST takes in: unknown fields are refused by name, every write may say why."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from ninja import Schema
from pydantic import ConfigDict, Field, ValidationInfo, field_validator

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
    """Unknown fields are refused; so is true or false for a number, which Python would read as 1 or 0."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if _holds_truth(value):
            kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError("expected a number, not true or false")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that a field's annotation is made of."""
    inner = get_args(annotation)
    if inner:
        return set().union(*map(_kinds, inner))
    return {annotation} if callable(annotation) else set()


def _holds_truth(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bool) or any(isinstance(each, bool) for each in inner)


class Reason(Body):
    """Why; ends in the audit trail."""

    reason: str = Field("", max_length=MAX_REASON_CHARS)


class Edit(Reason):
    """A partial edit: only what is given changes."""

    def changes(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True, exclude={"reason"})
