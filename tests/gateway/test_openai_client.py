"""The `openai` client against the gateway: chats with SmolLM2 over three real nodes, completions over simulated ones."""

from __future__ import annotations

import asyncio
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.world import EXPIRED_KEY, KEY, PHASES, World, agent_spec, world

MODEL = {
    "name": "smollm2", "served_names": ["smollm2-135m-instruct"], "tokenizer": "gguf", "tokenizer_path": None,
    "dtype": "f32", "block_tokens": 16, "ids_per_block": 16, "tokens_per_id": 1, "context_tokens": 2048,
}  # fmt: skip
LIMITS = {"max_decode_batch": 8, "prefill_chunk_tokens": 128, "kv_tokens": 4096}
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


def client(yard: World, secret: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=yard.url + "/v1", api_key=secret, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2-weights")


@pytest.fixture
async def chat_yard(tmp_path: Path, weights_dir: Path) -> AsyncIterator[World]:
    model = {name: MODEL[name] for name in MODEL if name not in ("served_names", "tokenizer", "tokenizer_path")}
    spec = agent_spec(tmp_path / "agent", PHASES, 1.0, engine="reference", model=model, pool_blocks=512, limits=LIMITS)
    spec["models_dir"] = str(weights_dir)
    async with world(tmp_path, spec=spec, model=MODEL) as running:
        yield running


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as running:
        yield running


@pytest.mark.slow
async def test_a_conversation_with_the_real_model_reuses_its_own_past(chat_yard: World) -> None:
    """Whole, streamed and stopped answers of one greedy question are the same text; the second turn finds the first."""
    async with client(chat_yard) as api:
        ask: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
        whole = await api.chat.completions.create(**ask)
        text = whole.choices[0].message.content
        assert text is not None and "Paris" in text
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None and whole.usage.completion_tokens >= 1

        stream = await api.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens_details is not None
        assert (chunks[-1].usage.prompt_tokens_details.cached_tokens or 0) >= 16

        stopped = await api.chat.completions.create(**ask, stop=["ris"])
        assert stopped.choices[0].message.content == text[: text.index("ris")]
        assert stopped.choices[0].finish_reason == "stop"

        turn = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "And of Italy?"}]
        raw = await api.chat.completions.with_raw_response.create(**(ask | {"messages": turn, "max_tokens": 8}))
        assert int(raw.headers["x-switchyard-cached-tokens"]) >= 32
        assert raw.parse().choices[0].message.content
    await chat_yard.idle()


@pytest.mark.slow
async def test_answers_at_the_same_time_equal_answers_alone(chat_yard: World) -> None:
    async with client(chat_yard) as api:

        async def ask(words: str) -> str | None:
            answer = await api.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": words}], max_tokens=12, temperature=0
            )
            return answer.choices[0].message.content

        questions = ["Name a colour.", "Count to five.", "Say hello in French."]
        together = await asyncio.gather(*(ask(words) for words in questions))
        assert together == [await ask(words) for words in questions]


async def test_models_are_listed_under_every_served_name(yard: World) -> None:
    async with client(yard) as api:
        assert [model.id async for model in api.models.list()] == ["glm", "glm-5.2"]
        assert (await api.models.retrieve("glm-5.2")).owned_by == "switchyard"


async def test_the_client_raises_its_own_errors(yard: World) -> None:
    async with client(yard) as api:
        with pytest.raises(openai.NotFoundError) as unknown:
            await api.completions.create(model="gpt-4", prompt=[1, 2])
        assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
        with pytest.raises(openai.BadRequestError) as text:
            await api.chat.completions.create(model="glm", messages=[{"role": "user", "content": "hello"}])
        assert text.value.code == "symbolic_model" and text.value.param == "messages"
    async with client(yard, EXPIRED_KEY) as api:
        with pytest.raises(openai.AuthenticationError, match="expired"):
            await api.completions.create(model="glm", prompt=[1, 2])


async def test_a_completion_streams_through_the_client(yard: World) -> None:
    async with client(yard) as api:
        stream = await api.completions.create(
            model="glm-5.2", prompt=[1, 2, 3], max_tokens=30, stream=True, extra_body={"switchyard": {}}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "." * 30
        assert chunks[-1].choices[0].finish_reason == "length"
        assert {chunk.model for chunk in chunks} == {"glm-5.2"}
