"""Contexts that are pushed to their decode node while their prompt is computed: the same tokens, nothing left to fetch."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.agent.reference_support import BLOCK, b64, greedy, prefill_job, prompt
from tests.agent.two_agents import Agents
from workers.agent.engines.base import PrefillJob
from workers.agent.push import END, LAYERS, LENGTH, SEAL, Piece, PushHead, encode
from workers.agent.shared_memory import checksum

LONG = 200


async def pushed(agents: Agents, job: PrefillJob) -> tuple[list[int], dict[str, Any]]:
    """Prefill with a push, decode once that is over: a short prompt may be asked for before its push has begun."""
    result = await agents.prefill("p", job, push=await agents.target("d"))

    async def over() -> bool:
        return not agents.engine("p")._pusher.under_way

    await until(over)
    tokens = [result["first_token_id"]]
    async for event in agents.decode("d", job, tokens[:1], result["handoff"]):
        tokens += event.get("ids", [])
    return tokens, event


async def counters(agents: Agents, node: str) -> dict[str, float]:
    found: dict[str, float] = (await agents.status(node))["counters"]
    return found


async def until(condition: Any) -> None:
    for _ in range(400):
        if await condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("did not come about")


@pytest.mark.parametrize("length", [BLOCK - 1, 2 * BLOCK, LONG, LONG + 8])
@pytest.mark.parametrize("way", ["shared_memory", "http"])
async def test_a_pushed_context_gives_the_models_own_tokens_and_nothing_is_fetched(
    agents: Agents, models_dir: Path, way: str, length: int, request: pytest.FixtureRequest
) -> None:
    if way == "http":
        request.getfixturevalue("other_host")
    job = prefill_job(prompt(length, length))
    tokens, end = await pushed(agents, job)
    assert tokens == greedy(models_dir, job.token_ids, 8)
    assert end["recomputed_tokens"] == 0
    sender, receiver = await counters(agents, "p"), await counters(agents, "d")
    assert receiver["received_blocks"] == sender[f"pushed_blocks_{way}"] == length // BLOCK
    assert receiver["fetched_blocks_http"] + receiver["fetched_blocks_shared_memory"] == 0
    assert sender["failed_pushes"] + receiver["broken_pushes"] + receiver["checksum_failures"] == 0
    await agents.idle()


async def test_a_push_overlaps_the_prefill(agents: Agents) -> None:
    """The decode node has the first chunks' blocks while later chunks are still being computed."""
    job = prefill_job(prompt(900, 3))
    running = asyncio.create_task(agents.prefill("p", job, push=await agents.target("d")))

    async def some_are_there() -> bool:
        return agents.engine("d").held_blocks(job.chain) > 0

    await until(some_are_there)
    assert not running.done()
    result = await running
    assert result["computed_tokens"] == 900


async def test_layers_of_a_chunk_arrive_before_the_chunk_is_computed(agents: Agents) -> None:
    engine = agents.engine("p")
    began: list[int] = []
    layer_done = engine._loop._through.layered

    def spied(task: Any, end: int) -> Any:
        write = layer_done(task, end)
        if write is not None:
            layer = write.layer

            def watch(number: int) -> None:
                began.append(number)
                layer(number)

            write.layer = watch
        return write

    engine._loop._through.layered = spied  # type: ignore[method-assign]
    await pushed(agents, prefill_job(prompt(2 * 64, 4)))
    layers = engine._pool.file.geometry.layers
    assert began == [*range(layers), *range(layers)], "two chunks of 64 tokens, layer by layer"


async def test_what_the_decode_node_has_already_is_not_sent_again(agents: Agents) -> None:
    trunk = prompt(96, 5)
    await pushed(agents, prefill_job(trunk, "one"))
    await pushed(agents, prefill_job(trunk + prompt(64, 6), "two"))
    assert (await counters(agents, "d"))["received_blocks"] == 10, "6 of the trunk, then 4 more"
    await agents.idle()


async def test_blocks_that_the_prefill_node_had_cached_are_pushed_too(agents: Agents, models_dir: Path) -> None:
    job = prefill_job(prompt(LONG, 7), "first")
    await agents.prefill("p", job)
    again = prefill_job(job.token_ids, "second")
    tokens, end = await pushed(agents, again)
    assert tokens == greedy(models_dir, job.token_ids, 8)
    assert end["recomputed_tokens"] == 0
    assert (await counters(agents, "d"))["received_blocks"] == LONG // BLOCK
    await agents.idle()


async def test_a_decode_that_comes_while_its_push_is_under_way_waits_for_it(agents: Agents, models_dir: Path) -> None:
    job = prefill_job(prompt(900, 15))
    tokens, end = await agents.run(job, push=await agents.target("d"))
    assert tokens == greedy(models_dir, job.token_ids, 8)
    assert end["recomputed_tokens"] == 0
    counts = await counters(agents, "d")
    assert counts["received_blocks"] == 900 // BLOCK
    assert counts["fetched_blocks_http"] + counts["fetched_blocks_shared_memory"] == 0
    await agents.idle()


async def test_a_push_that_cannot_arrive_is_fetched_instead(agents: Agents, models_dir: Path) -> None:
    job = prefill_job(prompt(LONG, 8))
    target = {"node": "d", "url": "http://127.0.0.1:9", "pool": "switchyard-gone"}
    tokens, end = await agents.run(job, push=target)
    assert tokens == greedy(models_dir, job.token_ids, 8)
    assert end["recomputed_tokens"] == 0
    assert (await counters(agents, "p"))["failed_pushes"] == 1
    assert (await counters(agents, "d"))["fetched_blocks_shared_memory"] == LONG // BLOCK + 1, "the tail too"
    await agents.idle()


async def test_a_node_that_takes_no_decodes_refuses_pushes(agents: Agents, models_dir: Path) -> None:
    await agents.order("d", "prefill", 1)
    job = prefill_job(prompt(LONG, 9))
    result = await agents.prefill("p", job, push=await agents.target("d"))
    assert result["computed_tokens"] == LONG

    async def failed() -> bool:
        return (await counters(agents, "p"))["failed_pushes"] == 1

    await until(failed)
    assert agents.engine("d").held_blocks(job.chain) == 0
    await agents.idle()


async def test_a_pushed_context_is_pinned_for_its_decode_and_let_go_with_it(agents: Agents) -> None:
    job = prefill_job(prompt(LONG, 10))
    result = await agents.prefill("p", job, push=await agents.target("d"))

    async def waits() -> bool:
        return bool((await agents.status("d"))["handoffs"] == 1)

    await until(waits)
    async for _ in agents.decode("d", job, [result["first_token_id"]], result["handoff"]):
        pass
    assert (await agents.status("d"))["handoffs"] == 0
    assert not agents.engine("d")._pool._held
    await agents.idle()


async def test_an_abort_of_a_pushed_context_frees_it_at_once(agents: Agents) -> None:
    job = prefill_job(prompt(LONG, 11))
    await agents.prefill("p", job, push=await agents.target("d"))

    async def waits() -> bool:
        return bool((await agents.status("d"))["handoffs"] == 1)

    await until(waits)
    async with agents.session.post(agents.url("d", "abort"), json={"request_id": "r"}) as answer:
        assert await answer.json() == {"aborted": True}
    assert not agents.engine("d")._pool._held
    assert not agents.engine("d")._pool._tails
    await agents.idle()


async def test_a_client_that_goes_away_in_prefill_leaves_nothing_on_either_node(agents: Agents) -> None:
    job = prefill_job(prompt(900, 12))
    running = asyncio.create_task(agents.prefill("p", job, push=await agents.target("d")))

    async def some_are_there() -> bool:
        return agents.engine("d").held_blocks(job.chain) > 0

    await until(some_are_there)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    async def nothing_left() -> bool:
        return not agents.engine("d")._receiver.under_way and not agents.engine("p")._pusher.under_way

    await until(nothing_left)
    assert not agents.engine("d")._pool._held
    await agents.idle()


# --- what a receiver refuses ------------------------------------------------------------------------------------------


def block_of(agents: Agents, seed: int = 1) -> Any:
    shape = agents.engine("d")._pool.file.geometry.shape
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


async def send(agents: Agents, head: PushHead, frames: list[bytes]) -> tuple[int, dict[str, Any]]:
    data = msgspec.json.encode(head)
    body = LENGTH.pack(len(data)) + data + b"".join(frames)
    async with agents.session.post(agents.url("d", "kv/push"), data=body) as answer:
        return answer.status, await answer.json()


def head_of(job: PrefillJob, **fields: Any) -> PushHead:
    return PushHead(**{"request_id": "r", "chain_b64": b64(job.chain), **fields})


async def test_frames_that_are_whole_are_kept_and_can_be_read(agents: Agents) -> None:
    job, block = prefill_job(prompt(40, 1)), block_of(agents)
    layers = len(block)
    frames = [encode(Piece(LAYERS, 0, number, number + 1), block[number].tobytes()) for number in range(layers)]
    frames += [encode(Piece(SEAL, 0, checksum=checksum(block)), b""), encode(Piece(END), b"")]
    status, answer = await send(agents, head_of(job), frames)
    assert (status, answer["blocks"], answer["tail"]) == (200, 1, False)
    assert agents.engine("d").held_blocks(job.chain) == 1
    await agents.idle()


async def test_what_is_wrong_is_named_and_nothing_of_it_stays(agents: Agents) -> None:
    job, block = prefill_job(prompt(40, 1)), block_of(agents)
    whole = encode(Piece(LAYERS, 0, 0, len(block)), block.tobytes())
    seal = encode(Piece(SEAL, 0, checksum=checksum(block)), b"")
    end = encode(Piece(END), b"")
    cases: list[tuple[PushHead, list[bytes], int, str]] = [
        (head_of(job), [whole, encode(Piece(SEAL, 0, checksum=1), b""), end], 400, "checksum"),
        (head_of(job), [encode(Piece(LAYERS, 0, 0, 1), block[0].tobytes()), seal, end], 400, "bad-frame"),
        (head_of(job), [encode(Piece(LAYERS, 9, 0, 1), block[0].tobytes()), end], 400, "bad-frame"),
        (head_of(job), [encode(Piece(LAYERS, 0, 0, 99), b""), end], 400, "bad-frame"),
        (head_of(job), [encode(Piece(LAYERS, 0, 0, 1), b"short"), end], 400, "bad-frame"),
        (head_of(job), [encode(Piece(77), b""), end], 400, "bad-frame"),
        (head_of(job), [whole], 400, "push-cut"),
        (head_of(job), [encode(Piece(LAYERS, 1, 0, len(block)), block.tobytes()), end], 409, "push-refused"),
        (head_of(job, chain_b64="!"), [end], 400, "bad-field"),
        (head_of(job, chain_b64=b64encode(b"abc").decode()), [end], 400, "bad-field"),
        (head_of(job, pool="switchyard-gone"), [end], 400, "bad-field"),
    ]
    for head, frames, status, code in cases:
        answered, document = await send(agents, head, frames)
        assert (answered, document["error"]["code"]) == (status, code), document
        assert agents.engine("d").held_blocks(job.chain) == 0
        await agents.idle()
    async with agents.session.post(agents.url("d", "kv/push"), data=LENGTH.pack(1 << 30)) as answer:
        assert answer.status == 413
    async with agents.session.post(agents.url("d", "kv/push"), data=b"\x01") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "push-cut")


async def test_more_unfinished_blocks_than_the_budget_are_refused(agents: Agents) -> None:
    job, block = prefill_job(prompt(40, 1)), block_of(agents)
    agents.engine("d")._receiver._most_open_blocks = 1
    first = [encode(Piece(LAYERS, number, 0, 1), block[0].tobytes()) for number in range(2)]
    status, answer = await send(agents, head_of(job), [*first, encode(Piece(END), b"")])
    assert (status, answer["error"]["code"]) == (429, "push-budget")
    assert agents.engine("d")._receiver._open_blocks == 0
    await agents.idle()


async def test_a_push_that_falls_silent_ends_and_frees_its_slots(agents: Agents) -> None:
    job, block = prefill_job(prompt(40, 1)), block_of(agents)
    agents.engine("d")._receiver._deadline_s = 0.1
    data = msgspec.json.encode(head_of(job))

    async def body() -> AsyncIterator[bytes]:
        yield LENGTH.pack(len(data)) + data + encode(Piece(LAYERS, 0, 0, 1), block[0].tobytes())
        await asyncio.sleep(5)

    async with agents.session.post(agents.url("d", "kv/push"), data=body()) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (408, "push-silent")
    assert agents.engine("d")._receiver._open_blocks == 0
    agents.engine("d").check_integrity()
