"""Node processes killed with -9 at every stage of a request: the client sees one whole, unchanged answer."""

from __future__ import annotations

import asyncio
import signal
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.agent.reference_support import greedy
from tests.scenarios.recovery_kit import Cluster, cluster, prompt_ids, until, until_true
from workers.gateway.upstream import Upstream
from workers.yard import recovery
from workers.yard.config import PartitionConfig
from workers.yard.requests import Stage

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path_factory.mktemp("cluster"), models_dir) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def yard(shared: Cluster) -> AsyncIterator[Cluster]:
    """Every node is well before a test; after it nothing is held and nothing was counted twice."""
    await shared.heal()
    yield shared
    await shared.nothing_is_held()
    assert await shared.orphans() == 0


async def test_killed_in_prefill_the_prompt_goes_on_from_the_dead_nodes_pool(yard: Cluster) -> None:
    ids, before = prompt_ids(1500, 1), yard.recoveries
    task = asyncio.create_task(yard.ask("prefill", ids, 20))
    await until(lambda: yard.state("prefill") is not None)
    state = yard.state("prefill")
    assert state is not None and state.prefill_node is not None
    lost = state.prefill_node

    async def partly_stored() -> bool:
        return int((await yard.status(lost))["pool"]["used_blocks"]) >= 20

    await until_true(partly_stored)
    assert state.stage is Stage.PREFILLING
    yard.nodes[lost].kill()
    answer = await task
    other = answer.headers["x-switchyard-prefill-node"]
    assert other != lost and yard.recoveries == before + 1
    assert (await yard.status(other))["counters"]["fetched_blocks_shared_memory"] >= 15
    yard.assert_whole(answer, ids, 20)


async def test_the_receiver_killed_in_transfer_is_replaced_without_a_new_prefill(yard: Cluster) -> None:
    ids, lost = prompt_ids(300, 2), []

    def hit(command: Any) -> None:
        lost.append(command.node)
        yard.nodes[command.node].signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.15, yard.nodes[command.node].kill)

    yard.before("start_decode", "receiver", hit)
    task = asyncio.create_task(yard.ask("receiver", ids, 30))
    await until(lambda: bool(lost))
    await until(lambda: (state := yard.state("receiver")) is None or state.decode_node != lost[0])
    state = yard.state("receiver")
    assert state is None or state.attempts == 1
    yard.assert_whole(await task, ids, 30)


@pytest.mark.parametrize("pushed", [False, True])
async def test_the_sender_killed_in_transfer_is_still_read_by_the_receiver(
    yard: Cluster, pushed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode node gets the request while the prefill node is already dead: its pool in shared memory is enough for what was
    not pushed before."""
    if not pushed:
        monkeypatch.setattr(Upstream, "_push", lambda *_: None)
    ids, before = prompt_ids(333, 3 + 90 * pushed), yard.recoveries
    seen: list[str] = []

    def hit(command: Any) -> None:
        receiver = yard.nodes[command.node]
        receiver.signal(signal.SIGSTOP)
        yard.nodes[command.source].kill()
        asyncio.get_running_loop().call_later(0.1, receiver.signal, signal.SIGCONT)
        seen.append(command.node)

    fetched = {name: await yard.status(name) for name in ("n3", "n4")}
    yard.before("start_decode", f"sender-{pushed}", hit)
    answer = await yard.ask(f"sender-{pushed}", ids, 30)
    yard.assert_whole(answer, ids, 30)
    assert yard.recoveries == before, "nothing had to be tried again"
    keys = ("fetched_blocks_shared_memory", "received_blocks") if pushed else ("fetched_blocks_shared_memory",)
    after = (await yard.status(seen[0]))["counters"]
    came = sum(after[key] - fetched[seen[0]]["counters"][key] for key in keys)
    assert came in ((20, 21) if pushed else (21,)), (
        "20 full blocks and the tail, which is not counted where it is pushed"
    )
    assert after["failed_fetches"] == fetched[seen[0]]["counters"]["failed_fetches"]


async def test_killed_in_decode_the_stream_goes_on_where_it_was(yard: Cluster) -> None:
    ids, before = prompt_ids(200, 5), yard.recoveries
    task = asyncio.create_task(yard.ask("decode", ids, 120))
    lost = await yard.decoding("decode", 30)
    yard.nodes[lost].kill()
    assert await yard.decoding("decode", 60) != lost
    answer = await task
    assert yard.recoveries == before + 1
    yard.assert_whole(answer, ids, 120)


async def test_killed_in_decode_with_its_context_out_of_reach_a_prefill_node_goes_on(
    yard: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output so far becomes part of a prompt; the next turn finds all of it, whoever computed it."""
    monkeypatch.setattr(recovery, "MAX_REDONE_TOKENS", 0)
    ids, tokens = prompt_ids(100, 11), 76
    task = asyncio.create_task(yard.ask("again", ids, tokens))
    lost = await yard.decoding("again", 30)
    yard.nodes[lost].kill()
    await until(lambda: (state := yard.state("again")) is not None and state.attempts == 2)
    yard.assert_whole(await task, ids, tokens)
    yard.serving.yard.kv.check_integrity()
    next_turn = ids + array("I", greedy(yard.models_dir, ids, tokens)) + prompt_ids(30, 12)
    answer = await yard.ask("next", next_turn, 2)
    assert answer.headers["x-switchyard-cached-tokens"] == "160", "10 of the 11 blocks; the last token was never fed"


async def test_killed_both_at_once_the_answer_comes_from_the_other_two(yard: Cluster) -> None:
    ids = prompt_ids(200, 8)
    task = asyncio.create_task(yard.ask("both", ids, 100))
    lost = await yard.decoding("both", 20)
    state = yard.state("both")
    assert state is not None and state.prefill_node is not None
    yard.nodes[lost].kill()
    yard.nodes[state.prefill_node].kill()
    yard.assert_whole(await task, ids, 100)


async def test_killed_while_it_drains_for_a_switch_its_outputs_go_on_and_it_returns_switched(yard: Cluster) -> None:
    ids = prompt_ids(150, 9)
    task = asyncio.create_task(yard.ask("switch", ids, 120))
    moving = await yard.decoding("switch", 20)
    order = {"phase": "prefill", "generation": 1, "drain_deadline_s": 60}
    assert (await yard.call(moving, "/v1/phase", order, "PUT"))["state"] == "draining"
    yard.nodes[moving].kill()
    yard.assert_whole(await task, ids, 120)
    await yard.heal()
    status = await yard.status(moving)
    assert (status["phase"], status["state"], status["generation"]) == ("prefill", "ready", 1)
    await yard.call(moving, "/v1/phase", {"phase": "decode", "generation": 2, "drain_deadline_s": 60}, "PUT")
    await until(lambda: len(yard.serving.yard.fleet.nodes.taking("decode")) == 2)


async def test_without_any_node_left_the_stream_ends_with_an_error_event(yard: Cluster) -> None:
    flow = yard.document["flow"] | {"empty_pool_ttl_s": 0.5}
    yard.serving.apply(PartitionConfig.parse(yard.document | {"flow": flow}))
    ids = prompt_ids(100, 10)
    task = asyncio.create_task(yard.ask("nobody", ids, 150))
    await yard.decoding("nobody", 20)
    for name in ("n3", "n4"):
        yard.nodes[name].kill()
    answer = await task
    yard.serving.apply(PartitionConfig.parse(yard.document))
    assert answer.status == 200 and answer.error is not None
    assert (answer.error["code"], answer.finish) == ("rejected-no-endpoints", None)
    assert yard.expected(ids, 150).startswith(answer.text) and answer.text, "what came was right as far as it went"
