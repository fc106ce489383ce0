"""What operators ask a running gateway and tell it, under `/operator/v1` with the agent token: the control plane calls it.

Requests and branches live in the gateway alone; the console and REST read them here, on demand. Whose they may see is the
control plane's business: it names the tenants.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from workers.gateway.errors import ApiError
from workers.gateway.gateway import Gateway
from workers.gateway.serving import Serving
from workers.gateway.web import Front, Handler, Request, Response, json_response
from workers.yard import events, inspection

MAX_ROWS = 2000
DEFAULT_ROWS = 100
MAX_WHY = 200
_FILTERS = ("tenant", "band", "stage", "flow", "node", "kind", "q")
Answer = Callable[[Request, Serving], Awaitable[Response]]


def add_routes(front: Front, gateway: Gateway, token: str) -> None:
    """Mounts the operators' paths; every one wants `Authorization: Bearer <token>`."""

    def guarded(answer: Answer) -> Handler:
        async def handler(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not token or not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
                raise ApiError(401, "This address is for the control plane, which knows the token.", code="bad_token")
            return await answer(request, gateway.ready())

        return handler

    for method, path, answer in (
        ("GET", "requests", _requests),
        ("GET", "requests/{id}", _request),
        ("POST", "requests/{id}/cancel", _cancel),
        ("GET", "branches", _branches),
        ("GET", "branch", _branch),
        ("POST", "branch/end", _end_branch),
        ("GET", "reuse", _reuse),
    ):
        front.add(method, f"/operator/v1/{path}", guarded(answer))


def _wanted(request: Request) -> tuple[dict[str, str], frozenset[str] | None, int]:
    """Filters, whose tenants may be seen (`only`, comma separated; absent: all), and how many rows."""
    query = request.query
    try:
        limit = int(query.get("limit", DEFAULT_ROWS))
    except ValueError:
        limit = 0
    if not 1 <= limit <= MAX_ROWS:
        raise ApiError(400, f"'limit' must be a number from 1 to {MAX_ROWS}.", code="invalid_value", param="limit")
    only = frozenset(filter(None, query["only"].split(","))) if "only" in query else None
    return {name: query[name] for name in _FILTERS if query.get(name)}, only, limit


async def _requests(request: Request, serving: Serving) -> Response:
    wanted, only, limit = _wanted(request)
    return json_response(inspection.living_requests(serving.clock(), serving.yard, wanted, only, limit))


async def _request(request: Request, serving: Serving) -> Response:
    found = inspection.living_request(serving.clock(), serving.yard, request.match_info["id"])
    if found is None:
        raise _gone(request.match_info["id"])
    return json_response(found)


async def _cancel(request: Request, serving: Serving) -> Response:
    """Ends one request: its client gets 403 (a client library would repeat a 5xx), both nodes are told to stop."""
    request_id = request.match_info["id"]
    why = request.query.get("why", "")[:MAX_WHY] or "no reason given"
    told = ApiError(403, f"An operator cancelled this request: {why}.", code="cancelled_by_operator")
    if not serving.cancel(request_id, told):
        raise _gone(request_id)
    serving.driver.feed(events.ClientGone(request_id, f"cancelled by an operator: {why}"))
    return json_response({"id": request_id, "cancelled": True})


def _gone(request_id: str) -> ApiError:
    return ApiError(404, f"The request '{request_id}' is not here; it may have ended.", code="request_not_found")


async def _branches(request: Request, serving: Serving) -> Response:
    wanted, only, limit = _wanted(request)
    return json_response(inspection.branches(serving.clock(), serving.yard, wanted, only, limit))


async def _branch(request: Request, serving: Serving) -> Response:
    found = inspection.branch(serving.clock(), serving.yard, request.query.get("id", ""))
    if found is None:
        raise _no_branch(request)
    return json_response(found)


async def _end_branch(request: Request, serving: Serving) -> Response:
    key = request.query.get("id", "")
    if serving.yard.kv.branch(key) is None:
        raise _no_branch(request)
    serving.driver.feed(events.BranchEnd(key))
    serving.hasher.forget(key)
    return json_response({"id": key, "ended": True})


def _no_branch(request: Request) -> ApiError:
    name = request.query.get("id", "")[:200]
    return ApiError(404, f"The branch '{name}' is not known, or has ended.", code="branch_not_found")


async def _reuse(request: Request, serving: Serving) -> Response:
    return json_response(inspection.reuse(serving.yard))
