"""One request between the client's connection and the yard: its ids, its text, and what is ready to be sent.

handler (client side)  <-- items --  Session  <-- ids, ends, errors --  upstream (node side)
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import Any

from apps.kvcache.domain.hashing import HashedPrompt
from workers.gateway.body import CompletionBody
from workers.gateway.errors import ApiError
from workers.gateway.logprobs import LogprobTrail, TokenBytes, TokenChoice
from workers.gateway.stops import StopMatcher
from workers.gateway.text import TextDecoder


@dataclass(frozen=True, slots=True)
class Text:
    """Text to be sent, with the choices of the tokens that begin in it where the client asked for them."""

    text: str
    choices: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    finish_reason: str


Item = Text | Ended | ApiError


@dataclass(slots=True)
class Route:
    """What the response headers tell: where the request went and why."""

    queue_s: float = 0.0
    prefill_node: str = ""
    decode_node: str = ""
    cached_tokens: int = 0
    predicted_ttft_s: float = 0.0
    reason: str = ""

    def headers(self) -> dict[str, str]:
        return {
            "x-switchyard-queue-ms": f"{self.queue_s * 1000:.1f}",
            "x-switchyard-prefill-node": self.prefill_node,
            "x-switchyard-decode-node": self.decode_node,
            "x-switchyard-cached-tokens": str(self.cached_tokens),
            "x-switchyard-predicted-ttft-ms": f"{self.predicted_ttft_s * 1000:.1f}",
            "x-switchyard-reason": self.reason.encode("ascii", "replace").decode().replace("\n", " ")[:500],
        }


@dataclass(slots=True)
class Session:
    """State of one request. `output_ids` are the tokens sent so far; `handoff` is the last prefill node's, verbatim;
    `resumed_tokens` of the output were part of that node's prompt."""

    request_id: str
    body: CompletionBody
    ids: array[int]
    prompt: HashedPrompt
    max_tokens: int
    tenant: str
    band: str
    symbolic: bool
    decoder: TextDecoder
    token_bytes: TokenBytes
    route: Route = field(default_factory=Route)
    handoff: dict[str, Any] | None = None
    resumed_tokens: int = 0
    output_ids: array[int] = field(default_factory=lambda: array("I"))
    output_tokens: int = 0
    over: bool = False
    _stops: StopMatcher = field(init=False)
    _trail: LogprobTrail | None = field(init=False)
    _decoded_characters: int = 0
    _sent_characters: int = 0
    _items: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self._stops = StopMatcher(self.body.stops)
        self._trail = LogprobTrail(self.token_bytes) if self.logprobs else None

    @property
    def logprobs(self) -> bool:
        """Whether the client asked for log probabilities."""
        return self.body.sampling["logprobs"] is not None

    def accept(self, ids: list[int], count: int, logprobs: list[dict[str, Any]] | None = None) -> bool:
        """Takes new output tokens, with their log probabilities where the node told them; True when a stop string ended
        the answer with them."""
        if self.over:
            return False
        self.output_tokens += count
        if not self.symbolic:
            self.output_ids.extend(ids)
        text, stopped = self._stops.push(self._decode(ids, count, logprobs))
        self._send(text, last=False)
        if stopped:
            self._end(Ended("stop"))
        return stopped

    def end(self, finish_reason: str) -> None:
        """The node says that the answer is complete: whatever was held back goes out."""
        if self.over:
            return
        text, stopped = self._stops.push(self.decoder.flush())
        text += "" if stopped else self._stops.flush()
        self._send(text, last=not stopped)
        self._end(Ended("stop" if stopped else finish_reason))

    def _decode(self, ids: list[int], count: int, logprobs: list[dict[str, Any]] | None) -> str:
        if self._trail is None or logprobs is None:
            return self.decoder.push(ids, count)
        text = ""
        for token, entry in zip(ids, logprobs, strict=True):
            self._trail.add(self._decoded_characters + len(text), token, entry)
            text += self.decoder.push([token], 1)
        self._decoded_characters += len(text)
        return text

    def _send(self, text: str, last: bool) -> None:
        self._sent_characters += len(text)
        choices = () if self._trail is None else self._trail.take(None if last else self._sent_characters)
        if text or choices:
            self._items.put_nowait(Text(text, choices))

    def fail(self, error: ApiError) -> None:
        if not self.over:
            self._end(error)

    def _end(self, item: Item) -> None:
        self.over = True
        self._items.put_nowait(item)

    @property
    def idle(self) -> bool:
        """Nothing more is ready to be sent."""
        return self._items.empty()

    async def next_item(self) -> Item:
        return await self._items.get()
