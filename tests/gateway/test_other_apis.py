"""Anthropic's messages and OpenAI's responses through a real gateway, by their own clients."""

import contextlib

import anthropic
import openai
import pytest

from tests.gateway.direct_world import direct_world
from tests.gateway.world import KEY

ASK = {"model": "glm", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}


@contextlib.asynccontextmanager
async def clients(url, key=KEY):
    """Both, closed in the end."""
    async with (
        anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=0) as messages,
        openai.AsyncOpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0) as responses,
    ):
        yield messages, responses


async def test_messages_come_whole_and_as_a_stream(tmp_path):
    async with direct_world(tmp_path) as world, clients(world.url) as (client, _):
        message = await client.messages.create(**ASK)
        assert (message.content[0].text, message.stop_reason) == ("abc", "end_turn")
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (24, 16)
        async with client.messages.stream(**ASK) as stream:
            assert [text async for text in stream.text_stream] == ["a", "b", "c"]
            assert (await stream.get_final_message()).usage.output_tokens == 3
        await world.idle()


async def test_responses_come_whole_and_as_a_stream(tmp_path):
    async with direct_world(tmp_path) as world, clients(world.url) as (_, client):
        response = await client.responses.create(model="glm", input="hi")
        assert (response.output_text, response.usage.total_tokens) == ("abc", 43)
        async with client.responses.stream(model="glm", input="hi") as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == "abc"
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        await world.idle()


async def test_tools_and_images_reach_the_engine(tmp_path):
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    async with direct_world(tmp_path) as world, clients(world.url) as (client, _):
        content = [{"type": "text", "text": "what"}, image]
        await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": content}]}, tools=[tool])
        (body,) = world.engines["v1"].bodies
        assert body["tools"][0]["function"]["name"] == "f"
        assert body["messages"][0]["content"][1]["image_url"]["url"] == "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("422", anthropic.UnprocessableEntityError),
        ("503", anthropic.InternalServerError),
        ("429", anthropic.InternalServerError),
    ],
)
async def test_errors_have_the_apis_shape(tmp_path, fault, error):
    async with direct_world(tmp_path) as world, clients(world.url) as (client, _):
        world.engines["v1"].fault = fault
        with pytest.raises(error) as told:
            await client.messages.create(**ASK)
        assert told.value.body["type"] == "error"
        assert told.value.body["error"]["message"]
        await world.idle()


async def test_an_engine_that_dies_in_its_stream_is_an_error_of_either_api(tmp_path):
    async with direct_world(tmp_path) as world, clients(world.url) as (messages, responses):
        world.engines["v1"].fault = "cut"
        with pytest.raises(anthropic.APIStatusError):
            async with messages.messages.stream(**ASK) as stream:
                await stream.get_final_message()
        async with responses.responses.stream(model="glm", input="hi") as stream:
            kinds = [event.type async for event in stream]
        assert kinds[-1] == "response.failed"


async def test_a_wrong_key_is_an_authentication_error(tmp_path):
    async with direct_world(tmp_path) as world, clients(world.url, "wrong") as (client, _):
        with pytest.raises(anthropic.AuthenticationError) as told:
            await client.messages.create(**ASK)
        assert told.value.body["error"]["type"] == "authentication_error"


async def test_a_bad_field_is_named_before_any_engine_hears_of_it(tmp_path):
    async with direct_world(tmp_path) as world, clients(world.url) as (client, other):
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].role"):
            await client.messages.create(**{**ASK, "messages": [{"role": "robot", "content": "x"}]})
        with pytest.raises(openai.BadRequestError) as told:
            await other.responses.create(model="glm", input="hi", previous_response_id="resp_1")
        assert told.value.param == "previous_response_id"
        assert world.engines["v1"].bodies == []
