"""ETags: a fingerprint of what a reader was shown, so that an edit of something older is refused."""

from __future__ import annotations

import hashlib
from typing import TypeVar

from django.http import HttpRequest, HttpResponse
from ninja import Schema

from controlplane.errors import PreconditionFailed

Shown = TypeVar("Shown", bound=Schema)


def etag_of(shown: Schema) -> str:
    return f'"{hashlib.sha256(shown.model_dump_json().encode()).hexdigest()[:24]}"'


def tagged(response: HttpResponse, shown: Shown) -> Shown:
    """`shown`, with its ETag set on the response."""
    response["ETag"] = etag_of(shown)
    return shown


def check_if_match(request: HttpRequest, present: Schema) -> None:
    """Raises PreconditionFailed when `If-Match` is given and names none of what is there now."""
    wanted = request.headers.get("If-Match")
    if wanted is None or wanted.strip() == "*":
        return
    if etag_of(present) not in {tag.strip() for tag in wanted.split(",")}:
        raise PreconditionFailed
