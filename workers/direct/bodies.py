"""A client's JSON body is passed on as it came; only the fields that a hand-over needs are added, at its end.

JSON parsers take the last of two fields of one name (RFC 8259 leaves it open; the engines' parsers do), so a field that is
added also overrides the client's. What a body holds beside these fields is never parsed, copied or re-encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_SPACE = b" \t\r\n"


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """`body`, a JSON object, with `fields` added after its own. Raises ValueError when it is not an object."""
    end = body.rstrip(_SPACE)
    start = body.lstrip(_SPACE)
    if not start.startswith(b"{") or not end.endswith(b"}"):
        raise ValueError("a JSON object is needed")
    if not fields:
        return body
    added = msgspec.json.encode(dict(fields))[1:]
    before = end[:-1].rstrip(_SPACE)
    return before + (b"" if before.endswith(b"{") and before.lstrip(_SPACE) == b"{" else b",") + added
