"""Reads a body of JSON with errors that name the field and what was expected there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workers.gateway.errors import ApiError, bad_field

Json = Mapping[str, Any]


def wrong(path: str, expected: str) -> ApiError:
    return bad_field(path, f"'{path}' must be {expected}.")


def unsupported(path: str, why: str) -> ApiError:
    return bad_field(path, f"'{path}' is not supported: {why}.", "unsupported_value")


def text(holder: Json, name: str, path: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise wrong(f"{path}{name}", "a text")
    return value


def optional_text(holder: Json, name: str, path: str) -> str | None:
    return None if holder.get(name) is None else text(holder, name, path)


def whole_number(holder: Json, name: str, path: str, low: int) -> int:
    value = holder.get(name)
    if type(value) is not int or value < low:
        raise wrong(f"{path}{name}", f"a whole number of at least {low}")
    return value


def flag(holder: Json, name: str, path: str, default: bool) -> bool:
    value = holder.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(f"{path}{name}", "true or false")
    return value


def section(holder: Json, name: str, path: str) -> Json | None:
    value = holder.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(f"{path}{name}", "an object")
    return value


def objects(value: Any, path: str) -> Iterator[tuple[str, Json]]:
    """The objects of a list with their paths (`path[3].`)."""
    if not isinstance(value, list):
        raise wrong(path, "a list")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong(f"{path}[{index}]", "an object")
        yield f"{path}[{index}].", item


def copied(source: Json, target: dict[str, Any], *names: str) -> None:
    """Fields that both APIs spell and mean alike: whoever reads the chat body checks them."""
    for name in names:
        if source.get(name) is not None:
            target[name] = source[name]
