"""Greedy tokens do not depend on how a prompt was computed, where its KV came from, or which node decodes."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

from tests.agent.reference_support import (
    BLOCK,
    RecordingSink,
    chain_of,
    collect,
    decode_job,
    fetch_from,
    generate,
    greedy,
    prefill_job,
    prompt,
    tiny_engine,
)

LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 63, 64, 65, 130, 200]


@pytest.fixture(scope="module")
def expected(models_dir: Path) -> dict[int, list[int]]:
    """Output of each prompt length, by the model alone."""
    return {length: greedy(models_dir, prompt(length, length), 8) for length in LENGTHS}


def test_outputs_differ_between_prompts(expected: dict[int, list[int]]) -> None:
    assert len({tuple(tokens) for tokens in expected.values()}) == len(LENGTHS)


@pytest.mark.parametrize("chunk_tokens", [7, 64, 1024])
async def test_chunks_and_batches_change_no_token(
    tmp_path: Path, models_dir: Path, expected: dict[int, list[int]], chunk_tokens: int
) -> None:
    async with tiny_engine(tmp_path, models_dir, prefill_chunk_tokens=chunk_tokens) as engine:
        outputs = await asyncio.gather(
            *(generate(engine, engine, prefill_job(prompt(length, length), f"r{length}")) for length in LENGTHS)
        )
    assert {length: output[0] for length, output in zip(LENGTHS, outputs, strict=True)} == expected


async def test_a_prompt_from_the_own_pool_gives_the_same_tokens(
    tmp_path: Path, models_dir: Path, expected: dict[int, list[int]]
) -> None:
    async with tiny_engine(tmp_path, models_dir) as engine:
        for length in LENGTHS:
            job = prefill_job(prompt(length, length))
            await generate(engine, engine, job)
            tokens, result, _ = await generate(engine, engine, job)
            assert tokens == expected[length]
            full = length // BLOCK * BLOCK
            assert result.cached_tokens == min(full, length - 1)
            assert result.computed_tokens == length - result.cached_tokens


async def test_a_fork_reuses_the_shared_blocks_and_gives_its_own_tokens(tmp_path: Path, models_dir: Path) -> None:
    trunk = prompt(70, 1)
    fork = trunk[:50] + prompt(30, 2)
    async with tiny_engine(tmp_path, models_dir) as engine:
        await generate(engine, engine, prefill_job(trunk))
        tokens, result, _ = await generate(engine, engine, prefill_job(fork))
    assert result.cached_tokens == 48
    assert tokens == greedy(models_dir, fork, 8)


async def test_prefill_on_one_node_and_decode_on_another_gives_the_same_tokens(
    tmp_path: Path, models_dir: Path, expected: dict[int, list[int]]
) -> None:
    async with tiny_engine(tmp_path, models_dir, "p") as first, tiny_engine(tmp_path, models_dir, "d") as second:
        for length in LENGTHS:
            tokens, result, end = await generate(first, second, prefill_job(prompt(length, length)))
            assert tokens == expected[length]
            assert result.handoff.context_tokens == length
            assert end.recomputed_tokens == 0, "the hand-over brought everything"
            assert end.output_tokens == 8
            assert end.finish_reason == "length"
        assert second.status().counters["fetched_blocks_shared_memory"] > 0


async def test_a_prompt_from_a_peers_pool_gives_the_same_tokens(
    tmp_path: Path, models_dir: Path, expected: dict[int, list[int]]
) -> None:
    async with tiny_engine(tmp_path, models_dir, "a") as first, tiny_engine(tmp_path, models_dir, "b") as second:
        for length in LENGTHS:
            ids = prompt(length, length)
            await first.prefill(prefill_job(ids))
            blocks = length // BLOCK
            job = prefill_job(ids, fetch=fetch_from(first, "a", blocks))
            tokens, result, _ = await generate(second, second, job)
            assert tokens == expected[length]
            assert result.fetched_tokens == min(blocks * BLOCK, length - 1)
            assert (result.cached_tokens, result.failed_fetch_tokens) == (0, 0)


async def test_an_output_continues_elsewhere_from_the_tokens_sent_so_far(
    tmp_path: Path, models_dir: Path, expected: dict[int, list[int]]
) -> None:
    async with tiny_engine(tmp_path, models_dir, "p") as first, tiny_engine(tmp_path, models_dir, "d") as second:
        for length in (BLOCK - 1, 65, 130):
            job = prefill_job(prompt(length, length))
            result = await first.prefill(job)
            sent = expected[length][:5]
            tokens, end = await collect(second, decode_job(job, sent, result.handoff))
            assert sent + tokens == expected[length]
            assert end.recomputed_tokens == 4, "only the tokens after the hand-over"


async def test_an_output_continues_without_any_hand_over(
    tmp_path: Path, models_dir: Path, expected: dict[int, list[int]]
) -> None:
    async with tiny_engine(tmp_path, models_dir) as engine:
        job = prefill_job(prompt(65, 65))
        tokens, end = await collect(engine, decode_job(job, expected[65][:3], None))
    assert expected[65][:3] + tokens == expected[65]
    assert end.recomputed_tokens == 67


async def test_a_phase_switch_between_two_turns_changes_no_token_and_loses_no_block(
    tmp_path: Path, models_dir: Path
) -> None:
    first_turn = prompt(90, 5)
    async with tiny_engine(tmp_path, models_dir) as engine:
        await engine.switch_phase("prefill")
        tokens, _, end = await generate(engine, engine, prefill_job(first_turn, max_tokens=24))
        await engine.switch_phase("decode")
        second_turn = first_turn + array("I", tokens) + prompt(20, 6)
        again, result, _ = await generate(engine, engine, prefill_job(second_turn))
        stored = chain_of(first_turn) + end.stored_chain
        assert stored == chain_of(first_turn + array("I", tokens[:-1])), "decoded blocks are kept too"
        assert result.cached_tokens == len(stored) // 16 * BLOCK
    assert again == greedy(models_dir, second_turn, 8)


async def test_events_tell_exactly_what_the_pool_holds_while_it_overflows(tmp_path: Path, models_dir: Path) -> None:
    sink = RecordingSink()
    async with tiny_engine(tmp_path, models_dir, sink=sink, pool_blocks=12) as engine:
        for seed in range(6):
            ids = prompt(65, 50 + seed)
            job = prefill_job(ids, max_tokens=1)
            result = await engine.prefill(job)
            assert result.first_token_id == greedy(models_dir, ids, 1)[0]
            await asyncio.sleep(0)
        segments = engine.snapshot()
        held = {chain[start : start + 16] for _, chain in segments for start in range(0, len(chain), 16)}
    assert held == sink.held()
    assert any(kind == "removed" for kind, _, _ in sink.events)


async def test_a_pool_too_small_for_the_prompt_hands_over_what_it_could_keep(tmp_path: Path, models_dir: Path) -> None:
    ids = prompt(130, 130)
    async with (
        tiny_engine(tmp_path, models_dir, "p", pool_blocks=3) as first,
        tiny_engine(tmp_path, models_dir, "d") as second,
    ):
        tokens, result, end = await generate(first, second, prefill_job(ids))
    assert tokens == greedy(models_dir, ids, 8)
    assert result.handoff.context_tokens == 3 * BLOCK
    assert end.recomputed_tokens == 130 - 3 * BLOCK


async def test_scattered_device_blocks_give_the_same_tokens(
    tmp_path: Path, models_dir: Path, expected: dict[int, list[int]]
) -> None:
    async with tiny_engine(tmp_path, models_dir, kv_tokens=20 * BLOCK, max_decode_batch=8) as engine:
        kv = engine._kv
        tables = [kv.allocate(BLOCK) for _ in range(20)]
        kept = tables[3:19:6]
        for table in tables:
            if table not in kept:
                assert table is not None
                kv.release(table)
        tokens, _, _ = await generate(engine, engine, prefill_job(prompt(200, 200)))
        for table in kept:
            assert table is not None
            kv.release(table)
    assert tokens == expected[200]


@pytest.mark.parametrize("seed", [None, 7])
async def test_random_sampling_continues_identically_on_another_node(
    tmp_path: Path, models_dir: Path, seed: int | None
) -> None:
    job = prefill_job(prompt(40, 3), max_tokens=12, temperature=0.9, top_p=0.95, seed=seed)
    async with tiny_engine(tmp_path, models_dir, "p") as first, tiny_engine(tmp_path, models_dir, "d") as second:
        whole, result, _ = await generate(first, first, job)
        rest, _ = await collect(second, decode_job(job, whole[:6], result.handoff))
        other, _, _ = await generate(
            first, first, prefill_job(prompt(40, 3), "other", max_tokens=12, temperature=0.9, seed=8)
        )
    assert whole[:6] + rest == whole
    assert other != whole
