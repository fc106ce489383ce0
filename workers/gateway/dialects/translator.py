"""What every API on top of chat completions can do with a chat answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from workers.gateway.errors import ApiError


class Translator(Protocol):
    """Speaks another API than the engine's: chat chunks in, its events or its whole answer out."""

    def head(self) -> bytes: ...

    def push(self, chunk: Mapping[str, Any]) -> bytes: ...

    def end(self) -> bytes: ...

    def whole(self) -> bytes: ...

    def failure(self, error: ApiError) -> bytes: ...

    def refusal(self, error: ApiError) -> bytes: ...
