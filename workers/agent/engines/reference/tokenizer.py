"""Text <-> token ids: byte-level BPE from a GGUF file's metadata or a model folder, its chat template, and a decoder that
streams text byte-exactly. The gateway uses this module; it needs no weights and no numpy."""

from __future__ import annotations

import codecs
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer

from workers.agent.engines.reference.gguf_file import ModelFileError, default_model_path, read_metadata

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_DIGITS_THEN_BYTES = {"smollm", "refact", "command-r", "codeshell", "exaone", "starcoder", "default"}
_GPT2 = {"gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "roberta-bpe", "trillion"}


class ChatTemplateError(Exception):
    """Messages that the model's chat template does not take."""


class Tokenizer:
    """One model's tokenizer. Thread-safe; ids are `array('I')`."""

    def __init__(
        self,
        name: str,
        tokens: list[str],
        kinds: list[int],
        bpe: BpeTokenizer,
        eos_ids: frozenset[int],
        template: str | None,
        template_names: Mapping[str, str],
    ) -> None:
        self.name = name
        self.vocab_size = len(tokens)
        self.special_ids = frozenset(index for index, kind in enumerate(kinds) if kind == _CONTROL)
        self.eos_ids = eos_ids
        self._bpe = bpe
        self._token_bytes = _bytes_of_tokens(tokens, kinds)
        self._template_names = template_names
        self._template = _compile_template(template)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file. Raises ModelFileError."""
        tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
        kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
        merges: list[str] = metadata.get("tokenizer.ggml.merges", [])
        if metadata.get("tokenizer.ggml.model") != "gpt2" or len(kinds) != len(tokens) or not merges:
            raise ModelFileError("tokenizer.ggml: expected a byte-level BPE (model gpt2) with token types and merges")
        bpe = _build_bpe(tokens, kinds, merges, str(metadata.get("tokenizer.ggml.pre", "default")))
        names = {"bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id"}
        template_names = {
            name: tokens[metadata[key]] if metadata.get(key) is not None else "" for name, key in names.items()
        }
        name, template = str(metadata.get("general.name", "")), metadata.get("tokenizer.chat_template")
        return cls(name, tokens, kinds, bpe, end_token_ids(metadata), template, template_names)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """From the `tokenizer.json` and `tokenizer_config.json` of a model folder. Raises ModelFileError."""
        try:
            bpe = BpeTokenizer.from_file(str(folder / "tokenizer.json"))
            settings = json.loads((folder / "tokenizer_config.json").read_text())
            separate = folder / "chat_template.jinja"
            template = separate.read_text() if separate.is_file() else _default_template(settings.get("chat_template"))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ModelFileError(f"{folder}: expected tokenizer.json and tokenizer_config.json ({error})") from None
        if not isinstance(bpe.decoder, decoders.ByteLevel):
            raise ModelFileError(f"{folder}: expected a byte-level BPE in tokenizer.json")
        tokens = [bpe.id_to_token(index) or "" for index in range(max(bpe.get_vocab(True).values()) + 1)]
        kinds = [_NORMAL] * len(tokens)
        for index, added in bpe.get_added_tokens_decoder().items():
            kinds[index] = _CONTROL if added.special else _USER_DEFINED
        names = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token")}
        ends = frozenset(index for index in [bpe.token_to_id(names["eos_token"])] if index is not None)
        return cls(folder.name, tokens, kinds, bpe, ends, template, names)

    def encode(self, text: str) -> array[int]:
        """Ids of `text`; control tokens written out in it (`<|im_start|>`) become their ids."""
        return array("I", self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without control tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to the text: none for control tokens and unknown ids."""
        if 0 <= token_id < self.vocab_size:
            return self._token_bytes[token_id]
        return b""

    def stream(self) -> TextStream:
        """A new incremental decoder."""
        return TextStream(self)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt text of a chat. Messages have `role` and text `content`. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template")
        try:
            text: str = self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._template_names, **extra
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ChatTemplateError(f"messages: the model's chat template refuses them ({error})") from None
        return text


class TextStream:
    """Turns tokens into text piece by piece; holds back the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; may be empty."""
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)


@lru_cache(maxsize=8)
def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file or of a model folder; None = the default model's. Raises ModelFileError."""
    found = Path(path) if path is not None else default_model_path()
    return Tokenizer.from_folder(found) if found.is_dir() else Tokenizer.from_gguf(read_metadata(found))


def _default_template(template: Any) -> str | None:
    """A folder's chat template; where it names several, the one called `default`."""
    if isinstance(template, list):
        return next((str(entry["template"]) for entry in template if entry.get("name") == "default"), None)
    return None if template is None else str(template)


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else "" if token is None else str(token)


def end_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Tokens that end an answer: end of sequence, of turn and of text."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ends = {metadata[key] for key in keys if metadata.get(key) is not None}
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if "<|endoftext|>" in tokens:
        ends.add(tokens.index("<|endoftext|>"))
    return frozenset(ends)


def _build_bpe(tokens: list[str], kinds: list[int], merges: list[str], pre: str) -> BpeTokenizer:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    bpe = BpeTokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _DIGITS_THEN_BYTES:
        bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in _GPT2:
        bpe.pre_tokenizer = byte_level
    else:
        raise ModelFileError(f"tokenizer.ggml.pre: expected one of smollm, gpt-2 and their kin, got {pre!r}")
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    bpe.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    return bpe


def _bytes_of_tokens(tokens: list[str], kinds: list[int]) -> list[bytes]:
    """Undo the byte-level alphabet, in which every byte is one printable character."""
    alphabet = _byte_alphabet()
    table = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            table.append(b"")
        elif kind == _USER_DEFINED or any(character not in alphabet for character in token):
            table.append(token.encode("utf-8", "surrogateescape"))
        else:
            table.append(bytes(alphabet[character] for character in token))
    return table


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte, as in GPT-2: printable Latin-1 stands for itself, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in printable}
    others = [value for value in range(256) if value not in set(printable)]
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(others)})
    return alphabet


def _compile_template(source: str | None) -> Any:
    if not source:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelFileError(f"tokenizer.chat_template: {error}") from None
