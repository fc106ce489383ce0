"""The part of a body that decisions need, where the engine itself reads the rest: its bytes are not looked into."""

from __future__ import annotations

import re
from array import array

import msgspec

from workers.gateway.errors import ApiError, bad_field
from workers.gateway.light_fields import LightBody

BYTES_A_TOKEN = 4
_SPACE = b" \t\r\n"
_WHERE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)

_decoder = msgspec.json.Decoder(LightBody)


def read(raw: bytes, chat: bool) -> LightBody:
    """Raises ApiError (400) naming the first field that is missing or of another type."""
    try:
        body = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError(400, "The body is not valid JSON.", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
    name, given = ("messages", body.messages) if chat else ("prompt", body.prompt)
    if not memoryview(given).nbytes:
        raise bad_field(name, f"'{name}' is needed.", "missing_required_parameter")
    for path in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, path)
        if value is not None and value < 1:
            raise bad_field(path, f"'{path}' must be a whole number of at least 1.")
    return body


def text_ids(body: LightBody, chat: bool) -> array[int]:
    """The prompt as ids of four bytes each, in the order in which templates put it: tools first, then the messages.

    A conversation that goes on has the bytes of its last turn as a prefix, so blocks of ids are shared as blocks of tokens
    would be. Lists of token ids count as they are.
    """
    if not chat:
        raw = bytes(body.prompt)
        if not raw.startswith((b'"', b"[")):
            raise bad_field("prompt", "'prompt' must be a text or a list.")
        if is_list(body.prompt) and not raw[1:].lstrip(_SPACE).startswith((b'"', b"[")):
            return _listed(raw)
        return _packed(raw[1:-1])
    return _packed(bytes(body.tools) + bytes(body.messages)[:-1])


def is_list(prompt: msgspec.Raw) -> bool:
    return bytes(prompt).startswith(b"[")


def _packed(raw: bytes) -> array[int]:
    """What is left over counts only where it is all there is: a short text is a text too."""
    ids = array("I")
    if 0 < len(raw) < BYTES_A_TOKEN:
        raw = raw.ljust(BYTES_A_TOKEN)
    ids.frombytes(raw[: len(raw) // BYTES_A_TOKEN * BYTES_A_TOKEN])
    return ids


def _listed(raw: bytes) -> array[int]:
    try:
        return array("I", msgspec.json.decode(raw, type=list[int]))
    except (msgspec.ValidationError, OverflowError):
        raise bad_field("prompt", "'prompt' must be a text or a list of token ids (0 to 4294967295).") from None


def _named(problem: str) -> ApiError:
    """msgspec's words about a wrong type, with the field's name first."""
    found = _WHERE.match(problem)
    what, path = (found[1], found[2]) if found is not None else (problem, None)
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing is not None:
        return bad_field(missing[1], f"'{missing[1]}' is needed.", "missing_required_parameter")
    if not path:
        return ApiError(400, "The body must be a JSON object.", code="invalid_json")
    return bad_field(path, f"'{path}': {what[0].lower()}{what[1:]}.")
