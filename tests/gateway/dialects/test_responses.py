"""OpenAI's Responses API, by its own client."""

import openai
import pytest

from tests.gateway.dialects.scripted import TEXT, TOOLS, Scripted, delta, finish
from workers.gateway.dialects.responses_answer import ResponseAnswer
from workers.gateway.errors import ApiError

TOOL = {"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True}


def test_a_text_comes_whole():
    response = Scripted(TEXT).openai.responses.create(model="m", input="hi", instructions="Be brief.", temperature=0.5)
    assert response.output_text == "Hello é"
    assert response.status == "completed"
    assert (response.instructions, response.temperature) == ("Be brief.", 0.5)
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (50, 32)
    assert (response.usage.output_tokens, response.usage.total_tokens) == (7, 57)


def test_a_text_streams_in_the_order_of_the_api():
    with Scripted(TEXT).openai.responses.stream(model="m", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    assert final.output_text == "Hello é"
    assert final.usage.output_tokens == 7


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_calls_come_as_items_of_their_own(streamed):
    client = Scripted(TOOLS).openai
    if streamed:
        with client.responses.stream(model="m", input="hi", tools=[TOOL]) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(model="m", input="hi", tools=[TOOL])
    message, weather, time = response.output
    assert message.content[0].text == "I look."
    assert (weather.call_id, weather.name, weather.arguments) == ("call_1", "weather", '{"city": "Rome"}')
    assert (time.call_id, time.name, time.arguments, time.status) == ("call_2", "time", "{}", "completed")


def test_an_answer_that_was_cut_is_incomplete():
    response = Scripted([delta(content="x"), finish("length")]).openai.responses.create(model="m", input="hi")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_thoughts_are_an_item():
    chunks = [delta(reasoning_content="hm"), delta(content="yes"), finish("stop")]
    response = Scripted(chunks).openai.responses.create(model="m", input="hi")
    assert [item.type for item in response.output] == ["reasoning", "message"]


def test_a_stream_that_fails_says_so():
    answer = ResponseAnswer("r1", "m", 1.0, {})
    answer.head()
    answer.push(delta(content="x"))
    assert b'"type":"response.failed"' in answer.failure(ApiError(502, "the node is gone", code="node-lost"))


def test_a_conversation_becomes_a_chat():
    scripted = Scripted(TEXT)
    scripted.openai.responses.create(
        model="m",
        instructions="Be brief.",
        max_output_tokens=9,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what"},
                    {"type": "input_image", "image_url": "data:x", "detail": "low"},
                ],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "reasoning", "id": "rs", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],
    )
    (chat,) = scripted.chat_bodies
    assert chat == {
        "model": "m",
        "max_completion_tokens": 9,
        "reasoning_effort": "low",
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "tools": [
            {
                "type": "function",
                "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what"},
                    {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
                ],
            },
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)
def test_a_bad_field_is_named_as_the_client_spelled_it(change, field):
    with pytest.raises(openai.BadRequestError) as told:
        Scripted(TEXT).openai.responses.create(**{"model": "m", "input": "hi", **change})
    assert told.value.param == field
