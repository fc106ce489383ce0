"""Listens, reads requests within limits, hands each to the application when it has come whole.

Limits, each with its answer: request line and headers (431), body (413), time to send them (408), and how long a client may
not read what was sent (its connection is closed). Requests that are sent ahead wait their turn. What llhttp does not accept
is answered with 400 and the end of the connection.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
import structlog

from workers.http.exchange import Exchange
from workers.http.wire import CONTINUE, ready_transport

WRITE_HIGH_BYTES = 128 * 1024
MAX_WAITING_REQUESTS = 32
LINGER_S = 2.0
SWEEP_EVERY_S = 0.5

logger = structlog.get_logger("switchyard.http")
Application = Callable[[Exchange], None]
Refusal = Callable[[Exchange, int, str, str], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may cost."""

    head_bytes: int = 64 * 1024
    body_bytes: int = 32 * 1024 * 1024
    head_s: float = 20.0
    body_silence_s: float = 30.0
    idle_s: float = 75.0
    unread_s: float = 60.0
    connections: int = 16_384


class Server:
    """Serves `application(exchange)`. `refuse(exchange, status, code, message)` answers what HTTP itself forbids."""

    def __init__(self, application: Application, refuse: Refusal, limits: Limits | None = None) -> None:
        self.application = application
        self.refuse = refuse
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.closing = False
        self._server: Any = None  # of the loop that runs; what its `sockets` are differs
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop

    async def listen(self, host: str, port: int) -> int:
        """Begins to listen; answers the port. Raises OSError when it is taken."""
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(lambda: Connection(self), host, port, backlog=2048)
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)
        return int(self._server.sockets[0].getsockname()[1])

    def stop_listening(self) -> None:
        """Takes no new connections; idle ones are closed, others close after their answer."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()

    def close(self) -> None:
        """Ends every connection."""
        self.stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.abort()

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in list(self.connections):
            connection.check_time(now)
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)


class Connection(asyncio.Protocol):
    """One client's connection. Reads on while a request is served, so that a client that leaves is noticed at once."""

    def __init__(self, server: Server) -> None:
        self.blocked = False
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser: Any = httptools.HttpRequestParser(self)
        self._current: Exchange | None = None  # being served
        self._reading: Exchange | None = None  # its headers are read, its body comes
        self._ready: deque[Exchange] = deque()  # sent ahead
        self._refusal: tuple[Exchange, int, str, str] | None = None  # the last answer; nothing is read any more
        self._url = bytearray()
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._marks = self._silent_bytes = 0  # the parser's callbacks, and what came since the last one
        self._paused = self._closing = self._over = False
        self._deadline = 0.0
        self._wait = "idle"

    # ---- the transport's callbacks ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = ready_transport(transport, WRITE_HIGH_BYTES)
        if len(self._server.connections) >= self._server.limits.connections:
            self._over = True
            self._transport.abort()
            return
        self._server.connections.add(self)
        self._until("idle", self._server.limits.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._over = True
        self._ready.clear()
        if self._current is not None:
            self._current.left()
            self._current = None

    def data_received(self, data: bytes) -> None:
        if self._closing or self._refusal is not None:
            return
        if self._wait == "idle":
            self._until("head", self._server.limits.head_s)
        marks = self._marks
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            self._refuse(400, "bad_request", f"This is not a valid HTTP request: {error}.")
        self._silent_bytes = self._silent_bytes + len(data) if marks == self._marks else 0
        if self._silent_bytes > self._server.limits.head_bytes:
            self._head_too_large()
        self._serve_next()
        if len(self._ready) > MAX_WAITING_REQUESTS and not self._paused and not self._over:
            self._paused = True
            self._transport.pause_reading()

    def _feed(self, data: bytes) -> None:
        """Parses. Other protocols that a client offers (h2c) are not taken: llhttp stops there, before the body, and is
        given the same head again without the offer."""
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                if self._refusal is not None:
                    return
                head = b"%b %b HTTP/1.1\r\n" % (self._parser.get_method(), bytes(self._url))
                offer = (b"upgrade", b"connection", b"http2-settings")
                head += b"".join(b"%b: %b\r\n" % line for line in self._headers if line[0] not in offer)
                data = head + b"\r\n" + data[stopped.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            else:
                return

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.blocked = True
        self._until("unread", self._server.limits.unread_s)
        if self._current is not None and self._current.on_blocked is not None:
            self._current.on_blocked(True)

    def resume_writing(self) -> None:
        self.blocked = False
        if self._closing:
            self._until("linger", LINGER_S)
        elif self._current is None:
            self._until("idle", self._server.limits.idle_s)
        else:
            self._until("answer", None)
            if self._current.on_blocked is not None:
                self._current.on_blocked(False)

    # ---- the parser's callbacks -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._marks += 1
        self._url = bytearray()
        self._headers = []
        self._head_bytes = 0

    def on_url(self, data: bytes) -> None:
        self._marks += 1
        self._url += data
        self._count_head(len(data))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after the body: a trailer counts, and goes nowhere."""
        self._marks += 1
        self._count_head(len(name) + len(value) + 4)
        if self._reading is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._marks += 1
        if self._refusal is not None or self._offers_another_protocol():
            return
        version = self._parser.get_http_version()
        path, query = _split(bytes(self._url))
        exchange = Exchange(self, self._parser.get_method().decode("ascii"), path, query, version)
        exchange.headers = self._headers
        exchange.keep_alive = bool(self._parser.should_keep_alive()) and not self._server.closing
        self._body, self._body_bytes = [], 0
        self._reading = exchange
        limits = self._server.limits
        hosts = length = 0
        expect: bytes | None = None
        for name, value in self._headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                length = int(value)
            elif name == b"expect":
                expect = value
        if version not in ("1.0", "1.1"):
            self._refuse(505, "version_not_supported", "This server speaks HTTP/1.0 and HTTP/1.1.")
        elif exchange.method == "CONNECT" or not path.startswith((b"/", b"*")):
            self._refuse(400, "bad_request", "The request's target must be a path.")
        elif version == "1.1" and hosts != 1:
            self._refuse(400, "bad_request", "A request of HTTP/1.1 has exactly one Host header.")
        elif length > limits.body_bytes:
            self._body_too_large()
        elif self._current is None:
            self._until("body", limits.body_silence_s)
            if expect is not None and expect.lower() == b"100-continue" and version == "1.1" and not self._ready:
                self.write(CONTINUE)

    def on_body(self, data: bytes) -> None:
        self._marks += 1
        if self._refusal is not None:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self._server.limits.body_bytes:
            self._body_too_large()
            return
        self._body.append(data)
        if self._current is None:
            self._until("body", self._server.limits.body_silence_s)

    def on_message_complete(self) -> None:
        self._marks += 1
        exchange = self._reading
        if exchange is None or self._refusal is not None:
            return
        self._reading = None
        parts = self._body
        exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._body = []
        self._ready.append(exchange)

    def _offers_another_protocol(self) -> bool:
        return bool(self._parser.should_upgrade()) and self._parser.get_method() != b"CONNECT"

    # ---- serving ----------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if data and not self._over and not self._closing:
            self._transport.write(data)

    def answered(self, exchange: Exchange) -> None:
        """The application has ended the answer. Called by the exchange."""
        if self._current is not exchange:
            return
        self._current = None
        if not exchange.keep_alive:
            self._close()
        elif self._ready or self._refusal is not None:
            self._loop.call_soon(self._serve_next)
        elif self._server.closing:
            self._close()
        elif self._reading is not None:
            self._until("body", self._server.limits.body_silence_s)
        elif not self.blocked:
            self._until("idle", self._server.limits.idle_s)

    def abort(self) -> None:
        if not self._over:
            self._transport.abort()

    def close_if_idle(self) -> None:
        if self._wait == "idle" and self._current is None and not self._ready:
            self._transport.close()

    def check_time(self, now: float) -> None:
        """What the passing of time brings: a client that takes too long to send or to read."""
        if self._deadline == 0.0 or now < self._deadline:
            return
        if self._wait in ("head", "body") and not self._closing:
            self._refuse(408, "request_timeout", "The request did not come whole in time.")
            self._serve_next()
        elif self._wait == "idle":
            self._transport.close()
        else:
            self._transport.abort()

    def _serve_next(self) -> None:
        while self._current is None and self._ready and not self._over and not self._closing:
            exchange = self._current = self._ready.popleft()
            if not self.blocked:
                self._until("answer", None)
            if self._paused and len(self._ready) <= MAX_WAITING_REQUESTS // 2:
                self._paused = False
                self._transport.resume_reading()
            self._serve(exchange)
        idle = self._current is None and not self._ready
        if self._refusal is not None and idle and not self._over and not self._closing:
            self._server.refuse(*self._refusal)
            self._close()

    def _serve(self, exchange: Exchange) -> None:
        problem = _unpack(exchange, self._server.limits.body_bytes)
        if problem is not None:
            self._server.refuse(exchange, *problem)
            return
        try:
            self._server.application(exchange)
        except Exception:
            logger.exception("the application failed on a request", path=exchange.path)
            if exchange.started:
                exchange.break_off()
            else:
                self._server.refuse(exchange, 500, "internal", "The server failed on this request; its log says why.")

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._server.limits.head_bytes:
            self._head_too_large()

    def _head_too_large(self) -> None:
        self._refuse(
            431,
            "headers_too_large",
            f"The request line and headers are larger than {self._server.limits.head_bytes} bytes.",
        )

    def _body_too_large(self) -> None:
        self._refuse(
            413,
            "request_too_large",
            f"The body is larger than the {self._server.limits.body_bytes} bytes that are accepted.",
        )

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Nothing more is read; after the answers that come before it, this one is given and the connection ends."""
        if self._refusal is not None or self._closing or self._over:
            return
        peer = self._transport.get_extra_info("peername")
        logger.info("a request was not taken", peer=peer[0] if peer else "", status=status, code=code)
        exchange = self._reading or Exchange(self, "GET", b"", b"", "1.1")
        exchange.keep_alive = False
        self._reading = None
        self._body = []
        self._refusal = (exchange, status, code, message)

    def _close(self) -> None:
        """Closes once everything is sent; unread input would reset the connection, so it is read for a moment longer."""
        if self._closing or self._over:
            return
        self._closing = True
        self._ready.clear()
        if self._transport.is_closing():
            return
        self._transport.write_eof()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if not self.blocked:
            self._until("linger", LINGER_S)

    def _until(self, wait: str, seconds: float | None) -> None:
        self._wait = wait
        self._deadline = 0.0 if seconds is None else self._loop.time() + seconds


def _unpack(exchange: Exchange, most: int) -> tuple[int, str, str] | None:
    """Undoes the body's Content-Encoding, up to `most` bytes; answers status, code and message of what cannot be undone."""
    encoding = exchange.header(b"content-encoding")
    if encoding is None or encoding.lower() == b"identity":
        return None
    if encoding.lower() not in (b"gzip", b"x-gzip", b"deflate"):
        return 415, "unreadable_body", "The body's Content-Encoding is not known here; use gzip, deflate or none."
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        body = unpack.decompress(exchange.body, most + 1)
    except zlib.error:
        return 400, "unreadable_body", "The body cannot be read: it does not fit its Content-Encoding."
    if len(body) > most:
        return 413, "request_too_large", f"The body is larger than the {most} bytes that are accepted."
    if not unpack.eof:
        return 400, "unreadable_body", "The body cannot be read: it does not fit its Content-Encoding."
    exchange.body = body
    return None


def _split(target: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request's target, which may also be a whole URL."""
    if not target.startswith(b"/") and b"://" in target:
        after = target.split(b"://", 1)[1]
        slash = after.find(b"/")
        target = after[slash:] if slash >= 0 else b"/"
    path, _, query = target.partition(b"?")
    return path.partition(b"#")[0], query
