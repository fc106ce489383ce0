"""HTTP under the CLI: one call, its problem as an error that a person can read, pages followed to their end."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

TIMEOUT_S = 30.0
PAGE = 200
Item = TypeVar("Item")


class CliError(Exception):
    """What went wrong, for a person; `code` is the exit status, `problem` what the API said, when it did."""

    def __init__(self, message: str, code: int = 2, problem: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.problem = problem


class Http:
    """Sends calls with an API key. A POST carries an Idempotency-Key, so that the one retry cannot do it twice."""

    def __init__(self, url: str, key: str, transport: httpx.BaseTransport | None = None) -> None:
        headers = {"User-Agent": "switchyard-cli"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            self._client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, transport=transport)
        except (httpx.InvalidURL, ValueError) as error:
            raise CliError(f"--url: expected an address such as http://127.0.0.1:8000: {error}") from None

    def __call__(self, method: str, path: str, places: dict[str, Any], query: dict[str, Any], body: Any) -> Any:
        address = path.format(**{name: quote(str(value), safe="") for name, value in places.items()})
        asked = {name: value for name, value in query.items() if value is not None}
        headers = {"Idempotency-Key": str(uuid.uuid4())} if method == "POST" else {}
        answer = self._send(method, address, params=asked, json=body, headers=headers)
        is_json = "json" in answer.headers.get("content-type", "")
        if answer.is_success:
            return _json(answer) if is_json and answer.content else answer.text
        problem = _json(answer) if is_json else None
        raise CliError(_told(answer, problem), problem=problem)

    def _send(self, method: str, address: str, **more: Any) -> httpx.Response:
        if more["json"] is None:
            del more["json"]
        for last in (method not in ("GET", "POST"), True):
            try:
                return self._client.request(method, address, **more)
            except httpx.UnsupportedProtocol:
                raise CliError("--url: expected an address such as http://127.0.0.1:8000") from None
            except httpx.TransportError as error:
                if last:
                    raise CliError(f"{self._client.base_url} does not answer: {error}") from None
        raise AssertionError("the last try answers or raises")


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise CliError(
            "answered with JSON that is cut off; is this the address of a Switchyard control plane?"
        ) from None


def _told(answer: httpx.Response, problem: Any) -> str:
    if not isinstance(problem, dict):
        return f"answered {answer.status_code}; is this the address of a Switchyard control plane?"
    if answer.status_code == 401:
        return f"{problem['detail']} (--key-file, or the variable SWITCHYARD_API_KEY)"
    return f"{problem['title']}: {problem['detail']}"


def pages(call: Callable[..., Any], *places: Any, most: int | None = None, **query: Any) -> Iterator[Any]:
    """The items of every page of a list, at most `most`."""
    cursor, given = None, 0
    while True:
        page = call(*places, limit=min(PAGE, most) if most else PAGE, cursor=cursor, **query)
        for item in page["items"]:
            if most is not None and given >= most:
                return
            given += 1
            yield item
        cursor = page["next_cursor"]
        if cursor is None:
            return
