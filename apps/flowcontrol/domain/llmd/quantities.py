"""Kubernetes quantities ("1k" = 1000, "1Ki" = 1024) and Go durations ("1m30s")."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Final

from apps.flowcontrol.domain.fields import FlowConfigError

_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_QUANTITY: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,2}))?")
_DURATION: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
_UNIT_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST: Final = 10**15


def quantity(path: str, value: object) -> int:
    """A whole number, rounded up as Kubernetes does. Raises `FlowConfigError`."""
    expected = 'a Kubernetes quantity from 0, such as 100, "1k" or "1Gi"'
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise FlowConfigError(path, expected, value)
    number, suffix, exponent = Decimal(found[1]), found[2] or "", found[3]
    if suffix in _BINARY:
        number *= 2 ** _BINARY[suffix]
    else:
        number = number.scaleb(int(exponent) if exponent else _DECIMAL[suffix])
    if number > _MOST:
        raise FlowConfigError(path, f"{expected}, and at most {_MOST}", value)
    return int(number.to_integral_value(ROUND_CEILING))


def as_quantity(number: int) -> int | str:
    """The shortest exact form: "1k", "1Gi", or the number itself."""
    for suffix in reversed(_BINARY):
        whole, rest = divmod(number, 2 ** _BINARY[suffix])
        if whole and not rest and number % 1000:
            return f"{whole}{suffix}"
    for suffix, exponent in reversed(_DECIMAL.items()):
        if exponent > 0 and number and number % 10**exponent == 0:
            return f"{number // 10**exponent}{suffix}"
    return number


def duration_s(path: str, value: object) -> float:
    """Seconds of a Go duration. Raises `FlowConfigError`."""
    text = value if isinstance(value, str) else ""
    if text in ("0", "0s"):
        return 0.0
    parts = list(_DURATION.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise FlowConfigError(path, 'a duration such as "500ms", "60s" or "1m30s"', value)
    seconds = sum(float(part[1]) * _UNIT_S[part[2]] for part in parts)
    if seconds > _MOST:
        raise FlowConfigError(path, f"a duration of at most {_MOST:g} seconds", value)
    return round(seconds, 9)


def as_duration(seconds: float) -> str:
    """ "60s", "1.5s" or "50ms"."""
    if 0 < seconds < 1:
        return f"{round(seconds * 1000, 6):g}ms"
    return f"{round(seconds, 9):.9g}s"
