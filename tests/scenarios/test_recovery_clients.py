"""Clients that leave at every stage, blocks that break, pools that are full: everything is freed, every answer is right."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from apps.kvcache.domain.hashing import extend_chain, root_hash
from tests.scenarios.recovery_kit import BLOCK, HEADERS, Cluster, cluster, prompt_ids, until, until_true
from workers.agent.shared_memory import PoolFile
from workers.gateway.upstream import Upstream
from workers.yard.config import PartitionConfig
from workers.yard.requests import Stage

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]
FREED_WITHIN_S = 1.0
PHASES = {"n1": "prefill", "n2": "prefill", "n3": "decode"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Cluster]:
    limits = {"fetch_deadline_s": 8.0}
    async with cluster(tmp_path_factory.mktemp("cluster"), models_dir, PHASES, limits=limits) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def yard(shared: Cluster) -> AsyncIterator[Cluster]:
    await shared.heal()
    yield shared
    await shared.nothing_is_held()
    assert await shared.orphans() == 0


def in_stage(yard: Cluster, request_id: str, stage: Stage) -> Callable[[], bool]:
    def there() -> bool:
        state = yard.state(request_id)
        return state is not None and state.stage is stage

    return there


async def leaves(yard: Cluster, request_id: str, task: asyncio.Task[Any], names: tuple[str, ...] = ()) -> None:
    """The client closes its connection; within a second nobody holds anything."""
    task.cancel()
    await yard.nothing_is_held(FREED_WITHIN_S, names)
    assert yard.serving.yard.outcomes.recent[0]["id"] == request_id
    assert yard.serving.yard.outcomes.recent[0]["outcome"] == "cancelled"


# ---- clients that leave


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_queue_or_the_prefill(yard: Cluster, stream: bool) -> None:
    flow = yard.document["flow"] | {"prefill": yard.document["flow"]["prefill"] | {"limit_per_node": 1}}
    yard.serving.apply(PartitionConfig.parse(yard.document | {"flow": flow}))
    running = [
        asyncio.create_task(yard.ask(f"running-{n}", prompt_ids(1900, 10 + n + 5 * stream), 50, stream))
        for n in range(2)
    ]
    await until(in_stage(yard, "running-1", Stage.PREFILLING))
    queued = asyncio.create_task(yard.ask("queued", prompt_ids(100, 12), 50, stream))
    await until(in_stage(yard, "queued", Stage.QUEUED))
    queued.cancel()
    await until(lambda: yard.state("queued") is None, 5 * FREED_WITHIN_S)
    running[0].cancel()
    await leaves(yard, "running-1", running[1])
    yard.serving.apply(PartitionConfig.parse(yard.document))


async def test_a_client_that_leaves_while_blocks_are_fetched_for_its_prompt(yard: Cluster) -> None:
    """The peer that holds the prefix hangs, and is read by TCP: the fetch would take its whole deadline."""
    ids = prompt_ids(640, 20)
    first = await yard.ask("warm", ids, 2)
    holder = first.headers["x-switchyard-prefill-node"]
    other = "n2" if holder == "n1" else "n1"
    draining = [item | {"draining": item["name"] == holder} for item in yard.document["nodes"]]
    yard.serving.apply(PartitionConfig.parse(yard.document | {"nodes": draining}))
    yard.before("start_prefill", "fetching", lambda _: yard.nodes[holder].signal(signal.SIGSTOP))
    with yard.by_tcp(holder):
        task = asyncio.create_task(yard.ask("fetching", ids, 50))

        async def waits_at_the_other() -> bool:
            return bool((await yard.status(other))["queued"]["prefill"])

        await until_true(waits_at_the_other)
        await leaves(yard, "fetching", task, (other, "n3"))
        yard.nodes[holder].signal(signal.SIGCONT)
    yard.serving.apply(PartitionConfig.parse(yard.document))


async def test_a_client_that_leaves_in_the_transfer_frees_both_nodes(yard: Cluster) -> None:
    """The prefill node hangs and is read by TCP, so its decode node waits for the context: then both are freed."""
    senders: list[str] = []

    def hang(command: Any) -> None:
        senders.append(command.source)
        yard.nodes[command.source].signal(signal.SIGSTOP)

    with yard.by_tcp("n1"), yard.by_tcp("n2"):
        yard.before("start_decode", "transfer", hang)
        task = asyncio.create_task(yard.ask("transfer", prompt_ids(320, 21), 50))

        async def waits_for_its_context() -> bool:
            return bool((await yard.status("n3"))["queued"]["decode"])

        await until_true(waits_for_its_context)
        task.cancel()
        await yard.nothing_is_held(FREED_WITHIN_S, ("n3",))
        yard.nodes[senders[0]].signal(signal.SIGCONT)
        await yard.nothing_is_held(FREED_WITHIN_S)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_its_answer_is_decoded(yard: Cluster, stream: bool) -> None:
    task = asyncio.create_task(yard.ask("decoding", prompt_ids(100, 22), 1500, stream))
    await yard.decoding("decoding", 20)
    await leaves(yard, "decoding", task)


async def test_a_client_whose_connection_is_reset_counts_as_gone(yard: Cluster) -> None:
    host, port = yard.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(yard.body(prompt_ids(100, 23), 1500)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-request-id: reset\r\n"
    head += f"Authorization: {HEADERS['Authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"data: ")
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()
    await yard.nothing_is_held(FREED_WITHIN_S)


async def test_ten_client_errors_open_no_circuit(yard: Cluster) -> None:
    for n in range(10):
        answer = await yard.ask(f"bad-{n}", array("I", [49_999_999]), 5, stream=False)
        assert answer.status == 400
        async with yard.http.post(f"{yard.nodes['n1'].url}/v1/prefill", json={}, headers=HEADERS) as refused:
            assert refused.status == 401
    ids = prompt_ids(50, 24)
    yard.assert_whole(await yard.ask("good", ids, 5), ids, 5)
    assert all(not node.breaker.faults and node.health == "ok" for node in yard.serving.yard.fleet.nodes)


# ---- blocks that break, pools that are full


def flip_a_byte(pool: str, ids: array[int], block: int) -> None:
    """Another process damages one block of a pool in shared memory."""
    chain = extend_chain(root_hash("tiny", "f32", "acme"), ids, BLOCK)
    file = PoolFile.open(pool, writable=True)
    hash_ = chain[16 * block : 16 * (block + 1)]
    data = file.block(file.find([hash_])[hash_]).view("u1")
    data.reshape(-1)[77] ^= 0x10
    file.close()


async def test_a_flipped_byte_in_the_own_pool_is_found_recomputed_and_counted(yard: Cluster) -> None:
    ids = prompt_ids(640, 30)
    first = await yard.ask("before", ids, 10)
    holder = first.headers["x-switchyard-prefill-node"]
    status = await yard.status(holder)
    flip_a_byte(status["pool"]["name"], ids, 25)
    again = await yard.ask("after", ids, 10)
    assert again.headers["x-switchyard-prefill-node"] == holder
    assert again.headers["x-switchyard-cached-tokens"] == str(25 * BLOCK), "what stands before the broken block"
    failures = (await yard.status(holder))["counters"]["checksum_failures"]
    assert failures == status["counters"]["checksum_failures"] + 1
    yard.assert_whole(again, ids, 10)
    third = await yard.ask("mended", ids, 10)
    assert third.headers["x-switchyard-cached-tokens"] == str(640 - 1), "it was stored anew"
    assert f'checksum_failures_total{{node="{holder}"}} {failures}' in await yard.call(holder, "/metrics")


async def test_a_flipped_byte_on_the_way_to_the_decode_node_is_found_recomputed_and_counted(
    yard: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a context that is fetched; one that is pushed is there before the byte could be flipped."""
    monkeypatch.setattr(Upstream, "_push", lambda *_: None)
    ids = prompt_ids(320, 31)
    pools = {name: (await yard.status(name))["pool"]["name"] for name in ("n1", "n2")}
    before = (await yard.status("n3"))["counters"]["checksum_failures"]
    yard.before("start_decode", "flipped", lambda command: flip_a_byte(pools[command.source], ids, 3))
    yard.assert_whole(await yard.ask("flipped", ids, 20), ids, 20)
    assert (await yard.status("n3"))["counters"]["checksum_failures"] == before + 1


async def test_full_pools_serve_every_request_right(tmp_path: Path, models_dir: Path) -> None:
    """Pools of 24 blocks, prompts of 25 to 60: what finds no room is recomputed, and nothing stays pinned."""
    phases = {"n1": "prefill", "n2": "decode"}
    async with cluster(tmp_path, models_dir, phases, pool_blocks=24) as yard:
        prompts = [prompt_ids(400 + 70 * n, 40 + n) for n in range(6)]
        answers = await asyncio.gather(*(yard.ask(f"full-{n}", ids, 20) for n, ids in enumerate(prompts)))
        for answer, ids in zip(answers, prompts, strict=True):
            yard.assert_whole(answer, ids, 20)
        await yard.nothing_is_held()
        assert (await yard.status("n1"))["pool"]["used_blocks"] <= 24
