"""What engines may answer, down to what no engine should: the client hears the truth of it, and nothing stays held."""

import asyncio
import json

import pytest

from tests.direct.engine import JSON, STREAM, event
from tests.gateway.direct_world import direct_world, text_of
from tests.gateway.world import until
from workers.yard import commands
from workers.yard import events as yard_events

DONE = b"data: [DONE]\n\n"
SAID = {"error": {"message": "out of memory", "type": "x", "code": 500}}


def delta(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


def speaks(engine, *pieces: bytes, whole: object = None) -> None:
    """The double answers streams with these pieces, anything else with `whole`."""

    async def answer(exchange, body):
        engine.open -= 1
        if not body.get("stream"):
            exchange.respond(200, JSON, json.dumps(whole).encode())
            return
        exchange.start(200, STREAM)
        for piece in pieces:
            exchange.write(piece)
            await asyncio.sleep(0)
        exchange.end(b"")

    engine._answer = answer


async def test_a_text_that_says_done_is_not_the_end(tmp_path):
    async with direct_world(tmp_path) as world:
        text = "the stream ends with data: [DONE] and then"
        speaks(world.engines["v1"], delta(text), delta("[DONE]"), delta("more"), DONE)
        response = await world.post(world.chat(stream=True))
        assert text_of(await response.read()) == text + "[DONE]more"
        await world.idle()
        assert world.serving.metrics._tokens.values[("output",)] == 3


@pytest.mark.parametrize("gap", [b"\n\n", b"\r\n\r\n"])
async def test_what_follows_the_closing_event_is_nobodys(tmp_path, gap):
    async with direct_world(tmp_path) as world:
        sent = (delta("a") + DONE + delta("b") + delta("c")).replace(b"\n\n", gap)
        speaks(world.engines["v1"], sent)
        body = await (await world.post(world.chat(stream=True))).read()
        assert body == sent[: sent.index(b"[DONE]") + 6] + gap
        await world.idle()


async def test_events_whose_ends_differ_all_arrive(tmp_path):
    async with direct_world(tmp_path) as world:
        usage = event({"choices": [{"index": 0, "delta": {"content": "u"}}], "usage": {"completion_tokens": 7}})
        speaks(world.engines["v1"], delta("a").replace(b"\n\n", b"\r\n\r\n") + usage + delta("b") + DONE)
        body = await (await world.post(world.chat(stream=True))).read()
        assert text_of(body.replace(b"\r\n\r\n", b"\n\n")) == "aub"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("begun", [True, False])
async def test_an_error_event_of_the_engine_is_an_error_not_an_answer(tmp_path, path, begun):
    async with direct_world(tmp_path) as world:
        said = b"data: " + json.dumps(SAID).encode() + b"\n\n"
        speaks(world.engines["v1"], *([delta("a") + said] if begun else [said]), DONE)
        ask = world.chat(stream=True, max_tokens=9)
        if path == "/v1/responses":
            ask = {"model": "glm", "input": "hello", "stream": True}
        response = await world.post(ask, path)
        body = await response.read()
        assert b"out of memory" in body
        assert b"message_stop" not in body and b"response.completed" not in body
        assert response.status == (200 if begun else 503)
        await world.idle()
        counters = world.serving.yard.outcomes.counters
        assert (counters.completed, counters.failed) == (0, 1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("code", [500, 400])
async def test_an_error_that_is_called_a_success_is_an_error(tmp_path, path, code):
    async with direct_world(tmp_path) as world:
        speaks(world.engines["v1"], whole={"error": {"message": "told so", "code": code}})
        ask = {"model": "glm", "input": "hello"} if path == "/v1/responses" else world.chat(max_tokens=9)
        response = await world.post(ask, path)
        assert response.status == (400 if code == 400 else 503)
        assert b"told so" in await response.read()
        await world.idle()


NONSENSE = [
    {"usage": "many"},
    {"usage": {"prompt_tokens": "x", "completion_tokens": -4, "prompt_tokens_details": 3}},
    {"usage": {"prompt_tokens": 1.5, "completion_tokens": 10**30, "prompt_tokens_details": {"cached_tokens": [1]}}},
    {"choices": 3},
    {"choices": [4]},
    {"choices": [{"delta": "x", "message": "x"}]},
    {"choices": [{"delta": {"content": 5}, "message": {"content": 5}}]},
    {"choices": [{"delta": {"tool_calls": [7]}, "message": {"tool_calls": [7]}}]},
    {"choices": [{"delta": {"content": [{"text": "x"}]}, "message": {"content": {"a": 1}}, "finish_reason": ["x"]}]},
]


@pytest.mark.parametrize(
    ("path", "stream"),
    [("/v1/chat/completions", True), ("/v1/messages", False), ("/v1/messages", True), ("/v1/responses", True)],
)
@pytest.mark.parametrize("said", NONSENSE, ids=json.dumps)
async def test_an_answer_of_another_shape_holds_nothing(tmp_path, path, stream, said):
    async with direct_world(tmp_path) as world:
        speaks(world.engines["v1"], event(said), DONE, whole={"choices": []} | said)
        ask = world.chat(stream=stream, max_tokens=9)
        if path == "/v1/responses":
            ask = {"model": "glm", "input": "hello", "stream": stream}
        async with asyncio.timeout(5):
            await world.post(ask, path)
        await world.idle()
        assert all(count >= 0 for count in world.serving.metrics._tokens.values.values())


async def test_a_hand_over_with_usage_of_another_shape_holds_nothing(tmp_path):
    async with direct_world(tmp_path, {"v1": "prefill", "v2": "decode"}) as world:
        speaks(world.engines["v1"], whole={"usage": "x", "kv_transfer_params": {"a": 1}})
        async with asyncio.timeout(5):
            assert (await world.post(world.chat())).status == 200
        await world.idle()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_an_answer_may_come_in_pieces_of_any_size(tmp_path, size):
    usage = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    sent = delta("a") + b": ping\n\n" + delta("é") + usage + DONE
    async with direct_world(tmp_path) as world:
        speaks(world.engines["v1"], *(sent[at : at + size] for at in range(0, len(sent), size)))
        body = await (await world.post(world.chat(stream=True))).read()
        assert body == sent.replace(usage, b"").removeprefix(b": ping\n\n"), "kept back until an answer begins"
        await world.idle()
        assert world.serving.metrics._tokens.values[("output",)] == 2


async def test_a_room_is_free_when_the_yard_gives_the_request_up(tmp_path):
    async with direct_world(tmp_path, {"v1": "prefill", "v2": "decode"}, "sglang") as world:
        for engine in world.engines.values():
            engine.fault = "hang"
        waiting = asyncio.create_task(world.post(world.chat(stream=True)))
        await until(lambda: world.engines["v2"].open == 1)
        (relay,) = world.upstream.relays.values()
        world.upstream.refuse(commands.Refuse(relay.request_id, 503, "given_up", "given up", None))
        assert (await waiting).status == 503
        await until(lambda: not any(engine.open for engine in world.engines.values()))
        assert world.upstream.rooms.in_use == 0
        world.serving.driver.feed(yard_events.ClientGone(relay.request_id))
