"""`make proof-recovery`: what takes too long for every test run. Nodes that hang, are slow, come back or switch; gateways that
die or hang; and everything at once, at random. Prints what the clients noticed, one JSON object a line."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench.report import report
from tests.gateway.world import AGENT_TOKEN, NOBODY_REDIS
from tests.scenarios.recovery_kit import (
    Answer,
    Cluster,
    Node,
    cluster,
    free_port,
    prompt_ids,
    start_process,
    until,
    until_true,
)
from workers.yard.requests import Stage

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
SEED = int(os.environ.get("PROOF_SEED", "1"))
LEASE_S = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> AsyncIterator[Cluster]:
    limits = {"lease_s": LEASE_S}
    async with cluster(tmp_path_factory.mktemp("cluster"), models_dir, limits=limits) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def yard(shared: Cluster) -> AsyncIterator[Cluster]:
    await shared.heal()
    yield shared
    await shared.heal()
    await shared.nothing_is_held(3.0)
    await until_true(lambda: no_orphans(shared))


async def no_orphans(yard: Cluster) -> bool:
    return await yard.orphans() == 0


def say_silence(case: str, answer: Answer, most_s: float) -> None:
    report(f"recovery_{case}_silence_s", answer.longest_silence_s, "s", target=most_s, aim="at_most")


async def prefilling(yard: Cluster, request_id: str) -> str:
    """Waits until the request's prompt is being computed; answers where."""
    await until(lambda: (state := yard.state(request_id)) is not None and state.stage is Stage.PREFILLING)
    state = yard.state(request_id)
    assert state is not None and state.prefill_node is not None
    node = state.prefill_node

    async def runs() -> bool:
        return bool((await yard.status(node))["running"]["prefill"])

    await until_true(runs)
    return node


# ---- killed


async def test_the_sender_killed_in_a_transfer_over_tcp_leaves_the_context_to_be_recomputed(yard: Cluster) -> None:
    ids = prompt_ids(320, 4)
    seen: list[str] = []

    def hit(command: Any) -> None:
        sender = yard.nodes[command.source]
        sender.signal(signal.SIGSTOP)
        asyncio.get_running_loop().call_later(0.3, sender.kill)
        seen.append(command.node)

    before = {name: (await yard.status(name))["counters"] for name in ("n3", "n4")}
    with yard.by_tcp("n1"), yard.by_tcp("n2"):
        yard.before("start_decode", "tcp", hit)
        answer = await yard.ask("tcp", ids, 30)
    yard.assert_whole(answer, ids, 30)
    assert (await yard.status(seen[0]))["counters"]["failed_fetches"] > before[seen[0]]["failed_fetches"]
    say_silence("sender_killed_over_tcp", answer, 3.0)


async def test_killed_in_decode_a_whole_answer_is_whole(yard: Cluster) -> None:
    """Without a stream, with sampling at a fixed seed: the same draw at each place of the answer."""
    ids = prompt_ids(100, 6)
    sampled: dict[str, Any] = {
        "temperature": 0.8,
        "seed": 7,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    }
    task = asyncio.create_task(yard.ask("whole", ids, 100, stream=False, **sampled))
    yard.nodes[await yard.decoding("whole", 20)].kill()
    answer = await task
    assert (answer.status, answer.output_tokens) == (200, 100)
    await yard.heal()
    assert answer.text == (await yard.ask("whole", ids, 100, stream=False, **sampled)).text


async def test_killed_late_in_a_long_answer_a_prefill_node_computes_what_was_said(yard: Cluster) -> None:
    ids = prompt_ids(120, 7)
    task = asyncio.create_task(yard.ask("long", ids, 400))
    yard.nodes[await yard.decoding("long", 300)].kill()
    answer = await task
    yard.assert_whole(answer, ids, 400)
    say_silence("killed_after_300_tokens", answer, 3.0)


async def test_all_decode_nodes_killed_the_stream_goes_on_once_one_is_back(yard: Cluster) -> None:
    ids = prompt_ids(120, 8)
    task = asyncio.create_task(yard.ask("back", ids, 150))
    await yard.decoding("back", 30)
    for name in ("n3", "n4"):
        yard.nodes[name].kill()
    await until(lambda: yard.serving.yard.waiting_for_nodes == 1)
    yard.start("n4")
    answer = await task
    yard.assert_whole(answer, ids, 150)
    say_silence("all_decode_nodes_killed", answer, 20.0)


async def test_all_prefill_nodes_killed_in_prefill_the_prompt_waits_for_one_to_come_back(yard: Cluster) -> None:
    ids = prompt_ids(1500, 9)
    task = asyncio.create_task(yard.ask("prompt", ids, 20))
    await prefilling(yard, "prompt")
    for name in ("n1", "n2"):
        yard.nodes[name].kill()
    await until(lambda: yard.serving.yard.waiting_for_nodes == 1)
    yard.start("n1")
    answer = await task
    yard.assert_whole(answer, ids, 20)
    assert (await yard.status("n1"))["counters"]["adopted_blocks"] > 0, "it found its pool again"


async def test_a_prefill_node_killed_in_a_switch_with_a_queue_loses_nothing(yard: Cluster) -> None:
    prompts = {f"q{n}": prompt_ids(600, 20 + n) for n in range(8)}
    tasks = {name: asyncio.create_task(yard.ask(name, ids, 30)) for name, ids in prompts.items()}
    moving = await prefilling(yard, "q0")
    generation = (await yard.status(moving))["generation"] + 1
    order = {"phase": "decode", "generation": generation, "drain_deadline_s": 60}
    await yard.call(moving, "/v1/phase", order, "PUT")
    await asyncio.sleep(0.1)
    yard.nodes[moving].kill()
    for name, ids in prompts.items():
        yard.assert_whole(await tasks[name], ids, 30)
    await yard.heal()
    await yard.call(moving, "/v1/phase", order | {"phase": "prefill", "generation": generation + 1}, "PUT")


async def test_an_output_that_outlives_the_drains_deadline_goes_on_also_when_its_node_is_killed(yard: Cluster) -> None:
    ids = prompt_ids(100, 10)
    task = asyncio.create_task(yard.ask("mixed", ids, 200))
    moving = await yard.decoding("mixed", 20)
    generation = (await yard.status(moving))["generation"] + 1
    order = {"phase": "prefill", "generation": generation, "drain_deadline_s": 0.05}
    await yard.call(moving, "/v1/phase", order, "PUT")

    async def is_mixed() -> bool:
        return bool((await yard.status(moving))["phase"] == "mixed")

    await until_true(is_mixed)
    yard.nodes[moving].kill()
    answer = await task
    yard.assert_whole(answer, ids, 200)
    await yard.heal()
    assert (await yard.status(moving))["phase"] == "prefill"
    await yard.call(moving, "/v1/phase", order | {"phase": "decode", "generation": generation + 1}, "PUT")


# ---- hung and slow


async def test_a_decode_node_that_hangs_is_given_up_and_frees_all_when_it_wakes(yard: Cluster) -> None:
    ids = prompt_ids(120, 11)
    task = asyncio.create_task(yard.ask("hung", ids, 150))
    hung = await yard.decoding("hung", 30)
    yard.nodes[hung].signal(signal.SIGSTOP)
    answer = await task
    yard.assert_whole(answer, ids, 150)
    say_silence("hung_in_decode", answer, 8.0)
    yard.nodes[hung].signal(signal.SIGCONT)
    report("recovery_woken_node_free_after_s", await yard.nothing_is_held(3.0), "s", target=3.0, aim="at_most")


async def test_a_prefill_node_that_hangs_is_given_up(yard: Cluster) -> None:
    ids = prompt_ids(1500, 12)
    began = time.monotonic()
    task = asyncio.create_task(yard.ask("hung-prompt", ids, 20))
    hung = await prefilling(yard, "hung-prompt")
    yard.nodes[hung].signal(signal.SIGSTOP)
    answer = await task
    yard.assert_whole(answer, ids, 20)
    assert answer.headers["x-switchyard-prefill-node"] != hung
    report("recovery_hung_in_prefill_ttft_s", answer.times[0] - began, "s", target=10.0, aim="at_most")
    yard.nodes[hung].signal(signal.SIGCONT)


async def test_a_node_that_hangs_for_a_moment_is_waited_for(yard: Cluster) -> None:
    ids, before = prompt_ids(120, 13), yard.recoveries
    task = asyncio.create_task(yard.ask("moment", ids, 150))
    hung = await yard.decoding("moment", 30)
    yard.nodes[hung].signal(signal.SIGSTOP)
    await asyncio.sleep(4.0)
    yard.nodes[hung].signal(signal.SIGCONT)
    yard.assert_whole(await task, ids, 150)
    assert yard.recoveries == before


async def test_a_slow_node_is_neither_lost_nor_wrong_and_gets_less_new_work(yard: Cluster) -> None:
    """It runs a fifth of the time. What it holds ends right; what comes meanwhile goes elsewhere while it is silent."""
    ids, before = prompt_ids(120, 14), yard.recoveries
    task = asyncio.create_task(yard.ask("slow", ids, 60))
    slow = await yard.decoding("slow", 5)

    async def slowed() -> None:
        while not task.done():
            yard.nodes[slow].signal(signal.SIGSTOP)
            await asyncio.sleep(0.2)
            yard.nodes[slow].signal(signal.SIGCONT)
            await asyncio.sleep(0.05)

    slowing = asyncio.create_task(slowed())
    answer = await task
    await slowing
    yard.assert_whole(answer, ids, 60)
    assert yard.recoveries == before
    say_silence("slow_node", answer, 3.0)


async def test_a_silent_node_gets_no_new_work_while_others_can_do_it(yard: Cluster) -> None:
    yard.nodes["n3"].signal(signal.SIGSTOP)
    await until(lambda: yard.serving.yard.fleet.nodes.by_name["n3"].health == "stale")
    for n in range(4):
        ids = prompt_ids(50, 200 + n)
        answer = await yard.ask(f"elsewhere-{n}", ids, 3)
        yard.assert_whole(answer, ids, 3)
        assert answer.headers["x-switchyard-decode-node"] == "n4"
    yard.nodes["n3"].signal(signal.SIGCONT)


# ---- gateways


@asynccontextmanager
async def gateway_process(yard: Cluster) -> AsyncIterator[tuple[Node, str]]:
    """Another gateway of the same nodes, as a process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    file = yard.folder / f"gateway-{port}.json"
    file.write_text(json.dumps(yard.document))
    environment = os.environ | {"SWITCHYARD_AGENT_TOKEN": AGENT_TOKEN, "REDIS_URL": NOBODY_REDIS}
    options = ["--partition", "test", "--port", str(port), "--config-file", str(file)]
    process = start_process(["-m", "workers.gateway", *options], environment, yard.folder / "gateway.log")

    async def takes_work() -> bool:
        try:
            async with yard.http.get(f"{url}/metrics") as answer:
                text = await answer.text()
        except aiohttp.ClientError:
            return False
        return text.count("switchyard_nodes_taking{") == 2 and text.count("} 2.0\n") >= 2

    try:
        await until_true(takes_work, 30)
        yield Node("gateway", file, port, process), url
    finally:
        process.kill()
        process.wait()


async def busy(yard: Cluster) -> int:
    statuses = [await yard.status(name) for name in yard.nodes]
    return sum(sum(status["running"].values()) + sum(status["queued"].values()) for status in statuses)


async def test_a_killed_gateways_requests_are_freed_on_the_nodes(yard: Cluster) -> None:
    async with gateway_process(yard) as (gateway, url):
        tasks = [
            asyncio.create_task(yard.ask(f"lost-{n}", prompt_ids(200, 30 + n), 1500, url=url, stream=n % 2 == 0))
            for n in range(4)
        ]

        async def all_run() -> bool:
            return await busy(yard) == 4

        await until_true(all_run)
        gateway.kill()
        freed_s = await yard.nothing_is_held(LEASE_S + 2.0)
        await asyncio.gather(*tasks, return_exceptions=True)
    report("recovery_gateway_killed_freed_s", freed_s, "s", target=1.0, aim="at_most")


async def test_a_hung_gateways_requests_are_freed_by_lease_and_go_on_when_it_wakes(yard: Cluster) -> None:
    ids = prompt_ids(200, 40)
    async with gateway_process(yard) as (gateway, url):
        task = asyncio.create_task(yard.ask("lease", ids, 1200, url=url))

        async def decodes() -> bool:
            return any([(await yard.status(name))["running"]["decode"] for name in ("n3", "n4")])

        await until_true(decodes)
        gateway.signal(signal.SIGSTOP)
        began = time.monotonic()

        async def freed() -> bool:
            return await busy(yard) == 0

        await until_true(freed)
        freed_s = time.monotonic() - began
        gateway.signal(signal.SIGCONT)
        answer = await task
    report("recovery_gateway_hung_freed_s", freed_s, "s", target=LEASE_S + 1.5, aim="at_most")
    yard.assert_whole(answer, ids, 1200)
    ended = [(await yard.status(name))["leases_ended"] for name in yard.nodes]
    assert sum(ended) >= 1


# ---- everything at once


class Chaos:
    """Requests in a closed loop, some of which leave early, while nodes are killed, stopped and switched at random."""

    def __init__(self, yard: Cluster, seed: int) -> None:
        self.yard = yard
        self.random = random.Random(seed)
        self.until = time.monotonic() + 40.0
        self.whole: list[tuple[Answer, array[int], int]] = []
        self.left = self.faults = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(6)), self._faults())

    async def _client(self, number: int) -> None:
        turn = 0
        while time.monotonic() < self.until:
            turn += 1
            ids = prompt_ids(self.random.randint(20, 900), 1000 * number + turn)
            tokens = self.random.randint(1, 120)
            task = asyncio.create_task(
                self.yard.ask(f"chaos-{number}-{turn}", ids, tokens, stream=self.random.random() < 0.8)
            )
            if self.random.random() < 0.25:
                await asyncio.wait({task}, timeout=self.random.uniform(0.0, 1.0))
                if not task.done():
                    task.cancel()
                    self.left += 1
                    continue
            self.whole.append((await task, ids, tokens))

    async def _faults(self) -> None:
        while time.monotonic() < self.until:
            await asyncio.sleep(self.random.uniform(0.3, 2.0))
            node = self.yard.nodes[self.random.choice(list(self.yard.nodes))]
            act = self.random.choice((self._kill, self._kill, self._stop, self._switch))
            if node.alive:
                self.faults += 1
                await act(node)

    async def _kill(self, node: Node) -> None:
        node.kill()
        await asyncio.sleep(self.random.uniform(0.0, 1.0))
        self.yard.start(node.name)

    async def _stop(self, node: Node) -> None:
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(self.random.choice((0.2, 1.0, 7.0)))
        node.signal(signal.SIGCONT)

    async def _switch(self, node: Node) -> None:
        """There and back again, the second order perhaps in the middle of the first switch."""
        own = self.yard.phases[node.name]
        try:
            for phase in ("decode" if own == "prefill" else "prefill", own):
                generation = (await self.yard.status(node.name))["generation"] + 1
                order = {"phase": phase, "generation": generation, "drain_deadline_s": self.random.choice((0.0, 5.0))}
                await self.yard.call(node.name, "/v1/phase", order, "PUT")
                await asyncio.sleep(self.random.uniform(0.0, 1.5))
        except aiohttp.ClientError:
            return


async def test_everything_at_once_loses_and_changes_nothing(yard: Cluster) -> None:
    chaos = Chaos(yard, SEED)
    before = yard.recoveries
    await chaos.run()
    await yard.heal()
    for name, phase in yard.phases.items():
        generation = (await yard.status(name))["generation"] + 1
        await yard.call(name, "/v1/phase", {"phase": phase, "generation": generation, "drain_deadline_s": 5}, "PUT")
    failed = [(answer.status, answer.error) for answer, _, _ in chaos.whole if answer.error is not None]
    changed = 0
    for answer, ids, tokens in chaos.whole:
        changed += answer.error is None and answer.text != yard.expected(ids, tokens)
    report("recovery_chaos_requests", len(chaos.whole), "requests")
    report("recovery_chaos_left_early", chaos.left, "requests")
    report("recovery_chaos_faults", chaos.faults, "faults")
    report("recovery_chaos_recoveries", yard.recoveries - before, "attempts")
    lost_ok = report("recovery_chaos_lost", len(failed), "requests", target=0, aim="at_most")
    changed_ok = report("recovery_chaos_changed", changed, "requests", target=0, aim="at_most")
    assert lost_ok and changed_ok, failed
