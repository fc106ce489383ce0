"""The API's description as a Python module: a type for every schema, a method for every operation.

The CLI is checked against it, so that a changed API breaks `make check` rather than an operator's evening.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]
HEADER = '''"""Types and calls of the REST API. Written by `make openapi` from docs/openapi.json; do not edit."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Protocol, TypedDict
'''
CALLER = '''
class Caller(Protocol):
    """Sends one call and gives back the answer's JSON, or its text when it is none."""

    def __call__(self, method: str, path: str, places: dict[str, Any], query: dict[str, Any], body: Any) -> Any: ...


class Api:
    """One method for each operation, named as in the description."""

    def __init__(self, call: Caller) -> None:
        self._call = call
'''
_PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


def module_of(description: Json) -> str:
    """The whole module's text, the same for the same description."""
    parts = [HEADER]
    for name, schema in sorted(description["components"]["schemas"].items()):
        parts.append("\n" + "\n".join(_declared(name, schema)) + "\n")
    parts.append(CALLER)
    for path, operations in sorted(description["paths"].items()):
        for method, operation in sorted(operations.items()):
            parts.append("\n" + "\n".join(_method(path, method, operation)) + "\n")
    return "".join(parts)


def type_of(schema: Json) -> str:
    """The annotation for one schema."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " | ".join(dict.fromkeys(type_of(each) for each in schema[several]))
    if len(schema.get("allOf", [])) == 1:
        return type_of(schema["allOf"][0])
    if "enum" in schema or "const" in schema:
        return f"Literal[{', '.join(repr(value) for value in schema.get('enum', [schema.get('const')]))}]"
    kind = schema.get("type")
    if kind == "array":
        return f"list[{type_of(schema.get('items', {}))}]"
    if kind == "object":
        more = schema.get("additionalProperties")
        return f"dict[str, {type_of(more) if isinstance(more, dict) else 'Any'}]"
    return _PLAIN.get(kind or "", "Any")


def _declared(name: str, schema: Json) -> Iterator[str]:
    if "properties" not in schema:
        yield f"{name} = {type_of(schema)}"
        return
    required = set(schema.get("required", ()))
    fields = {
        field: type_of(inner) if field in required else f"NotRequired[{type_of(inner)}]"
        for field, inner in schema["properties"].items()
    }
    if all(field.isidentifier() and not keyword.iskeyword(field) for field in fields):
        yield f"class {name}(TypedDict):"
        yield from (f"    {field}: {annotation}" for field, annotation in fields.items())
        return
    # Names that Python reserves ("from") need the other way of writing.
    yield f"{name} = TypedDict({name!r}, {{"
    yield from (f"    {field!r}: {annotation!r}," for field, annotation in fields.items())
    yield "})"


def _method(path: str, method: str, operation: Json) -> Iterator[str]:
    parameters = [each for each in operation.get("parameters", []) if each["in"] in ("path", "query")]
    arguments, places, queries = ["self"], [], []
    for each in (p for p in parameters if p["in"] == "path"):
        arguments.append(f"{each['name']}: {type_of(each['schema'])}")
        places.append(each["name"])
    body = _content(operation.get("requestBody", {}))
    if body:
        arguments.append(f"body: {body}")
    asked = [p for p in parameters if p["in"] == "query"]
    if asked:
        arguments.append("*")
    for each in asked:
        annotation = type_of(each["schema"])
        annotation += "" if "None" in annotation else " | None"
        arguments.append(f"{each['name']}: {annotation} = None")
        queries.append(each["name"])
    answer = _answer(operation)
    yield f"    def {operation['operationId']}("
    yield from (f"        {argument}," for argument in arguments)
    yield f"    ) -> {answer}:"
    yield f"        {'' if answer == 'None' else 'return '}self._call("
    plain = re.sub(r"\{\w+:", "{", path)
    yield f"            {method.upper()!r}, {plain!r}, {_mapping(places)}, {_mapping(queries)}, {'body' if body else None}"
    yield "        )"


def _mapping(names: list[str]) -> str:
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def _content(holder: Json) -> str:
    content = holder.get("content", {}).get("application/json")
    return type_of(content["schema"]) if content else ""


def _answer(operation: Json) -> str:
    for status, answer in operation["responses"].items():
        if str(status).startswith("2"):
            if "content" in answer:
                return _content(answer) or "Any"
            return "None" if str(status) == "204" else "Any"
    return "Any"
