"""Filters that live in the URL, so that a narrowed page can be sent to somebody else as a link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest

MAX_CHARS = 200


@dataclass(frozen=True, slots=True)
class Filter:
    """One field of a filter form. With `options` it is a choice, else a text."""

    name: str
    label: str
    value: str = ""
    options: Sequence[tuple[str, str]] = ()
    hint: str = ""
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Filters:
    fields: list[Filter] = field(default_factory=list)

    @property
    def values(self) -> dict[str, str]:
        """What is set, by name."""
        return {each.name: each.value for each in self.fields if each.value}

    def value(self, name: str) -> str:
        return self.values.get(name, "")

    @property
    def active(self) -> int:
        return len(self.values)

    def query(self, **more: Any) -> str:
        """The present filters as a query string, with `more` on top (None removes one)."""
        values = self.values | {name: str(value) for name, value in more.items() if value is not None}
        return urlencode({name: value for name, value in values.items() if name not in more or more[name] is not None})


def read(request: HttpRequest, *fields: Filter) -> Filters:
    """Fields with their values from the URL; a value that is no option counts as not set."""
    read_fields = []
    for each in fields:
        value = request.GET.get(each.name, each.value).strip()[:MAX_CHARS].replace("\x00", "")
        if each.options and value not in {option for option, _ in each.options}:
            value = each.value
        read_fields.append(Filter(each.name, each.label, value, each.options, each.hint, each.wide))
    return Filters(read_fields)


def choice(name: str, label: str, options: Iterable[str | tuple[str, str]], value: str = "") -> Filter:
    """A choice with "any" first, unless `value` is given as the default."""
    pairs = [option if isinstance(option, tuple) else (option, option) for option in options]
    return Filter(name, label, value, pairs if value else [("", "any"), *pairs])


def text(name: str, label: str, hint: str = "") -> Filter:
    return Filter(name, label, hint=hint, wide=True)
