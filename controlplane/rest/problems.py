"""Problem details (RFC 9457): the one shape of every REST error."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import IntegrityError
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI, Schema
from ninja.errors import AuthenticationError, HttpError, ValidationError

from controlplane.audit import TAKEN, is_taken
from controlplane.errors import InvalidField, SwitchyardError, Unavailable, database_trouble
from controlplane.permissions import NotAuthenticated
from controlplane.rest.auth import CsrfRefused
from controlplane.rest.bodies import unreadable

logger = logging.getLogger(__name__)
MEDIA_TYPE = "application/problem+json"


class FieldProblem(Schema):
    field: str
    message: str


class Problem(Schema):
    """RFC 9457. `type` and `code` are for programs, `title` and `detail` for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str
    request_id: str
    errors: list[FieldProblem] = []


def problem(
    request: HttpRequest,
    status: int,
    code: str,
    detail: str,
    title: str = "",
    errors: list[dict[str, str]] | None = None,
) -> HttpResponse:
    body: dict[str, Any] = {
        "type": f"urn:switchyard:problem:{code}",
        "title": title or HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "instance": request.path,
        "request_id": getattr(request, "request_id", ""),
        "errors": errors or [],
    }
    response = HttpResponse(json.dumps(body), status=status, content_type=MEDIA_TYPE)
    if status == HTTPStatus.UNAUTHORIZED:
        response["WWW-Authenticate"] = 'Bearer realm="switchyard"'
    return response


def unavailable(request: HttpRequest, error: Unavailable) -> HttpResponse:
    response = problem(request, error.status, error.code, error.message, error.title)
    response["Retry-After"] = "2"
    return response


def _field(location: tuple[Any, ...]) -> str:
    """`("body", "payload", "weight")` -> `weight`: without the source, and without the view's name for the body."""
    inner = location[2:] if location[:1] == ("body",) and len(location) > 2 else location[1:]
    return ".".join(str(part) for part in inner) or str(location[0])


def install(api: NinjaAPI) -> None:
    """Registers a handler for every error an endpoint can raise."""

    @api.exception_handler(SwitchyardError)
    def _known(request: HttpRequest, error: Any) -> HttpResponse:
        errors = [{"field": error.field, "message": error.expected}] if isinstance(error, InvalidField) else None
        return problem(request, error.status, error.code, error.message, error.title, errors)

    @api.exception_handler(ValidationError)
    def _invalid(request: HttpRequest, error: Any) -> HttpResponse:
        errors = [{"field": _field(tuple(each["loc"])), "message": each["msg"]} for each in error.errors]
        detail = "; ".join(f"{each['field']}: {each['message']}" for each in errors)
        return problem(request, 422, "invalid-field", detail, "Invalid field", errors)

    @api.exception_handler(PermissionDenied)
    def _denied(request: HttpRequest, error: Any) -> HttpResponse:
        if isinstance(error, NotAuthenticated):
            return problem(request, 401, "not-authenticated", str(error))
        return problem(
            request, 403, "csrf" if isinstance(error, CsrfRefused) else "forbidden", str(error) or "not allowed"
        )

    @api.exception_handler(AuthenticationError)
    def _anonymous(request: HttpRequest, error: Any) -> HttpResponse:
        return problem(request, 401, "not-authenticated", "log in, or send an API key in the header Authorization")

    @api.exception_handler(Http404)
    def _missing(request: HttpRequest, error: Any) -> HttpResponse:
        return problem(request, 404, "not-found", str(error) or "there is nothing here")

    @api.exception_handler(HttpError)
    def _http(request: HttpRequest, error: Any) -> HttpResponse:
        unread = error.status_code == 400 and isinstance(error.__cause__, ValueError | RecursionError)
        told = unreadable(request, error.__cause__) if unread else error.message
        return problem(request, error.status_code, "bad-request", told)

    @api.exception_handler(RequestDataTooBig)
    def _too_big(request: HttpRequest, error: Any) -> HttpResponse:
        return problem(request, 413, "body-too-large", "the request body is larger than this API accepts")

    @api.exception_handler(SuspiciousOperation)
    def _suspicious(request: HttpRequest, error: Any) -> HttpResponse:
        return problem(request, 400, "bad-request", str(error) or "the request could not be read")

    @api.exception_handler(IntegrityError)
    def _taken(request: HttpRequest, error: Any) -> HttpResponse:
        """At the end of a transaction: constraints that are looked at only then."""
        return problem(request, 409, "already-exists", TAKEN) if is_taken(error) else _unexpected(request, error)

    @api.exception_handler(Exception)
    def _unexpected(request: HttpRequest, error: Any) -> HttpResponse:
        trouble = database_trouble(error)
        if trouble is not None:
            return unavailable(request, trouble)
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        return problem(request, 500, "internal", "this is a fault of Switchyard; the log has it under the request id")
