"""Anthropic's Messages API: a chat answer as a message, whole or as server-sent events; its errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from workers.gateway.dialects.chat_stream import Counted, Finish, Piece, TextPiece, Thought, ToolCall, pieces
from workers.gateway.errors import ApiError

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageAnswer:
    """One answer. Feed it chat chunks in order; it gives the events that they make, and the message they add up to."""

    def __init__(self, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._id = f"msg_{request_id}"
        self._model = model
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._arguments: list[str] = []
        self._call: int | None = None
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._usage = Counted(0, 0, 0)

    def head(self) -> bytes:
        """What a stream begins with."""
        message = self._message() | {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": message}) + _event("ping", {})

    def push(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of one chunk."""
        return b"".join(self._take(piece) for piece in pieces(chunk))

    def end(self) -> bytes:
        """What a stream ends with, once the last chunk was pushed."""
        delta = {"stop_reason": self._stop_reason or "end_turn", "stop_sequence": self._stop_sequence}
        last = _event("message_delta", {"delta": delta, "usage": self._usage_document()})
        return self._close() + last + _event("message_stop", {})

    def whole(self) -> bytes:
        """The whole message, once everything was pushed."""
        self._close()
        return msgspec.json.encode(self._message())

    def failure(self, error: ApiError) -> bytes:
        """The error as the last event of a stream that had begun."""
        return error_event(error, self._request_id)

    def refusal(self, error: ApiError) -> bytes:
        """The error as the answer."""
        return error_body(error, self._request_id)

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def _take(self, piece: Piece) -> bytes:
        if isinstance(piece, TextPiece):
            opened = self._into({"type": "text", "text": ""})
            self._block["text"] += piece.text
            return opened + self._delta({"type": "text_delta", "text": piece.text})
        if isinstance(piece, Thought):
            opened = self._into({"type": "thinking", "thinking": "", "signature": ""})
            self._block["thinking"] += piece.text
            return opened + self._delta({"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, ToolCall):
            return self._tool_call(piece)
        if isinstance(piece, Finish):
            self._stop_reason = "stop_sequence" if piece.stop else _STOP_REASONS.get(piece.reason, "end_turn")
            self._stop_sequence = piece.stop
            if self._stop_reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks):
                self._stop_reason = "tool_use"
            return b""
        self._usage = piece
        return b""

    def _tool_call(self, piece: ToolCall) -> bytes:
        opened = b""
        if self._call != piece.index:
            opened = self._close()
            self._call = piece.index
            name = f"toolu_{self._id}_{piece.index}"
            block = {"type": "tool_use", "id": piece.call_id or name, "name": piece.name or "", "input": {}}
            opened += self._start(block)
        if not piece.arguments:
            return opened
        self._arguments.append(piece.arguments)
        return opened + self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    # ---- blocks -----------------------------------------------------------------------------------------------------

    @property
    def _block(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _into(self, block: dict[str, Any]) -> bytes:
        """Opens a block unless one of its kind is open."""
        if self._open is not None and self._open["type"] == block["type"]:
            return b""
        return self._close() + self._start(block)

    def _start(self, block: dict[str, Any]) -> bytes:
        self._open = block
        self._blocks.append(block)
        return _event("content_block_start", {"index": len(self._blocks) - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        if self._open["type"] == "tool_use":
            self._open["input"] = _arguments("".join(self._arguments))
        self._open, self._call, self._arguments = None, None, []
        return _event("content_block_stop", {"index": len(self._blocks) - 1})

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._stop_reason or "end_turn",
            "stop_sequence": self._stop_sequence,
            "usage": self._usage_document(),
        }

    def _usage_document(self) -> dict[str, int]:
        """`input_tokens` are those that were not read from the cache, as this API counts."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        }


def error_body(error: ApiError, request_id: str) -> bytes:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": error.message}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": request_id})


def error_event(error: ApiError, request_id: str) -> bytes:
    """The error as the last event of a stream that had begun."""
    return b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"


def _arguments(text: str) -> Any:
    """A tool call's input; what a model wrote that is not an object is passed on as it is, under a name of its own."""
    try:
        found = msgspec.json.decode(text) if text.strip() else {}
    except msgspec.DecodeError:
        return {"_unparsed": text}
    return found if isinstance(found, dict) else {"_unparsed": text}


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind} | data))
