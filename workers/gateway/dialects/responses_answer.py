"""OpenAI's Responses API: a chat answer as a response, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from workers.gateway.dialects.chat_stream import Counted, Finish, Piece, TextPiece, Thought, ToolCall, pieces
from workers.gateway.errors import ApiError

_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


class ResponseAnswer:
    """One answer. Feed it chat chunks in order; it gives the events that they make, and the response they add up to.

    `body` is the request's, of which a response repeats some fields; `created` is in unix seconds.
    """

    def __init__(self, request_id: str, model: str, created: float, body: Mapping[str, Any]) -> None:
        self._request_id = request_id
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._call: int | None = None
        self._finish = "stop"
        self._usage: Counted | None = None
        self._response: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "usage": None,
        } | {name: body[name] if body.get(name) is not None else default for name, default in _ECHOED.items()}

    def head(self) -> bytes:
        """What a stream begins with."""
        return self._event("response.created", response=self._response) + self._event(
            "response.in_progress", response=self._response
        )

    def push(self, chunk: Mapping[str, Any]) -> bytes:
        """The events of one chunk."""
        return b"".join(self._take(piece) for piece in pieces(chunk))

    def end(self) -> bytes:
        """What a stream ends with, once the last chunk was pushed."""
        closed = self._close()
        response = self._ended()
        return closed + self._event(f"response.{response['status']}", response=response)

    def whole(self) -> bytes:
        """The whole response, once everything was pushed."""
        self._close()
        return msgspec.json.encode(self._ended())

    def refusal(self, error: ApiError) -> bytes:
        """The error as the answer."""
        return error.encoded()

    def failure(self, error: ApiError) -> bytes:
        """The error as the last event of a stream that had begun."""
        told = {"code": error.code or "server_error", "message": error.message}
        response = self._response | {"status": "failed", "error": told, "output": self._output}
        return self._event("response.failed", response=response)

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def _take(self, piece: Piece) -> bytes:
        if isinstance(piece, TextPiece):
            return self._text(piece.text)
        if isinstance(piece, Thought):
            return self._thought(piece.text)
        if isinstance(piece, ToolCall):
            return self._tool_call(piece)
        if isinstance(piece, Finish):
            self._finish = piece.reason
        else:
            self._usage = piece
        return b""

    def _text(self, text: str) -> bytes:
        opened = b""
        if self._kind != "message":
            item = {"type": "message", "status": "in_progress", "role": "assistant", "content": []}
            opened = self._close() + self._start("msg", item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            opened += self._event("response.content_part.added", **self._at(), content_index=0, part=part)
            self._current["content"].append(part)
        self._current["content"][0]["text"] += text
        return opened + self._event(
            "response.output_text.delta", **self._at(), content_index=0, delta=text, logprobs=[]
        )

    def _thought(self, text: str) -> bytes:
        opened = b""
        if self._kind != "reasoning":
            item = {"type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            opened = self._close() + self._start("rs", item)
            self._current["content"].append({"type": "reasoning_text", "text": ""})
        self._current["content"][0]["text"] += text
        return opened + self._event("response.reasoning_text.delta", **self._at(), content_index=0, delta=text)

    def _tool_call(self, piece: ToolCall) -> bytes:
        opened = b""
        if self._call != piece.index:
            opened = self._close()
            item = {
                "type": "function_call",
                "status": "in_progress",
                "call_id": piece.call_id or f"call_{self._request_id}_{piece.index}",
                "name": piece.name or "",
                "arguments": "",
            }
            opened += self._start("fc", item)
            self._call = piece.index
        if not piece.arguments:
            return opened
        self._current["arguments"] += piece.arguments
        return opened + self._event("response.function_call_arguments.delta", **self._at(), delta=piece.arguments)

    # ---- items ------------------------------------------------------------------------------------------------------

    @property
    def _current(self) -> dict[str, Any]:
        assert self._item is not None
        return self._item

    @property
    def _kind(self) -> str | None:
        return None if self._item is None else str(self._item["type"])

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._current["id"], "output_index": len(self._output) - 1}

    def _start(self, prefix: str, item: dict[str, Any]) -> bytes:
        self._item = {"id": f"{prefix}_{self._request_id}_{len(self._output)}"} | item
        self._output.append(self._item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=self._item)

    def _close(self) -> bytes:
        """Ends the open item with the events of its kind."""
        item = self._item
        if item is None:
            return b""
        item["status"] = "completed" if self._finish != "length" else "incomplete"
        closing = b""
        if item["type"] == "message":
            part = item["content"][0]
            closing += self._event(
                "response.output_text.done", **self._at(), content_index=0, text=part["text"], logprobs=[]
            )
            closing += self._event("response.content_part.done", **self._at(), content_index=0, part=part)
        elif item["type"] == "reasoning":
            text = item["content"][0]["text"]
            closing += self._event("response.reasoning_text.done", **self._at(), content_index=0, text=text)
        else:
            closing += self._event(
                "response.function_call_arguments.done", **self._at(), name=item["name"], arguments=item["arguments"]
            )
        closing += self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._item = self._call = None
        return closing

    def _ended(self) -> dict[str, Any]:
        cut = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(self._finish)
        return self._response | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": cut} if cut else None,
            "output": self._output,
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        document = {"type": kind, "sequence_number": self._number} | data
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(document))


def _usage(counted: Counted) -> dict[str, Any]:
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counted.cached_tokens},
        "output_tokens": counted.output_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
        "total_tokens": counted.prompt_tokens + counted.output_tokens,
    }
