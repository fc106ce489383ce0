"""One request to existing engines, between the client's exchange and the calls to the engines. Callbacks only, no task.

    client --exchange--> Relay --Leg--> engine        what comes back is passed on as it comes

A relay has at most one prefill leg and one answer leg at a time. Nothing goes to the client before the answer leg has data,
so until then another engine can take over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from apps.kvcache.domain.hashing import HashedPrompt
from workers.direct.bodies import with_fields
from workers.gateway.dialects.chat_stream import Counted, counted
from workers.gateway.dialects.translator import Translator
from workers.gateway.errors import ApiError
from workers.gateway.event_stream import EventStream, documents
from workers.http.client import Call
from workers.http.exchange import Exchange
from workers.http.wire import encode_headers

JSON_HEADERS = encode_headers({"content-type": "application/json"})
STREAM_HEADERS = encode_headers({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"})


class NotAnAnswer(ValueError):
    """What an engine sent has another shape than an answer. It was half translated: no other engine can take over."""


@dataclass(slots=True)
class Relay:
    """State of one request. `path` is the engine's; `body` goes to it as it came, with what a leg adds; `head_lines` are
    the answer's own header lines."""

    exchange: Exchange
    request_id: str
    path: str
    body: bytes
    stream: bool
    wants_usage: bool
    prompt: HashedPrompt
    translator: Translator | None = None
    head_lines: bytes = b""
    room: int | None = None
    handoff: bytes | None = None
    prefill: Call | None = None
    answer: Call | None = None
    begun: bool = False
    over: bool = False
    reported_tokens: int = 0
    events: EventStream = field(init=False)

    def __post_init__(self) -> None:
        self.events = EventStream(self.wants_usage)

    @property
    def engine_body(self) -> bytes:
        """The client's body; a stream is asked for its usage, which the client sees only if it asked too."""
        if self.stream and not self.wants_usage:
            return with_fields(self.body, {"stream_options": {"include_usage": True}})
        return self.body

    def new_stream(self) -> None:
        """Another engine answers from the beginning; of a former one nothing went to the client."""
        if self.events.heard:
            self.events = EventStream(self.wants_usage)

    @property
    def output_tokens(self) -> int:
        usage = self.events.usage
        return usage.output_tokens if usage is not None else max(0, self.events.events)

    @property
    def usage(self) -> Counted | None:
        return self.events.usage

    # ---- towards the client -----------------------------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        """Passes on a piece of the engine's stream; True with the first one that reaches the client.

        The closing event ends the answer at once, in the same write: the engine's own end of it brings nothing more. Raises
        EventTooLong and NotAnAnswer.
        """
        return self._pass_on(self.events.push(data))

    def close(self) -> bool:
        """The engine's stream has ended: what was held back of it counts too. True as `write`."""
        return self._pass_on(self.events.close())

    def _pass_on(self, passed: bytes) -> bool:
        first = not self.begun
        if first and not self.events.events and not self.events.done:
            return (
                False  # half an event, or comments that keep the connection alive: another engine can still take over
            )
        translator = self.translator
        if translator is not None:
            passed = self._translated(translator, documents(passed))
        if first:
            self.begun = True
            self.exchange.start(200, self.head_lines + STREAM_HEADERS)
            if translator is not None:
                passed = translator.head() + passed
        if self.events.done and not self.over:
            self.over = True
            self.exchange.end(passed if translator is None else passed + translator.end())
        else:
            self.exchange.write(passed)
        return first

    def finish_whole(self, body: bytes, document: dict[str, Any]) -> None:
        """The engine's answer that is not streamed. Raises NotAnAnswer."""
        if document.get("usage"):
            self.events.usage = counted(document["usage"])
        if self.translator is not None:
            self._translated(self.translator, [document])
            body = self.translator.whole()
        self.over = self.begun = True
        self.exchange.respond(200, self.head_lines + JSON_HEADERS, body)

    def _translated(self, translator: Translator, told: list[dict[str, Any]]) -> bytes:
        try:
            return b"".join([translator.push(document) for document in told])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotAnAnswer(f"what it sent is no chat completion ({error})") from error

    def pass_refusal(self, status: int, headers: bytes, body: bytes, error: ApiError) -> None:
        """The engine's own error, as it is, or as the client's API puts it."""
        self.over = True
        if self.translator is not None:
            headers, body = JSON_HEADERS, self.translator.refusal(error)
        self.exchange.respond(status, self.head_lines + headers, body)

    def fail(self, error: ApiError) -> None:
        """Ends with an error of ours: as the answer, or as the last event of a stream that has begun."""
        if self.over:
            return
        self.over = True
        self.abort()
        if not self.begun:
            lines = self.head_lines + encode_headers(error.headers) + JSON_HEADERS
            told = error.encoded() if self.translator is None else self.translator.refusal(error)
            self.exchange.respond(error.status, lines, told)
        else:
            self.exchange.end(error.event() if self.translator is None else self.translator.failure(error))

    # ---- towards the engines ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Leaves every engine that works for this request: it sees its client go."""
        for call in (self.prefill, self.answer):
            if call is not None:
                call.abort()
        self.prefill = self.answer = None

    def pause(self, paused: bool) -> None:
        """The client reads too slowly, or has caught up: the engine's stream waits with it."""
        if self.answer is not None:
            self.answer.pause(paused)
