"""Calls awaited whole, for everything that is not a request's own stream: status, references, models, metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from workers.http.client import Call, CallError, Client, Origin
from workers.http.wire import Headers, header

MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        return header(self.headers, name)


class _Collector:
    def __init__(self, most: int) -> None:
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._most = most
        self._status = 0
        self._headers: Headers = []
        self._parts: list[bytes] = []
        self._size = 0

    def head(self, call: Call, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers

    def data(self, call: Call, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._most:
            call.abort()
            self.failed(call, CallError("too-large", f"the answer is larger than {self._most} bytes"))
        else:
            self._parts.append(data)

    def end(self, call: Call) -> None:
        if not self.future.done():
            self.future.set_result(Answer(self._status, self._headers, b"".join(self._parts)))

    def failed(self, call: Call, error: CallError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


async def fetch(
    client: Client,
    origin: Origin,
    method: str,
    path: str,
    *,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    timeout_s: float,
    max_bytes: int = MAX_BODY_BYTES,
) -> Answer:
    """One call, read whole. Raises CallError (also after `timeout_s`); cancelling it closes the connection."""
    collector = _Collector(max_bytes)
    call = client.send(origin, origin.head(method, path, headers or {}), body, collector)
    try:
        async with asyncio.timeout(timeout_s):
            return await collector.future
    except TimeoutError:
        raise CallError("timeout", f"{origin.authority} did not answer within {timeout_s:g} s") from None
    finally:
        call.abort()
