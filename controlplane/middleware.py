"""Request ids, and problem details for REST errors that no endpoint has answered (unknown address, wrong method)."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseNotFound

REST_PREFIX = "/api/v1/"
_ACCEPTABLE = re.compile(r"[A-Za-z0-9._:-]{1,80}")


class RequestIdMiddleware:
    """`request.request_id` and `X-Request-ID`: the caller's own when it is a plain token, else a new one."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        given = request.headers.get("X-Request-ID", "")
        request.request_id = given if _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex  # type: ignore[attr-defined]
        response = self.get_response(request)
        response["X-Request-ID"] = request.request_id  # type: ignore[attr-defined]
        return response


class RestProblemMiddleware:
    """Answers under the REST prefix that are errors but not JSON become problem details."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self._answer(request)
        if (
            response.status_code < 400
            or not request.path.startswith(REST_PREFIX)
            or "json" in response.get("Content-Type", "")
        ):
            return response
        # Imported late: the models behind the problem module are not loaded when Django imports middleware.
        from controlplane.rest.problems import problem

        code, detail = {
            404: (
                "not-found",
                f"there is nothing at {request.path[:200]}; the description is at {REST_PREFIX}openapi.json",
            ),
            405: (
                "method-not-allowed",
                f"{request.method} is not possible here; try {response.get('Allow', 'another')}",
            ),
        }.get(response.status_code, ("bad-request", "the request could not be handled"))
        answer = problem(request, response.status_code, code, detail)
        if response.has_header("Allow"):
            answer["Allow"] = response["Allow"]
        return answer

    def _answer(self, request: HttpRequest) -> HttpResponseBase:
        """No name holds a NUL character, and PostgreSQL would refuse to look for one."""
        if "\x00" not in request.path:
            return self.get_response(request)
        if request.path.startswith(REST_PREFIX):
            return HttpResponseNotFound()
        raise Http404
