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


def counted(usage: Mapping[str, Any]) -> Counted:
    """What a `usage` object tells; what it leaves out counts as nothing."""
    prompt = usage.get("prompt_tokens_details") or {}
    output = usage.get("completion_tokens_details") or {}
    return Counted(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=prompt.get("cached_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or 0,
        reasoning_tokens=output.get("reasoning_tokens") or 0,
    )
