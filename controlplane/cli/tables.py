"""Tables and lines for people. Programs read `--json`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

NONE = "–"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str = "none") -> str:
    """Columns as wide as what they hold; numbers to the right, the last column cut at the terminal's edge."""
    cells = [[shown(value) for value in row] for row in rows]
    numbers = [bool(cells) and all(_number(row[at]) for row in cells) for at in range(len(columns))]
    if not cells:
        return empty
    widths = [max(len(columns[at]), *(len(row[at]) for row in cells)) for at in range(len(columns))]
    lines = []
    for row in [list(columns), *cells]:
        told = [
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(row, widths, numbers, strict=True)
        ]
        lines.append(_cut("  ".join(told).rstrip()))
    return "\n".join(lines)


def facts(pairs: Mapping[str, Any]) -> str:
    """One fact a line."""
    width = max(len(name) for name in pairs)
    return "\n".join(_cut(f"{name.ljust(width)}  {shown(value)}") for name, value in pairs.items())


def shown(value: Any) -> str:
    if value is None or value == "" or value == []:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return " ".join(str(value).split())


def ago(moment: str | None, now: datetime | None = None) -> str:
    """An ISO time as how long ago it was, or how far ahead it is."""
    if not moment:
        return NONE
    seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(moment)).total_seconds()
    return f"{span(seconds)} ago" if seconds >= 0 else f"in {span(-seconds)}"


def span(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size * 2:
            return f"{seconds / size:.0f} {unit}"
    if 0 < seconds < 0.1:
        return f"{seconds * 1e3:.2g} ms"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"


def split(names: Mapping[str, Any] | None) -> str:
    """A split as operators say it: 3P6D."""
    if names is None:
        return NONE
    mixed = len(names.get("mixed") or [])
    return f"{len(names['prefill'])}P{len(names['decode'])}D" + (f"{mixed}M" if mixed else "")


def _number(text: str) -> bool:
    return text == NONE or text.lstrip("-+").replace(".", "", 1).replace("e", "").replace("+", "").isdigit()


def _cut(line: str) -> str:
    width = shutil.get_terminal_size((160, 24)).columns
    return line if len(line) <= width else line[: max(1, width - 1)] + "…"
