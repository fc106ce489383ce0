"""Anthropic's Messages API, by its own client."""

import anthropic
import pytest

from tests.gateway.dialects.scripted import TEXT, TOOLS, Scripted, delta, finish
from workers.gateway.dialects.messages_answer import error_event
from workers.gateway.errors import ApiError

ASK = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}


def test_a_text_comes_whole():
    message = Scripted(TEXT).anthropic.messages.create(**ASK)
    assert message.content[0].text == "Hello é"
    assert message.stop_reason == "end_turn"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (
        18,
        32,
        7,
    )


def test_a_text_streams_and_adds_up_to_the_same():
    scripted = Scripted(TEXT)
    with scripted.anthropic.messages.stream(**ASK) as stream:
        assert list(stream.text_stream) == ["Hel", "lo é"]
        streamed = stream.get_final_message()
    whole = scripted.anthropic.messages.create(**ASK)
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 7
    assert streamed.usage.cache_read_input_tokens == 32
    assert scripted.chat_bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls_come_as_blocks_of_their_own(streamed):
    client = Scripted(TOOLS).anthropic
    if streamed:
        with client.messages.stream(**ASK, tools=[TOOL]) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**ASK, tools=[TOOL])
    text, weather, time = message.content
    assert text.text == "I look."
    assert (weather.id, weather.name, weather.input) == ("call_1", "weather", {"city": "Rome"})
    assert (time.id, time.name, time.input) == ("call_2", "time", {})
    assert message.stop_reason == "tool_use"


def test_thoughts_come_before_the_text():
    chunks = [delta(reasoning_content="hm"), delta(content="yes"), finish("stop")]
    with Scripted(chunks).anthropic.messages.stream(**ASK) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "hm"


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (finish("length"), "max_tokens", None),
        (finish("stop", stop_reason="END"), "stop_sequence", "END"),
        (finish("stop", matched_stop="END"), "stop_sequence", "END"),
        (finish("stop", matched_stop=2), "end_turn", None),
    ],
)
def test_why_an_answer_ended_is_told(end, reason, sequence):
    message = Scripted([delta(content="x"), end]).anthropic.messages.create(**ASK, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_arguments_that_are_not_an_object_are_passed_on_as_they_are():
    chunks = [
        delta(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": "[1"}}]),
        finish("tool_calls"),
    ]
    assert Scripted(chunks).anthropic.messages.create(**ASK).content[0].input == {"_unparsed": "[1"}


def test_a_conversation_with_tools_and_images_becomes_a_chat():
    scripted = Scripted(TEXT)
    scripted.anthropic.messages.create(
        model="m",
        max_tokens=5,
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Now."},
        ],
        extra_body={"temperature": 0.5, "top_k": 3},
        metadata={"user_id": "u1"},
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                    {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    )
    (chat,) = scripted.chat_bodies
    assert chat == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "user": "u1",
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "d", "parameters": TOOL["input_schema"]},
            }
        ],
        "messages": [
            {"role": "system", "content": "Be brief.\nNow."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
            {"role": "user", "content": "and?"},
        ],
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "n", "input": 1}]}
                ]
            },
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "x"}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"metadata": {"user_id": 3}}, "metadata.user_id"),
    ],
)
def test_a_bad_field_is_named_as_the_client_spelled_it(change, field):
    with pytest.raises(anthropic.BadRequestError) as told:
        Scripted(TEXT).anthropic.messages.create(**{**ASK, **change})
    assert told.value.body["error"]["type"] == "invalid_request_error"
    assert f"'{field}'" in told.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, "rate_limit_error"), (503, "overloaded_error"), (502, "api_error"), (409, "invalid_request_error")],
)
def test_an_error_in_a_stream_has_the_apis_shape(status, kind):
    event = error_event(ApiError(status, "no room"), "r1")
    assert event.startswith(b"event: error\ndata: ")
    assert f'"type":"{kind}"'.encode() in event


def test_usage_that_never_came_counts_nothing():
    assert Scripted([delta(content="x"), finish("stop")]).anthropic.messages.create(**ASK).usage.output_tokens == 0
