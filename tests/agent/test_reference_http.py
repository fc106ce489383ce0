"""Two reference agents over HTTP: hand-over, peer reads by shared memory and by HTTP, switches, aborts, broken blocks."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path

import msgspec
import pytest

from tests.agent.reference_support import BLOCK, b64, chain_of, greedy, prefill_job, prompt
from tests.agent.two_agents import Agents
from workers.agent.engines.base import PrefillJob


@pytest.mark.parametrize("length", [BLOCK - 1, 2 * BLOCK, 130])
async def test_a_chat_over_two_agents_gives_the_models_own_tokens(
    agents: Agents, models_dir: Path, length: int
) -> None:
    job = prefill_job(prompt(length, length))
    tokens, end = await agents.run(job)
    assert tokens == greedy(models_dir, job.token_ids, 8)
    assert (end["finish_reason"], end["output_tokens"], end["recomputed_tokens"]) == ("length", 8, 0)
    await agents.idle()


async def test_the_same_over_http_between_hosts(agents: Agents, models_dir: Path, other_host: None) -> None:
    job = prefill_job(prompt(130, 130))
    tokens, end = await agents.run(job)
    assert tokens == greedy(models_dir, job.token_ids, 8)
    assert end["recomputed_tokens"] == 0
    counters = (await agents.status("d"))["counters"]
    assert (counters["fetched_blocks_http"], counters["fetched_blocks_shared_memory"]) == (9, 0)
    await agents.idle()


async def test_the_next_turn_fetches_the_decoded_blocks_from_the_decode_node(agents: Agents, models_dir: Path) -> None:
    job = prefill_job(prompt(60, 1), "turn-1", max_tokens=30)
    tokens, end = await agents.run(job)
    ids = job.token_ids + array("I", tokens) + prompt(10, 2)
    chain = chain_of(job.token_ids + array("I", tokens[:-1]))
    assert b64(chain[3 * 16 :]) == end["stored_chain_b64"]
    pool = (await agents.status("d"))["pool"]["name"]
    fetch = {
        "node": "d",
        "url": agents.processes["d"].base_url,
        "pool": pool,
        "from_block": 3,
        "to_block": len(chain) // 16,
    }
    second = prefill_job(ids, "turn-2")
    result = await agents.prefill("p", second, fetch)
    assert (result["cached_tokens"], result["fetched_tokens"]) == (48, len(chain) - 48)
    assert result["first_token_id"] == greedy(models_dir, ids, 1)[0]
    await agents.idle()


async def test_a_peer_that_is_gone_is_recomputed_and_counted(agents: Agents, models_dir: Path) -> None:
    ids = prompt(70, 4)
    fetch = {"node": "x", "url": "http://127.0.0.1:9", "pool": "switchyard-gone", "from_block": 0, "to_block": 4}
    result = await agents.prefill("p", prefill_job(ids), fetch)
    assert (result["computed_tokens"], result["failed_fetch_tokens"]) == (70, 64)
    assert result["first_token_id"] == greedy(models_dir, ids, 1)[0]
    assert (await agents.status("p"))["counters"]["failed_fetches"] == 1
    await agents.idle()


@pytest.mark.parametrize("way", ["shared-memory", "http"])
async def test_one_flipped_byte_is_detected_recomputed_and_counted(
    agents: Agents, models_dir: Path, way: str, request: pytest.FixtureRequest
) -> None:
    if way == "http":
        request.getfixturevalue("other_host")
    job = prefill_job(prompt(130, 9))
    result = await agents.prefill("p", job)
    file = agents.engine("p")._pool.file
    slot = file.find([job.chain[5 * 16 : 6 * 16]])[job.chain[5 * 16 : 6 * 16]]
    file.block(slot).data.cast("B")[1234] ^= 1
    tokens = [result["first_token_id"]]
    async for event in agents.decode("d", job, tokens[:1], result["handoff"]):
        tokens += event.get("ids", [])
    assert tokens == greedy(models_dir, job.token_ids, 8)
    assert event["recomputed_tokens"] == 130 - 5 * BLOCK
    assert (await agents.status("d"))["counters"]["checksum_failures"] == 1
    again = await agents.prefill("p", job)
    assert (again["cached_tokens"], again["first_token_id"]) == (5 * BLOCK, tokens[0])
    assert (await agents.status("p"))["counters"]["checksum_failures"] == 1
    third = await agents.prefill("p", job)
    assert third["cached_tokens"] == 8 * BLOCK, "the recomputed blocks are sound again"
    await agents.idle()


async def test_a_turn_after_both_nodes_swapped_phases_keeps_tokens_and_cache(agents: Agents, models_dir: Path) -> None:
    job = prefill_job(prompt(96, 11), "turn-1", max_tokens=20)
    tokens, _ = await agents.run(job)
    await agents.order("p", "decode", 1)
    await agents.order("d", "prefill", 1)
    ids = job.token_ids + array("I", tokens) + prompt(7, 12)
    result = await agents.prefill("d", prefill_job(ids, "turn-2"))
    assert result["cached_tokens"] == (96 + 19) // BLOCK * BLOCK
    outputs = [result["first_token_id"]]
    async for event in agents.decode("p", prefill_job(ids, "turn-2"), outputs[:1], result["handoff"]):
        outputs += event.get("ids", [])
    assert outputs == greedy(models_dir, ids, 8)
    await agents.idle()


async def test_an_abort_ends_the_stream_and_frees_the_device_at_once(agents: Agents) -> None:
    job = prefill_job(prompt(40, 13), max_tokens=1500)
    result = await agents.prefill("p", job)
    free = (await agents.status("d"))["kv_free_tokens"]
    seen = []
    async for event in agents.decode("d", job, [result["first_token_id"]], result["handoff"]):
        seen.append(event)
        if len(seen) == 3:
            async with agents.session.post(agents.url("d", "abort"), json={"request_id": "r"}) as answer:
                assert await answer.json() == {"aborted": True}
    assert seen[-1]["finish_reason"] == "abort"
    assert seen[-1]["output_tokens"] < 200
    assert (await agents.status("d"))["kv_free_tokens"] == free
    async with agents.session.post(agents.url("d", "abort"), json={"request_id": "r"}) as answer:
        assert await answer.json() == {"aborted": False}
    await agents.idle()


async def test_leaving_a_stream_frees_the_device(agents: Agents) -> None:
    job = prefill_job(prompt(40, 14), max_tokens=1500)
    result = await agents.prefill("p", job)
    free = (await agents.status("d"))["kv_free_tokens"]
    stream = agents.decode("d", job, [result["first_token_id"]], result["handoff"])
    await anext(stream)
    assert (await agents.status("d"))["kv_free_tokens"] < free
    await stream.aclose()  # type: ignore[attr-defined]
    await agents.idle()
    assert (await agents.status("d"))["kv_free_tokens"] == free


async def test_events_lead_a_reader_to_the_same_blocks_as_a_snapshot(agents: Agents) -> None:
    start = agents.processes["d"].nodes["d"].events.oldest_seq
    await agents.run(prefill_job(prompt(100, 15), max_tokens=30))
    await agents.idle()
    async with agents.session.get(agents.url("d", "kv/snapshot")) as answer:
        snapshot = await answer.json()
    seen = b""
    async with agents.session.get(agents.url("d", f"events?from={start}")) as answer:
        async for line in answer.content:
            event = json.loads(line)
            if event["type"] == "stored":
                seen += msgspec.json.decode(f'"{event["chain_b64"]}"', type=bytes)
            if event["seq"] >= snapshot["seq"]:
                break
    assert [segment["parent_b64"] for segment in snapshot["segments"]] == [None]
    assert snapshot["segments"][0]["chain_b64"] == b64(seen)


async def test_ten_switches_under_load_lose_no_request_and_no_token(agents: Agents, models_dir: Path) -> None:
    jobs = [prefill_job(prompt(50 + 9 * index, 100 + index), f"load-{index}", max_tokens=12) for index in range(16)]
    phases = {"p": "mixed", "d": "mixed"}
    for node in phases:
        await agents.order(node, "mixed", 1)

    async def ask(job: PrefillJob) -> list[int]:
        """As a gateway: go where the phase allows; on a refusal try again."""
        while True:
            takes = {
                stage: [node for node, phase in phases.items() if phase in (stage, "mixed")]
                for stage in ("prefill", "decode")
            }
            try:
                return (await agents.run(job, takes["prefill"][0], takes["decode"][-1]))[0]
            except AssertionError as error:
                assert any(code in str(error) for code in ("draining", "wrong-phase")), error
                await asyncio.sleep(0.02)

    async def switch() -> None:
        for index in range(10):
            node, phase = ("p", "d")[index % 2], ("prefill", "decode", "mixed")[index % 3]
            other = phases["d" if node == "p" else "p"]
            phase = "mixed" if other != "mixed" else phase
            await agents.order(node, phase, index + 2)
            phases[node] = phase

    outputs = (await asyncio.gather(switch(), *(ask(job) for job in jobs)))[1:]
    for job, tokens in zip(jobs, outputs, strict=True):
        assert tokens == greedy(models_dir, job.token_ids, 12)
    await agents.idle()
