"""Checks that model fields share; their messages end in the answer to the person who sent the value."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.deconstruct import deconstructible

from controlplane.errors import InvalidField


@deconstructible
class Between:
    """A number within [low, high]; NaN is outside of everything."""

    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.high = high

    def __call__(self, value: float) -> None:
        if not self.low <= value <= self.high:
            raise ValidationError(f"expected a number from {self.low:g} to {self.high:g}", "out-of-range")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Between) and (self.low, self.high) == (other.low, other.high)

    def __hash__(self) -> int:
        return hash((self.low, self.high))


@deconstructible
class JsonFields:
    """A JSON object with these keys and types, no others; numbers are finite and not negative."""

    def __init__(self, **fields: str) -> None:
        self.fields = fields

    def __call__(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise ValidationError("expected an object", "not-an-object")
        for name in value.keys() | self.fields.keys():
            if name not in self.fields:
                raise ValidationError(f"unknown field {name!r}; expected {', '.join(self.fields)}", "unknown-field")
            if name not in value:
                raise ValidationError(f"field {name!r} is missing", "missing-field")
            if not _matches(value[name], self.fields[name]):
                raise ValidationError(f"{name}: expected {self.fields[name]}", "wrong-type")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonFields) and self.fields == other.fields

    def __hash__(self) -> int:
        return hash(tuple(self.fields.items()))


UNSTORABLE = "holds a character that cannot be stored (NUL or half of a surrogate pair)"


def storable(value: Any) -> bool:
    """Whether PostgreSQL can hold every text within `value`: neither NUL characters nor halves of surrogate pairs."""
    if isinstance(value, str):
        return not any(char == "\x00" or "\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, dict):
        return all(storable(name) and storable(inner) for name, inner in value.items())
    return all(storable(inner) for inner in value) if isinstance(value, list | tuple) else True


# PostgreSQL stores what, in UTC, lies past the year 9999, and no row that holds it can be read again.
LATEST = datetime(9000, 1, 1, tzinfo=UTC)


def check_future(field: str, moment: datetime | None) -> None:
    """Raises InvalidField for an end that has no zone, is over already, or is too late to be kept. None: without end."""
    if moment is None:
        return
    if timezone.is_naive(moment):
        raise InvalidField(field, "expected a time with its zone, such as 2026-12-01T12:00:00Z")
    if moment <= timezone.now():
        raise InvalidField(field, "expected a time in the future")
    if moment >= LATEST:
        raise InvalidField(field, f"expected a time before the year {LATEST.year}; leave it out for no end")


def http_url(value: str) -> None:
    """An http or https address. Host names without a dot are fine: containers and clusters use them."""
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if valid and "@" in parts.netloc:
        raise ValidationError("expected an address without a name or password, which lists would show", "secret")
    if not valid or not value.isprintable() or " " in value:
        raise ValidationError("expected an http:// or https:// address", "not-an-address")


_DIRECT_FIELDS = ("bootstrap_port", "token_env", "kv_tokens", "kv_events")
_KV_EVENT_FIELDS = ("endpoint", "replay", "topic")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OURS = re.compile(r"SWITCHYARD_.*|DATABASE_URL|REDIS_URL|.*PASSWORD.*", re.IGNORECASE)
_ENDPOINT = re.compile(r"(tcp://[^\s/:]+|tcp://\[[0-9A-Fa-f:]+\]):([0-9]{1,5})|ipc://\S+|inproc://\S+")


def direct_settings(value: Any) -> None:
    """Section `direct` of a node (docs/interfaces.md, section 8): an existing engine, or null for a node with an agent."""
    if value is None:
        return
    _only("", value, _DIRECT_FIELDS)
    for name, high in (("bootstrap_port", 65535), ("kv_tokens", 10**12)):
        given = value.get(name)
        if given is not None and not (_matches(given, "whole number") and 1 <= given <= high):
            raise ValidationError(f"{name}: expected a whole number from 1 to {high}, or null", "wrong-type")
    token_env = value.get("token_env")
    if token_env is not None:
        if not isinstance(token_env, str) or not _VARIABLE.fullmatch(token_env):
            raise ValidationError("token_env: expected the name of an environment variable, or null", "wrong-type")
        if _OURS.fullmatch(token_env):
            raise ValidationError(f"token_env: {token_env} holds a secret of Switchyard's own", "not-allowed")
    if value.get("kv_events") is not None:
        _kv_events(value["kv_events"])


def _kv_events(value: Any) -> None:
    _only("kv_events.", value, _KV_EVENT_FIELDS)
    if "endpoint" not in value:
        raise ValidationError("kv_events.endpoint is missing", "missing-field")
    for name in ("endpoint", "replay"):
        given = value.get(name)
        if given is None and name == "replay":
            continue
        match = _ENDPOINT.fullmatch(given) if isinstance(given, str) else None
        if match is None or (match[2] and not 1 <= int(match[2]) <= 65535):
            raise ValidationError(f"kv_events.{name}: expected an address such as tcp://10.0.0.5:5557", "wrong-type")
        if name == "replay" and "*" in given:
            raise ValidationError("kv_events.replay: expected the engine's address, not a wildcard", "wrong-type")
    topic = value.get("topic")
    if topic is not None and not isinstance(topic, str):
        raise ValidationError("kv_events.topic: expected a text", "wrong-type")


def _only(place: str, value: Any, names: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise ValidationError(f"{place.rstrip('.') or 'direct'}: expected an object", "not-an-object")
    for name in value:
        if name not in names:
            raise ValidationError(f"unknown field {place + str(name)!r}; expected {', '.join(names)}", "unknown-field")


def _matches(value: Any, expected: str) -> bool:
    if expected == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
    if expected == "whole number":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if expected == "text":
        return isinstance(value, str) and value != ""
    if expected == "text or null":
        return value is None or isinstance(value, str)
    if expected == "list of texts":
        return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)
    raise AssertionError(f"unknown expectation {expected!r}")
