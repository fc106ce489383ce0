"""Mooncake's transfer engine as a way to read peers' pools: where it can be imported, and what is said where it cannot."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.agent.reference_support import (
    TOKEN,
    RecordingSink,
    build,
    context,
    fetch_from,
    greedy,
    prefill_job,
    prompt,
    tiny_spec,
)
from workers.agent.engines.reference.engine import ReferenceEngine
from workers.agent.process import AgentProcess
from workers.agent.spec import AgentSpec, NodeSpec, SpecError

try:
    import mooncake.engine  # noqa: F401

    WHY_NOT = ""
except ImportError as error:
    WHY_NOT = str(error)
needs_mooncake = pytest.mark.skipif(bool(WHY_NOT), reason=f"mooncake cannot be imported: {WHY_NOT}")


def spec_of(name: str, **fields: object) -> NodeSpec:
    return msgspec.structs.replace(tiny_spec(name), transports=("mooncake",), **fields)


async def test_a_node_that_lacks_mooncake_says_what_is_missing(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    monkeypatch.setattr("workers.agent.mooncake.MooncakeEngine._of_process", None)
    engine = build(spec_of("n1"), context(tmp_path, models_dir))
    with pytest.raises(SpecError, match=r"nodes\.transports: mooncake: .* cannot be imported .*libibverbs\.so\.1"):
        await engine.start(RecordingSink())
    await engine.close()


def reference(process: AgentProcess, name: str) -> ReferenceEngine:
    engine = process.nodes[name].engine
    assert isinstance(engine, ReferenceEngine)
    return engine


@needs_mooncake
async def test_a_prompt_comes_from_a_peers_pool_by_mooncake(tmp_path: Path, models_dir: Path) -> None:
    specs = [spec_of("source"), spec_of("reader")]
    process = AgentProcess(AgentSpec(data_dir=str(tmp_path), nodes=specs, models_dir=str(models_dir)), TOKEN)
    await process.start()
    try:
        source, reader = reference(process, "source"), reference(process, "reader")
        job = prefill_job(prompt(130, 1))
        await source.prefill(job)
        fetch = replace(fetch_from(source, "source", 8), url=process.base_url)
        result = await reader.prefill(prefill_job(job.token_ids, "again", fetch))
        assert (result.fetched_tokens, result.first_token_id) == (128, greedy(models_dir, job.token_ids, 1)[0])
        counters = reader.status().counters
        assert (counters["fetched_blocks_mooncake"], counters["failed_fetches"]) == (8, 0)
    finally:
        await process.close()


@needs_mooncake
async def test_a_flipped_byte_is_found_also_when_mooncake_brought_it(tmp_path: Path, models_dir: Path) -> None:
    specs = [spec_of("source"), spec_of("reader")]
    process = AgentProcess(AgentSpec(data_dir=str(tmp_path), nodes=specs, models_dir=str(models_dir)), TOKEN)
    await process.start()
    try:
        source, reader = reference(process, "source"), reference(process, "reader")
        job = prefill_job(prompt(130, 2))
        await source.prefill(job)
        found = source._pool.locate(job.chain[3 * 16 : 4 * 16])
        assert found is not None
        slot, _ = found
        source._pool.file.block(slot).data.cast("B")[99] ^= 1
        fetch = replace(fetch_from(source, "source", 8), url=process.base_url)
        result = await reader.prefill(prefill_job(job.token_ids, "again", fetch))
        assert (result.fetched_tokens, result.first_token_id) == (48, greedy(models_dir, job.token_ids, 1)[0])
        assert reader.status().counters["checksum_failures"] == 1
    finally:
        await process.close()
