"""The answer to a request that nobody else has answered: its error reached Django itself."""

from __future__ import annotations

import sys

from django.http import HttpRequest, HttpResponse
from django.template import loader

from controlplane.errors import database_trouble
from controlplane.middleware import REST_PREFIX
from controlplane.rest.problems import problem, unavailable

RETRY_AFTER_S = 2


def failed(request: HttpRequest) -> HttpResponse:
    """503 while PostgreSQL is away or busy, else 500; problem details under the REST prefix, a page elsewhere."""
    trouble = database_trouble(sys.exc_info()[1])
    rest = request.path.startswith(REST_PREFIX)
    if trouble is None:
        if rest:
            return problem(
                request, 500, "internal", "this is a fault of Switchyard; the log has it under the request id"
            )
        return HttpResponse(loader.render_to_string("500.html"), status=500)
    if rest:
        return unavailable(request, trouble)
    page = loader.render_to_string("503.html", {"what": trouble.message, "again_s": RETRY_AFTER_S})
    response = HttpResponse(page, status=503)
    response["Retry-After"] = str(RETRY_AFTER_S)
    return response
