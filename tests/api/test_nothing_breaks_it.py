"""Whatever is sent, no operation of the description answers with a fault of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from django.http import HttpResponse

from controlplane.api import api
from controlplane.rest.problems import MEDIA_TYPE
from controlplane.validators import storable

SCHEMA = json.loads(json.dumps(api.get_openapi_schema(), default=str))
SEGMENTS = ["1", "-1", "nobody", "9" * 30, "a\x00b", "é" * 300, "%", "a/b", " "]
VALUES: list[Any] = [
    *(None, True, -1, 2**63, 10**400, 1e308, "", "a\x00b", "\ud800", "x" * 5000, "standard"),
    *(
        "9999-12-31T23:59:59.999999Z",
        "2101-01-01T00:00:00",
        "0001-01-01T00:00:00+14:00",
        [None],
        ["a\x00"],
        {"a\x00": 1},
    ),
]
BROKEN = [
    *(b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"a":', b"[" * 3000, b"{}"),
    b'{"ttl_s": NaN, "weight": Infinity, "slice_s": -Infinity}',
]
# Among them cursors that hold [1], ["a", 1], [1e999], ["2030-01-01"] and [null].
QUERIES = [
    *("", "x", "-1", "0", "9" * 20, "9" * 400, "%00", "%ff", "NaN", "0001-01-01T00:00:00%2B14:00"),
    *("WzFd", "WyJhIiwgMV0", "WzFlOTk5XQ", "WyIyMDMwLTAxLTAxIl0", "W251bGxd"),
]
GOOD = {
    "yaml": "kind: Tenant",
    "reason": "x",
    "name": "third",
    "priority": 7,
    "band": "standard",
    "prefill_nodes": 1,
    "phase": "decode",
}
PLACES = {"{partition}": "gb300", "{node}": "gb300-1", "{number}": "1", "{key_id}": "1", "{version}": "1"}
NAMES = {"nodes": "gb300-1", "tenants": "acme", "clusters": "gb300"}


class Described(NamedTuple):
    """One operation of the description; `places` are the indices of the path's variable parts."""

    method: str
    parts: list[str]
    places: list[int]
    fields: list[str] | None
    queries: list[str]

    def path(self, place: int = 0, value: str = "") -> str:
        return "/".join([*self.parts[:place], quote(value, safe=""), *self.parts[place + 1 :]]) if place else self.good

    @property
    def good(self) -> str:
        return "/".join(self.parts)

    @property
    def body(self) -> dict[str, Any] | None:
        return None if self.fields is None else {name: GOOD[name] for name in self.fields if name in GOOD}


def _described() -> Iterator[Described]:
    for path, methods in SCHEMA["paths"].items():
        parts = path.removeprefix("/api/v1").split("/")
        places = [index for index, part in enumerate(parts) if part.startswith("{")]
        for place in places:
            parts[place] = PLACES.get(parts[place], NAMES.get(parts[1], "standard"))
        for method, operation in methods.items():
            queries = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
            yield Described(method, parts, places, _fields(operation), queries)


def _fields(operation: dict[str, Any]) -> list[str] | None:
    if "requestBody" not in operation:
        return None
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return list(SCHEMA["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"])


OPERATIONS = list(_described())
WITH_BODY = [each for each in OPERATIONS if each.fields is not None]


def _fault(answer: HttpResponse) -> str:
    """What is wrong with an answer; blank for none. 503 is fine: there is no gateway here."""
    if answer.status_code >= 500 and answer.status_code != 503:
        return f"answered {answer.status_code}"
    if answer.status_code >= 400 and answer["Content-Type"] != MEDIA_TYPE:
        return f"{answer.status_code} is no problem detail"
    return ""


@pytest.fixture
def faults(rest: Any, undone: Any) -> Callable[[Iterable[tuple[str, str, Any]]], list[str]]:
    """Sends requests of (method, path, body), each by itself, and says what was wrong with the answers."""
    rest.log_in("administrator")

    def faults(requests: Iterable[tuple[str, str, Any]]) -> list[str]:
        found = []
        for method, path, body in requests:
            data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            with undone():
                answer = rest.client.generic(method.upper(), f"/api/v1{path}", data, content_type="application/json")
            if fault := _fault(answer):
                found.append(f"{method} {path} {data[:80]!r}: {fault}")
        return found

    return faults


def test_no_address_breaks_an_operation(faults):
    assert not faults(
        (each.method, each.path(place, value), each.body)
        for each in OPERATIONS
        for place in each.places
        for value in SEGMENTS
    )


def test_no_malformed_body_breaks_an_operation(faults):
    assert not faults((each.method, each.good, body) for each in WITH_BODY for body in BROKEN)


def test_no_value_of_a_field_breaks_an_operation(faults):
    assert not faults(
        (each.method, each.good, {**(each.body or {}), name: value})
        for each in WITH_BODY
        for name in [*(each.fields or []), "surprise"]
        for value in VALUES
    )


def test_no_query_breaks_an_operation(faults):
    assert not faults(
        (each.method, f"{each.good}?{name}={value}", None)
        for each in OPERATIONS
        for name in each.queries
        for value in QUERIES
    )


@pytest.mark.parametrize("header", ["Authorization", "If-Match", "Idempotency-Key", "X-Request-ID", "X-CSRFToken"])
def test_no_header_breaks_an_operation(rest, header):
    for value in ("", "Bearer", "Bearer \x00", "Bearer é", "\x00", "é" * 300, "W/", '"' * 50, "x" * 4000):
        for method, path in (("post", "/tenants/acme/pause"), ("patch", "/partitions/gb300/bands/standard")):
            assert not _fault(rest.answer(method, path, {"reason": "x"}, **{header: value})), value


def test_a_body_that_is_too_large_is_refused(rest):
    status, problem = rest("patch", "/tenants/acme", b'{"title": "' + b"x" * 2_100_000 + b'"}')
    assert (status, problem["code"]) == (413, "body-too-large")


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("patch", "/tenants/acme", {"title": "a\x00b"}, "title"),
        ("patch", "/tenants/acme", {"title": None}, "title"),
        ("patch", "/partitions/gb300", {"title": "\ud800"}, "title"),
        ("post", "/tenants/acme/keys", {"name": "a\x00b"}, "name"),
        ("delete", "/partitions/gb300/bands/spare?reason=a%00", None, "reason"),
        ("get", "/partitions/gb300/requests?band=%00", None, "band"),
        ("get", "/partitions/gb300/bands?cursor=WzFlOTk5XQ", None, "cursor"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_the_name_of_its_field(rest, method, path, body, field):
    status, problem = rest(method, path, body)
    assert (status, problem["code"], problem["errors"][0]["field"]) == (422, "invalid-field", field)


def test_too_many_parameters_are_refused(rest):
    status, problem = rest("get", "/partitions/gb300/requests?" + "a=1&" * 2000)
    assert (status, problem["code"]) == (400, "bad-request")


def test_an_address_with_a_nul_character_is_not_found(rest):
    assert rest("get", "/nodes/a%00b")[1]["code"] == "not-found"
    assert rest.client.get("/nodes/a%00b").status_code == 404


@pytest.mark.parametrize(
    ("value", "fits"), [("é", True), ("\x00", False), ({"a": ["\ud800"]}, False), ({"a": 1}, True)]
)
def test_texts_within_a_value_are_looked_at(value, fits):
    assert storable(value) is fits
