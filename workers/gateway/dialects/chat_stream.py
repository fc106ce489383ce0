"""What a chat answer is made of, chunk by chunk, whatever the engine: text, thoughts, tool calls, the end, usage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextPiece:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A piece of the tool call of this index; `call_id` and `name` come with its first piece."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Finish:
    """`stop`: the stop text that was met, where the engine tells it."""

    reason: str
    stop: str | None


@dataclass(frozen=True, slots=True)
class Counted:
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0


# More than any context: an engine that says so does not count.
MAX_COUNT = 1_000_000_000
Piece = TextPiece | Thought | ToolCall | Finish | Counted


def pieces(chunk: Mapping[str, Any]) -> Iterator[Piece]:
    """The pieces of one `chat.completion.chunk`, or of a whole `chat.completion`."""
    for choice in chunk.get("choices") or ():
        yield from _content(choice.get("delta") or choice.get("message") or {})
        if choice.get("finish_reason"):
            told = choice.get("stop_reason", choice.get("matched_stop"))
            yield Finish(choice["finish_reason"], told if isinstance(told, str) else None)
    usage = chunk.get("usage")
    if usage:
        yield counted(usage)


def _content(delta: Mapping[str, Any]) -> Iterator[Piece]:
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if thought:
        yield Thought(thought)
    if delta.get("content"):
        yield TextPiece(delta["content"])
    for position, call in enumerate(delta.get("tool_calls") or ()):
        function = call.get("function") or {}
        yield ToolCall(
            call.get("index", position), call.get("id"), function.get("name"), function.get("arguments") or ""
        )


def counted(usage: object) -> Counted:
    """What a `usage` object tells; what it leaves out, or tells as no count, counts as nothing."""
    told = _object(usage)
    return Counted(
        prompt_tokens=_count(told.get("prompt_tokens")),
        cached_tokens=_count(_object(told.get("prompt_tokens_details")).get("cached_tokens")),
        output_tokens=_count(told.get("completion_tokens")),
        reasoning_tokens=_count(_object(told.get("completion_tokens_details")).get("reasoning_tokens")),
    )


def _object(told: object) -> Mapping[str, Any]:
    return told if isinstance(told, dict) else {}


def _count(told: object) -> int:
    if isinstance(told, float) and told.is_integer():
        told = int(told)
    return told if isinstance(told, int) and not isinstance(told, bool) and 0 <= told <= MAX_COUNT else 0
