"""Existing engines behind the gateway: what passes through, both hand-overs, and what goes wrong."""

import asyncio
import json

import aiohttp
import pytest

from tests.gateway.direct_world import direct_world, events, text_of
from tests.gateway.world import KEY, until
from workers.gateway import direct_upstream

VLLM_PAIR = {"v1": "prefill", "v2": "decode"}
TWO = {"v1": "mixed", "v2": "mixed"}


async def test_a_stream_comes_as_the_engine_sent_it(tmp_path):
    async with direct_world(tmp_path) as world:
        response = await world.post(world.chat(stream=True))
        body = await response.read()
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert text_of(body) == "abc"
        assert events(body)[-1] == "[DONE]"
        assert response.headers["x-switchyard-prefill-node"] == "v1"
        await world.idle()


async def test_usage_is_asked_of_the_engine_and_shown_only_to_who_asked(tmp_path):
    async with direct_world(tmp_path) as world:
        plain = await (await world.post(world.chat(stream=True))).read()
        assert not any(event.get("usage") for event in events(plain)[:-1])
        asked = await (await world.post(world.chat(stream=True, stream_options={"include_usage": True}))).read()
        assert events(asked)[-2]["usage"]["completion_tokens"] == 3
        (double,) = world.engines.values()
        assert all(body["stream_options"] == {"include_usage": True} for body in double.bodies)
        await world.idle()
        reuse = world.serving.yard.kv.reuse()
        assert reuse.actual_tokens == reuse.prompt_tokens  # the engine counted more than the text suggests


async def test_an_answer_that_is_not_streamed_comes_as_it_is(tmp_path):
    async with direct_world(tmp_path) as world:
        answer = await (await world.post(world.chat())).json()
        assert answer["choices"][0]["message"]["content"] == "abc"
        assert answer["usage"]["prompt_tokens"] == 40
        await world.idle()


async def test_fields_that_the_gateway_does_not_know_pass_through(tmp_path):
    extra = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "guided_json": {"type": "object"},
        "seed": 2**62,
        "n": 2,
        "logit_bias": {"5": -100},
        "unknown": [1.5, None, "é"],
    }
    image = [
        {"type": "text", "text": "what"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    async with direct_world(tmp_path) as world:
        await world.post(world.chat(**extra, messages=[{"role": "user", "content": image}]))
        (body,) = world.engines["v1"].bodies
        assert {name: body[name] for name in extra} == extra
        assert body["messages"][0]["content"] == image


async def test_the_engine_hears_the_requests_id_and_never_the_clients_key(tmp_path):
    async with direct_world(tmp_path) as world:
        response = await world.post(world.chat(), **{"x-request-id": "req-7"})
        assert response.headers["x-request-id"] == "req-7"
        (headers,) = world.engines["v1"].headers
        assert headers[b"x-request-id"] == b"req-7"
        assert KEY not in str(headers)


async def test_an_alias_of_the_model_goes_by_the_engines_name(tmp_path):
    async with direct_world(tmp_path) as world:
        assert (await world.post(world.chat(model="glm-5.2"))).status == 200
        assert world.engines["v1"].bodies[0]["model"] == "glm"
        assert (await world.post(world.chat(model="other"))).status == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", None),
        (b"[]", None),
        (b"{}", "model"),
        (b'{"model":"glm"}', "messages"),
        (b'{"model":3,"messages":[]}', "model"),
        (b'{"model":"glm","messages":[{"role":"user","content":"x"}],"max_tokens":0}', "max_tokens"),
        (b'{"model":"glm","messages":[{"role":"user","content":"x"}],"max_tokens":"many"}', "max_tokens"),
        (b'{"model":"glm","messages":[{"role":"user","content":"x"}],"stream":"yes"}', "stream"),
        (b'{"model":"glm","messages":[{"role":"user","content":"x"}],"stream_options":3}', "stream_options"),
        (b'{"model":"glm","messages":[{"role":"user","content":"x"}],"user":"a\\u0000b"}', "user"),
        (b'{"model":"glm","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
)
async def test_a_body_that_cannot_be_is_refused_by_its_field(tmp_path, body, field):
    async with direct_world(tmp_path) as world:
        response = await world.post(body)
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, field)
        assert world.engines["v1"].bodies == []


async def test_without_a_key_nobody_is_served(tmp_path):
    async with direct_world(tmp_path) as world:
        assert (await world.post(world.chat(), authorization="")).status == 401
        assert world.engines["v1"].bodies == []


# ---- hand-overs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_hands_over_verbatim_under_one_id(tmp_path, stream):
    async with direct_world(tmp_path, VLLM_PAIR) as world:
        response = await world.post(world.chat(stream=stream, max_tokens=50))
        body = await response.read()
        assert (text_of(body) if stream else json.loads(body)["choices"][0]["message"]["content"]) == "abc"
        (first,), (second,) = world.engines["v1"].bodies, world.engines["v2"].bodies
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert second["kv_transfer_params"]["remote_engine_id"] == "e"
        assert second["kv_transfer_params"]["extra"] == 1.5
        assert (second["max_tokens"], second.get("stream", False)) == (50, stream)
        assert world.engines["v1"].headers[0][b"x-request-id"] == world.engines["v2"].headers[0][b"x-request-id"]
        assert (response.headers["x-switchyard-prefill-node"], response.headers["x-switchyard-decode-node"]) == (
            "v1",
            "v2",
        )
        await world.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_sglangs_legs_meet_in_a_room_of_their_own(tmp_path, stream):
    async with direct_world(tmp_path, {"v1": "prefill", "v2": "decode"}, "sglang", pause_s=0.005) as world:
        bodies = await asyncio.gather(*(world.post(world.chat(stream=stream)) for _ in range(8)))
        assert all(response.status == 200 for response in bodies)
        first, second = world.engines["v1"].bodies, world.engines["v2"].bodies
        rooms = [body["bootstrap_room"] for body in first]
        assert len(set(rooms)) == 8
        assert sorted(rooms) == sorted(body["bootstrap_room"] for body in second)
        assert {body["bootstrap_host"] for body in first + second} == {"127.0.0.1"}
        assert {body["bootstrap_port"] for body in first + second} == {9000}
        await world.idle()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("status", ["500", "503", "400"])
async def test_no_decode_is_started_for_a_prefill_that_failed(tmp_path, monkeypatch, kind, status):
    monkeypatch.setattr("workers.gateway.direct_upstream.REFUSAL_GRACE_S", 1.0)  # however slow the machine is
    async with direct_world(tmp_path, VLLM_PAIR, kind) as world:
        world.engines["v1"].fault = status
        response = await world.post(world.chat(stream=True))
        assert response.status in ((400,) if status == "400" else (502, 503))
        assert world.engines["v2"].bodies == []
        await world.idle()


async def test_a_prefill_that_fails_late_ends_the_leg_that_waits_for_it(tmp_path):
    async with direct_world(tmp_path, VLLM_PAIR, "sglang") as world:
        world.engines["v2"].fault = "hang"
        world.engines["v1"].pause_s = 0.1
        world.engines["v1"].fault = "cut"
        response = await world.post(world.chat(stream=True))
        assert response.status in (502, 503)
        assert world.engines["v2"].left == len(world.engines["v2"].bodies) >= 1
        await until(lambda: world.engines["v2"].open == 0)
        assert world.upstream.rooms.in_use == 0


async def test_a_server_without_a_connector_is_found_out(tmp_path):
    async with direct_world(tmp_path, VLLM_PAIR) as world:
        world.engines["v1"].answers["/v1/chat/completions"] = (200, b'{"choices":[]}')
        response = await world.post(world.chat())
        assert response.status == 502
        assert "kv_transfer_params" in (await response.json())["error"]["message"]
        await world.idle()


# ---- faults ----------------------------------------------------------------------------------------------------------


async def test_what_the_engine_refuses_the_client_hears_as_it_was_said(tmp_path):
    async with direct_world(tmp_path) as world:
        world.engines["v1"].fault = "422"
        for _ in range(12):
            response = await world.post(world.chat())
            assert (response.status, (await response.json())["error"]["message"]) == (422, "forced")
        world.engines["v1"].fault = ""
        assert (await world.post(world.chat())).status == 200  # a dozen refusals opened no circuit
        await world.idle()


@pytest.mark.parametrize("fault", ["503", "500", "429"])
async def test_a_server_that_fails_is_left_for_another(tmp_path, fault):
    async with direct_world(tmp_path, TWO) as world:
        world.engines["v1"].fault = fault
        for _ in range(4):
            assert text_of(await (await world.post(world.chat(stream=True))).read()) == "abc"
        await world.idle()


async def test_a_server_that_is_gone_is_left_for_another(tmp_path):
    async with direct_world(tmp_path, TWO) as world:
        world.engines["v1"].close()
        for _ in range(4):
            assert text_of(await (await world.post(world.chat(stream=True))).read()) == "abc"


async def test_the_gateways_own_key_being_refused_is_not_the_clients_fault(tmp_path):
    async with direct_world(tmp_path) as world:
        world.engines["v1"].fault = "401"
        response = await world.post(world.chat())
        assert response.status == 502
        assert "token_env" in (await response.json())["error"]["message"]


async def test_an_engine_that_dies_in_its_stream_is_an_error_event_in_ours(tmp_path):
    async with direct_world(tmp_path) as world:
        world.engines["v1"].fault = "cut"
        response = await world.post(world.chat(stream=True))
        told = events(await response.read())
        assert told[0]["choices"][0]["delta"]["content"] == "a"
        assert told[-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in told
        await world.idle()


async def test_an_engine_that_only_keeps_the_connection_alive_has_not_begun(tmp_path):
    """Comments and half an event, then it dies: another engine answers, and nothing of the first is in its answer."""
    async with direct_world(tmp_path, TWO) as world:
        for engine in world.engines.values():
            engine.texts = [b": keep-alive\n\n", b'data: {"choi', ...]
        tried = asyncio.ensure_future(world.post(world.chat(stream=True)))
        await until(lambda: any(engine.bodies for engine in world.engines.values()))
        for engine in world.engines.values():
            engine.texts = ["x"] if not engine.bodies else engine.texts
        response = await tried
        assert text_of(await response.read()) == "x"
        assert world.serving.yard.outcomes.counters.completed == 1
        await world.idle()


async def test_a_prefill_leg_that_does_not_end_is_left_and_its_room_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_upstream, "ENDING_S", 0.3)
    async with direct_world(tmp_path, VLLM_PAIR, "sglang") as world:
        world.engines["v1"].fault = "no end"
        assert text_of(await (await world.post(world.chat(stream=True))).read()) == "abc"
        assert world.upstream.rooms.in_use == 1
        await until(lambda: world.engines["v1"].open == 0, 3.0)
        await world.idle()


async def test_an_answer_goes_on_when_the_prefill_leg_of_its_room_breaks_late(tmp_path):
    async with direct_world(tmp_path, VLLM_PAIR, "sglang") as world:
        world.engines["v1"].fault = "cut"
        world.engines["v1"].pause_s = 0.2
        world.engines["v2"].texts = ["a", 0.4, "b"]
        response = await world.post(world.chat(stream=True))
        assert text_of(await response.read()) == "ab"
        assert world.serving.yard.outcomes.counters.completed == 1
        await world.idle()


@pytest.mark.parametrize("fault", ["no end", "late cut"])
async def test_the_closing_event_ends_the_answer_however_the_engine_ends_it(tmp_path, monkeypatch, fault):
    """And an engine that does not end its own answer is left a few seconds later."""
    monkeypatch.setattr(direct_upstream, "ENDING_S", 1.0)
    async with direct_world(tmp_path) as world:
        world.engines["v1"].fault = fault
        async with asyncio.timeout(0.9):
            told = events(await (await world.post(world.chat(stream=True))).read())
        assert told[-1] == "[DONE]"
        assert not any("error" in event for event in told[:-1])
        counters = world.serving.yard.outcomes.counters
        assert (counters.completed, counters.failed) == (1, 0)
        await until(lambda: world.engines["v1"].open == 0, 2.0)
        await world.idle()
        await until(lambda: not world.upstream.ending, 2.0)
        world.engines["v1"].fault = ""
        assert text_of(await (await world.post(world.chat(stream=True))).read()) == "abc"


async def test_a_decode_server_that_fails_before_its_first_token_is_tried_elsewhere(tmp_path):
    async with direct_world(tmp_path, {"v1": "prefill", "v2": "decode", "v3": "decode"}) as world:
        world.engines["v2"].fault = world.engines["v3"].fault = ""
        first = await world.post(world.chat(stream=True))
        broken = first.headers["x-switchyard-decode-node"]
        world.engines[broken].fault = "503"
        for _ in range(3):
            assert text_of(await (await world.post(world.chat(stream=True))).read()) == "abc"
        await world.idle()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_both_legs_at_once(tmp_path, kind, stream):
    async with direct_world(tmp_path, VLLM_PAIR, kind) as world:
        for fault_at in ("v1", "v2"):
            world.engines["v1"].fault = world.engines["v2"].fault = ""
            for name in (fault_at,) if kind == "vllm" else VLLM_PAIR:  # SGLang's decode waits for its prefill
                world.engines[name].fault = "hang"
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.2):
                    await world.post(world.chat(stream=stream))
            await until(lambda: not any(engine.open for engine in world.engines.values()), 1.0)
            await world.idle()


async def test_a_client_that_leaves_in_the_queue_is_gone_from_it(tmp_path):
    async with direct_world(tmp_path, limit=1) as world:
        world.engines["v1"].fault = "hang"
        waiting = [asyncio.create_task(world.post(world.chat())) for _ in range(3)]
        await until(lambda: len(world.serving.yard.requests) == 3)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await world.idle()
        assert len(world.engines["v1"].bodies) == 1


async def test_a_slow_reader_slows_only_itself(tmp_path):
    texts = ["x" * 20_000] * 400
    async with direct_world(tmp_path, texts=texts) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rsplit(":", 1)[1]), limit=1024)
        body = json.dumps(world.chat(stream=True)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: world.engines["v1"].open == 1)
        await asyncio.sleep(0.3)
        (relay,) = world.upstream.relays.values()
        assert relay.exchange.blocked
        assert relay.answer.paused
        world.engines["v1"].texts = ["fast"]
        fast = await world.post(world.chat(stream=True))
        assert text_of(await fast.read()) == "fast"
        size = 0
        while size < 8_000_000 and (data := await asyncio.wait_for(reader.read(1 << 20), 5)):
            size += len(data)
            if data.endswith(b"0\r\n\r\n"):
                break
        assert size > 8_000_000
        writer.close()
        await world.idle()


async def test_connections_to_engines_are_kept(tmp_path):
    async with direct_world(tmp_path, VLLM_PAIR) as world:
        for _ in range(5):
            await world.post(world.chat(stream=True))
        before = world.upstream.client.opened
        for _ in range(20):
            await world.post(world.chat(stream=True))
        assert world.upstream.client.opened == before


async def test_an_operator_cancels_a_request(tmp_path):
    async with direct_world(tmp_path) as world:
        world.engines["v1"].fault = "hang"
        waiting = asyncio.create_task(world.post(world.chat(), **{"x-request-id": "r1"}))
        await until(lambda: "r1" in world.serving.yard.requests)
        headers = {"authorization": "Bearer agent-token"}
        cancelled = await world.http.post(f"{world.url}/operator/v1/requests/r1/cancel?why=test", headers=headers)
        assert cancelled.status == 200
        assert (await waiting).status == 403
        await world.idle()


async def test_a_conversation_that_goes_on_finds_its_node_again(tmp_path):
    async with direct_world(tmp_path, {f"v{n}": "mixed" for n in range(1, 5)}) as world:
        messages = [{"role": "user", "content": "word " * 800}]
        first = await world.post(world.chat(messages=messages))
        home = first.headers["x-switchyard-prefill-node"]
        for turn in range(4):
            messages = [
                *messages,
                {"role": "assistant", "content": "abc"},
                {"role": "user", "content": f"and {turn}? " * 20},
            ]
            assert (await world.post(world.chat(messages=messages))).headers["x-switchyard-prefill-node"] == home


async def test_new_conversations_one_at_a_time_spread_over_equal_nodes(tmp_path):
    async with direct_world(tmp_path, {f"v{n}": "mixed" for n in range(1, 5)}) as world:
        for number in range(12):
            await world.post(world.chat(messages=[{"role": "user", "content": f"{number} " * 600}]))
        assert {len(engine.bodies) for engine in world.engines.values()} == {3}


async def test_completions_with_token_ids_pass_too(tmp_path):
    async with direct_world(tmp_path) as world:
        response = await world.post({"model": "glm", "prompt": [1, 2, 3], "max_tokens": 5}, "/v1/completions")
        assert response.status == 200
        assert world.engines["v1"].bodies[0]["prompt"] == [1, 2, 3]
        wrong = await world.post({"model": "glm", "prompt": [1, -2]}, "/v1/completions")
        assert (wrong.status, (await wrong.json())["error"]["param"]) == (400, "prompt")


async def test_tokens_are_counted_by_the_engine(tmp_path):
    ask = {"model": "glm", "messages": [{"role": "user", "content": "hi"}]}
    async with direct_world(tmp_path) as world:
        refused = await world.post(ask, "/v1/messages/count_tokens")
        assert (refused.status, (await refused.json())["error"]["type"]) == (501, "api_error")
        world.engines["v1"].answers["/tokenize"] = (200, b'{"count": 17, "tokens": []}')
        assert await (await world.post(ask, "/v1/messages/count_tokens")).json() == {"input_tokens": 17}


async def test_the_view_of_an_engine_without_events_is_said_to_be_assumed(tmp_path):
    async with direct_world(tmp_path) as world:
        assert "assumed" in world.serving.engines["v1"].view


async def test_http_clients_may_be_of_the_simplest_kind(tmp_path):
    """HTTP/1.0 without keep-alive: the stream ends with the connection."""
    async with direct_world(tmp_path) as world:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(version=aiohttp.HttpVersion10, timeout=timeout) as old:
            headers = {"authorization": f"Bearer {KEY}"}
            response = await old.post(f"{world.url}/v1/chat/completions", json=world.chat(stream=True), headers=headers)
            assert text_of(await response.read()) == "abc"
