"""SmolLM2-135M-Instruct: greedy tokens equal those recorded with transformers and torch (tools/record_greedy_tokens.py)."""

from __future__ import annotations

import asyncio
import hashlib
import json
from array import array
from pathlib import Path

import pytest

from tests.agent.reference_support import RecordingSink, chain_of, collect, context, decode_job, settled
from workers.agent.engines.base import PrefillJob, Sampling
from workers.agent.engines.reference.engine import build
from workers.agent.engines.reference.gguf_file import default_model_path
from workers.agent.engines.reference.tokenizer import load_tokenizer
from workers.agent.spec import LimitsSpec, ModelSpec, NodeSpec

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())


@pytest.fixture(scope="module")
def default_models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("default-model")


def test_the_recording_is_of_the_installed_model() -> None:
    assert hashlib.sha256(default_model_path().read_bytes()).hexdigest() == RECORDED["model_sha256"]
    assert len(RECORDED["prompts"]) >= 12


@pytest.mark.slow
async def test_greedy_tokens_equal_the_independent_implementation(tmp_path: Path, default_models_dir: Path) -> None:
    """All prompts at once, prefilled in chunks together and decoded in batches, KV handed over through the pool."""
    spec = NodeSpec(
        name="n1",
        engine="reference",
        model=ModelSpec(name="smollm2"),
        pool_blocks=512,
        limits=LimitsSpec(kv_tokens=4096, prefill_chunk_tokens=128),
    )
    engine = build(spec, context(tmp_path, default_models_dir))
    await engine.start(RecordingSink())

    async def answer(number: int, ids: list[int], tokens: int) -> list[int]:
        job = PrefillJob(
            f"r{number}", array("I", ids), len(ids), chain_of(array("I", ids)), None, None, Sampling(tokens)
        )
        result = await engine.prefill(job)
        output = [result.first_token_id]
        if result.first_finish is None:
            more, end = await collect(engine, decode_job(job, output, result.handoff))
            output += more
            if end.finish_reason == "stop":
                output.append(2)
        return output

    try:
        outputs = await asyncio.gather(
            *(
                answer(number, prompt["token_ids"], len(prompt["output_ids"]) + (prompt["output_ids"][-1] == 2))
                for number, prompt in enumerate(RECORDED["prompts"])
            )
        )
        await settled(engine)
        engine.check_integrity()
    finally:
        await engine.close()
    for prompt, output in zip(RECORDED["prompts"], outputs, strict=True):
        assert output == prompt["output_ids"], prompt["text"]
    assert "Paris" in load_tokenizer().decode(outputs[0])
