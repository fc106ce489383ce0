"""Numbers as people read them. Every function takes None (unknown) and answers with a dash, never with a zero."""

from __future__ import annotations

UNKNOWN = "–"


def count(value: float | None) -> str:
    """A whole number with thin grouping up to 9,999, then three significant digits: 12,345 -> 12.3k."""
    if value is None:
        return UNKNOWN
    if abs(value) < 10_000:
        return f"{round(value):,}"
    for limit, unit in ((1e6, "k"), (1e9, "M"), (1e12, "G"), (float("inf"), "T")):
        if abs(value) < limit * 0.9995:
            return f"{value / (limit / 1e3 if limit != float('inf') else 1e12):.3g}{unit}"
    return UNKNOWN


def exact(value: float | None) -> str:
    """A whole number in full: 12345 -> 12,345."""
    return UNKNOWN if value is None else f"{round(value):,}"


def rate(value: float | None) -> str:
    """A number per second: one decimal below 100, then as `count`."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if abs(value) < 100 else count(value)


def duration(seconds: float | None) -> str:
    """A span of time in one or two units: 0.0042 -> 4.2 ms, 75 -> 1 min 15 s."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0:
        return f"−{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def age(seconds: float | None) -> str:
    """How long ago, coarsely: below two seconds it is `now`."""
    if seconds is None:
        return "never"
    if seconds < 2:
        return "now"
    if seconds < 60:
        return f"{int(seconds)} s ago"
    return f"{duration(float(int(seconds)))} ago"


def percent(ratio: float | None, digits: int = 0) -> str:
    """A ratio as a percentage: 0.873 -> 87 %."""
    return UNKNOWN if ratio is None else f"{ratio * 100:.{digits}f} %"


def signed_percent(ratio: float | None, digits: int = 1) -> str:
    return UNKNOWN if ratio is None else f"{ratio * 100:+.{digits}f} %".replace("-", "−")


def size(n_bytes: float | None) -> str:
    """Bytes with decimal units: 1500000 -> 1.5 MB."""
    if n_bytes is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n_bytes) < 999.5 or unit == "TB":
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return UNKNOWN


def plural(number: int, one: str, many: str | None = None) -> str:
    return f"{exact(number)} {one if number == 1 else many or one + 's'}"
