"""Paths, handlers and errors on top of `workers.http`: what the front door's handlers see and answer.

A handler is a coroutine that answers a `Response`, or writes its stream itself and answers None. It is cancelled when its
client leaves. A plain function that answers None has seen to everything itself, by callbacks.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
import structlog

from workers.gateway.errors import ApiError
from workers.http.exchange import Exchange
from workers.http.server import Limits, Server
from workers.http.wire import Headers, encode_headers

MAX_BODY_BYTES = 32 * 1024 * 1024
DRAIN_S = 5.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CODES = {404: "not_found", 405: "method_not_allowed"}
logger = structlog.get_logger("switchyard.gateway")


def header_view(headers: Headers) -> dict[str, str]:
    """Headers by name in lower case; the first of several. What is not UTF-8 keeps its bytes as surrogates."""
    return {name.decode("latin-1"): value.decode("utf-8", "surrogateescape") for name, value in reversed(headers)}


@dataclass(frozen=True, slots=True)
class Response:
    """An answer that is there as a whole."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json; charset=utf-8"})


def json_response(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status)


class Request:
    """One request of a client."""

    __slots__ = ("_writable", "encode_error", "exchange", "headers", "match_info", "request_id")

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.encode_error: Callable[[ApiError, str], bytes] = _encode_error
        self.headers = header_view(exchange.headers)
        self.match_info: dict[str, str] = {}
        given = self.headers.get("x-request-id", "")
        self.request_id = given if given and _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
        self._writable: asyncio.Event | None = None

    @property
    def body(self) -> bytes:
        return self.exchange.body

    @property
    def path(self) -> str:
        return self.exchange.path.decode("latin-1")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.exchange.query.decode("latin-1"), keep_blank_values=True))

    def respond(self, response: Response) -> None:
        headers = {**response.headers, "x-request-id": self.request_id}
        self.exchange.respond(response.status, encode_headers(headers), response.body)

    def fail(self, error: ApiError) -> None:
        """The error as the answer; as the last event where a stream has begun."""
        if not self.exchange.started:
            headers = {**error.headers, "content-type": "application/json; charset=utf-8"}
            self.respond(Response(self.encode_error(error, self.request_id), error.status, headers))
        elif not self.exchange.ended:
            self.exchange.end(error.event())

    async def write(self, data: bytes) -> None:
        """Sends more of a stream; waits while the client reads too slowly."""
        self.exchange.write(data)
        if self.exchange.blocked:
            self._writable = asyncio.Event()
            self.exchange.on_blocked = self._blocked
            await self._writable.wait()

    def _blocked(self, blocked: bool) -> None:
        if not blocked and self._writable is not None:
            self._writable.set()


def _encode_error(error: ApiError, request_id: str) -> bytes:
    return error.encoded()


Handler = Callable[[Request], Coroutine[Any, Any, "Response | None"] | None]


class Front:
    """The application that a `Server` serves. Add paths, then `listen`."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._encoders: dict[bytes, Callable[[ApiError, str], bytes]] = {}
        self._server = Server(self._handle, self._refuse, Limits(body_bytes=max_body_bytes))
        self._exact: dict[bytes, dict[str, Handler]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Handler]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, method: str, path: str, handler: Handler) -> None:
        """`path` may have `{names}` for single segments, found in `Request.match_info`."""
        if "{" not in path:
            self._exact.setdefault(path.encode(), {})[method] = handler
            return
        pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))
        for known, handlers in self._patterns:
            if known.pattern == pattern.pattern:
                handlers[method] = handler
                return
        self._patterns.append((pattern, {method: handler}))

    def errors_of(self, path: str, encode: Callable[[ApiError, str], bytes]) -> None:
        """Errors of this path have a shape of their own: `encode(error, request_id)`."""
        self._encoders[path.encode()] = encode

    async def listen(self, host: str, port: int) -> int:
        """Begins to serve; answers the port."""
        return await self._server.listen(host, port)

    def stop_listening(self) -> None:
        self._server.stop_listening()

    async def close(self) -> None:
        """Lets answers end for a moment, then closes every connection."""
        self._server.stop_listening()
        deadline = time.monotonic() + DRAIN_S
        while self._tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()

    # ---- one request --------------------------------------------------------------------------------------------------

    def _handle(self, exchange: Exchange) -> None:
        request = self._request(exchange)
        found = self._find(request)
        if isinstance(found, ApiError):
            request.fail(found)
            return
        work = self._begin(found, request)
        if work is None:
            return
        task = asyncio.get_running_loop().create_task(self._run(work, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.on_gone = partial(_cancel, task)

    def _find(self, request: Request) -> Handler | ApiError:
        method = "GET" if request.exchange.method == "HEAD" else request.exchange.method
        handlers = self._exact.get(request.exchange.path)
        if handlers is None:
            for pattern, candidates in self._patterns:
                match = pattern.fullmatch(request.path)
                if match is not None:
                    request.match_info = {name: _segment(value) for name, value in match.groupdict().items()}
                    handlers = candidates
                    break
        if handlers is None:
            return _no_way(request, 404, "Not Found")
        handler = handlers.get(method)
        if handler is None:
            error = _no_way(request, 405, "Method Not Allowed")
            error.headers["allow"] = ", ".join(sorted(handlers))
            return error
        return handler

    def _begin(self, handler: Handler, request: Request) -> Coroutine[Any, Any, Response | None] | None:
        """Calls the handler; answers what is left to await, if anything."""
        try:
            return handler(request)
        except ApiError as error:
            request.fail(error)
        except Exception:
            self._failed(request)
        return None

    async def _run(self, work: Coroutine[Any, Any, Response | None], request: Request) -> None:
        try:
            response = await work
            if response is not None:
                request.respond(response)
        except ApiError as error:
            request.fail(error)
        except asyncio.CancelledError:
            request.exchange.break_off()
            raise
        except Exception:
            self._failed(request)

    @staticmethod
    def _failed(request: Request) -> None:
        logger.exception("request failed", request=request.request_id, path=request.path)
        request.fail(ApiError(500, "The gateway failed on this request; its log says why.", code="internal"))

    def _request(self, exchange: Exchange) -> Request:
        request = Request(exchange)
        request.encode_error = self._encoders.get(exchange.path, _encode_error)
        return request

    def _refuse(self, exchange: Exchange, status: int, code: str, message: str) -> None:
        self._request(exchange).fail(ApiError(status, message, code=code))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _no_way(request: Request, status: int, reason: str) -> ApiError:
    path = request.path[:200].encode("latin-1", "replace").decode("utf-8", "replace")
    return ApiError(status, f"{request.exchange.method} {path}: {reason}.", code=_CODES[status])


def _segment(raw: str) -> str:
    """A path's segment as text, undone from its percent signs."""
    return unquote(raw.encode("latin-1").decode("utf-8", "replace"))
