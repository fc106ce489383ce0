"""What both sides of HTTP put on the wire, and what they accept from it."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import cast

Headers = list[tuple[bytes, bytes]]
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_A_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS_LINES = {int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus}


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} Status\r\n".encode()


def encode_headers(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> bytes:
    """Header lines, each with its line end. Raises ValueError for a name or value that would break out of its line."""
    lines = []
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not the name of a header")
        if _NOT_A_VALUE.search(value) is not None:
            raise ValueError(f"the value of the header {name!r} holds control characters")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("latin-1", "replace")


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; `data` is not empty (an empty chunk would end the body)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class HttpDate:
    """The `date` line of an answer, made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._line = b""

    def line(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._line = f"date: {formatdate(second, usegmt=True)}\r\n".encode()
        return self._line


def header(headers: Headers, name: bytes) -> bytes | None:
    """The first value under a name in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


def ready_transport(transport: asyncio.BaseTransport, write_high_bytes: int) -> asyncio.Transport:
    """A connection's transport, with its buffer bounded and without Nagle's delay (44 ms on every first token)."""
    ready = cast(asyncio.Transport, transport)  # uvloop's do not derive from asyncio's
    ready.set_write_buffer_limits(high=write_high_bytes)
    sock = ready.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ready
