"""An engine's server-sent events on their way through: passed on as they come, looked into only where usage or an error is
told."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from workers.gateway.dialects.chat_stream import Counted, counted

MAX_EVENT_BYTES = 4 * 1024 * 1024
# Lines may end in either way, even within one stream: an event's end is a line's end and an empty line.
_ENDS = (b"\n\n", b"\n\r\n")
_end_of_event = re.compile(rb"\n\r?\n").finditer
NEWLINE = 10
_USUAL_CLOSING = b"data: [DONE]\n\n"
_closing_event = re.compile(rb"(?:\A|\n)data: ?\[DONE\][ \t]*\r?\n\r?\n").search
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
        self.heard = False  # anything came at all
        self.done = False  # the closing [DONE] came
        self.error: Any = None  # what the engine said in an error event; nothing after it is passed on
        self._keep_usage = keep_usage
        self._rest = b""

    def push(self, data: bytes) -> bytes:
        """What may be passed on: nothing from behind the closing event or from an error event on. Raises EventTooLong."""
        self.heard = True
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not data.endswith(_ENDS):
            cut = max(_after(data, end) for end in _ENDS)
            data, self._rest = data[:cut], data[cut:]
            if len(self._rest) > MAX_EVENT_BYTES:
                raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        # Within a text the quotes would be escaped: these are an engine's own.
        if b'"error"' in data:
            data = self._until_error(data)
        if b"[DONE]" in data:
            end = _end_of_answer(data)
            if end:
                data = data[:end]
                self.done = True
                self.events -= 1
        self.events += data.count(b"\ndata:") + data.startswith(b"data:")
        if b'"usage":{' in data or (b'"usage": ' in data and b'"usage": {' in data):
            data = self._without_usage(data)
        return data

    def close(self) -> bytes:
        """The engine ended the stream: a closing event counts without its empty line too. What may be passed on."""
        rest, self._rest = self._rest, b""
        return self.push(rest.rstrip(b"\r\n") + b"\n\n") if rest.strip() == b"data: [DONE]" else b""

    def _until_error(self, data: bytes) -> bytes:
        kept = []
        for part in _parts(data):
            told = _document(part)
            said = None if told is None or told.get("choices") else error_of(told)
            if said is not None:
                self.error = said
                break
            kept.append(part)
        return b"".join(kept)

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


def _end_of_answer(data: bytes) -> int:
    """Where the closing event ends; 0 where there is none. Mostly it is all there is, or the last."""
    begin = len(data) - len(_USUAL_CLOSING)
    if (
        data.endswith(_USUAL_CLOSING)
        and data.find(b"[DONE]") == begin + 6
        and (not begin or data[begin - 1] == NEWLINE)
    ):
        return len(data)
    closing = _closing_event(data)
    return 0 if closing is None else closing.end()


def error_of(told: dict[str, Any]) -> Any:
    """What an engine's document says went wrong, an object or a text; None where nothing did."""
    return told.get("error") or (told if told.get("object") == "error" else None)


def _after(data: bytes, end: bytes) -> int:
    found = data.rfind(end)
    return found + len(end) if found >= 0 else 0


def documents(data: bytes) -> list[dict[str, Any]]:
    """The JSON documents of whole events."""
    return [told for told in map(_document, _parts(data)) if told is not None]


def _parts(data: bytes) -> list[bytes]:
    """Whole events, each with its end."""
    parts, begin = [], 0
    for end in _end_of_event(data):
        parts.append(data[begin : end.end()])
        begin = end.end()
    return parts


def _document(event: bytes) -> dict[str, Any] | None:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    if not lines or lines == [b"[DONE]"]:
        return None
    try:
        told = _decode(b"\n".join(lines))
    except (msgspec.DecodeError, RecursionError):
        return None
    return told if isinstance(told, dict) else None
