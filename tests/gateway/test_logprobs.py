"""Log probabilities and penalties through the front door, over small seeded nodes whose tokens are any bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import KEY, PHASES, World, agent_spec, world

MODEL = {
    "name": "tiny", "served_names": [], "tokenizer": "gguf", "tokenizer_path": None,
    "dtype": "f32", "block_tokens": 16, "ids_per_block": 16, "tokens_per_id": 1, "context_tokens": 1024,
}  # fmt: skip
NODE_MODEL = {"name": "tiny", "weights": "random", "context_tokens": 1024}
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Any bytes, please: 🚂"}],
    "max_tokens": 40,
    "temperature": 1.0,
    "seed": 3,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny-weights")


@pytest.fixture
async def yard(tmp_path: Path, weights_dir: Path) -> AsyncIterator[World]:
    limits = {"max_decode_batch": 8, "prefill_chunk_tokens": 64, "kv_tokens": 2048}
    spec = agent_spec(
        tmp_path / "agent", PHASES, 1.0, engine="reference", model=NODE_MODEL, pool_blocks=256, limits=limits
    )
    spec["models_dir"] = str(weights_dir)
    async with world(tmp_path, spec=spec, model=MODEL) as running:
        yield running


async def ask(yard: World, path: str = "/v1/chat/completions", **changes: Any) -> tuple[int, dict[str, Any]]:
    body = {name: value for name, value in (ASK | changes).items() if value is not None}
    headers = {"Authorization": f"Bearer {KEY}"}
    async with yard.http.post(yard.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def stream(yard: World, **changes: Any) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = ASK | changes | {"stream": True}
    async with yard.http.post(yard.url + "/v1/chat/completions", json=body, headers=headers) as answer:
        lines = [line[6:] async for line in answer.content if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def told(answer: dict[str, Any]) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    return content


async def test_every_token_is_told_with_its_bytes_which_make_the_text(yard: World) -> None:
    status, answer = await ask(yard, logprobs=True, top_logprobs=3)
    assert status == 200
    entries = told(answer)
    text = answer["choices"][0]["message"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 40
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode("utf-8", "replace") == text
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry["logprob"] <= values[0] < 0


async def test_a_stream_tells_the_same_tokens_and_the_same_bytes_as_the_whole(yard: World) -> None:
    _, answer = await ask(yard, logprobs=True, top_logprobs=2)
    chunks = await stream(yard, logprobs=True, top_logprobs=2)
    assert (
        "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        == (answer["choices"][0]["message"]["content"])
    )
    streamed = [entry for chunk in chunks if chunk["choices"][0]["logprobs"] for entry in told(chunk)]
    assert streamed == told(answer)


async def test_tokens_of_a_stop_string_are_not_told(yard: World) -> None:
    _, whole = await ask(yard, logprobs=True)
    text = whole["choices"][0]["message"]["content"]
    at = next(index for index in range(8, len(text)) if text.index(text[index : index + 3]) == index)
    _, stopped = await ask(yard, logprobs=True, stop=[text[at : at + 3]])
    assert stopped["choices"][0]["message"]["content"] == text[:at]
    kept = told(stopped)
    assert kept == told(whole)[: len(kept)]
    assert len(b"".join(bytes(entry["bytes"]) for entry in kept[:-1]).decode("utf-8", "replace")) <= at


async def test_a_text_completion_tells_tokens_and_offsets(yard: World) -> None:
    status, answer = await ask(yard, "/v1/completions", messages=None, prompt="Once upon", logprobs=2, max_tokens=12)
    assert status == 200
    choice = answer["choices"][0]
    shape = choice["logprobs"]
    assert {len(shape[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {12}
    assert shape["text_offset"][0] == 0
    assert shape["text_offset"] == sorted(shape["text_offset"])
    assert shape["text_offset"][-1] <= len(choice["text"])


async def test_a_frequency_penalty_ends_repetition(yard: World) -> None:
    loop = {"temperature": 0, "max_tokens": 60, "logprobs": True}
    _, plain = await ask(yard, **loop)
    _, varied = await ask(yard, **loop, frequency_penalty=2.0, presence_penalty=2.0)
    distinct = [len({tuple(entry["bytes"]) for entry in told(answer)}) for answer in (plain, varied)]
    assert distinct[1] > distinct[0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
async def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    yard: World, change: dict[str, Any], field: str
) -> None:
    status, answer = await ask(yard, **change)
    assert (status, answer["error"]["param"]) == (400, field)
