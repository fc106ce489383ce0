"""Errors that a person can act on. Services raise them; REST answers with problem details, the console with a message."""

from __future__ import annotations


class SwitchyardError(Exception):
    """Base: `code` is for programs, `message` for people, `status` is what HTTP answers."""

    status = 400
    title = "Bad request"

    def __init__(self, message: str, code: str = "bad-request") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class InvalidField(SwitchyardError):
    """A value that cannot be accepted; names the field and what was expected."""

    status = 422
    title = "Invalid field"

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"{field}: {expected}", "invalid-field")
        self.field = field
        self.expected = expected


class NotFound(SwitchyardError):
    status = 404
    title = "Not found"

    def __init__(self, kind: str, name: object) -> None:
        super().__init__(f"there is no {kind} called {str(name)[:80]!r}", "not-found")


class Conflict(SwitchyardError):
    """The request is well formed, but what it asks for clashes with the present state."""

    status = 409
    title = "Conflict"


class PreconditionFailed(SwitchyardError):
    status = 412
    title = "Precondition failed"

    def __init__(
        self, message: str = "someone changed this since you read it; read it again and repeat the edit"
    ) -> None:
        super().__init__(message, "precondition-failed")


class Unavailable(SwitchyardError):
    """Something the answer needs (Redis, a gateway) is away."""

    status = 503
    title = "Unavailable"


def database_trouble(error: BaseException | None) -> Unavailable | None:
    """What to say when PostgreSQL is away, or busy with somebody else's change; None when `error` is something else."""
    from django.db import InterfaceError, OperationalError

    if not isinstance(error, OperationalError | InterfaceError):
        return None
    if getattr(error.__cause__, "sqlstate", None) in ("40001", "40P01", "55P03", "57014"):
        return Unavailable("another change is under way; try again in a moment", "database-busy")
    return Unavailable("PostgreSQL does not answer; it is tried again with the next request", "database-away")
