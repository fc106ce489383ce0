"""YAML that people hand in: read once it is known to be small, shallow and free of what makes little text say a lot.

An alias (`*name`) repeats what an anchor (`&name`) named: a kilobyte of them can say more than any machine could hold. Every
place that takes YAML from a person reads it here; only a file of the machine's own operator may hold aliases, and counts
with what they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_CHARS = 1_000_000
MAX_DOCUMENTS = 2000
MAX_VALUES = 200_000
MAX_DEPTH = 50
MAX_VALUE_CHARS = 10_000
"""Far longer numbers take longer to compute than to write."""
MAX_WHOLE_NUMBER = 10**100
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlTextError(ValueError):
    """What is wrong with the text, and in which line where that is known."""


def load(text: str, *, aliases: bool = False) -> list[Any]:
    """The documents of `text` as plain values; empty ones are left out. Raises YamlTextError."""
    if len(text) > MAX_CHARS:
        raise YamlTextError(f"expected at most {MAX_CHARS:,} characters, got {len(text):,}")
    try:
        reading = _Reading(aliases)
        for event in yaml.parse(text, Loader=_LOADER):
            reading.take(event)
        documents = [found for found in yaml.load_all(text, Loader=_LOADER) if found is not None]
    except YamlTextError:
        raise
    except yaml.MarkedYAMLError as error:
        where = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise YamlTextError(f"expected YAML{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError):
        raise YamlTextError("expected YAML: it holds a character or a date that does not exist") from None
    _check_numbers(documents)
    return documents


@dataclass(slots=True)
class _Open:
    """A list or an object that has begun: its anchor, how many values came before it, the depth of what is in it, and of
    an object its names so far."""

    anchor: str | None
    before: int
    names: set[str] | None
    name_is_next: bool = True
    height: int = 0


@dataclass(slots=True)
class _Reading:
    """Goes over the text's events, which are made one by one, before anything is built of them."""

    aliases: bool
    open: list[_Open] = field(default_factory=list)
    anchors: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Values and levels that each anchor stands for."""
    documents: int = 0
    values: int = 0
    line: int = 0

    def take(self, event: Any) -> None:
        self.line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            self.anchors.clear()
            if self.documents > MAX_DOCUMENTS:
                raise YamlTextError(f"expected at most {MAX_DOCUMENTS:,} documents")
        elif isinstance(event, yaml.AliasEvent):
            self._take_alias(event)
        elif isinstance(event, yaml.NodeEvent):
            self._take_value(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close()

    def _take_value(self, event: Any) -> None:
        if event.anchor is not None and not self.aliases:
            raise self._refusal(f"every value written out, without anchors (&{event.anchor})")
        if event.tag is not None:
            raise self._refusal(f"plain values, without tags ({event.tag})")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_VALUE_CHARS:
            raise self._refusal(f"values of at most {MAX_VALUE_CHARS:,} characters")
        self._note_name(event)
        self._count(1)
        if isinstance(event, yaml.CollectionStartEvent):
            names = set[str]() if isinstance(event, yaml.MappingStartEvent) else None
            self.open.append(_Open(event.anchor, self.values - 1, names))
            self._deepen(0)
        elif event.anchor is not None:
            self.anchors[event.anchor] = (1, 0)

    def _take_alias(self, event: Any) -> None:
        if not self.aliases:
            raise self._refusal(f"every value written out, without aliases (*{event.anchor})")
        if any(each.anchor == event.anchor for each in self.open):
            raise self._refusal(f"a value that does not contain itself (*{event.anchor})")
        self._note_name(event)
        values, height = self.anchors.get(event.anchor, (1, 0))
        self._count(values)
        self._deepen(height)

    def _close(self) -> None:
        closed = self.open.pop()
        height = closed.height + 1
        if closed.anchor is not None:
            self.anchors[closed.anchor] = (self.values - closed.before, height)
        if self.open:
            self.open[-1].height = max(self.open[-1].height, height)

    def _count(self, more: int) -> None:
        self.values += more
        if self.values > MAX_VALUES:
            raise self._refusal(f"at most {MAX_VALUES:,} values")

    def _deepen(self, height: int) -> None:
        if len(self.open) + height > MAX_DEPTH:
            raise self._refusal(f"at most {MAX_DEPTH} levels inside each other")
        if self.open:
            self.open[-1].height = max(self.open[-1].height, height)

    def _note_name(self, event: Any) -> None:
        """Of two values with one name only the second would count; nobody means that."""
        inside = self.open[-1] if self.open else None
        if inside is None or inside.names is None:
            return
        if inside.name_is_next:
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refusal("a name before the colon")
            if event.value in inside.names:
                raise YamlTextError(f"line {self.line}: {event.value[:80]!r} is there twice")
            inside.names.add(event.value)
        inside.name_is_next = not inside.name_is_next

    def _refusal(self, expected: str) -> YamlTextError:
        return YamlTextError(f"line {self.line}: expected {expected}")


def _check_numbers(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_WHOLE_NUMBER:
        raise YamlTextError("expected whole numbers of at most 100 digits")
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(name)
            _check_numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(inner)
