"""Completions through the front door: a replayed prompt goes to a prefill node, its KV to a decode node, and back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.world import World, prompt, world


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as running:
        yield running


async def test_a_symbolic_prompt_is_answered_with_one_dot_a_token(yard: World) -> None:
    response = await yard.complete()
    answer = await response.json()
    assert response.status == 200, answer
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "length", "text": "." * 20}]
    assert answer["usage"] == {
        "prompt_tokens": 263,
        "completion_tokens": 20,
        "total_tokens": 283,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_headers_say_where_a_request_went_and_why(yard: World) -> None:
    first = await yard.complete(x_request_id="mine-1")
    again = await yard.complete(prompt(6))
    assert first.headers["x-request-id"] == "mine-1"
    assert first.headers["x-switchyard-prefill-node"] == "n1"
    assert first.headers["x-switchyard-decode-node"] in ("n2", "n3")
    assert first.headers["x-switchyard-cached-tokens"] == "0"
    assert float(first.headers["x-switchyard-predicted-ttft-ms"]) > 50
    assert float(first.headers["x-switchyard-queue-ms"]) < 1000
    assert "n1" in first.headers["x-switchyard-reason"]
    assert again.headers["x-switchyard-cached-tokens"] == str(4 * 64)


async def test_a_stream_carries_the_same_answer_in_chunks(yard: World) -> None:
    body = prompt(max_tokens=50, stream=True, stream_options={"include_usage": True})
    response = await yard.complete(body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-switchyard-decode-node"] in ("n2", "n3")
    lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == "." * 50
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 50
