"""Edits while requests wait, on a running gateway: nobody is lost, and the next dispatch follows the new configuration."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import aiohttp

from tests.flowcontrol.test_outcomes import block, end, metrics, narrow
from tests.gateway.world import World, prompt, until, world
from workers.yard import commands
from workers.yard.config import PartitionConfig


def edit(yard: World, **changes: Any) -> None:
    """Puts a changed document in force, as the gateway does with one that was published."""
    yard.document = copy.deepcopy(yard.document) | changes | {"version": yard.document["version"] + 1}
    yard.serving.apply(PartitionConfig.parse(yard.document))


def bands(yard: World, **of: dict[str, Any]) -> list[dict[str, Any]]:
    return [band | of.get(band["name"], {}) for band in yard.document["bands"]]


async def queue(yard: World, number: int, objective: str, **headers: str) -> asyncio.Task[aiohttp.ClientResponse]:
    """One more that waits. The end of its name is its place in the order of arrival."""
    waiting = yard.serving.yard.flow.totals.waiting
    name = f"{objective}-{number}"
    call = yard.complete(
        prompt(1, 2, 5000 + 10 * number), x_request_id=name, x_llm_d_inference_objective=objective, **headers
    )
    task = asyncio.create_task(call)
    await until(lambda: yard.serving.yard.flow.totals.waiting == waiting + 1)
    return task


def watch_dispatches(yard: World) -> list[str]:
    """Names of requests in the order in which they go to a prefill node."""
    order: list[str] = []
    upstream = yard.serving.upstream
    start = upstream.start_prefill

    def seen(command: commands.StartPrefill) -> None:
        order.append(command.request_id)
        start(command)

    upstream.start_prefill = seen  # type: ignore[method-assign]
    return order


async def served(yard: World, running: asyncio.Task[Any], waiting: list[asyncio.Task[aiohttp.ClientResponse]]) -> None:
    """The place becomes free, and everybody who waits is answered."""
    await end(running)
    answers = await asyncio.gather(*waiting)
    assert [answer.status for answer in answers] == [200] * len(waiting)
    await yard.idle()
    totals = yard.serving.yard.flow.totals
    assert (totals.waiting, totals.expired, totals.displaced, totals.rejected) == (0, 0, 0, 0)


async def test_bands_that_trade_priorities_keep_their_requests(tmp_path: Path) -> None:
    async with world(tmp_path, speed=4.0, **narrow()) as yard:
        running = await block(yard)
        waiting = [await queue(yard, n, name) for n, name in enumerate(("best-effort", "premium", "best-effort"))]
        order = watch_dispatches(yard)
        edit(yard, bands=bands(yard, premium={"priority": -10}, **{"best-effort": {"priority": 100}}))
        await served(yard, running, waiting)
    assert order == ["best-effort-0", "best-effort-2", "premium-1"]


async def test_who_waits_in_a_removed_band_is_served_in_its_place(tmp_path: Path) -> None:
    async with world(tmp_path, speed=4.0, **narrow()) as yard:
        running = await block(yard)
        waiting = [await queue(yard, n, name) for n, name in enumerate(("best-effort", "standard", "best-effort"))]
        order = watch_dispatches(yard)
        kept = [band for band in yard.document["bands"] if band["name"] != "best-effort"]
        objectives = [o | {"band": "standard"} for o in yard.document["objectives"]]
        edit(yard, bands=kept, objectives=objectives)
        waiting.append(await queue(yard, 3, "best-effort"))  # its objective leads to another band now
        text = await metrics(yard)
        assert 'queue_size{inference_pool="test",priority="-10"} 2.0' in text
        await served(yard, running, waiting)
    assert order == ["standard-1", "best-effort-3", "best-effort-0", "best-effort-2"]


async def test_another_policy_lines_up_who_waits_by_its_own_rule(tmp_path: Path) -> None:
    async with world(tmp_path, speed=4.0, **narrow()) as yard:
        running = await block(yard)
        flows = ("a", "a", "b")
        waiting = [await queue(yard, n, "standard", x_llm_d_inference_fairness_id=f) for n, f in enumerate(flows)]
        late = await queue(yard, 3, "standard", x_llm_d_inference_fairness_id="a", x_llm_d_slo_ttft_ms="100ms")
        order = watch_dispatches(yard)
        edit(yard, bands=bands(yard, standard={"ordering": "slo-deadline", "fairness": "global-strict"}))
        await served(yard, running, [*waiting, late])
    assert order == ["standard-3", "standard-0", "standard-1", "standard-2"]


async def test_a_gate_that_is_taken_away_lets_all_go_and_a_lower_limit_recalls_nobody(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0, **narrow()) as yard:
        running = await block(yard)
        waiting = [await queue(yard, n, "standard") for n in range(3)]
        flow, off = yard.document["flow"], {"detector": "off"}
        edit(yard, flow=flow | {"prefill": off, "decode": off})
        assert yard.serving.yard.flow.totals.dispatched == 4
        edit(yard, flow=flow)
        held = await queue(yard, 4, "standard")
        await end(*waiting)
        await until(lambda: yard.serving.yard.flow.snapshot(yard.serving.clock()).stages["prefill"].in_flight == 1)
        assert yard.serving.yard.flow.totals.waiting == 1, "the first still runs"
        await served(yard, running, [held])
