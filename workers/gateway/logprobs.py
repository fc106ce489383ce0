"""Log probabilities of an answer's tokens, in step with its text, and the two shapes in which they are answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One token of the answer, whose text begins at character `offset`; `top` are the likeliest at its place."""

    offset: int
    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


class LogprobTrail:
    """Holds choices back until text after their beginning is sent, so that none is told of a stop string's tokens."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._held: list[TokenChoice] = []

    def add(self, offset: int, token: int, entry: dict[str, Any]) -> None:
        """A token as a node tells it: `{logprob, top: [[id, logprob]]}`. Raises KeyError, TypeError or ValueError."""
        top = tuple((self._token_bytes(int(other)), float(value)) for other, value in entry["top"])
        self._held.append(TokenChoice(offset, self._token_bytes(token), float(entry["logprob"]), top))

    def take(self, sent_characters: int | None) -> tuple[TokenChoice, ...]:
        """Choices that begin in the first `sent_characters` characters (None: all that are left)."""
        ready = [choice for choice in self._held if sent_characters is None or choice.offset < sent_characters]
        self._held = self._held[len(ready) :]
        return tuple(ready)


def chat_logprobs(choices: tuple[TokenChoice, ...]) -> dict[str, Any]:
    """As in a chat completion's choice."""
    content = [
        _token(choice.token, choice.logprob) | {"top_logprobs": [_token(token, value) for token, value in choice.top]}
        for choice in choices
    ]
    return {"content": content, "refusal": None}


def text_logprobs(choices: tuple[TokenChoice, ...]) -> dict[str, Any]:
    """As in a text completion's choice."""
    return {
        "tokens": [_text(choice.token) for choice in choices],
        "token_logprobs": [choice.logprob for choice in choices],
        "top_logprobs": [{_text(token): value for token, value in choice.top} for choice in choices],
        "text_offset": [choice.offset for choice in choices],
    }


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
