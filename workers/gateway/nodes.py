"""One node agent as the gateway sees it: status poll, event stream, reference pushes, and the calls that serve requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import structlog

from workers.yard import events
from workers.yard.commands import RefChange

POLL_EVERY_S = 1.0
POLL_TIMEOUT_S = 2.0
STREAM_SILENCE_S = 5.0
DRAIN_S = 1.0
BACKOFF_LONGEST_S = 5.0
REFS_EVERY_S = 0.05
RELEASE_EVERY_S = 0.2
MAX_RELEASES = 5000
MAX_REFS_A_PUSH = 5000
MAX_LINE_BYTES = 64 * 1024 * 1024
logger = structlog.get_logger("switchyard.gateway")
Feed = Callable[[events.Event], None]


class NodeCallError(Exception):
    """A call that a node refused or that broke. `retryable`: another node may do better."""

    def __init__(self, reason: str, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable


class NodeClient:
    """Talks to `url`, the node's own address on its agent (`http://host:port/nodes/name`); reports to the yard through `feed`. Start and close it on the event loop."""

    def __init__(
        self, name: str, url: str, http: aiohttp.ClientSession, token: str, feed: Feed, owner: str = ""
    ) -> None:
        self.name = name
        self.url = url
        self.pool_name = ""
        self._base = url
        self._http = http
        self._owner = owner
        self._headers = {"Authorization": f"Bearer {token}"}
        if owner:
            self._headers["x-switchyard-gateway"] = owner
        self._feed = feed
        self._tasks: list[asyncio.Task[None]] = []
        self._stream: asyncio.Task[None] | None = None
        self._next_seq: int | None = None
        self._resynced = asyncio.Event()
        self._refs = _RefQueue()
        self._releases: list[str] = []
        self._releasing = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(loop(), name=f"{loop.__name__} {self.name}") for loop in self._loops()]

    def _loops(self) -> tuple[Callable[[], Any], ...]:
        return (self._poll_status, self._follow_events, self._push_refs, self._send_releases)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- serving requests -----------------------------------------------------------------------------------------

    async def prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        """Runs a prompt; returns when it is computed. Raises NodeCallError; cancelling closes the connection."""
        async with self._call("POST", "/v1/prefill", body) as response:
            return msgspec.json.decode(await response.read(), type=dict[str, Any])

    async def decode(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The decode events in order. Raises NodeCallError, also when the stream ends without `done`.

        Read on after `done`: the stream is then read to its end, and the connection can serve the next call.
        """
        async with self._call("POST", "/v1/decode", body) as response:
            async for line in _lines(response):
                if not line.startswith(b"data: "):
                    continue
                event = msgspec.json.decode(line[6:], type=dict[str, Any])
                if event["type"] == "error":
                    raise NodeCallError(event["code"], event["message"], retryable=event["code"] != "context-length")
                yield event
                if event["type"] == "done":
                    await _drain(response)
                    return
        raise NodeCallError("stream-broken", f"The stream of {self.name} ended before the answer did.", True)

    async def abort(self, request_id: str) -> None:
        """Frees what the node holds for a request. A node that cannot be reached has nothing left to free."""
        with contextlib.suppress(NodeCallError, asyncio.TimeoutError):
            async with asyncio.timeout(POLL_TIMEOUT_S), self._call("POST", "/v1/abort", {"request_id": request_id}):
                pass

    def release(self, request_id: str) -> None:
        """Tells the node, soon and many at a time, that the request's computed context is fetched or unwanted."""
        self._releases.append(request_id)
        self._releasing.set()

    async def _send_releases(self) -> None:
        """What does not arrive is let go by the node itself, when the hand-over's time is up."""
        while True:
            await self._releasing.wait()
            await asyncio.sleep(RELEASE_EVERY_S)
            self._releasing.clear()
            names, self._releases = self._releases, []
            for start in range(0, len(names), MAX_RELEASES):
                body = {"request_ids": names[start : start + MAX_RELEASES]}
                with contextlib.suppress(NodeCallError, asyncio.TimeoutError):
                    async with asyncio.timeout(POLL_TIMEOUT_S), self._call("POST", "/v1/release", body):
                        pass

    @contextlib.asynccontextmanager
    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answered call. Raises NodeCallError for refusals and broken connections.

        A kept connection that the node closed in the meantime is tried again once, on a fresh one.
        """
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        try:
            async with await self._send(method, path, data, headers) as response:
                if response.status >= 400:
                    raise await _refusal(self.name, response)
                yield response
        except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
            code = "connection-refused" if error.errno == errno.ECONNREFUSED else "unreachable"
            raise NodeCallError(code, f"The node {self.name} cannot be reached: {error}.", True) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            text = f"The connection to the node {self.name} broke: {type(error).__name__}."
            raise NodeCallError("connection-broken", text, True) from None

    async def _send(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        try:
            return await self._http.request(method, self._base + path, data=data, headers=headers)
        except (aiohttp.ServerDisconnectedError, ConnectionResetError):
            return await self._http.request(method, self._base + path, data=data, headers=headers)

    # ---- status ---------------------------------------------------------------------------------------------------

    async def _poll_status(self) -> None:
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(POLL_TIMEOUT_S), self._call("GET", "/v1/status") as response:
                    status = node_state(msgspec.json.decode(await response.read(), type=dict[str, Any]), self._owner)
                self.pool_name = status.pool_name
                self._feed(events.NodeStatus(self.name, status))
            except NodeCallError as error:
                refused = error.reason in ("connection-refused", "unreachable")
                self._feed(events.NodeUnreachable(self.name, refused, error.message))
            except TimeoutError:
                self._feed(events.NodeUnreachable(self.name, False, "no answer in time"))
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("status not understood", node=self.name, error=str(error))
                self._feed(events.NodeUnreachable(self.name, False, f"status not understood: {error}"))
            await asyncio.sleep(max(0.05, POLL_EVERY_S - (time.monotonic() - began)))

    # ---- the event stream -----------------------------------------------------------------------------------------

    def resync(self) -> None:
        """Take a snapshot, then follow the stream from there; at once, for the node has just been heard of."""
        self._next_seq = None
        self._resynced.set()
        if self._stream is not None:
            self._stream.cancel()

    async def _follow_events(self) -> None:
        pause_s = 0.2
        while True:
            self._stream = asyncio.create_task(self._follow_once())
            try:
                await self._stream
                pause_s = 0.2
            except asyncio.CancelledError:
                if asyncio.current_task() is not None and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    self._stream.cancel()
                    raise
                continue
            except (NodeCallError, TimeoutError, ValueError, KeyError, aiohttp.ClientError) as error:
                logger.debug("event stream ended", node=self.name, error=str(error))
            self._resynced.clear()
            try:
                await asyncio.wait_for(self._resynced.wait(), pause_s)
                pause_s = 0.2
            except TimeoutError:
                pause_s = min(pause_s * 2, BACKOFF_LONGEST_S)

    async def _follow_once(self) -> None:
        if self._next_seq is None:
            async with asyncio.timeout(30), self._call("GET", "/v1/kv/snapshot") as response:
                snapshot = msgspec.json.decode(await response.read(), type=dict[str, Any])
            segments = [(_bytes(item["parent_b64"]), b64decode(item["chain_b64"])) for item in snapshot["segments"]]
            self._next_seq = int(snapshot["seq"]) + 1
            self._feed(events.NodeSnapshotTaken(self.name, int(snapshot["seq"]), segments))
        async with self._call("GET", f"/v1/events?from={self._next_seq}") as response:
            rest = b""
            while True:
                async with asyncio.timeout(STREAM_SILENCE_S):
                    data = await response.content.readany()
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    raise ValueError("an event is too long")
                self._deliver([msgspec.json.decode(line) for line in lines if line])

    def _deliver(self, batch: list[dict[str, Any]]) -> None:
        if not batch:
            return
        self._next_seq = max(self._next_seq or 0, int(batch[-1]["seq"]) + 1)
        self._feed(events.NodeEvents(self.name, batch))

    # ---- references -----------------------------------------------------------------------------------------------

    def push_refs(self, changes: tuple[RefChange, ...], reset: bool) -> None:
        self._refs.add(changes, reset)

    async def _push_refs(self) -> None:
        """Sends changes in order, many at a time; a push that did not arrive is sent again as it was, number included."""
        seq = 0
        while True:
            batch = await self._refs.take()
            seq += 1
            pause_s = REFS_EVERY_S
            while not batch.superseded and not await self._push_once(seq, batch):
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, BACKOFF_LONGEST_S)
            await asyncio.sleep(REFS_EVERY_S)

    async def _push_once(self, seq: int, batch: _RefBatch) -> bool:
        changes = [{"last_b64": _text(c.last), "blocks": c.blocks, "delta": c.delta} for c in batch.changes]
        body = {"seq": seq, "reset": batch.reset, "changes": changes}
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S), self._call("POST", "/v1/kv/refs", body):
                return True
        except (NodeCallError, TimeoutError) as error:
            logger.debug("references not pushed", node=self.name, error=str(error))
            return False


@dataclass(slots=True)
class _RefBatch:
    """One push. `superseded` once a reset made it pointless."""

    reset: bool
    changes: list[RefChange] = field(default_factory=list)
    superseded: bool = False


class _RefQueue:
    """Changes not yet pushed. The first push is a reset: what an earlier gateway pushed does not count any more."""

    def __init__(self) -> None:
        self._batches: deque[_RefBatch] = deque([_RefBatch(reset=True)])
        self._taken: _RefBatch | None = None
        self._filled = asyncio.Event()
        self._filled.set()

    def add(self, changes: tuple[RefChange, ...], reset: bool) -> None:
        if reset:
            self._batches.clear()
            if self._taken is not None:
                self._taken.superseded = True
        if reset or not self._batches or len(self._batches[-1].changes) >= MAX_REFS_A_PUSH:
            self._batches.append(_RefBatch(reset))
        self._batches[-1].changes.extend(changes)
        self._filled.set()

    async def take(self) -> _RefBatch:
        while not self._batches:
            self._filled.clear()
            await self._filled.wait()
        self._taken = self._batches.popleft()
        return self._taken


def node_state(document: dict[str, Any], owner: str = "") -> events.NodeState:
    """A status answer in the yard's words; `owner` is who we are. Raises KeyError or TypeError when it is not one."""
    held = document.get("held", {}).values()
    running, queued, pool, limits = (document[part] for part in ("running", "queued", "pool", "limits"))
    return events.NodeState(
        phase=document["phase"],
        target_phase=document["target_phase"],
        state=document["state"],
        generation=int(document["generation"]),
        boot_id=document["boot_id"],
        running_prefill=int(running["prefill"]),
        queued_prefill=int(queued["prefill"]),
        running_decode=int(running["decode"]),
        queued_decode=int(queued["decode"]),
        queued_tokens=int(document["queued_tokens"]),
        pool_used_blocks=int(pool["used_blocks"]),
        pool_capacity_blocks=int(pool["capacity_blocks"]),
        pool_referenced_blocks=int(pool["referenced_blocks"]),
        kv_free_tokens=int(document["kv_free_tokens"]),
        max_decode_batch=int(limits["max_decode_batch"]),
        event_seq=int(document["event_seq"]),
        kv_tokens=int(limits["kv_tokens"]),
        prefill_chunk_tokens=int(limits["prefill_chunk_tokens"]),
        pool_name=pool["name"],
        last_switch=document.get("last_switch"),
        own_requests=frozenset(name for owners in held for name in owners.get(owner, ())) if owner else frozenset(),
        orphans=int(document.get("orphans", 0)),
        stalled_s=float(document.get("stalled_s", 0.0)),
    )


async def _refusal(node: str, response: aiohttp.ClientResponse) -> NodeCallError:
    try:
        error = msgspec.json.decode(await response.read())["error"]
        code, message = str(error["code"]), str(error["message"])
        if error.get("field"):
            message = f"{error['field']}: {message}"
    except (msgspec.DecodeError, KeyError, TypeError):
        code, message = f"http-{response.status}", f"The node {node} answered {response.status}."
    retryable = response.status in (401, 404, 409, 429) or response.status >= 500
    return NodeCallError(code, message, retryable)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Reads what is left, a moment at most; a connection that is not read to its end cannot be kept."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await response.read()


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    while True:
        data = await response.content.readany()
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)


def _text(data: bytes) -> str:
    return b64encode(data).decode()
