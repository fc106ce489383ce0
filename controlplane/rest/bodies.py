"""How request bodies are read: JSON, and YAML documents as they lie in a file."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja.parser import Parser

YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})


class BodyParser(Parser):
    """A YAML body is the member `yaml`; the members beside it come from the query string."""

    def parse_body(self, request: HttpRequest) -> Any:
        if request.content_type in YAML_TYPES:
            return request.GET.dict() | {"yaml": request.body.decode()}
        return super().parse_body(request)
