"""Carries out the yard's commands on existing engines: which leg goes where with which body, and what came of it.

vLLM: the prefill leg's answer carries the hand-over for the decode leg. SGLang: both legs meet in a room; the decode leg
starts once the prefill leg was not refused, and both end together. A node that serves whole gets the request as it came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog

from workers.direct import sglang, vllm
from workers.direct.node import DirectNode
from workers.gateway.dialects.chat_stream import Counted, counted
from workers.gateway.errors import ApiError, dropped
from workers.gateway.event_stream import EventTooLong, error_of
from workers.gateway.relay import NotAnAnswer, Relay
from workers.http.client import Call, CallError, Client
from workers.http.wire import Headers, header
from workers.yard import commands, events

MAX_ANSWER_BYTES = 64 * 1024 * 1024
PROGRESS_EVERY_S = 0.5
PROGRESS_STEPS = 10
REFUSAL_GRACE_S = 0.01
GRACE_STEP_S = 0.001
ENDING_S = 5.0
OURS = frozenset((401, 403))  # the gateway's own key was refused: not the client's fault
RETRYABLE = frozenset((408, 425, 429, 499))
logger = structlog.get_logger("switchyard.gateway")
Feed = Callable[[events.Event], None]
FeedAll = Callable[[list[events.Event]], None]


class DirectUpstream:
    """One per gateway. `relays` are the living requests, `nodes` are shared with the rest of the gateway; `feed` reports to the yard."""

    def __init__(
        self, client: Client, nodes: Mapping[str, DirectNode], rooms: sglang.Rooms, feed: Feed, feed_all: FeedAll
    ) -> None:
        self.client = client
        self.rooms = rooms
        self.feed, self.feed_all = feed, feed_all
        self.loop = asyncio.get_running_loop()
        self.relays: dict[str, Relay] = {}
        self.ending: dict[Call, float] = {}  # what they carried is over; till when the engine may take to end them
        self._in_grace: deque[tuple[float, RoomLeg]] = deque()
        self._nodes = nodes
        self._to_report: list[Relay] = []
        self._share = self._step = 0
        self._sweeper = self.loop.call_later(0.0, self._sweep)

    async def close(self) -> None:
        """Ends every call."""
        self._sweeper.cancel()
        for relay in list(self.relays.values()):
            relay.abort()
        for call in self.ending:
            call.abort()
        await self.client.close()

    # ---- commands ---------------------------------------------------------------------------------------------------

    def start_prefill(self, command: commands.StartPrefill) -> None:
        relay, node = self.relays.get(command.request_id), self._nodes.get(command.node)
        if relay is None:
            return
        self.leave(relay)
        relay.handoff = None
        relay.head_lines = _head_lines(relay.request_id, command)
        if node is None:
            self._later(events.PrefillFailed(relay.request_id, True, "unreachable", f"{command.node} is not known."))
        elif node.config.serves_whole:
            relay.answer = self._send(relay, node, relay.engine_body, AnswerLeg(self, relay, node, computes=node))
        elif node.config.engine == "sglang":
            self._meet(relay, node, command.decode_node)
        else:
            relay.prefill = self._send(relay, node, vllm.prefill_body(relay.body), PrefillLeg(self, relay, node))

    def start_decode(self, command: commands.StartDecode) -> None:
        relay, node = self.relays.get(command.request_id), self._nodes.get(command.node)
        if relay is None or relay.answer is not None:
            return  # the engine answers already: it serves the request whole, or waited in the room
        if node is None:
            self._later(events.DecodeFailed(relay.request_id, True, "unreachable", f"{command.node} is not known."))
            return
        body = relay.engine_body
        # A server that has just changed its part may decode what it prefilled: it has the context, and fetches from others only.
        if relay.handoff is not None and command.source != command.node:
            body = vllm.decode_body(body, relay.handoff)
        relay.answer = self._send(relay, node, body, AnswerLeg(self, relay, node))

    def abort(self, command: commands.AbortOnNode) -> None:
        relay = self.relays.get(command.request_id)
        if relay is not None:
            self.leave(relay)

    def drop_orphan(self, node: DirectNode, request_id: str) -> None:
        """An engine holds nothing of ours that has no open call."""

    def refuse(self, command: commands.Refuse) -> None:
        relay = self.relays.get(command.request_id)
        if relay is not None:
            self.forget(relay)
            relay.fail(dropped(command.http_status, command.code, command.message, command.retry_after_s))
            self.left_room(relay)

    def leave(self, relay: Relay) -> None:
        """No engine works for it any more; its room is free."""
        relay.abort()
        self.left_room(relay)

    def _meet(self, relay: Relay, node: DirectNode, decode_name: str | None) -> None:
        """Both legs of SGLang. The decode leg waits a moment for a refusal of the prefill leg: a decode that was started
        for a prefill that failed would wait in vain."""
        decode = self._nodes.get(decode_name) if decode_name is not None else None
        if decode is None:
            self._later(events.PrefillFailed(relay.request_id, True, "unreachable", "There is no node to decode on."))
            return
        room = relay.room = self.rooms.take()
        port = node.direct.bootstrap_port or sglang.DEFAULT_BOOTSTRAP_PORT
        body = sglang.leg_body(relay.engine_body, node.origin.host, port, room)
        prefill = RoomLeg(self, relay, node)
        relay.prefill = self._send(relay, node, body, prefill, repeatable=False)
        prefill.then = lambda: self._join(relay, node, decode, body, room)
        if not self._in_grace:
            self.loop.call_later(REFUSAL_GRACE_S, self._grace_over)
        self._in_grace.append((self.loop.time() + REFUSAL_GRACE_S, prefill))

    def _grace_over(self) -> None:
        """One timer for all that wait: most were answered before."""
        now = self.loop.time()
        while self._in_grace and self._in_grace[0][0] <= now + GRACE_STEP_S:
            self._in_grace.popleft()[1].not_refused()
        if self._in_grace:
            self.loop.call_later(max(GRACE_STEP_S, self._in_grace[0][0] - now), self._grace_over)

    def _join(self, relay: Relay, prefill: DirectNode, decode: DirectNode, body: bytes, room: int) -> None:
        """Unless the prefill leg was left meanwhile, perhaps for another attempt in another room."""
        if relay.prefill is not None and relay.room == room and relay.answer is None and not relay.over:
            leg = AnswerLeg(self, relay, decode, computes=prefill)
            relay.answer = self._send(relay, decode, body, leg, repeatable=False)

    def _send(self, relay: Relay, node: DirectNode, body: bytes, leg: Leg, repeatable: bool = True) -> Call:
        head = node.head(relay.path, relay.request_id)
        return self.client.send(node.origin, head, body, leg, repeatable)

    def _later(self, event: events.Event) -> None:
        """Reports once the yard's present step is over."""
        self.loop.call_soon(self.feed, event)

    # ---- what came of it ----------------------------------------------------------------------------------------------

    def cancel(self, request_id: str, error: ApiError) -> bool:
        """Ends a request with this error; False when it is not here."""
        relay = self.relays.get(request_id)
        if relay is None:
            return False
        self.forget(relay)
        relay.fail(error)
        self.left_room(relay)
        return True

    def forget(self, relay: Relay) -> None:
        """The request is over."""
        self.relays.pop(relay.request_id, None)

    def left_room(self, relay: Relay) -> None:
        """The room is free again once nobody is in it."""
        if relay.room is not None and all(call is None or call.done for call in (relay.prefill, relay.answer)):
            self.rooms.leave(relay.room)
            relay.room = None

    def _sweep(self) -> None:
        """Tells the yard how far the streams are: often enough to count, not once a token, and of a few at a time, so that
        thousands of them do not wait for it. Closes what does not end."""
        self._sweeper = self.loop.call_later(PROGRESS_EVERY_S / PROGRESS_STEPS, self._sweep)
        now = self.loop.time()
        for call in [call for call, deadline in self.ending.items() if deadline <= now]:
            del self.ending[call]
            call.abort()
        self._step = (self._step + 1) % PROGRESS_STEPS
        if self._step == 0:
            self._to_report = list(self.relays.values())
            self._share = -(-len(self._to_report) // PROGRESS_STEPS)
        came: list[events.Event] = []
        for _ in range(min(self._share, len(self._to_report))):
            relay = self._to_report.pop()
            if not relay.over:
                came += self.progress(relay)
        if came:
            self.feed_all(came)

    def progress(self, relay: Relay) -> list[events.Event]:
        """What the client got since the last report."""
        new = relay.output_tokens - relay.reported_tokens
        if new <= 0 or not relay.begun:
            return []
        relay.reported_tokens += new
        return [events.DecodeProgress(relay.request_id, new)]


class Leg:
    """One call of a relay to one engine."""

    stage = "decode"

    def __init__(self, upstream: DirectUpstream, relay: Relay, node: DirectNode) -> None:
        self.upstream = upstream
        self.relay = relay
        self.node = node
        self.status = 0
        self.headers: Headers = []
        self.parts: list[bytes] = []
        self.size = 0

    def head(self, call: Call, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def data(self, call: Call, data: bytes) -> None:
        self.size += len(data)
        if self.size > MAX_ANSWER_BYTES:
            call.abort()
            self.failed(call, CallError("too-large", f"more than {MAX_ANSWER_BYTES} bytes of answer"))
        else:
            self.parts.append(data)

    def end(self, call: Call) -> None:
        body = b"".join(self.parts)
        if self.status != 200:
            self.refused(body)
        else:
            self.answered(body)

    def failed(self, call: Call, error: CallError) -> None:
        self.broken(error.reason, f"The node {self.node.name} failed: {error.message}.", True)

    def answered(self, body: bytes) -> None:
        raise NotImplementedError

    def broken(self, reason: str, message: str, retryable: bool) -> None:
        """This engine will not do it. Both legs end, and the yard hears of it."""
        relay, upstream = self.relay, self.upstream
        relay.abort()
        upstream.left_room(relay)
        kind = events.PrefillFailed if self.stage == "prefill" else events.DecodeFailed
        failed = kind(relay.request_id, retryable and not relay.begun, reason, message)
        upstream.feed_all([*upstream.progress(relay), failed])

    def refused(self, body: bytes) -> None:
        """Another status than 200. What is the client's fault goes to it as it is; the rest is the engine's or ours."""
        status, relay = self.status, self.relay
        reason = f"engine-{status}"
        if status in OURS:
            self.broken(reason, f"The node {self.node.name} refuses the gateway's key (token_env).", False)
        elif not 400 <= status < 500 or status in RETRYABLE or relay.begun:
            self.broken(reason, f"The node {self.node.name} answered {status}: {_told(body)}", True)
        else:
            relay.abort()
            self.upstream.left_room(relay)
            self.upstream.forget(relay)
            kind = header(self.headers, b"content-type") or b"application/json"
            error = ApiError(status, _told(body), code="engine_refused")
            relay.pass_refusal(status, b"content-type: %b\r\n" % kind, body, error)
            self.upstream.feed(events.EngineRefused(relay.request_id, status, error.message))


class PrefillLeg(Leg):
    """vLLM's first leg: its answer is for the second."""

    stage = "prefill"

    def answered(self, body: bytes) -> None:
        relay = self.relay
        try:
            relay.handoff = vllm.handoff(body)
            usage = msgspec.json.decode(body).get("usage")
        except (vllm.HandoffMissing, msgspec.DecodeError, RecursionError) as error:
            self.broken("no-handoff", f"The node {self.node.name}: {error}.", False)
            return
        relay.prefill = None
        self.node.served(relay.prompt.chain)
        result = _result(relay, counted(usage)) if usage else None
        self.upstream.feed(events.PrefillFinished(relay.request_id, result))


class RoomLeg(Leg):
    """SGLang's first leg: what it answers is thrown away, how it ends is not."""

    stage = "prefill"
    then: Callable[[], None] | None = None

    def head(self, call: Call, status: int, headers: Headers) -> None:
        super().head(call, status, headers)
        if status == 200:
            self.not_refused()

    def data(self, call: Call, data: bytes) -> None:
        if self.status != 200:
            super().data(call, data)

    def not_refused(self) -> None:
        """Time for the other leg, unless this one has failed meanwhile."""
        then, self.then = self.then, None
        if then is not None:
            then()

    def answered(self, body: bytes) -> None:
        self.not_refused()
        self.relay.prefill = None
        self.upstream.left_room(self.relay)

    def broken(self, reason: str, message: str, retryable: bool) -> None:
        self.then = None
        if self.relay.begun:  # the other leg has its context: the answer goes on
            self.relay.prefill = None
            self.upstream.left_room(self.relay)
            return
        super().broken(reason, message, retryable)


class AnswerLeg(Leg):
    """The leg whose answer is the client's. `computes`: the node that computes the prompt, when the yard cannot know yet
    that it is done; the answer's first token tells."""

    def __init__(
        self, upstream: DirectUpstream, relay: Relay, node: DirectNode, computes: DirectNode | None = None
    ) -> None:
        super().__init__(upstream, relay, node)
        self.computes = computes
        self.stage = "decode" if computes is None else "prefill"
        self.streams = False
        if not relay.begun:
            relay.new_stream()

    def head(self, call: Call, status: int, headers: Headers) -> None:
        super().head(call, status, headers)
        kind = header(headers, b"content-type") or b""
        self.streams = status == 200 and self.relay.stream and kind.startswith(b"text/event-stream")

    def data(self, call: Call, data: bytes) -> None:
        if not self.streams:
            super().data(call, data)
            return
        relay = self.relay
        if relay.over:
            return  # what follows the closing event is nobody's
        try:
            first = relay.write(data)
        except NotAnAnswer as error:
            call.abort()
            self.broken("bad-answer", f"The node {self.node.name} failed: {error}.", False)
            return
        except EventTooLong as error:
            call.abort()
            self.failed(call, CallError("bad-answer", str(error)))
            return
        came = self._first_token() if first else []
        if relay.over:
            call.pause(False)
            self.upstream.ending[call] = self.upstream.loop.time() + ENDING_S
            came.append(self._done())
        if came:
            self.upstream.feed_all(came)
        if relay.events.error is not None and not relay.over:
            self.erred(relay.events.error)
        elif first and not relay.over and relay.exchange.blocked:
            call.pause(True)

    def end(self, call: Call) -> None:
        if not self.streams:
            super().end(call)
        elif self.upstream.ending.pop(call, None) is None:
            first = self.relay.close()
            if self.relay.over:
                self.upstream.feed_all([*(self._first_token() if first else ()), self._done()])
            else:
                self.broken("stream-broken", f"The stream of {self.node.name} ended before the answer did.", True)

    def erred(self, said: Any) -> None:
        """An error where an answer should be, after the status 200 had gone out: judged by the status that it names."""
        status = said.get("code") if isinstance(said, dict) else None
        self.status = status if isinstance(status, int) and 400 <= status < 600 else 500
        self.headers = []
        self.refused(msgspec.json.encode({"error": said}))

    def failed(self, call: Call, error: CallError) -> None:
        if self.upstream.ending.pop(call, None) is None:
            super().failed(call, error)

    def answered(self, body: bytes) -> None:
        try:
            document = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):
            document = None
        if not isinstance(document, dict):
            self.broken("bad-answer", f"The node {self.node.name} did not answer in JSON.", True)
            return
        said = None if document.get("choices") else error_of(document)
        if said is not None:
            self.erred(said)
            return
        try:
            self.relay.finish_whole(body, document)
        except NotAnAnswer as error:
            self.broken("bad-answer", f"The node {self.node.name} failed: {error}.", False)
            return
        self.upstream.feed_all([*self._first_token(), self._done()])

    def _first_token(self) -> list[events.Event]:
        relay = self.relay
        came: list[events.Event] = [events.FirstToken(relay.request_id)]
        if self.computes is not None:
            self.computes.served(relay.prompt.chain)
            self.computes, self.stage = None, "decode"
            came.append(events.PrefillFinished(relay.request_id, None))
        return came

    def _done(self) -> events.Event:
        relay = self.relay
        relay.answer = None
        self.upstream.left_room(relay)
        if relay.room is not None:  # a prefill leg that does not end after its answer has
            self.upstream.loop.call_later(ENDING_S, self.upstream.leave, relay)
        self.upstream.forget(relay)
        result = _result(relay, relay.usage) if relay.usage is not None else None
        return events.DecodeFinished(relay.request_id, "stop", relay.output_tokens, result=result)

    def broken(self, reason: str, message: str, retryable: bool) -> None:
        self.relay.answer = None
        super().broken(reason, message, retryable)


def _result(relay: Relay, usage: Counted) -> events.PrefillResult:
    """What became of the prompt by the engine's own count."""
    prompt_tokens = usage.prompt_tokens or relay.prompt.tokens
    cached = min(usage.cached_tokens, prompt_tokens)
    return events.PrefillResult(cached_tokens=cached, fetched_tokens=0, computed_tokens=prompt_tokens - cached)


def _told(body: bytes) -> str:
    """The engine's own words about its error, short."""
    try:
        told: Any = msgspec.json.decode(body)
        error = told.get("error", told)
        text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (msgspec.DecodeError, AttributeError):
        text = body.decode("utf-8", "replace")
    return str(text or "no reason was given")[:500]


def _head_lines(request_id: str, command: commands.StartPrefill) -> bytes:
    """The answer's header lines about where the request went and why."""
    reason = command.reason.encode("ascii", "replace").decode().replace("\n", " ").replace("\r", " ")[:500]
    return (
        f"x-request-id: {request_id}\r\n"
        f"x-switchyard-queue-ms: {command.queue_s * 1000:.1f}\r\n"
        f"x-switchyard-prefill-node: {command.node}\r\n"
        f"x-switchyard-decode-node: {command.decode_node or command.node}\r\n"
        f"x-switchyard-predicted-ttft-ms: {command.predicted_ttft_s * 1000:.1f}\r\n"
        f"x-switchyard-reason: {reason}\r\n"
    ).encode()
