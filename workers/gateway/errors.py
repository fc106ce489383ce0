"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, with the headers that go with them."""

from __future__ import annotations

import json
import math

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
}


class ApiError(Exception):
    """A request that ends with an error. `code` is for programs, `message` for people, `param` names the bad field."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, object]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return json.dumps(self.body(), separators=(",", ":")).encode()

    def event(self) -> bytes:
        """The error as the last event of a stream that had already begun."""
        return b"data: " + self.encoded() + b"\n\n"


def bad_field(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def dropped(status: int, code: str, message: str, retry_after_s: float | None) -> ApiError:
    """A refusal of flow control or of the yard, with the reason as code and header."""
    headers = {"x-llm-d-request-dropped-reason": code} if code.startswith(("rejected-", "evicted-")) else {}
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    return ApiError(status, message, code=code, headers=headers)
