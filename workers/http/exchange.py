"""One request and its answer. The application gets it when the request was read whole, and answers by its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workers.http.wire import LAST_CHUNK, Headers, HttpDate, chunk, header, status_line

if TYPE_CHECKING:
    from workers.http.server import Connection

_DATE = HttpDate()


class Exchange:
    """A request read whole, and its answer: either `respond`, or `start`, `write`s and `end`.

    `on_gone` is called once when the client leaves before the answer's end; nothing that is written after that goes
    anywhere. `on_blocked` is called with True when the client reads too slowly (stop producing: what is written is kept in
    memory) and with False when it has caught up.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "body",
        "ended",
        "gone",
        "headers",
        "keep_alive",
        "method",
        "on_blocked",
        "on_gone",
        "path",
        "query",
        "started",
        "version",
    )

    def __init__(self, connection: Connection, method: str, path: bytes, query: bytes, version: str) -> None:
        self._connection = connection
        self._head = b""
        self._chunked = False
        self.method = method
        self.path = path
        self.query = query
        self.version = version
        self.headers: Headers = []
        self.body = b""
        self.keep_alive = True
        self.started = self.ended = self.gone = False
        self.on_gone: Callable[[], None] | None = None
        self.on_blocked: Callable[[bool], None] | None = None

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; `name` in lower case."""
        return header(self.headers, name)

    @property
    def blocked(self) -> bool:
        """The client reads too slowly at the moment."""
        return self._connection.blocked

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """The whole answer at once. `headers`: encoded lines (`wire.encode_headers`)."""
        if self.gone or self.ended:
            return
        assert not self.started, "the answer has begun"
        self.started = True
        length = b"" if status in (204, 304) else b"content-length: %d\r\n" % len(body)
        head = b"".join((status_line(status), headers, _DATE.line(), length, self._connection_line(), b"\r\n"))
        self._finish(head if self.method == "HEAD" else head + body)

    def start(self, status: int, headers: bytes) -> None:
        """Begins an answer of unknown length; the head goes out with the first `write`."""
        if self.gone or self.ended:
            return
        assert not self.started, "the answer has begun"
        self.started = True
        self._chunked = self.version == "1.1"
        if not self._chunked:
            self.keep_alive = False
        framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
        self._head = b"".join((status_line(status), headers, _DATE.line(), framing, self._connection_line(), b"\r\n"))

    def write(self, data: bytes) -> None:
        """More of the answer's body."""
        if self.gone or self.ended or not data or self.method == "HEAD":
            return
        framed = chunk(data) if self._chunked else data
        if self._head:
            framed = self._head + framed
            self._head = b""
        self._connection.write(framed)

    def end(self, data: bytes = b"") -> None:
        """The last of the body, and the end of the answer."""
        if self.gone or self.ended:
            return
        last = self._head
        self._head = b""
        if self.method != "HEAD":
            if data:
                last += chunk(data) if self._chunked else data
            if self._chunked:
                last += LAST_CHUNK
        self._finish(last)

    def break_off(self) -> None:
        """Closes the connection in the middle of the answer, so that the client cannot take it for a whole one."""
        if not self.gone and not self.ended:
            self.ended = True
            self.on_gone = self.on_blocked = None
            self._connection.abort()

    def left(self) -> None:
        """The connection is lost. Called by the connection."""
        if not self.ended and not self.gone:
            self.gone = True
            on_gone, self.on_gone, self.on_blocked = self.on_gone, None, None
            if on_gone is not None:
                on_gone()

    def _connection_line(self) -> bytes:
        if not self.keep_alive:
            return b"connection: close\r\n"
        return b"" if self.version == "1.1" else b"connection: keep-alive\r\n"

    def _finish(self, last: bytes) -> None:
        self.ended = True
        self.on_gone = self.on_blocked = None  # they know the request, which knows this exchange
        self._connection.write(last)
        self._connection.answered(self)
