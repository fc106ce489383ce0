"""The front door: OpenAI-compatible endpoints, branch ends, health and metrics, as an aiohttp application."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import HashedPrompt
from workers.gateway import operator_api
from workers.gateway.answers import AnswerFormat, Usage
from workers.gateway.body import CompletionBody, decode_json, parse, parse_announcement, refuse_without_text
from workers.gateway.errors import ApiError, bad_field
from workers.gateway.gateway import Gateway, Serving
from workers.gateway.logprobs import TokenChoice
from workers.gateway.session import Ended, Session, Text
from workers.gateway.signals import Caller, Standing, authenticate, branch_key, branch_signal, standing
from workers.yard import events
from workers.yard.config import PartitionConfig

GATEWAY = web.AppKey("gateway", Gateway)
REQUEST_ID = web.RequestKey("request_id", str)
MAX_BODY_BYTES = 32 * 1024 * 1024
TOKENISE_IN_THREAD_BYTES = 20_000
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}
logger = structlog.get_logger("switchyard.gateway")


def build_app(gateway: Gateway, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
    """The application. Serve it with `handler_cancellation=True`: a client that goes away ends its request."""
    app = web.Application(middlewares=[_answer_errors], client_max_size=max_body_bytes)
    app[GATEWAY] = gateway
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{model}", _model)
    app.router.add_get("/v1/branches/{branch}", _show_branch)
    app.router.add_put("/v1/branches/{branch}", _announce_branch)
    app.router.add_post("/v1/branches/{branch}/end", _end_branch)
    operator_api.add_routes(app, gateway, gateway.agent_token)
    app.router.add_get("/healthz", _health)
    app.router.add_get("/metrics", _metrics)
    return app


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's shape, with the request's id."""
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    try:
        response = await handler(request)
    except ApiError as error:
        return error.response(request[REQUEST_ID])
    except web.HTTPRequestEntityTooLarge:
        text = f"The body is larger than the {request.app._client_max_size} bytes that are accepted."
        return ApiError(413, text, code="request_too_large").response(request[REQUEST_ID])
    except web.HTTPException as error:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status, "bad_request")
        text = f"{request.method} {request.path}: {error.reason}."
        return ApiError(error.status, text, code=code).response(request[REQUEST_ID])
    except web.RequestPayloadError:
        text = "The body cannot be read: it does not fit its Content-Encoding or Transfer-Encoding."
        return ApiError(400, text, code="unreadable_body").response(request[REQUEST_ID])
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception("request failed", request=request[REQUEST_ID], path=request.path)
        text = "The gateway failed on this request; its log says why."
        return ApiError(500, text, code="internal").response(request[REQUEST_ID])
    if not response.prepared:
        response.headers["x-request-id"] = request[REQUEST_ID]
    return response


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _complete(request, chat=True)


async def _completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, chat=False)


async def _complete(request: web.Request, chat: bool) -> web.StreamResponse:
    """One completion: authenticate, read, tokenise, queue, and send what comes. Ends the request if the client goes."""
    serving = request.app[GATEWAY].ready()
    config = serving.config
    received_at = serving.clock()
    caller = authenticate(config, request.headers, received_at)
    raw = await request.read()
    body = parse(decode_json(raw), chat)
    _check_model(config, body.model)
    if config.model.symbolic:
        refuse_without_text(body)
    place = standing(config, caller, request.headers)
    branch = branch_signal(caller, request.headers, body.session_id)
    ids = await _token_ids(serving, body, len(raw))
    request_id = _own_id(request, serving)
    prompt = _hash(serving, caller, body, branch, ids)
    max_tokens = _max_tokens(config, body, prompt.tokens)
    session = Session(
        request_id=request_id,
        body=body,
        ids=ids,
        prompt=prompt,
        max_tokens=max_tokens,
        tenant=caller.tenant.name,
        band=place.band,
        symbolic=config.model.symbolic,
        decoder=serving.codec.decoder(),
        token_bytes=serving.codec.token_bytes,
    )
    serving.sessions[request_id] = session
    try:
        _enqueue(serving, session, branch, place, received_at, len(raw))
        return await _answer(request, session)
    finally:
        del serving.sessions[request_id]
        if request_id in serving.yard.requests:
            serving.driver.feed(events.ClientGone(request_id))


def _enqueue(
    serving: Serving, session: Session, branch: BranchSignal, place: Standing, received_at: float, body_bytes: int
) -> None:
    began = time.perf_counter()
    arrived = events.YardRequest(
        request_id=session.request_id,
        tenant=session.tenant,
        band=place.band,
        flow_id=place.flow_id,
        bytes=body_bytes,
        prompt=session.prompt,
        output_tokens=session.max_tokens,
        received_at=received_at,
        branch=branch,
        ttl_s=place.ttl_s,
        slo_ttft_s=place.slo_ttft_s,
        objective=place.objective,
    )
    serving.driver.feed(events.Arrived(arrived))
    serving.metrics.enqueued(serving.yard, time.perf_counter() - began)


# ---- reading -----------------------------------------------------------------------------------------------------


def _own_id(request: web.Request, serving: Serving) -> str:
    """The client's request id, unless a request of that id is still here."""
    request_id = request[REQUEST_ID]
    if request_id in serving.sessions or request_id in serving.yard.requests:
        request[REQUEST_ID] = request_id = uuid.uuid4().hex
    return request_id


def _check_model(config: PartitionConfig, name: str) -> None:
    if name != config.model.name and name not in config.model.served_names:
        raise ApiError(404, f"The model '{name}' does not exist here.", code="model_not_found", param="model")


async def _token_ids(serving: Serving, body: CompletionBody, size: int) -> array[int]:
    if body.ids is not None:
        ids = array("I", body.ids)
        serving.check_vocabulary(ids)
        return ids
    if size > TOKENISE_IN_THREAD_BYTES:
        ids = await asyncio.to_thread(_tokenise, serving, body)
    else:
        ids = _tokenise(serving, body)
    if not ids:
        raise bad_field(body.prompt_param, f"'{body.prompt_param}' must not be empty.")
    return ids


def _tokenise(serving: Serving, body: CompletionBody) -> array[int]:
    if body.messages is not None:
        return serving.codec.encode_chat(body.messages)
    return serving.codec.encode(body.text or "")


def _hash(
    serving: Serving, caller: Caller, body: CompletionBody, branch: BranchSignal, ids: array[int]
) -> HashedPrompt:
    prompt_tokens = body.prompt_tokens if serving.config.model.symbolic else None
    try:
        return serving.hasher.hash(caller.tenant.sharing_domain, ids, prompt_tokens, branch.branch_id or branch.session)
    except ValueError as error:
        raise bad_field("switchyard.prompt_tokens", f"{error}.") from None


def _max_tokens(config: PartitionConfig, body: CompletionBody, prompt_tokens: int) -> int:
    """How many tokens may be produced. Raises ApiError 400 when prompt and answer do not fit the model's context."""
    context = config.model.context_tokens
    room = context - prompt_tokens
    if room < 1:
        text = f"This model's context holds {context} tokens, and the prompt alone has {prompt_tokens}."
        raise bad_field(body.prompt_param, text, "context_length_exceeded")
    if body.max_tokens is None:
        return room
    if body.max_tokens > room:
        text = (
            f"This model's context holds {context} tokens; the prompt has {prompt_tokens} and "
            f"'{body.max_tokens_param}' asks for {body.max_tokens} more."
        )
        raise bad_field(body.max_tokens_param, text, "context_length_exceeded")
    return body.max_tokens


# ---- answering ---------------------------------------------------------------------------------------------------


async def _answer(request: web.Request, session: Session) -> web.StreamResponse:
    body = session.body
    shape = AnswerFormat(
        session.request_id, body.model, int(time.time()), body.chat, body.include_usage, session.logprobs
    )
    return await (_stream(request, session, shape) if body.stream else _whole(session, shape))


async def _whole(session: Session, shape: AnswerFormat) -> web.Response:
    pieces: list[str] = []
    choices: list[TokenChoice] = []
    while True:
        item = await session.next_item()
        if isinstance(item, ApiError):
            raise item
        if isinstance(item, Ended):
            answer = shape.whole("".join(pieces), item.finish_reason, _usage(session), tuple(choices))
            return web.Response(body=answer, content_type="application/json", headers=session.route.headers())
        pieces.append(item.text)
        choices += item.choices


async def _stream(request: web.Request, session: Session, shape: AnswerFormat) -> web.StreamResponse:
    """Headers go out with the first token, so that a refused request still gets its own status."""
    item = await session.next_item()
    if isinstance(item, ApiError):
        raise item
    headers = {**_SSE_HEADERS, **session.route.headers(), "x-request-id": session.request_id}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    chunk = shape.head()
    while True:
        if isinstance(item, Text):
            chunk += shape.text(item.text, item.choices)
        elif isinstance(item, Ended):
            chunk += shape.end(item.finish_reason, _usage(session))
        else:
            chunk += item.event()
        if session.idle or not isinstance(item, Text):
            await response.write(chunk)
            chunk = b""
        if not isinstance(item, Text):
            await response.write_eof()
            return response
        item = await session.next_item()


def _usage(session: Session) -> Usage:
    return Usage(session.prompt.tokens, session.route.cached_tokens, session.output_tokens)


# ---- the other endpoints -----------------------------------------------------------------------------------------


def _model_object(config: PartitionConfig, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": int(config.published_at),
        "owned_by": "switchyard",
        "max_model_len": config.model.context_tokens,
    }


def _names(config: PartitionConfig) -> list[str]:
    return list(dict.fromkeys([config.model.name, *config.model.served_names]))


async def _models(request: web.Request) -> web.Response:
    serving = request.app[GATEWAY].ready()
    authenticate(serving.config, request.headers, serving.clock())
    data = [_model_object(serving.config, name) for name in _names(serving.config)]
    return web.json_response({"object": "list", "data": data})


async def _model(request: web.Request) -> web.Response:
    serving = request.app[GATEWAY].ready()
    authenticate(serving.config, request.headers, serving.clock())
    name = request.match_info["model"]
    _check_model(serving.config, name)
    return web.json_response(_model_object(serving.config, name))


async def _show_branch(request: web.Request) -> web.Response:
    """A branch of the caller's own tenant, as the ledger has it."""
    serving = request.app[GATEWAY].ready()
    caller = authenticate(serving.config, request.headers, serving.clock())
    branch = request.match_info["branch"]
    view = serving.yard.kv.branch(branch_key(caller, branch))
    if view is None:
        raise _no_branch(branch)
    shown = {
        "id": branch,
        "object": "branch",
        "version": view.version,
        "sequence": view.sequence,
        "kind": view.kind,
        "parent": None if view.parent is None else view.parent.removeprefix(f"{caller.tenant.name}/"),
        "program": view.program,
        "inferred": view.inferred,
        "context_blocks": view.context_blocks,
        "open_requests": view.open_requests,
        "lease_until": view.lease_until_s,
    }
    return web.json_response(shown)


async def _announce_branch(request: web.Request) -> web.Response:
    """What a harness says of a branch without a request; saying it again changes nothing."""
    serving = request.app[GATEWAY].ready()
    caller = authenticate(serving.config, request.headers, serving.clock())
    branch = request.match_info["branch"]
    said = parse_announcement(decode_json(await request.read()))
    serving.driver.feed(
        events.BranchAnnounced(
            branch_id=branch_key(caller, branch),
            parent=branch_key(caller, said.parent) if said.parent else None,
            relation=said.relation,
            program=said.program,
            rewritten=said.rewritten,
        )
    )
    return web.json_response({"id": branch, "object": "branch", "announced": True})


async def _end_branch(request: web.Request) -> web.Response:
    serving = request.app[GATEWAY].ready()
    caller = authenticate(serving.config, request.headers, serving.clock())
    branch = request.match_info["branch"]
    key = branch_key(caller, branch)
    if not serving.yard.kv.names_live_branch(key):
        raise _no_branch(branch)
    serving.driver.feed(events.BranchEnd(key))
    serving.hasher.forget(key)
    return web.json_response({"id": branch, "object": "branch", "ended": True})


def _no_branch(branch: str) -> ApiError:
    return ApiError(404, f"The branch '{branch[:200]}' is not known, or has ended.", code="branch_not_found")


async def _health(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    status = "ok" if gateway.serving is not None else gateway.fault or "waiting for a configuration"
    version = None if gateway.serving is None else gateway.serving.config.version
    return web.json_response(
        {"status": status, "partition": gateway.partition, "config_version": version, "degraded": gateway.degraded}
    )


async def _metrics(request: web.Request) -> web.Response:
    serving = request.app[GATEWAY].ready()
    text = serving.metrics.render(serving.clock(), serving.yard)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
