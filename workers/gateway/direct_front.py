"""Completions of partitions with existing engines: read lightly, queued and routed like any other, relayed as they come.

A plain function a request: no task, no coroutine. Chat and text completions are passed on byte for byte; Anthropic's messages
and OpenAI's responses are put into chat completions first and back on the way out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from workers.direct.bodies import with_fields
from workers.gateway import light_body
from workers.gateway.body import decode_json
from workers.gateway.dialects import messages_request, responses_request
from workers.gateway.dialects.messages_answer import MessageAnswer
from workers.gateway.dialects.responses_answer import ResponseAnswer
from workers.gateway.dialects.translator import Translator
from workers.gateway.direct_upstream import DirectUpstream
from workers.gateway.errors import ApiError, bad_field
from workers.gateway.light_fields import LightBody
from workers.gateway.relay import Relay
from workers.gateway.serving import ENGINE_DOMAIN, Serving
from workers.gateway.signals import authenticate, branch_signal, standing
from workers.gateway.web import Request
from workers.http.client import CallError
from workers.yard import events

Kind = Literal["chat", "text", "messages", "responses"]
DEFAULT_OUTPUT_TOKENS = 1024
_PATHS: Mapping[Kind, str] = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "messages": "/v1/chat/completions",
    "responses": "/v1/chat/completions",
}


def complete(request: Request, serving: Serving, upstream: DirectUpstream, kind: Kind) -> None:
    """Authenticates, reads what decisions need, queues. Raises ApiError before anything was answered."""
    received_at = serving.clock()
    config = serving.config
    caller = authenticate(config, request.headers, received_at)
    raw, translator = _as_chat(request, kind)
    chat = kind != "text"
    body = light_body.read(raw, chat)
    serving.check_model(body.model)
    if body.model != config.model.name:
        raw = with_fields(raw, {"model": config.model.name})
    place = standing(config, caller, request.headers)
    branch = branch_signal(caller, request.headers, body.session_id)
    request.request_id = serving.own_id(request.request_id)
    relay = Relay(
        exchange=request.exchange,
        request_id=request.request_id,
        path=_PATHS[kind],
        body=raw,
        stream=bool(body.stream),
        wants_usage=body.wants_usage,
        prompt=serving.hasher.hash(ENGINE_DOMAIN, _ids(serving, body, chat), None, branch.branch_id or branch.session),
        translator=translator,
        head_lines=b"x-request-id: %b\r\n" % request.request_id.encode(),
    )
    if relay.prompt.tokens >= config.model.context_tokens and not config.model.by_text:
        text = f"This model's context holds {config.model.context_tokens} tokens; the prompt has {relay.prompt.tokens}."
        raise bad_field("messages" if chat else "prompt", text, "context_length_exceeded")
    upstream.relays[relay.request_id] = relay
    request.exchange.on_gone = lambda: _gone(serving, upstream, relay)
    request.exchange.on_blocked = relay.pause
    room = max(1, config.model.context_tokens - relay.prompt.tokens)
    output_tokens = min(body.output_tokens or DEFAULT_OUTPUT_TOKENS, room)
    serving.enqueue(
        relay.request_id, caller, place, branch, relay.prompt, output_tokens, len(request.body), received_at
    )


def _gone(serving: Serving, upstream: DirectUpstream, relay: Relay) -> None:
    """The client left: both legs end at once."""
    relay.over = True
    relay.abort()
    upstream.left_room(relay)
    upstream.forget(relay)
    if relay.request_id in serving.yard.requests:
        serving.driver.feed_all([*upstream.progress(relay), events.ClientGone(relay.request_id)])


def _as_chat(request: Request, kind: Kind) -> tuple[bytes, Translator | None]:
    """The body for the engine, and who translates its answer."""
    if kind in ("chat", "text"):
        return request.body, None
    given = decode_json(request.body)
    if kind == "messages":
        chat: dict[str, Any] = messages_request.chat_body(given)
        return msgspec.json.encode(chat), MessageAnswer(request.request_id, chat["model"])
    chat = responses_request.chat_body(given)
    return msgspec.json.encode(chat), ResponseAnswer(request.request_id, chat["model"], float(int(time.time())), given)


def _ids(serving: Serving, body: LightBody, chat: bool) -> Any:
    """The prompt's ids: real tokens where the model's tokenizer is known, else four bytes of text each."""
    if serving.config.model.by_text:
        ids = light_body.text_ids(body, chat)
    elif chat:
        ids = serving.codec.encode_chat(_messages(body))
    elif light_body.is_list(body.prompt):
        ids = light_body.text_ids(body, chat)
    else:
        ids = serving.codec.encode(_decoded(body.prompt, "prompt", str))
    if not ids:
        raise bad_field("messages" if chat else "prompt", f"'{'messages' if chat else 'prompt'}' must not be empty.")
    return ids


def _messages(body: LightBody) -> list[dict[str, str]]:
    """The messages as texts for the template: routing needs no more than that, the engine reads the rest itself."""
    messages = _decoded(body.messages, "messages", list[dict[str, Any]])
    if not messages:
        raise bad_field("messages", "'messages' must be a list of at least one message.")
    return [{"role": str(message.get("role", "user")), "content": _text(message)} for message in messages]


def _decoded(raw: msgspec.Raw, name: str, kind: Any) -> Any:
    """A field that was not looked into so far. Raises ApiError (400)."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        what = "a text or a list" if name == "prompt" else "a list of objects"
        raise bad_field(name, f"'{name}' must be {what}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise bad_field(name, f"'{name}' is not text in UTF-8, or nested too deeply.", "invalid_json") from None


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "" if content is None else msgspec.json.encode(content).decode()


async def count_tokens(serving: Serving, upstream: DirectUpstream, chat: Mapping[str, Any]) -> int:
    """The engine's own count of a chat's prompt, from its `/tokenize`. Raises ApiError 503 or 501."""
    body = msgspec.json.encode({**chat, "model": serving.config.model.name, "add_generation_prompt": True})
    problem = "no engine is ready"
    for node in serving.yard.fleet.nodes:
        engine = serving.engines.get(node.name)
        if engine is None or node.health != "ok":
            continue
        try:
            answer = await engine.post("/tokenize", body)
            told = msgspec.json.decode(answer.body) if answer.status == 200 else {}
        except (CallError, msgspec.DecodeError) as error:
            problem = f"{node.name}: {error}"
            continue
        if isinstance(told, dict) and type(told.get("count")) is int:
            return int(told["count"])
        text = f"The engine of {node.name} does not count tokens ('/tokenize' answered {answer.status})."
        raise ApiError(501, text, code="not_supported")
    raise ApiError(503, f"Tokens cannot be counted now: {problem}.", code="unavailable", headers={"retry-after": "2"})
