"""Calls to engines over kept connections: one receiver of callbacks a call, no task, nothing kept that was passed on.

A kept connection that its server closed in the meantime is tried again once on a fresh one, if nothing of an answer had come
and the call allows it (a call whose repetition would harm, such as one with a room of its own, does not).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import httptools
import structlog

from workers.http.wire import Headers, encode_headers, header, ready_transport

WRITE_HIGH_BYTES = 256 * 1024
MAX_HEAD_BYTES = 64 * 1024
IDLE_S = 30.0
CONNECT_S = 2.0
MAX_IDLE_AN_ORIGIN = 512
SWEEP_EVERY_S = 5.0
logger = structlog.get_logger("switchyard.http")


class CallError(Exception):
    """A call that broke. `reason`: unreachable | connection-broken | not-http | too-large | timeout."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Origin:
    """Where calls go: `scheme://host:port` and the path under which everything lies."""

    tls: bool
    host: str
    port: int
    base: str = ""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Raises ValueError for what is not an http or https URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        """The constant part of a request's head; `Client.send` adds the length. Raises ValueError for bad headers."""
        line = f"{method} {self.base}{path} HTTP/1.1\r\nhost: {self.authority}\r\n"
        return line.encode("ascii") + encode_headers(headers)


class Receiver(Protocol):
    """Who made a call. Exactly one of `end` and `failed` is called, last; none after `Call.abort`."""

    def head(self, call: Call, status: int, headers: Headers) -> None: ...

    def data(self, call: Call, data: bytes) -> None: ...

    def end(self, call: Call) -> None: ...

    def failed(self, call: Call, error: CallError) -> None: ...


class Call:
    """One call under way."""

    __slots__ = ("body", "connection", "done", "head", "origin", "paused", "receiver", "repeatable", "reused")

    def __init__(self, origin: Origin, head: bytes, body: bytes, receiver: Receiver, repeatable: bool) -> None:
        self.origin = origin
        self.head = head
        self.body = body
        self.receiver = receiver
        self.repeatable = repeatable
        self.reused = self.done = self.paused = False
        self.connection: UpstreamConnection | None = None

    def abort(self) -> None:
        """Closes the call's connection: the server sees its client leave. The receiver hears nothing more."""
        if not self.done:
            self.done = True
            if self.connection is not None:
                self.connection.drop()

    def pause(self, paused: bool) -> None:
        """Stops reading the answer, so that the server stops sending, or goes on."""
        if self.paused != paused:
            self.paused = paused
            if self.connection is not None and not self.done:
                self.connection.pause(paused)


class Client:
    """Keeps connections and starts calls. Make it on the event loop."""

    def __init__(self, connect_s: float = CONNECT_S, idle_s: float = IDLE_S, tls: ssl.SSLContext | None = None) -> None:
        self.opened = 0  # connections ever opened
        self.calls = 0
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Origin, deque[tuple[float, UpstreamConnection]]] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def send(self, origin: Origin, head: bytes, body: bytes, receiver: Receiver, repeatable: bool = True) -> Call:
        """Starts a call: `head` from `Origin.head`. What comes of it the receiver hears, never before this returns."""
        call = Call(origin, head, body, receiver, repeatable)
        self.calls += 1
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()[1]
            if connection.usable:
                call.reused = True
                connection.begin(call)
                return call
        self._connect(call)
        return call

    def keep(self, connection: UpstreamConnection) -> None:
        """A connection whose call is over serves the next. Called by the connection."""
        idle = self._idle.setdefault(connection.origin, deque())
        if len(idle) >= MAX_IDLE_AN_ORIGIN:
            connection.drop()
        else:
            idle.append((self._loop.time() + self._idle_s, connection))

    def again(self, call: Call) -> None:
        """Once more, on a fresh connection. Called by a connection that turned out to be closed."""
        call.reused = False
        call.connection = None
        self._connect(call)

    async def close(self) -> None:
        self._sweeper.cancel()
        for task in list(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for idle in self._idle.values():
            for _, connection in idle:
                connection.drop()
        self._idle.clear()

    def _connect(self, call: Call) -> None:
        task = self._loop.create_task(self._open(call))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _open(self, call: Call) -> None:
        origin = call.origin
        tls = (self._tls or ssl.create_default_context()) if origin.tls else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self, origin), origin.host, origin.port, ssl=tls
                )
        except (OSError, TimeoutError) as error:
            if not call.done:
                call.done = True
                why = "no connection in time" if isinstance(error, TimeoutError) else str(error)
                call.receiver.failed(call, CallError("unreachable", f"{origin.authority} cannot be reached: {why}"))
            return
        self.opened += 1
        if call.done:
            connection.drop()
        else:
            connection.begin(call)

    def _sweep(self) -> None:
        now = self._loop.time()
        for origin, idle in list(self._idle.items()):
            while idle and idle[0][0] <= now:
                idle.popleft()[1].drop()
            if not idle:
                del self._idle[origin]
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine: one call at a time."""

    def __init__(self, client: Client, origin: Origin) -> None:
        self.origin = origin
        self._client = client
        self._transport: asyncio.Transport
        self._parser: Any = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._status = 0
        self._answered = self._complete = self._keep = self._lost = False
        self._unasked = False  # more came than the answer
        self._to_end_of_connection = False
        self._marks = self._silent_bytes = 0

    @property
    def usable(self) -> bool:
        return not self._lost and not self._transport.is_closing()

    def begin(self, call: Call) -> None:
        """Sends a call's request; its answer comes to its receiver."""
        self._call = call
        call.connection = self
        self._answered = self._complete = self._keep = self._unasked = self._to_end_of_connection = False
        length = b"content-length: %d\r\n\r\n" % len(call.body)
        if len(call.body) < 32_768:
            self._transport.write(b"".join((call.head, length, call.body)))
        else:
            self._transport.writelines((call.head + length, call.body))
        if call.paused:
            self.pause(True)

    def pause(self, paused: bool) -> None:
        if not self._lost and not self._transport.is_closing():
            if paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def drop(self) -> None:
        """Closes at once; whoever was being served hears nothing."""
        self._call = None
        if not self._lost:
            self._transport.abort()

    # ---- the transport's callbacks ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = ready_transport(transport, WRITE_HIGH_BYTES)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nobody asked: not a connection to rely on
            self.drop()
            return
        marks = self._marks
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(call, CallError("not-http", "the answer was not understood"))
            raise error.__context__ or error from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(call, CallError("not-http", f"{self.origin.authority} did not answer in HTTP: {error}"))
            return
        self._silent_bytes = self._silent_bytes + len(data) if marks == self._marks else 0
        if self._silent_bytes > MAX_HEAD_BYTES:
            self._fail(call, CallError("not-http", f"{self.origin.authority} sent headers without end"))
            return
        self._deliver(call)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        call = self._call
        self._call = None
        if call is None or call.done:
            return
        if self._to_end_of_connection and exc is None:
            self._ended(call)
        elif call.reused and call.repeatable and not self._answered:
            self._client.again(call)
        else:
            call.done = True
            where = "in the middle of its answer" if self._answered else "without an answer"
            text = f"{self.origin.authority} closed the connection {where}"
            call.receiver.failed(call, CallError("connection-broken", text))

    # ---- the parser's callbacks -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._marks += 1
        self._headers = []
        self._unasked = self._complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self._marks += 1
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._marks += 1
        self._status = self._parser.get_status_code()
        call = self._call
        if self._status < 200 or call is None or call.done or self._unasked:
            return
        self._answered = True
        headers, self._headers = self._headers, []
        framed = self._status in (204, 304) or header(headers, b"content-length") is not None
        coding = header(headers, b"transfer-encoding")
        self._to_end_of_connection = not framed and (coding is None or not coding.lower().endswith(b"chunked"))
        call.receiver.head(call, self._status, headers)

    def on_body(self, data: bytes) -> None:
        self._marks += 1
        if not self._unasked:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._marks += 1
        if self._status >= 200 and not self._unasked:
            self._complete = True
            self._keep = bool(self._parser.should_keep_alive())

    # ---- delivery ---------------------------------------------------------------------------------------------------

    def _deliver(self, call: Call) -> None:
        pieces = self._pieces
        if pieces:
            self._pieces = []
            if not call.done:
                call.receiver.data(call, pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if not self._complete:
            return
        keep = self._keep and self._call is call and not self._unasked
        self._call = None
        if keep:
            if call.paused:
                self.pause(False)
            self._client.keep(self)
        elif not self._lost:
            self._transport.abort()
        if not call.done:
            self._ended(call)

    def _ended(self, call: Call) -> None:
        """The answer is whole. A receiver that cannot make sense of it hears that the call failed: each call has an end."""
        call.done = True
        try:
            call.receiver.end(call)
        except Exception as error:
            logger.error("an answer was not understood", server=self.origin.authority, error=repr(error))
            text = f"{self.origin.authority} sent an answer that cannot be read ({type(error).__name__})"
            call.receiver.failed(call, CallError("bad-answer", text))

    def _fail(self, call: Call, error: CallError) -> None:
        self._call = None
        self._transport.abort()
        if not call.done:
            call.done = True
            call.receiver.failed(call, error)
