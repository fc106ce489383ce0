"""Branch signals for Python clients that speak through httpx: OpenAI's and Anthropic's, sync and async.

    http_client = signalling_http_client(openai.DefaultHttpxClient)
    client = openai.OpenAI(base_url=..., http_client=http_client)
    harness = HarnessClient(gateway_url, api_key)
    with harness.branch(program="fix-the-build") as branch, in_branch(branch):
        client.chat.completions.create(...)                      # carries the branch's headers
        with branch.subagent() as helper, in_branch(helper):
            client.chat.completions.create(...)                  # carries the sub-agent's

`anthropic.Anthropic` takes one of `anthropic.DefaultHttpxClient`; the async clients take `signalling_async_http_client` of
`DefaultAsyncHttpxClient`. Any other client with httpx's event hooks will do. Which branch is current belongs to the thread or task (a context variable), so parallel agents do not mix. Headers that a request already
has are left alone; without a current branch nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from workers.harness.client import BRANCH, BranchSignals

Client = TypeVar("Client")

_current: ContextVar[BranchSignals | None] = ContextVar("switchyard_branch", default=None)


@contextmanager
def in_branch(branch: BranchSignals) -> Iterator[BranchSignals]:
    """Requests of this thread or task belong to `branch` inside the block."""
    token = _current.set(branch)
    try:
        yield branch
    finally:
        _current.reset(token)


class Request(Protocol):
    """A request of httpx, or of a library made like it."""

    @property
    def headers(self) -> MutableMapping[str, str]: ...


def add_signals(request: Request) -> None:
    """Request hook: the current branch's headers. Raises `BranchError` when that branch has ended."""
    branch = _current.get()
    if branch is not None and BRANCH not in request.headers:
        request.headers.update(branch.headers())


async def add_signals_async(request: Request) -> None:
    """The same for async clients."""
    add_signals(request)


def signalling_http_client(make: Callable[..., Client], **options: Any) -> Client:
    """A client of the class `make` that adds the signals; `options` as that class takes them."""
    return make(**_with_hook(options, add_signals))


def signalling_async_http_client(make: Callable[..., Client], **options: Any) -> Client:
    """The same for async clients."""
    return make(**_with_hook(options, add_signals_async))


def _with_hook(options: dict[str, Any], hook: Callable[[Request], object]) -> dict[str, Any]:
    hooks = dict(options.get("event_hooks") or {})
    hooks["request"] = [*hooks.get("request", ()), hook]
    return options | {"event_hooks": hooks}
