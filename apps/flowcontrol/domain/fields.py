"""Typed access to one object of a configuration document; every refusal names the field and what belongs there."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A YAML document's aliases can stand for more text than fits any memory: no value is told whole.
_REPR = reprlib.Repr()
_REPR.maxlevel = 2
_REPR.maxstring = _REPR.maxother = 200


class FlowConfigError(ValueError):
    """A configuration that cannot be used: `field` is its path in the document, `expected` what belongs there."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {_REPR.repr(got)}")
        self.field = field
        self.expected = expected


@dataclass(slots=True)
class Fields:
    """One object at `path`; remembers which fields were read, so that unknown ones can be named."""

    raw: Any
    path: str
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not isinstance(self.raw, Mapping):
            raise FlowConfigError(self.path or "document", "an object", self.raw)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        self.seen.add(name)
        return self.raw.get(name)

    def section(self, name: str) -> Fields:
        """An object of its own; an absent one is empty."""
        value = self.get(name)
        return Fields({} if value is None else value, self.at(name))

    def items(self, name: str) -> list[Fields]:
        """The objects of a list; an absent list is empty."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise FlowConfigError(self.at(name), "a list", value)
        return [Fields(item, f"{self.at(name)}[{index}]") for index, item in enumerate(value)]

    def text(self, name: str, default: str | None) -> str:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not value:
            raise FlowConfigError(self.at(name), "a non-empty text", value)
        return value

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self.get(name)
        if value is None:
            return default
        if value not in allowed:
            raise FlowConfigError(self.at(name), "one of " + ", ".join(allowed), value)
        return str(value)

    def integer(self, name: str, default: int | None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise FlowConfigError(self.at(name), "a whole number", value)
        return value

    def limit(self, name: str, auto: bool = False) -> int | None:
        """A whole number from 1; null, or `auto` where that is a choice, leaves it open."""
        value = self.get(name)
        if value is None or (auto and value == "auto"):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            open_ended = "null or auto to follow the engines" if auto else "null for no limit"
            raise FlowConfigError(self.at(name), f"a whole number from 1, or {open_ended}", value)
        return value

    def number(self, name: str, default: float, low: float, high: float = math.inf, above: bool = False) -> float:
        """A finite number from `low` (or above it) to `high`."""
        value = self.get(name)
        if value is None:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or (above and value == low):
            upto = "" if high == math.inf else f" to {high:g}"
            raise FlowConfigError(self.at(name), f"a number {'above' if above else 'from'} {low:g}{upto}", value)
        return float(value)

    def seconds(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise FlowConfigError(self.at(name), "seconds above 0, or null for the default", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FlowConfigError(self.at(name), "true or false", value)
        return value

    def texts(self, name: str) -> list[str]:
        """A list of texts; an absent list is empty."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise FlowConfigError(self.at(name), "a list of texts", value)
        return value

    def refuse_others(self) -> None:
        for name in self.raw:
            if name not in self.seen:
                known = ", ".join(sorted(self.seen))
                raise FlowConfigError(self.at(str(name)), f"no such field (known: {known})", self.raw[name])
