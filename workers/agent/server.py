"""The agent's HTTP API (docs/interfaces.md section 7): many nodes under `/nodes/{node}` of one aiohttp application."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

import msgspec
import structlog
from aiohttp import web

from workers.agent.custody import NOBODY
from workers.agent.engines.base import DecodeFinished, EngineError, TokenChunk
from workers.agent.messages import (
    AbortBody,
    DecodeBody,
    PhaseBody,
    PrefillBody,
    RefsBody,
    ReleaseBody,
    encode_logprob,
    encode_prefill_result,
    parse_body,
)
from workers.agent.metrics import render_metrics
from workers.agent.node import NodeAgent
from workers.agent.push import LENGTH, MAX_HEAD_BYTES, PushHead

MAX_BODY_BYTES = 32 * 1024 * 1024
SSE_KEEPALIVE_S = 10.0
MAX_BLOCKS_PER_READ = 4096
PUSH_HEAD_TIMEOUT_S = 10.0
OWNER_HEADER = "x-switchyard-gateway"
_OWNER = re.compile(r"[A-Za-z0-9._:-]{1,128}")
NODES = web.AppKey("nodes", dict[str, NodeAgent])
Handler = Callable[[web.Request, NodeAgent], Awaitable[web.StreamResponse]]
logger = structlog.get_logger("switchyard.agent")


def build_app(nodes: dict[str, NodeAgent], token: str, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
    """The application for `nodes`. Serve it with `handler_cancellation=True`: a closed connection aborts its work."""
    app = web.Application(middlewares=[_errors, _authentication(token)], client_max_size=max_body_bytes)
    app[NODES] = nodes
    route = app.router.add_route
    route("GET", "/healthz", _process_health)
    route("GET", "/nodes/{node}/healthz", _of_node(_health))
    route("GET", "/nodes/{node}/metrics", _of_node(_metrics))
    route("POST", "/nodes/{node}/v1/prefill", _of_node(_prefill))
    route("POST", "/nodes/{node}/v1/decode", _of_node(_decode))
    route("POST", "/nodes/{node}/v1/abort", _of_node(_abort))
    route("POST", "/nodes/{node}/v1/release", _of_node(_release))
    route("PUT", "/nodes/{node}/v1/phase", _of_node(_phase))
    route("GET", "/nodes/{node}/v1/status", _of_node(_status))
    route("GET", "/nodes/{node}/v1/events", _of_node(_events))
    route("GET", "/nodes/{node}/v1/kv/snapshot", _of_node(_snapshot))
    route("POST", "/nodes/{node}/v1/kv/refs", _of_node(_refs))
    route("POST", "/nodes/{node}/v1/kv/blocks", _of_node(_blocks))
    route("POST", "/nodes/{node}/v1/kv/locate", _of_node(_locate))
    route("POST", "/nodes/{node}/v1/kv/held", _of_node(_held))
    route("POST", "/nodes/{node}/v1/kv/push", _of_node(_push))
    return app


async def serve(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Listen on host:port (0 = a free one). Returns the runner, to be cleaned up by the caller, and the port."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    return runner, runner.addresses[0][1]


# --- around every call --------------------------------------------------------------------------------------------


def _error(status: int, code: str, message: str, field: str | None = None) -> web.Response:
    error: dict[str, Any] = {"code": code, "message": message}
    if field is not None:
        error["field"] = field
    return web.json_response({"error": error}, status=status)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineError as error:
        return _error(error.status, error.code, error.message, error.field)
    except web.HTTPRequestEntityTooLarge as error:
        return _error(413, "body-too-large", error.text or "the body is too large")
    except web.HTTPException as error:
        code = {404: "not-found", 405: "method-not-allowed"}.get(error.status, "bad-request")
        return _error(error.status, code, error.reason)
    except web.RequestPayloadError:
        return _error(400, "unreadable-body", "expected a body that fits its Content-Encoding and Transfer-Encoding")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception("request failed", path=request.path)
        return _error(500, "internal", "the agent failed on this request; its log says why")


def _authentication(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def authenticate(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not request.path.endswith("/healthz") and not hmac.compare_digest(given, expected):
            return _error(401, "unauthenticated", "expected 'Authorization: Bearer <agent token>'")
        return await handler(request)

    return authenticate


def _of_node(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        node = request.app[NODES].get(request.match_info["node"])
        if node is None:
            raise EngineError(404, "unknown-node", "no node of this name runs here", "node")
        node.custody.heard(node.now(), _owner(request))
        return await handler(request, node)

    return handle


def _owner(request: web.Request) -> str:
    """The gateway process that calls. Raises EngineError 400 for a name that is none."""
    owner = request.headers.get(OWNER_HEADER, NOBODY)
    if owner != NOBODY and _OWNER.fullmatch(owner) is None:
        raise EngineError(400, "bad-field", "expected at most 128 letters, digits and ._:-", OWNER_HEADER)
    return owner


def _no_delay(request: web.Request) -> None:
    transport = request.transport
    connection = transport.get_extra_info("socket") if transport is not None else None
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# --- calls --------------------------------------------------------------------------------------------------------


async def _process_health(request: web.Request) -> web.Response:
    nodes = request.app[NODES]
    return web.json_response({"status": "ok", "nodes": sorted(nodes)})


async def _health(_request: web.Request, node: NodeAgent) -> web.Response:
    return web.json_response({"status": "ok", "node": node.name})


async def _metrics(_request: web.Request, node: NodeAgent) -> web.Response:
    return web.Response(text=render_metrics(node.status()), content_type="text/plain", charset="utf-8")


async def _status(_request: web.Request, node: NodeAgent) -> web.Response:
    return web.json_response(node.status())


async def _prefill(request: web.Request, node: NodeAgent) -> web.Response:
    body = parse_body(await request.read(), PrefillBody)
    owner = _owner(request)
    result = await node.prefill(body.job(node.spec.model, owner), body.generation, owner)
    return web.json_response(encode_prefill_result(result))


async def _decode(request: web.Request, node: NodeAgent) -> web.StreamResponse:
    body = parse_body(await request.read(), DecodeBody)
    job = body.job(node.spec.model)
    node.admit("decode", job.request_id, body.generation)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    _no_delay(request)
    items = node.decode(job, body.generation, _owner(request))
    async with contextlib.aclosing(_with_keepalive(items)) as lines:  # type: ignore[type-var]
        await response.prepare(request)
        async for line in lines:
            await response.write(line)
    await response.write_eof()
    return response


async def _with_keepalive(items: AsyncIterator[TokenChunk | DecodeFinished]) -> AsyncIterator[bytes]:
    """SSE lines of a decode; a comment line whenever nothing was said for a while (the context is being fetched)."""
    pending: asyncio.Task[Any] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(items, None))  # type: ignore[arg-type]
            done, _ = await asyncio.wait({pending}, timeout=SSE_KEEPALIVE_S)
            if not done:
                yield b": waiting\n\n"
                continue
            try:
                item = pending.result()
            except EngineError as error:
                yield _sse({"type": "error", "code": error.code, "message": error.message})
                return
            finally:
                pending = None
            if item is None:
                return
            yield _sse(_decode_item(item))
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await items.aclose()  # type: ignore[attr-defined]


def _decode_item(item: TokenChunk | DecodeFinished) -> dict[str, Any]:
    if isinstance(item, TokenChunk):
        line: dict[str, Any] = {"type": "tokens", "ids": item.ids, "n": item.count}
        if item.logprobs is not None:
            line["logprobs"] = [encode_logprob(entry) for entry in item.logprobs]
        return line
    return {
        "type": "done",
        "finish_reason": item.finish_reason,
        "output_tokens": item.output_tokens,
        "stored_chain_b64": b64encode(item.stored_chain).decode(),
        "recomputed_tokens": item.recomputed_tokens,
        "timings": asdict(item.timings),
    }


def _sse(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


async def _abort(request: web.Request, node: NodeAgent) -> web.Response:
    body = parse_body(await request.read(), AbortBody)
    return web.json_response({"aborted": node.abort(body.request_id)})


async def _release(request: web.Request, node: NodeAgent) -> web.Response:
    body = parse_body(await request.read(), ReleaseBody)
    return web.json_response({"released": sum(node.release_handoff(name) for name in body.request_ids)})


async def _phase(request: web.Request, node: NodeAgent) -> web.Response:
    body = parse_body(await request.read(), PhaseBody)
    return web.json_response(node.order_phase(body.phase, body.generation, body.drain_deadline_s))


async def _events(request: web.Request, node: NodeAgent) -> web.StreamResponse:
    text = request.query.get("from")
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 20):
        raise EngineError(400, "bad-field", "expected a sequence number", "from")
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    _no_delay(request)
    await response.prepare(request)
    async for event in node.events.follow(None if text is None else int(text)):
        await response.write(msgspec.json.encode(event) + b"\n")
    return response


async def _snapshot(_request: web.Request, node: NodeAgent) -> web.Response:
    return web.json_response(node.snapshot())


async def _refs(request: web.Request, node: NodeAgent) -> web.Response:
    body = parse_body(await request.read(), RefsBody)
    return web.json_response(node.apply_refs(body.seq, body.reset, body.ref_changes()))


async def _held(request: web.Request, node: NodeAgent) -> web.Response:
    chain = await request.read()
    if len(chain) % 16:
        raise EngineError(400, "bad-field", "expected 16-byte hashes", "body")
    return web.json_response({"blocks": node.held_for_push(chain)})


async def _push(request: web.Request, node: NodeAgent) -> web.Response:
    received = await node.receive_push(await _push_head(request), request.content)
    return web.json_response({"blocks": received.blocks, "tail": received.tail, "expires_at": received.expires_at})


async def _push_head(request: web.Request) -> PushHead:
    """The head of a pushed context; its frames are left to be read."""
    try:
        async with asyncio.timeout(PUSH_HEAD_TIMEOUT_S):
            (length,) = LENGTH.unpack(await request.content.readexactly(LENGTH.size))
            if length > MAX_HEAD_BYTES:
                raise EngineError(413, "body-too-large", f"expected a head of at most {MAX_HEAD_BYTES} bytes", "body")
            return parse_body(await request.content.readexactly(length), PushHead)
    except asyncio.IncompleteReadError:
        raise EngineError(400, "push-cut", "the body ended before its head did", "body") from None
    except TimeoutError:
        raise EngineError(408, "push-silent", "the head of the push did not come in time", "body") from None


async def _hashes(request: web.Request) -> bytes:
    hashes = await request.read()
    if len(hashes) % 16 or not hashes:
        raise EngineError(400, "bad-field", "expected one or more 16-byte hashes", "body")
    if len(hashes) > 16 * MAX_BLOCKS_PER_READ:
        raise EngineError(413, "too-many-blocks", f"expected at most {MAX_BLOCKS_PER_READ} hashes", "body")
    return hashes


async def _locate(request: web.Request, node: NodeAgent) -> web.Response:
    found = node.engine.locate_blocks(await _hashes(request))
    blocks = [(block.hex(), address, value) for block, address, value in found.blocks]
    return web.json_response({"port": found.port, "blocks": blocks})


async def _blocks(request: web.Request, node: NodeAgent) -> web.StreamResponse:
    hashes = await _hashes(request)
    frames = node.engine.read_blocks(hashes)
    first = await anext(frames, None)  # type: ignore[arg-type]
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    _no_delay(request)
    await response.prepare(request)
    if first is not None:
        await response.write(first)
        async for frame in frames:
            await response.write(frame)
    await response.write_eof()
    return response
