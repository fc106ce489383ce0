"""Base classes of what REST takes in: unknown fields are refused by name, every write may say why."""

from __future__ import annotations

from typing import Annotated, Any

from ninja import Schema
from pydantic import ConfigDict, Field

from controlplane.audit import MAX_REASON_CHARS

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(Schema):
    model_config = ConfigDict(extra="forbid")


class Reason(Body):
    """Why; ends in the audit trail."""

    reason: str = Field("", max_length=MAX_REASON_CHARS)


class Edit(Reason):
    """A partial edit: only what is given changes."""

    def changes(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True, exclude={"reason"})
