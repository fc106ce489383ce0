"""Checks that model fields share; their messages end in the answer to the person who sent the value."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ValidationError
from django.utils.deconstruct import deconstructible


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


def http_url(value: str) -> None:
    """An http or https address. Host names without a dot are fine: containers and clusters use them."""
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or not value.isprintable() or " " in value:
        raise ValidationError("expected an address such as http://127.0.0.1:8200/nodes/name", "not-an-address")


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
