"""Text and token ids: the model's own tokenizer, or the symbolic stand-in of replayed traces."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

from workers.agent.engines.reference.tokenizer import ChatTemplateError, TextStream, load_tokenizer
from workers.gateway.errors import ApiError, bad_field
from workers.yard.config import ModelConfig


class TextDecoder(Protocol):
    """Turns one answer's ids into text, holding back bytes that do not yet make a character."""

    def push(self, ids: list[int], count: int) -> str: ...

    def flush(self) -> str: ...


class TextCodec(Protocol):
    """How a model's prompts become ids and its ids text. `vocabulary` bounds the ids a prompt may hold (None: any)."""

    vocabulary: int | None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> array[int]: ...

    def encode(self, text: str) -> array[int]: ...

    def decoder(self) -> TextDecoder: ...

    def token_bytes(self, token: int) -> bytes: ...


class SymbolicDecoder:
    """Every token is a dot, so that lengths can be seen."""

    def push(self, ids: list[int], count: int) -> str:
        return "." * count

    def flush(self) -> str:
        return ""


class SymbolicCodec:
    """A model without text: prompts are lists of block ids."""

    vocabulary: int | None = None

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> array[int]:
        text = "This model takes block ids: send them as 'prompt' to /v1/completions."
        raise ApiError(400, text, code="symbolic_model", param="messages")

    def encode(self, text: str) -> array[int]:
        raise ApiError(400, "This model takes a list of block ids, not text.", code="symbolic_model", param="prompt")

    def decoder(self) -> TextDecoder:
        return SymbolicDecoder()

    def token_bytes(self, token: int) -> bytes:
        return b"."


class GgufDecoder:
    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def push(self, ids: list[int], count: int) -> str:
        return self._stream.push(ids)

    def flush(self) -> str:
        return self._stream.flush()


class GgufCodec:
    """The tokenizer inside a GGUF file; None = the packaged default model's."""

    def __init__(self, path: str | None) -> None:
        self._tokenizer = load_tokenizer(path)
        self.vocabulary: int | None = self._tokenizer.vocab_size

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> array[int]:
        try:
            return self._tokenizer.encode(self._tokenizer.render_chat(messages))
        except ChatTemplateError as error:
            raise bad_field("messages", f"{error}") from None

    def encode(self, text: str) -> array[int]:
        return self._tokenizer.encode(text)

    def decoder(self) -> TextDecoder:
        return GgufDecoder(self._tokenizer.stream())

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)


def load_codec(model: ModelConfig) -> TextCodec:
    """The codec of a model. Reads the tokenizer's file: seconds, so call it off the event loop."""
    return SymbolicCodec() if model.symbolic or model.by_text else GgufCodec(model.tokenizer_path)
