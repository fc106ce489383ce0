"""The simulated engine: streams, memory, pool, fetches, hand-over, cancellation."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import pairwise

import pytest

from apps.kvcache.domain.hashing import HASH_BYTES
from tests.agent.simulated_support import (
    NETWORK,
    Nodes,
    chain_of,
    elsewhere,
    in_virtual_time,
    output,
    prompt,
    read,
)
from workers.agent.engines.base import EngineError, FetchSource, RefChange, TokenChunk
from workers.agent.engines.simulated_prefill_loop import MAX_OVERTAKEN


def transfer_s(tokens: int) -> float:
    return NETWORK["latency_s"] + tokens * NETWORK["kv_bytes_per_token"] / NETWORK["peer_bandwidth_bytes_s"]


def fetch_from(node: str, to_block: int) -> FetchSource:
    return FetchSource(node, "http://agent", "pool", 0, to_block)


# --- streams ------------------------------------------------------------------------------------------------------


def test_the_first_tokens_come_at_once_and_the_rest_at_most_every_quarter_second() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            stream = await read(nodes.one, output("r", 640, 1_200, elsewhere(640)))
            times = [at for at, _ in stream.chunks]
            assert times[0] - stream.started_at < 0.05
            gaps = [later - earlier for earlier, later in pairwise(times[1:-1])]
            assert len(gaps) > 5
            assert min(gaps) >= 0.249
            assert max(gaps) < 0.3
            assert stream.tokens == 1_199
            assert stream.finished.finish_reason == "length"
            assert stream.finished.output_tokens == 1_200

    in_virtual_time(work)


def test_an_output_never_leaves_the_context_of_the_model() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            stream = await read(nodes.one, output("r", 999_990, 500, elsewhere(999_990)))
            assert (stream.finished.finish_reason, stream.finished.output_tokens) == ("length", 10)

    in_virtual_time(work)


def test_an_output_of_one_token_is_over_after_prefill() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            result = await nodes.one.prefill(prompt("r", 640, max_tokens=1))
            assert result.first_finish == "length"
            assert nodes.one.node.kept_device_tokens() == 0
            stream = await read(nodes.one, output("r", 640, 1))
            assert (stream.tokens, stream.finished.output_tokens) == (0, 1)

    in_virtual_time(work)


def test_a_full_batch_makes_the_next_request_wait_in_order() -> None:
    async def work() -> None:
        async with Nodes(limits={"max_decode_batch": 2}) as nodes:
            tasks = [
                asyncio.create_task(read(nodes.one, output(f"r{n}", 640, 100 + n, elsewhere(640)))) for n in range(4)
            ]
            await asyncio.sleep(0.3)
            status = nodes.one.status()
            assert (status.running_decode, status.queued_decode) == (2, 2)
            streams = await asyncio.gather(*tasks)
            assert streams[2].finished.timings.queued_s >= streams[0].finished.timings.decode_s
            assert streams[3].finished_at > streams[2].finished_at
            assert max(sample.batch for sample in nodes.sink.of("decode")) == 2

    in_virtual_time(work)


def test_device_memory_limits_the_batch_and_is_given_back() -> None:
    async def work() -> None:
        async with Nodes(limits={"kv_tokens": 2_500}) as nodes:
            tasks = [
                asyncio.create_task(read(nodes.one, output(f"r{n}", 1_000, 200, elsewhere(1_000)))) for n in range(3)
            ]
            await asyncio.sleep(0.2)
            assert nodes.one.status().running_decode == 2
            assert nodes.one.status().kv_free_tokens == 100
            await asyncio.gather(*tasks)
            assert nodes.one.status().kv_free_tokens == 2_500

    in_virtual_time(work)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_request_that_can_never_fit_is_refused(stage: str) -> None:
    async def work() -> None:
        async with Nodes(limits={"kv_tokens": 1_000}) as nodes:
            with pytest.raises(EngineError, match="at most 1000 tokens of device KV") as refused:
                if stage == "prefill":
                    await nodes.one.prefill(prompt("r", 2_000))
                else:
                    await read(nodes.one, output("r", 900, 200, elsewhere(900)))
            assert (refused.value.status, refused.value.code) == (400, "context-length")

    in_virtual_time(work)


# --- prefill and pool ---------------------------------------------------------------------------------------------


def test_a_computed_prompt_is_stored_and_found_by_the_next_turn() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            first = await nodes.one.prefill(prompt("a", 1_000))
            second = await nodes.one.prefill(prompt("b", 1_290))
            assert (first.cached_tokens, first.computed_tokens) == (0, 1_000)
            assert (second.cached_tokens, second.computed_tokens) == (15 * 64, 1_290 - 15 * 64)
            assert nodes.sink.events == [
                ("stored", None, chain_of(1, 15)),
                ("stored", chain_of(1, 15)[-HASH_BYTES:], chain_of(1, 20)[15 * HASH_BYTES :]),
            ]
            assert [segment.chain for segment in nodes.one.snapshot()] == [chain_of(1, 20)]

    in_virtual_time(work)


def test_a_prompt_that_is_all_cached_still_computes_one_token() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            await nodes.one.prefill(prompt("a", 640))
            again = await nodes.one.prefill(prompt("b", 640))
            assert (again.cached_tokens, again.computed_tokens) == (639, 1)

    in_virtual_time(work)


def test_prompts_share_an_iteration_up_to_the_chunk() -> None:
    async def work() -> None:
        async with Nodes(limits={"prefill_chunk_tokens": 1_000}) as nodes:
            busy = asyncio.create_task(nodes.one.prefill(prompt("a", 64, first_id=1)))
            await asyncio.sleep(0)
            rest = [nodes.one.prefill(prompt(f"r{n}", 600, first_id=1_000 * (n + 1))) for n in range(3)]
            await asyncio.gather(busy, *rest)
            shape = [(sample.batch, sample.t_uc, sample.requests) for sample in nodes.sink.samples]
            assert shape == [(1, 64, 1), (2, 1_000, 1), (2, 800, 2)]

    in_virtual_time(work)


def test_a_full_pool_evicts_what_nobody_counts_on_and_reports_it() -> None:
    async def work() -> None:
        async with Nodes(pool_blocks=30) as nodes:
            await nodes.one.prefill(prompt("kept", 640, first_id=1, max_tokens=1))
            await nodes.one.prefill(prompt("dropped", 640, first_id=100, max_tokens=1))
            nodes.one.apply_refs([RefChange(chain_of(1, 10)[-HASH_BYTES:], 10, 1)], reset=False)
            assert nodes.one.status().pool_referenced_blocks == 10
            await nodes.one.prefill(prompt("new", 1_280, first_id=200, max_tokens=1))
            removed = b"".join(hashes for kind, _, hashes in nodes.sink.events if kind == "removed")
            dropped = chain_of(100, 10)
            assert {removed[at : at + HASH_BYTES] for at in range(0, len(removed), HASH_BYTES)} == {
                dropped[at : at + HASH_BYTES] for at in range(0, len(dropped), HASH_BYTES)
            }
            assert nodes.one.node.pool.held_blocks(chain_of(1, 10)) == 10
            nodes.one.apply_refs([], reset=True)
            assert nodes.one.status().pool_referenced_blocks == 0

    in_virtual_time(work)


def test_there_are_no_bytes_to_read() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            with pytest.raises(EngineError, match="without having any") as refused:
                await anext(nodes.one.read_blocks(chain_of(1, 1)))
            assert (refused.value.status, refused.value.code) == (400, "no-kv-bytes")

    in_virtual_time(work)


# --- fetches ------------------------------------------------------------------------------------------------------


def test_a_missing_prefix_is_fetched_from_the_peer_while_the_prompt_waits() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2")) as nodes:
            await nodes["n1"].prefill(prompt("a", 64_000))
            result = await nodes["n2"].prefill(prompt("b", 65_000, fetch=fetch_from("n1", 1_000)))
            assert (result.cached_tokens, result.fetched_tokens, result.computed_tokens) == (0, 64_000, 1_000)
            assert result.failed_fetch_tokens == 0
            assert result.timings.fetch_s == pytest.approx(transfer_s(64_000), rel=1e-6)
            assert result.timings.queued_s == pytest.approx(transfer_s(64_000), rel=1e-6)
            assert nodes["n2"].status().counters["fetched_tokens"] == 64_000

    in_virtual_time(work)


def test_only_what_is_missing_is_fetched() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2")) as nodes:
            await nodes["n1"].prefill(prompt("a", 64_000))
            await nodes["n2"].prefill(prompt("b", 32_000))
            result = await nodes["n2"].prefill(prompt("c", 65_000, fetch=fetch_from("n1", 1_000)))
            assert (result.cached_tokens, result.fetched_tokens) == (32_000, 32_000)
            assert result.timings.fetch_s == pytest.approx(transfer_s(32_000), rel=1e-6)

    in_virtual_time(work)


def test_transfers_of_one_node_queue_behind_each_other() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2", "n3")) as nodes:
            await nodes["n1"].prefill(prompt("a", 64_000))
            fetch = fetch_from("n1", 1_000)
            two, three = await asyncio.gather(
                nodes["n2"].prefill(prompt("b", 65_000, fetch=fetch)),
                nodes["n3"].prefill(prompt("c", 65_000, fetch=fetch)),
            )
            assert two.timings.fetch_s == pytest.approx(transfer_s(64_000), rel=1e-6)
            assert three.timings.fetch_s == pytest.approx(2 * transfer_s(64_000), rel=1e-6)

    in_virtual_time(work)


@pytest.mark.parametrize(
    ("fetch", "limits", "failed"),
    [
        (fetch_from("absent", 100), {}, 6_400),
        (fetch_from("n1", 150), {}, 3_200),
        (fetch_from("n1", 100), {"fetch_deadline_s": 0.001}, 6_400),
    ],
    ids=["unknown peer", "peer holds less", "too late"],
)
def test_what_cannot_be_fetched_is_computed_and_counted(fetch: FetchSource, limits: dict, failed: int) -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2"), limits=limits) as nodes:
            await nodes["n1"].prefill(prompt("a", 6_400))
            result = await nodes["n2"].prefill(prompt("b", 9_600, fetch=fetch))
            assert result.failed_fetch_tokens == failed
            assert result.cached_tokens + result.fetched_tokens + result.computed_tokens == 9_600
            assert nodes["n2"].status().counters["failed_fetch_tokens"] == failed

    in_virtual_time(work)


def test_a_prompt_whose_kv_is_under_way_lets_a_bounded_number_pass() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2"), limits={"prefill_chunk_tokens": 64}, network={"latency_s": 3.0}) as nodes:
            await nodes["n1"].prefill(prompt("a", 640))
            order: list[str] = []

            async def run(name: str, fetch: FetchSource | None, first_id: int, tokens: int) -> None:
                await nodes["n2"].prefill(prompt(name, tokens, first_id=first_id, fetch=fetch))
                order.append(name)

            slow = asyncio.create_task(run("slow", fetch_from("n1", 10), 1, 700))
            await asyncio.sleep(0)
            quick = [run(f"q{n}", None, 1_000 * (n + 1), 64) for n in range(MAX_OVERTAKEN + 4)]
            await asyncio.gather(slow, *quick)
            assert order.index("slow") == MAX_OVERTAKEN

    in_virtual_time(work)


# --- hand-over ----------------------------------------------------------------------------------------------------


def test_a_context_is_handed_over_and_freed_at_the_sender() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2")) as nodes:
            result = await nodes["n1"].prefill(prompt("r", 64_010))
            assert (result.handoff.node, result.handoff.url) == ("n1", "http://agent/nodes/n1")
            assert (result.handoff.context_tokens, result.handoff.tail_tokens) == (64_010, 10)
            assert nodes["n1"].node.kept_device_tokens() == 64_010
            stream = await read(nodes["n2"], output("r", 64_010, 50, result.handoff))
            assert stream.finished.timings.fetch_s == pytest.approx(transfer_s(64_010), rel=1e-6)
            assert stream.finished.recomputed_tokens == 0
            assert nodes["n1"].node.kept_device_tokens() == 0
            assert nodes["n2"].node.pool.held_blocks(chain_of(1, 1_000)) == 1_000

    in_virtual_time(work)


def test_a_context_on_the_same_node_needs_no_transfer() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            result = await nodes.one.prefill(prompt("r", 64_000))
            stream = await read(nodes.one, output("r", 64_000, 50, result.handoff))
            assert (stream.finished.timings.fetch_s, stream.finished.timings.queued_s) == (0, 0)

    in_virtual_time(work)


def test_a_context_that_nobody_fetches_is_let_go_after_thirty_seconds_and_recomputed() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2")) as nodes:
            result = await nodes["n1"].prefill(prompt("r", 6_400))
            await asyncio.sleep(29.9)
            assert nodes["n1"].node.kept_device_tokens() == 6_400
            await asyncio.sleep(0.2)
            assert nodes["n1"].node.kept_device_tokens() == 0
            assert nodes["n1"].status().counters["expired_handoffs"] == 1
            stream = await read(nodes["n2"], output("r", 6_400, 50, result.handoff))
            assert stream.finished.recomputed_tokens == 6_401
            assert stream.tokens == 49

    in_virtual_time(work)


def test_without_a_handoff_the_own_pool_serves_and_the_rest_is_recomputed() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            await nodes.one.prefill(prompt("r", 6_400))
            nodes.one.node.release_handoff("r")
            stream = await read(nodes.one, output("r", 7_000, 50))
            assert stream.finished.recomputed_tokens == 7_001 - 6_400

    in_virtual_time(work)


def test_a_node_that_closed_takes_its_contexts_with_it() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2")) as nodes:
            result = await nodes["n1"].prefill(prompt("r", 640_000))
            decoding = asyncio.create_task(read(nodes["n2"], output("r", 640_000, 50, result.handoff)))
            await asyncio.sleep(0.01)
            await nodes["n1"].close()
            assert (await decoding).finished.recomputed_tokens == 640_001
            with pytest.raises(EngineError, match="not running"):
                await nodes["n1"].prefill(prompt("s", 640))

    in_virtual_time(work)


def test_memory_freed_by_a_hand_over_starts_the_prompt_that_waits_for_it() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2"), limits={"kv_tokens": 10_000}) as nodes:
            first = await nodes["n1"].prefill(prompt("a", 6_400))
            waiting = asyncio.create_task(nodes["n1"].prefill(prompt("b", 6_400, first_id=5_000)))
            await asyncio.sleep(1.0)
            assert nodes["n1"].status().queued_prefill == 1
            await read(nodes["n2"], output("a", 6_400, 5, first.handoff))
            await asyncio.wait_for(waiting, 2.0)

    in_virtual_time(work)


# --- cancellation -------------------------------------------------------------------------------------------------


def test_an_aborted_prompt_frees_at_once_wherever_it_stands() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2")) as nodes:
            await nodes["n1"].prefill(prompt("a", 64_000))
            nodes["n1"].abort("a")
            engine = nodes["n2"]
            running = asyncio.create_task(engine.prefill(prompt("running", 100_000, first_id=9_000)))
            fetching = asyncio.create_task(engine.prefill(prompt("fetching", 65_000, fetch=fetch_from("n1", 1_000))))
            await asyncio.sleep(0.01)
            for name, task in (("running", running), ("fetching", fetching)):
                assert engine.abort(name)
                with pytest.raises(EngineError) as ended:
                    await task
                assert (ended.value.status, ended.value.code) == (409, "aborted")
                assert not engine.abort(name)
            assert engine.node.device.used_tokens == 0
            assert (engine.status().running_prefill, engine.status().queued_prefill) == (0, 0)
            await asyncio.sleep(1.0)
            assert engine.status().counters["aborted_requests"] == 2

    in_virtual_time(work)


def test_a_cancelled_prompt_frees_at_once() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            task = asyncio.create_task(nodes.one.prefill(prompt("r", 100_000)))
            await asyncio.sleep(0.5)
            assert nodes.one.node.device.used_tokens == 100_000
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert nodes.one.node.device.used_tokens == 0
            assert (await nodes.one.prefill(prompt("next", 640))).computed_tokens == 640

    in_virtual_time(work)


def test_an_aborted_output_ends_with_abort_and_the_others_go_faster() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            tasks = [asyncio.create_task(read(nodes.one, output(f"r{n}", 640, 2_000, elsewhere(640)))) for n in (0, 1)]
            await asyncio.sleep(1.0)
            assert nodes.one.abort("r0")
            stopped = await tasks[0]
            assert stopped.finished.finish_reason == "abort"
            assert stopped.finished.output_tokens == stopped.tokens + 1
            assert nodes.one.status().running_decode == 1
            await tasks[1]
            assert nodes.sink.of("decode")[-1].batch == 1

    in_virtual_time(work)


def test_closing_a_stream_frees_at_once() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            stream = nodes.one.decode(output("r", 640, 2_000, elsewhere(640)))
            await anext(stream)
            assert nodes.one.status().running_decode == 1
            await stream.aclose()  # type: ignore[attr-defined]
            assert nodes.one.status().running_decode == 0
            assert nodes.one.node.device.used_tokens == 0
            assert not nodes.one.abort("r")

    in_virtual_time(work)


def test_an_output_aborted_in_transfer_never_starts() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2")) as nodes:
            result = await nodes["n1"].prefill(prompt("r", 640_000))
            decoding = asyncio.create_task(read(nodes["n2"], output("r", 640_000, 50, result.handoff)))
            await asyncio.sleep(0.1)
            assert nodes["n2"].abort("r")
            stream = await decoding
            assert (stream.tokens, stream.finished.finish_reason) == (0, "abort")
            await asyncio.sleep(2.0)
            assert nodes["n2"].status().running_decode == 0
            assert nodes["n1"].node.kept_device_tokens() == 0

    in_virtual_time(work)


# --- everything together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_loses_no_request_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    names = ("n1", "n2", "n3")
    limits = {"max_decode_batch": 4, "kv_tokens": 30_000, "prefill_chunk_tokens": 2_048}

    async def work() -> None:
        async with Nodes(names, pool_blocks=400, limits=limits) as nodes:

            async def request(number: int) -> str:
                await asyncio.sleep(rng.uniform(0, 8))
                tokens, first_id, wanted = rng.randrange(1, 12_000), 1_000 * rng.randrange(1, 9), rng.randrange(1, 200)
                fetch = fetch_from(rng.choice((*names, "absent")), rng.randrange(0, tokens // 64 + 1))
                name, fate = f"r{number}", rng.random()
                result = await nodes[rng.choice(names)].prefill(prompt(name, tokens, first_id, wanted, fetch))
                assert result.cached_tokens + result.fetched_tokens + result.computed_tokens == tokens
                assert result.failed_fetch_tokens <= result.computed_tokens
                job = output(name, tokens, wanted, result.handoff if fate < 0.8 else None, first_id)
                stream = nodes[rng.choice(names)].decode(job)
                got = 1
                async for item in stream:
                    if fate < 0.1:
                        await stream.aclose()  # type: ignore[attr-defined]
                        return "closed"
                    if isinstance(item, TokenChunk):
                        got += item.count
                    elif item.finish_reason == "abort":
                        return "aborted"
                assert got == wanted
                return "done"

            async def meddle() -> None:
                for _ in range(200):
                    await asyncio.sleep(rng.uniform(0, 0.15))
                    for engine in nodes.engines.values():
                        engine.check_integrity()
                    if rng.random() < 0.1:
                        nodes[rng.choice(names)].abort(f"r{rng.randrange(60)}")

            outcomes = await asyncio.gather(*(request(n) for n in range(60)), meddle(), return_exceptions=True)
            wrong = [
                outcome
                for outcome in outcomes
                if isinstance(outcome, BaseException)
                and not (isinstance(outcome, EngineError) and outcome.code == "aborted")
            ]
            assert not wrong
            assert outcomes.count("done") > 30
            assert all(engine.status().running_decode == 0 for engine in nodes.engines.values())

    in_virtual_time(work)


async def test_nine_nodes_with_sixty_outputs_are_light() -> None:
    """CPU seconds, so a busy machine does not matter; the bound is twice what the design asks for."""
    async with Nodes(tuple(f"n{n}" for n in range(9))) as nodes:
        tasks = [
            asyncio.create_task(read(nodes[f"n{n % 9}"], output(f"r{n}", 6_400, 100_000, elsewhere(6_400))))
            for n in range(60)
        ]
        await asyncio.sleep(0.5)
        cpu_s, started = time.process_time(), time.monotonic()
        await asyncio.sleep(2.0)
        share = (time.process_time() - cpu_s) / (time.monotonic() - started)
        assert sum(engine.status().running_decode for engine in nodes.engines.values()) == 60
        for number in range(60):
            nodes[f"n{number % 9}"].abort(f"r{number}")
        await asyncio.gather(*tasks)
    assert share < 0.5, f"{share:.1%} of a core"
