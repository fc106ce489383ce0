"""The front door: OpenAI-compatible endpoints, branches, health and metrics."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import apps
from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import HashedPrompt
from workers.gateway import direct_front, operator_api
from workers.gateway.answers import AnswerFormat, TranslatedFormat, Usage
from workers.gateway.body import CompletionBody, decode_json, parse, parse_announcement, refuse_without_text
from workers.gateway.dialects import messages_answer, messages_request, responses_request
from workers.gateway.dialects.messages_answer import MessageAnswer
from workers.gateway.dialects.responses_answer import ResponseAnswer
from workers.gateway.direct_front import Kind, count_tokens
from workers.gateway.errors import ApiError, bad_field
from workers.gateway.gateway import Gateway
from workers.gateway.logprobs import TokenChoice
from workers.gateway.metrics_text import render
from workers.gateway.serving import Serving
from workers.gateway.session import Ended, Session, Text
from workers.gateway.signals import Caller, authenticate, branch_key, branch_signal, standing
from workers.gateway.web import MAX_BODY_BYTES, Front, Handler, Request, Response, json_response
from workers.http.wire import encode_headers
from workers.yard import events
from workers.yard.config import PartitionConfig

TOKENISE_IN_THREAD_BYTES = 20_000
COUNT_TOKENS = "/v1/messages/count_tokens"
COMPLETIONS: dict[Kind, str] = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
Answer = Callable[[Request, Serving], Awaitable[Response | None]]
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


def build_front(gateway: Gateway, max_body_bytes: int = MAX_BODY_BYTES) -> Front:
    """Every path of a gateway."""

    def serving(answer: Answer) -> Handler:
        """A path that needs a configuration."""

        async def handler(request: Request) -> Response | None:
            return await answer(request, gateway.ready())

        return handler

    front = Front(max_body_bytes)
    for kind, path in COMPLETIONS.items():
        front.add("POST", path, partial(_begin, gateway, kind))
    for path in (COMPLETIONS["messages"], COUNT_TOKENS):
        front.errors_of(path, messages_answer.error_body)
    front.add("POST", COUNT_TOKENS, serving(_count_tokens))
    front.add("GET", "/v1/models", serving(_models))
    front.add("GET", "/v1/models/{model}", serving(_model))
    front.add("GET", "/v1/branches/{branch}", serving(_show_branch))
    front.add("PUT", "/v1/branches/{branch}", serving(_announce_branch))
    front.add("POST", "/v1/branches/{branch}/end", serving(_end_branch))
    operator_api.add_routes(front, gateway, gateway.agent_token)
    front.add("GET", "/healthz", partial(_health, gateway))
    front.add("GET", "/metrics", serving(_metrics))
    return front


def _begin(gateway: Gateway, kind: Kind, request: Request) -> Coroutine[Any, Any, Response | None] | None:
    """One completion. Existing engines' need no task of their own."""
    serving = gateway.ready()
    if serving.direct is None:
        return _complete(request, serving, kind)
    direct_front.complete(request, serving, serving.direct, kind)
    return None


async def _complete(request: Request, serving: Serving, kind: Kind) -> Response | None:
    """One completion: authenticate, read, tokenise, queue, and send what comes. Ends the request if the client goes."""
    config = serving.config
    received_at = serving.clock()
    caller = authenticate(config, request.headers, received_at)
    raw = request.body
    given = decode_json(raw)
    body = parse(_as_chat(given, kind), kind != "text")
    serving.check_model(body.model)
    if config.model.symbolic:
        refuse_without_text(body)
    place = standing(config, caller, request.headers)
    branch = branch_signal(caller, request.headers, body.session_id)
    ids = await _token_ids(serving, body, len(raw))
    request_id = request.request_id = serving.own_id(request.request_id)
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
        serving.enqueue(request_id, caller, place, branch, prompt, max_tokens, len(raw), received_at)
        return await _answer(request, session, kind, given)
    finally:
        del serving.sessions[request_id]
        if request_id in serving.yard.requests:
            serving.driver.feed(events.ClientGone(request_id))


def _as_chat(given: dict[str, Any], kind: Kind) -> dict[str, Any]:
    if kind == "messages":
        return messages_request.chat_body(given)
    return responses_request.chat_body(given) if kind == "responses" else given


async def _count_tokens(request: Request, serving: Serving) -> Response:
    """How many tokens a message's prompt has (Anthropic's `count_tokens`). Existing engines count themselves."""
    authenticate(serving.config, request.headers, serving.clock())
    chat = messages_request.count_body(decode_json(request.body))
    serving.check_model(chat["model"])
    if serving.direct is not None:
        return json_response({"input_tokens": await count_tokens(serving, serving.direct, chat)})
    body = parse(chat, chat=True)
    return json_response({"input_tokens": len(await _token_ids(serving, body, len(request.body)))})


# ---- reading -----------------------------------------------------------------------------------------------------


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


async def _answer(request: Request, session: Session, kind: Kind, given: dict[str, Any]) -> Response | None:
    body = session.body
    created = int(time.time())
    shape = AnswerFormat(session.request_id, body.model, created, body.chat, body.include_usage, session.logprobs)
    if kind == "messages":
        shape = TranslatedFormat(MessageAnswer(session.request_id, body.model))
    elif kind == "responses":
        shape = TranslatedFormat(ResponseAnswer(session.request_id, body.model, created, given))
    if body.stream:
        await _stream(request, session, shape)
        return None
    return await _whole(session, shape)


async def _whole(session: Session, shape: AnswerFormat) -> Response:
    pieces: list[str] = []
    choices: list[TokenChoice] = []
    while True:
        item = await session.next_item()
        if isinstance(item, ApiError):
            raise item
        if isinstance(item, Ended):
            answer = shape.whole("".join(pieces), item.finish_reason, _usage(session), tuple(choices))
            return Response(answer, headers={"content-type": "application/json", **session.route.headers()})
        pieces.append(item.text)
        choices += item.choices


async def _stream(request: Request, session: Session, shape: AnswerFormat) -> None:
    """Headers go out with the first token, so that a refused request still gets its own status."""
    item = await session.next_item()
    if isinstance(item, ApiError):
        raise item
    headers = {**_SSE_HEADERS, **session.route.headers(), "x-request-id": session.request_id}
    request.exchange.start(200, encode_headers(headers))
    chunk = shape.head()
    while True:
        if isinstance(item, Text):
            chunk += shape.text(item.text, item.choices)
        elif isinstance(item, Ended):
            chunk += shape.end(item.finish_reason, _usage(session))
        else:
            chunk += shape.failure(item)
        if not isinstance(item, Text):
            request.exchange.end(chunk)
            return
        if session.idle:
            await request.write(chunk)
            chunk = b""
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


async def _models(request: Request, serving: Serving) -> Response:
    authenticate(serving.config, request.headers, serving.clock())
    data = [_model_object(serving.config, name) for name in _names(serving.config)]
    return json_response({"object": "list", "data": data})


async def _model(request: Request, serving: Serving) -> Response:
    authenticate(serving.config, request.headers, serving.clock())
    name = request.match_info["model"]
    serving.check_model(name)
    return json_response(_model_object(serving.config, name))


async def _show_branch(request: Request, serving: Serving) -> Response:
    """A branch of the caller's own tenant, as the ledger has it."""
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
    return json_response(shown)


async def _announce_branch(request: Request, serving: Serving) -> Response:
    """What a harness says of a branch without a request; saying it again changes nothing."""
    caller = authenticate(serving.config, request.headers, serving.clock())
    branch = request.match_info["branch"]
    said = parse_announcement(decode_json(request.body))
    serving.driver.feed(
        events.BranchAnnounced(
            branch_id=branch_key(caller, branch),
            parent=branch_key(caller, said.parent) if said.parent else None,
            relation=said.relation,
            program=said.program,
            rewritten=said.rewritten,
        )
    )
    return json_response({"id": branch, "object": "branch", "announced": True})


async def _end_branch(request: Request, serving: Serving) -> Response:
    caller = authenticate(serving.config, request.headers, serving.clock())
    branch = request.match_info["branch"]
    key = branch_key(caller, branch)
    if not serving.yard.kv.names_live_branch(key):
        raise _no_branch(branch)
    serving.driver.feed(events.BranchEnd(key))
    serving.hasher.forget(key)
    return json_response({"id": branch, "object": "branch", "ended": True})


def _no_branch(branch: str) -> ApiError:
    return ApiError(404, f"The branch '{branch[:200]}' is not known, or has ended.", code="branch_not_found")


async def _health(gateway: Gateway, request: Request) -> Response:
    status = "ok" if gateway.serving is not None else gateway.fault or "waiting for a configuration"
    version = None if gateway.serving is None else gateway.serving.config.version
    return json_response(
        {
            "status": status,
            "partition": gateway.partition,
            "config_version": version,
            "degraded": gateway.degraded,
            "modules": apps.RUNS,
        }
    )


async def _metrics(request: Request, serving: Serving) -> Response:
    text = render(serving.metrics, serving.clock(), serving.yard)
    return Response(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})
