"""Reading the bodies of `/v1/chat/completions` and `/v1/completions`; a bad field is a 400 that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from apps.kvcache.domain.events import Relation
from workers.gateway.errors import ApiError, bad_field
from workers.gateway.signals import MAX_NAME_LENGTH

MAX_STOPS = 4
MAX_LOGPROBS = 20
LEAST_REPETITION_PENALTY = 0.01
DEFAULT_COMPLETION_TOKENS = 16
_NO: tuple[Any, ...] = (None, False, 0, 0.0, [], {}, "")


@dataclass(frozen=True, slots=True)
class CompletionBody:
    """A checked body. Exactly one of `messages`, `text` and `ids` is set; `max_tokens` is None when the client left it open.

    `sampling` has the fields of the node API except `max_tokens`. `prompt_tokens` is set for symbolic prompts only.
    """

    model: str
    chat: bool
    messages: tuple[Mapping[str, str], ...] | None
    text: str | None
    ids: tuple[int, ...] | None
    prompt_tokens: int | None
    max_tokens: int | None
    max_tokens_param: str
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    sampling: Mapping[str, Any]
    session_id: str | None

    @property
    def prompt_param(self) -> str:
        return "messages" if self.chat else "prompt"


def decode_json(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError(400, "The body is not valid JSON.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return body


def parse(body: dict[str, Any], chat: bool) -> CompletionBody:
    """Checks one body. Raises `ApiError` (400) naming the first bad field."""
    _refuse_unsupported(body, chat)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise bad_field("model", "'model' must be the name of a model.", "missing_required_parameter")
    messages = _messages(body) if chat else None
    text, ids, prompt_tokens = (None, None, None) if chat else _prompt(body)
    max_tokens, max_tokens_param = _max_tokens(body, chat)
    stream = _flag(body, "stream")
    return CompletionBody(
        model=model,
        chat=chat,
        messages=messages,
        text=text,
        ids=ids,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        stops=_stops(body),
        stream=stream,
        include_usage=_include_usage(body, stream),
        sampling=_sampling(body, chat),
        session_id=_session_id(body),
    )


def _refuse_unsupported(body: dict[str, Any], chat: bool) -> None:
    n = body.get("n")
    if n is not None and n != 1:
        raise bad_field("n", "Only n=1 is supported: send the request again for another answer.", "unsupported_value")
    unsupported = ["logit_bias"]
    unsupported += ["tools", "functions", "audio"] if chat else ["echo", "suffix"]
    for name in unsupported:
        if name in body and body[name] not in _NO:
            raise bad_field(name, f"'{name}' is not supported by this model.", "unsupported_parameter")
    best_of = body.get("best_of")
    if best_of is not None and best_of != 1:
        raise bad_field("best_of", "Only best_of=1 is supported.", "unsupported_value")
    shape = body.get("response_format")
    if shape is not None and not (isinstance(shape, dict) and shape.get("type") == "text"):
        raise bad_field("response_format", "Only the response format 'text' is supported.", "unsupported_value")


def _messages(body: dict[str, Any]) -> tuple[Mapping[str, str], ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "'messages' must be a list of at least one message.", "missing_required_parameter")
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))


def _message(path: str, message: object) -> Mapping[str, str]:
    if not isinstance(message, dict):
        raise bad_field(path, f"'{path}' must be an object with 'role' and 'content'.")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise bad_field(f"{path}.role", f"'{path}.role' must be system, developer, user, assistant or tool.")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(f"{path}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise bad_field(f"{path}.content", f"'{path}.content' must be a text or a list of text parts.")
    return {"role": "system" if role == "developer" else role, "content": content}


def _text_part(path: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise bad_field(path, f"'{path}' must be a part of type 'text': this model reads text only.")
    return str(part["text"])


def _prompt(body: dict[str, Any]) -> tuple[str | None, tuple[int, ...] | None, int | None]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    extra = body.get("switchyard")
    prompt_tokens = extra.get("prompt_tokens") if isinstance(extra, dict) else None
    if prompt_tokens is not None and (isinstance(prompt_tokens, bool) or not isinstance(prompt_tokens, int)):
        raise bad_field("switchyard.prompt_tokens", "'switchyard.prompt_tokens' must be a whole number.")
    if isinstance(prompt, str):
        return prompt, None, prompt_tokens
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list):
        for index, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < 2**32:
                raise bad_field(f"prompt[{index}]", f"'prompt[{index}]' must be a token id (0 to 4294967295).")
        return None, tuple(prompt), prompt_tokens
    if isinstance(prompt, list) and len(prompt) > 1:
        raise bad_field("prompt", "Only one prompt a request is supported: send the others by themselves.")
    raise bad_field("prompt", "'prompt' must be a text or a list of token ids.", "missing_required_parameter")


def _max_tokens(body: dict[str, Any], chat: bool) -> tuple[int | None, str]:
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise bad_field(name, f"'{name}' must be a whole number of at least 1.")
            return value, name
    return (None if chat else DEFAULT_COMPLETION_TOKENS), names[0]


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None or stop == []:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise bad_field("stop", "'stop' must be a non-empty text or a list of such texts.")
    if len(stops) > MAX_STOPS:
        raise bad_field("stop", f"'stop' holds at most {MAX_STOPS} texts.")
    return tuple(stops)


def _include_usage(body: dict[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad_field("stream_options", "'stream_options' must be an object.")
    if not stream:
        raise bad_field("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    return _flag(options, "include_usage", "stream_options.include_usage")


def _sampling(body: dict[str, Any], chat: bool) -> dict[str, Any]:
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise bad_field("top_p", "'top_p' must be more than 0; for the likeliest tokens set 'temperature' to 0.")
    return {
        "temperature": _number(body, "temperature", 1.0, 0.0, 2.0),
        "top_p": top_p,
        "top_k": _integer(body, "top_k", 0, 0, 1_000_000),
        "min_p": _number(body, "min_p", 0.0, 0.0, 1.0),
        "seed": _integer(body, "seed", None, -(2**63), 2**63 - 1),
        "stop_token_ids": _stop_token_ids(body),
        "ignore_eos": _flag(body, "ignore_eos"),
        "repetition_penalty": _repetition_penalty(body),
        "presence_penalty": _number(body, "presence_penalty", 0.0, -2.0, 2.0),
        "frequency_penalty": _number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        "logprobs": _chat_logprobs(body) if chat else _integer(body, "logprobs", None, 0, MAX_LOGPROBS),
    }


def _repetition_penalty(body: dict[str, Any]) -> float:
    penalty = _number(body, "repetition_penalty", 1.0, 0.0, 10.0)
    if penalty < LEAST_REPETITION_PENALTY:
        least = f"'repetition_penalty' must be at least {LEAST_REPETITION_PENALTY}; 1 changes nothing."
        raise bad_field("repetition_penalty", least)
    return penalty


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    """How many of the likeliest tokens to tell at each place; None: no log probabilities at all."""
    wanted = _flag(body, "logprobs")
    top = _integer(body, "top_logprobs", None, 0, MAX_LOGPROBS)
    if top and not wanted:
        raise bad_field("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return (top or 0) if wanted else None


def refuse_without_text(body: CompletionBody) -> None:
    """Raises ApiError 400 for what a model without text and probabilities cannot do."""
    neutral = {"logprobs": None, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for name, value in neutral.items():
        if body.sampling[name] != value:
            raise bad_field(name, f"'{name}' is not supported by this model.", "unsupported_parameter")


def _stop_token_ids(body: dict[str, Any]) -> list[int]:
    ids = body.get("stop_token_ids")
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        raise bad_field("stop_token_ids", "'stop_token_ids' must be a list of token ids (0 to 4294967295).")
    return ids


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_field(name, f"'{name}' must be a number from {low:g} to {high:g}.")
    return float(value)


def _integer(body: dict[str, Any], name: str, default: int | None, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise bad_field(name, f"'{name}' must be a whole number from {low} to {high}.")
    return value


def _flag(body: dict[str, Any], name: str, path: str | None = None) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_field(path or name, f"'{path or name}' must be true or false.")
    return value


@dataclass(frozen=True, slots=True)
class Announcement:
    """What `PUT /v1/branches/{id}` says; every part may be missing."""

    parent: str | None
    relation: Relation | None
    program: str | None
    rewritten: bool


def parse_announcement(body: dict[str, Any]) -> Announcement:
    """Checks one announcement. Raises `ApiError` (400) naming the first bad field."""
    unknown = sorted(body.keys() - {"parent", "relation", "program", "rewritten"})
    if unknown:
        raise bad_field(unknown[0], f"'{unknown[0]}' is not known; expected parent, relation, program or rewritten.")
    relation = body.get("relation")
    if relation not in (None, "fork", "subagent"):
        raise bad_field("relation", "'relation' must be 'fork' or 'subagent'.")
    return Announcement(_name(body, "parent"), relation, _name(body, "program"), _flag(body, "rewritten"))


def _name(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_NAME_LENGTH or not value.isprintable():
        raise bad_field(name, f"'{name}' must be printable text of at most {MAX_NAME_LENGTH} characters.")
    return value.strip()


def _session_id(body: dict[str, Any]) -> str | None:
    """A session's id in the body: `metadata.session_id`, else `user`."""
    metadata = body.get("metadata")
    found, path = (metadata.get("session_id") if isinstance(metadata, dict) else None), "metadata.session_id"
    if found is None:
        found, path = body.get("user"), "user"
    if not isinstance(found, str) or not found:
        return None
    if len(found) > MAX_NAME_LENGTH or not found.isprintable():
        raise bad_field(path, f"'{path}' must be printable text of at most {MAX_NAME_LENGTH} characters.")
    return found
