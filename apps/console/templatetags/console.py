"""Template tags of live pages.

`{% live "queue.waiting" %}` writes the value now and marks the element, so that `static/console/live.js` writes the next
one there. Rows do the same relative to their item: `{% live "waiting" of=band %}`. `{% bind band "data-tone=tone" %}`
does it for attributes and (`--share=waiting_share`) CSS variables. A row's template is included once for every item and
once, blank, inside `<template>`: the browser clones that one for items it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django import template
from django.utils.html import format_html, format_html_join
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


def _source(context: template.Context, of: Any) -> Any:
    return context.get("view") if of is _PAGE else of


@register.simple_tag(takes_context=True)
def live(context: template.Context, path: str, of: Any = _PAGE, cls: str = "") -> SafeString:
    """A span whose text is the value at `path`, kept up to date by the page's live feed (unless the context is `still`)."""
    attributes = format_html(' class="{}"', cls) if cls else ""
    value = _lookup(_source(context, of), path)
    if context.get("still"):
        return format_html("<span{}>{}</span>", attributes, value)
    return format_html('<span data-live="{}"{}>{}</span>', path, attributes, value)


@register.simple_tag(takes_context=True)
def bind(context: template.Context, of: Any, pairs: str) -> SafeString:
    """Attributes from an item's values: "title=reason --share=waiting_share"; "view" as `of` is the page itself."""
    source = context.get("view") if of == "view" else of
    split = [pair.split("=", 1) for pair in pairs.split()]
    plain = format_html_join(" ", '{}="{}"', ((n, _lookup(source, p)) for n, p in split if not n.startswith("--")))
    styles = format_html_join(";", "{}:{}", ((n, _lookup(source, p)) for n, p in split if n.startswith("--")))
    style = format_html(' style="{}"', styles) if styles else ""
    if context.get("still"):
        return format_html("{}{}", plain, style)
    return format_html('data-bind="{}" {}{}', pairs, plain, style)


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
