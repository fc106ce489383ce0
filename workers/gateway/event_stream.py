"""An engine's server-sent events on their way through: passed on as they come, looked into only where usage is told."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.gateway.dialects.chat_stream import Counted, counted

MAX_EVENT_BYTES = 4 * 1024 * 1024
_DONE = b"[DONE]\n\n"
_ENDS = (b"\n\n", b"\r\n\r\n")
_decode = msgspec.json.Decoder().decode


class EventTooLong(ValueError):
    """An event grew beyond `MAX_EVENT_BYTES` without an end."""


class EventStream:
    """Cuts a stream between events, so that what is passed on can always be followed by an error event of our own.

    `keep_usage`: the client asked for the closing usage event; otherwise it is taken out, as we asked for it.
    """

    def __init__(self, keep_usage: bool) -> None:
        self.usage: Counted | None = None
        self.events = 0  # events of the answer so far: engines send a token in each
        self.done = False  # the closing [DONE] came
        self._keep_usage = keep_usage
        self._rest = b""

    def push(self, data: bytes) -> bytes:
        """What may be passed on. Raises EventTooLong."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not data.endswith(_ENDS):
            cut = max(_after(data, end) for end in _ENDS)
            data, self._rest = data[:cut], data[cut:]
            if len(self._rest) > MAX_EVENT_BYTES:
                raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        self.events += data.count(b"data:")
        if data.endswith(_DONE) or b"[DONE]" in data:
            self.done = True
            self.events -= 1
        if b'"usage":{' in data or (b'"usage": ' in data and b'"usage": {' in data):
            data = self._without_usage(data)
        return data

    def _without_usage(self, data: bytes) -> bytes:
        kept = []
        for part in _parts(data):
            told = _document(part)
            if told is not None and told.get("usage"):
                self.usage = counted(told["usage"])
                if not told.get("choices"):
                    self.events -= 1
                    if not self._keep_usage:
                        continue
            kept.append(part)
        return b"".join(kept)


def _after(data: bytes, end: bytes) -> int:
    found = data.rfind(end)
    return found + len(end) if found >= 0 else 0


def documents(data: bytes) -> list[dict[str, Any]]:
    """The JSON documents of whole events."""
    return [told for told in map(_document, _parts(data)) if told is not None]


def _parts(data: bytes) -> list[bytes]:
    """Whole events, each with its end."""
    end = b"\r\n\r\n" if b"\r\n\r\n" in data else b"\n\n"
    return [part + end for part in data.split(end)[:-1]]


def _document(event: bytes) -> dict[str, Any] | None:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    if not lines or lines == [b"[DONE]"]:
        return None
    try:
        told = _decode(b"\n".join(lines))
    except msgspec.DecodeError:
        return None
    return told if isinstance(told, dict) else None
