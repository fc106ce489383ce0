"""How request bodies are read: JSON, and YAML documents as they lie in a file."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja.parser import Parser

YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})


def unreadable(request: HttpRequest, fault: BaseException) -> str:
    """What to tell whoever sent a body that `fault` stopped from being read."""
    if request.content_type in YAML_TYPES:
        return f"expected text in UTF-8 as a body of the type {request.content_type}"
    if request.content_type == "application/json":
        return f"expected a body of JSON: {fault}"
    came = request.content_type or "no type"
    return (
        f"expected a body of JSON; it came as {came}. "
        "Documents for /apply go as they are with the header Content-Type: application/yaml"
    )


class BodyParser(Parser):
    """A YAML body is the member `yaml`; the members beside it come from the query string."""

    def parse_body(self, request: HttpRequest) -> Any:
        if request.content_type in YAML_TYPES:
            return request.GET.dict() | {"yaml": request.body.decode()}
        return super().parse_body(request)
