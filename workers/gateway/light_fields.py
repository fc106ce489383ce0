"""The fields of a body that are read where the engine reads the rest. (A class that cannot be compiled, so it is apart.)"""

from __future__ import annotations

from typing import Any

import msgspec

from workers.gateway.errors import bad_field
from workers.gateway.signals import MAX_NAME_LENGTH

_NOTHING = msgspec.Raw(b"")


class LightBody(msgspec.Struct):
    """Fields of a chat or text completion. `messages`, `prompt`, `tools`: their JSON as it came."""

    model: str
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    user: Any = None

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def output_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def session_id(self) -> str | None:
        """A branch id in the body: `metadata.session_id`, else `user`. Raises ApiError."""
        found, path = (self.metadata or {}).get("session_id"), "metadata.session_id"
        if found is None:
            found, path = self.user, "user"
        if not isinstance(found, str) or not found:
            return None
        if len(found) > MAX_NAME_LENGTH or not found.isprintable():
            raise bad_field(path, f"'{path}' must be printable text of at most {MAX_NAME_LENGTH} characters.")
        return found
