"""Template tags of live pages.

`{% live "queue.waiting" %}` writes the value now and marks the element, so that `static/console/live.js` writes the next
one there. Rows do the same relative to their item: `{% live "waiting" of=band %}`. `{% bind band "data-tone=tone" %}`
does it for attributes and (`--share=waiting_share`) CSS variables. A row's template is included once for every item and
once, blank, inside `<template>`: the browser clones that one for items it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from html import escape
from typing import Any

from django import template
from django.utils.safestring import SafeString

from apps.console import formats

register = template.Library()
_PAGE = object()


def _known(form: Callable[..., str]) -> Callable[..., str]:
    """A format as a filter: what a template cannot find is the empty text, and that is unknown."""

    @wraps(form)
    def shown(value: Any, *more: Any) -> str:
        return form(None if value == "" else value, *more)

    return shown


for _form in (formats.duration, formats.count, formats.exact, formats.percent, formats.signed_percent, formats.size):
    register.filter(_form.__name__, _known(_form))


def _lookup(source: Any, path: str) -> Any:
    for part in path.split("."):
        source = source.get(part) if isinstance(source, dict) else None
    return "" if source is None else source


def _escaped(value: Any) -> str:
    """Django's own escaping without its care for lazy texts: there are thousands of values on a page."""
    return value if isinstance(value, SafeString) else escape(str(value))


def _source(context: template.Context, of: Any) -> Any:
    return context.get("view") if of is _PAGE else of


@register.simple_tag(takes_context=True)
def live(context: template.Context, path: str, of: Any = _PAGE, cls: str = "") -> SafeString:
    """A span whose text is the value at `path`, kept up to date by the page's live feed (unless the context is `still`)."""
    marked = "" if context.get("still") else f' data-live="{escape(path)}"'
    attributes = f' class="{escape(cls)}"' if cls else ""
    return SafeString(f"<span{marked}{attributes}>{_escaped(_lookup(_source(context, of), path))}</span>")


@register.simple_tag(takes_context=True)
def bind(context: template.Context, of: Any, pairs: str) -> SafeString:
    """Attributes from an item's values: "title=reason --share=waiting_share"; "view" as `of` is the page itself."""
    source = context.get("view") if of == "view" else of
    attributes, styles = _pairs(pairs)
    plain = " ".join(f'{name}="{_escaped(_lookup(source, path))}"' for name, path in attributes)
    style = ";".join(f"{name}:{_escaped(_lookup(source, path))}" for name, path in styles)
    styled = f' style="{style}"' if styles else ""
    return SafeString(f"{plain}{styled}" if context.get("still") else f'data-bind="{escape(pairs)}" {plain}{styled}')


@cache
def _pairs(text: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Attributes, and CSS variables, each with the path of its value; the texts are the templates' own."""
    split = [pair.partition("=") for pair in text.split()]
    found = [(escape(name), path) for name, _, path in split]
    return [pair for pair in found if not pair[0].startswith("--")], [
        pair for pair in found if pair[0].startswith("--")
    ]


@register.simple_tag
def lane_parts(parts: Iterable[Mapping[str, Any]]) -> SafeString:
    """The stretches of a timeline's lane; hundreds of them, so they are written without a template's loop."""
    return SafeString(
        "".join(
            f'<li class="lane-part" data-kind="{escape(part["kind"])}" style="left:{part["left"]};width:{part["width"]}" '
            f'title="{escape(part["text"])}"><span class="sr">{escape(part["text"])}</span></li>'
            for part in parts
        )
    )


@register.filter
def get(mapping: Any, key: str) -> Any:
    """The value under a key that is only known at run time."""
    return mapping.get(key) if hasattr(mapping, "get") else None


@register.filter
def words(text: str) -> list[str]:
    """The words of a text, for a short loop in a template."""
    return text.split()


@register.filter
def removed(stored: Any) -> list[Any]:
    """Of nodes by name, those that are taken out of service."""
    return [node for node in stored.values() if not node.enabled] if stored else []
