"""The answers of the two completion endpoints, as one object or as server-sent events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from workers.gateway.dialects.translator import Translator
from workers.gateway.errors import ApiError
from workers.gateway.logprobs import TokenChoice, chat_logprobs, text_logprobs

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def document(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


class AnswerFormat:
    """Writes one request's answer. `include_usage` adds the closing usage event of a stream, `logprobs` what was chosen."""

    def __init__(
        self, request_id: str, model: str, created: int, chat: bool, include_usage: bool, logprobs: bool = False
    ) -> None:
        prefix = "chatcmpl-" if chat else "cmpl-"
        self._chat = chat
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._envelope = {"id": prefix + request_id, "created": created, "model": model}

    def head(self) -> bytes:
        """What a stream begins with, before any text."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self._chat else b""

    def text(self, text: str, choices: tuple[TokenChoice, ...] = ()) -> bytes:
        return self._chunk({"content": text} if self._chat else text, None, choices)

    def end(self, finish_reason: str, usage: Usage) -> bytes:
        parts = [self._chunk({} if self._chat else "", finish_reason)]
        if self._include_usage:
            parts.append(_event(self._stream_envelope() | {"choices": [], "usage": usage.document()}))
        return b"".join([*parts, DONE])

    def failure(self, error: ApiError) -> bytes:
        """The error as the last event of a stream that had begun."""
        return error.event()

    def whole(self, text: str, finish_reason: str, usage: Usage, choices: tuple[TokenChoice, ...] = ()) -> bytes:
        """The answer as one JSON object."""
        told = self._told(choices) if self._logprobs else None
        choice: dict[str, Any] = {"index": 0, "logprobs": told, "finish_reason": finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return msgspec.json.encode(self._envelope | {"object": kind, "choices": [choice], "usage": usage.document()})

    def _stream_envelope(self) -> dict[str, Any]:
        return self._envelope | {"object": "chat.completion.chunk" if self._chat else "text_completion"}

    def _told(self, choices: tuple[TokenChoice, ...]) -> dict[str, Any]:
        return chat_logprobs(choices) if self._chat else text_logprobs(choices)

    def _chunk(
        self, piece: dict[str, str] | str, finish_reason: str | None, choices: tuple[TokenChoice, ...] = ()
    ) -> bytes:
        told = self._told(choices) if choices else None
        choice: dict[str, Any] = {"index": 0, "logprobs": told, "finish_reason": finish_reason}
        choice["delta" if self._chat else "text"] = piece
        document = self._stream_envelope() | {"choices": [choice]}
        if self._include_usage:
            document["usage"] = None
        return _event(document)


class TranslatedFormat(AnswerFormat):
    """The same answer in another API's words."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def head(self) -> bytes:
        return self._translator.head()

    def text(self, text: str, choices: tuple[TokenChoice, ...] = ()) -> bytes:
        return self._translator.push(_delta({"content": text}, None))

    def end(self, finish_reason: str, usage: Usage) -> bytes:
        last = self._translator.push(_delta({}, finish_reason) | {"usage": usage.document()})
        return last + self._translator.end()

    def failure(self, error: ApiError) -> bytes:
        return self._translator.failure(error)

    def whole(self, text: str, finish_reason: str, usage: Usage, choices: tuple[TokenChoice, ...] = ()) -> bytes:
        self._translator.push(_delta({"content": text}, finish_reason) | {"usage": usage.document()})
        return self._translator.whole()


def _delta(content: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": finish_reason}]}
