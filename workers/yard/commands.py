"""What a yard asks its driver to do. Commands are requests: state changes when the answering event arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Fetch:
    """Which blocks `[from_block, to_block)` of the prompt's chain a prefill node should pull from which peer."""

    source_node: str
    from_block: int
    to_block: int


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Send the request to a prefill node. `attempt` counts from 1; `resumed_tokens` are output tokens already sent.

    `predicted_ttft_s` counts from the arrival; `queue_s` is how long the request waited for its turn.
    """

    request_id: str
    node: str
    url: str
    generation: int
    fetch: Fetch | None
    decode_node: str | None
    attempt: int
    resumed_tokens: int
    predicted_ttft_s: float
    queue_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring blocks of a request that still waits in the central queue to a prefill node; answered by `PrefetchEnded`. A
    `StartPrefill` of the request there takes over what is under way."""

    request_id: str
    node: str
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class CancelPrefetch:
    """Bring no more; what has come may stay."""

    request_id: str
    node: str


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Send the request to a decode node, which takes the KV over from `source` (where it was prefilled)."""

    request_id: str
    node: str
    url: str
    generation: int
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortOnNode:
    """Free what the node holds for the request. `stage` is `prefill` or `decode`."""

    node: str
    request_id: str
    stage: str


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """The node need not keep the request's computed context any longer."""

    node: str
    request_id: str


@dataclass(frozen=True, slots=True)
class DropOrphan:
    """The node holds a request that has no business there: free it. Calls of the request to other nodes go on."""

    node: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request ends here, with an error for the client. `code` is a drop reason or an error code of the yard."""

    request_id: str
    http_status: int
    code: str
    message: str
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class RefChange:
    """`delta` more (or fewer) branches count on `blocks` blocks, from the one called `last` up to the root."""

    last: bytes
    blocks: int
    delta: int


@dataclass(frozen=True, slots=True)
class PushRefs:
    """Tell a node which blocks branches count on; `reset` means these are all there are."""

    node: str
    changes: tuple[RefChange, ...]
    reset: bool = False


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    node: str


@dataclass(frozen=True, slots=True)
class Journal:
    """A telemetry record (docs/interfaces.md, section 10): `record["kind"]` is request, load or cost-window. One of a
    request (`of_request`) is made when it is first read; `source` holds it, or what makes it."""

    source: dict[str, Any] | Callable[[], dict[str, Any]]
    _made: list[dict[str, Any]] = field(default_factory=list, repr=False, compare=False)

    @property
    def of_request(self) -> bool:
        return callable(self.source)

    @property
    def record(self) -> dict[str, Any]:
        if not self._made:
            self._made.append(self.source() if callable(self.source) else self.source)
        return self._made[0]


Command = (
    StartPrefill
    | Prefetch
    | CancelPrefetch
    | StartDecode
    | AbortOnNode
    | ReleaseHandoff
    | DropOrphan
    | Refuse
    | PushRefs
    | FetchSnapshot
    | Journal
)
