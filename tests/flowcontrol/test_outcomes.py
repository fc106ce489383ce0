"""Every way out of the queue as a client, the metrics and the request's record tell it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.gateway.world import World, document, prompt, until, world
from tests.yard.scene import Scene
from workers.gateway.metrics import GatewayMetrics
from workers.gateway.metrics_text import render
from workers.gateway.signals import Caller, standing
from workers.yard import events
from workers.yard.config import PartitionConfig

REASON = "x-llm-d-request-dropped-reason"
PREFIX = "llm_d_epp_flow_control_"
BANDS = {"premium": 100, "standard": 0, "best-effort": -10}


def narrow(**flow: Any) -> dict[str, Any]:
    """One request at a time, three bands, and limits as given."""
    parts = document([])
    one = {"detector": "concurrency", "mode": "requests", "limit_per_node": 1}
    return {
        "flow": parts["flow"] | {"prefill": one, "decode": one} | flow,
        "bands": [parts["bands"][0] | {"name": name, "priority": priority} for name, priority in BANDS.items()],
        "objectives": [{"name": name, "band": name, "slo_ttft_s": None, "ttl_s": None} for name in BANDS],
    }


async def metrics(yard: World) -> str:
    async with yard.http.get(yard.url + "/metrics") as response:
        return await response.text()


def count(text: str, outcome: str, priority: int) -> float:
    """`requests_total` of an outcome in a band."""
    line = f'{PREFIX}requests_total{{inference_pool="test",outcome="{outcome}",priority="{priority}"}} '
    return sum(float(row.removeprefix(line)) for row in text.splitlines() if row.startswith(line))


async def block(yard: World) -> asyncio.Task[aiohttp.ClientResponse]:
    """A request that holds the only place for long."""
    running = asyncio.create_task(yard.complete(prompt(2000, 400)))
    await until(lambda: yard.serving.yard.outcomes.counters.dispatched == 1)
    return running


async def end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def assert_told(response: aiohttp.ClientResponse, status: int, reason: str) -> None:
    """The OpenAI error object, the header, and when to come back."""
    error = (await response.json())["error"]
    assert (response.status, response.headers[REASON], error["code"]) == (status, reason, reason)
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["type"] == ("rate_limit_error" if status == 429 else "server_error")
    assert 1 <= int(response.headers["retry-after"]) <= 30


async def test_who_gives_way_to_a_higher_band_is_told_so(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0, **narrow(max_requests=1)) as yard:
        running = await block(yard)
        low = asyncio.create_task(yard.complete(prompt(1, 2, 5000), x_llm_d_inference_objective="best-effort"))
        await until(lambda: yard.serving.yard.flow.totals.waiting == 1)
        high = asyncio.create_task(yard.complete(prompt(1, 2, 6000), x_llm_d_inference_objective="premium"))
        await assert_told(await low, 429, "evicted-priority")
        text = await metrics(yard)
        assert (count(text, "Displaced", -10), count(text, "Displaced", 100)) == (1, 0)
        await end(running, high)


async def test_a_gateway_that_stops_tells_who_waits_and_who_comes(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0, **narrow()) as yard:
        running = await block(yard)
        waiting = asyncio.create_task(yard.complete(prompt(1, 2, 5000)))
        await until(lambda: yard.serving.yard.flow.totals.waiting == 1)
        yard.serving.driver.feed(events.ShutDown())
        await assert_told(await waiting, 503, "rejected-shutting-down")
        await assert_told(await yard.complete(prompt(1, 2, 6000)), 503, "rejected-shutting-down")
        text = await metrics(yard)
        assert (count(text, "EvictedShuttingDown", 0), count(text, "RejectedShuttingDown", 0)) == (1, 1)
        await end(running)


async def test_a_pool_without_nodes_that_may_not_be_waited_for_refuses_at_once(tmp_path: Path) -> None:
    async with world(tmp_path, **narrow(empty_pool_ttl_s=0)) as yard:
        await yard.agent.close()
        await until(lambda: not yard.serving.yard.fleet.nodes.taking("prefill"), 10)
        await assert_told(await yard.complete(), 503, "rejected-no-endpoints")
        text = await metrics(yard)
        assert (count(text, "RejectedNoEndpoints", 0), count(text, "EvictedNoEndpoints", 0)) == (1, 0)


async def test_a_client_that_leaves_frees_its_place_at_once_and_is_counted(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0, **narrow()) as yard:
        running = await block(yard)
        gone = asyncio.create_task(yard.complete(prompt(1, 2, 5000), x_request_id="gone"))
        await until(lambda: yard.serving.yard.flow.totals.waiting == 1)
        await end(gone)
        await until(lambda: yard.serving.yard.flow.totals.waiting == 0)
        assert yard.serving.yard.flow.totals.cancelled == 1
        assert count(await metrics(yard), "EvictedContextCancelled", 0) == 1
        row = next(row for row in yard.gateway.snapshot()["recent"] if row["id"] == "gone")
        assert row["outcome"] == "cancelled" and row["queue_s"] is not None
        await end(running)


async def test_an_untrusted_callers_headers_do_not_count(tmp_path: Path) -> None:
    """Its own tenant, band and time to live are used."""
    async with world(tmp_path, speed=1.0, **narrow()) as yard:
        running = await block(yard)
        headers = {"x_llm_d_inference_ttl": "1ms", "x_llm_d_inference_fairness_id": "other"}
        waiting = asyncio.create_task(yard.complete(prompt(1, 2, 5000), secret="sk-plain", **headers))
        await asyncio.sleep(0.2)
        flows = next(b for b in yard.gateway.snapshot()["bands"] if b["name"] == "standard")["flows"]
        assert [(flow["id"], flow["waiting"]) for flow in flows if flow["waiting"]] == [("acme", 1)]
        await end(running, waiting)


async def test_the_metrics_have_llmds_names_and_labels(tmp_path: Path) -> None:
    async with world(tmp_path, **narrow()) as yard:
        await yard.complete(x_gateway_inference_fairness_id="team-7")
        text = await metrics(yard)
    labels = {
        "request_queue_duration_seconds_count": "fairness_id inference_pool model_name outcome priority target_model_name",
        "request_enqueue_duration_seconds_count": "inference_pool",
        "dispatch_cycle_duration_seconds_count": "inference_pool",
        "queue_size": "inference_pool priority",
        "queue_bytes": "inference_pool priority",
        "pool_saturation": "inference_pool stage",
        "requests_total": "inference_pool outcome priority",
        "capacity_utilization_requests": "inference_pool priority",
        "capacity_utilization_bytes": "inference_pool priority",
        "global_capacity_utilization_requests": "inference_pool",
        "global_capacity_utilization_bytes": "inference_pool",
    }
    for name, expected in labels.items():
        found = re.search(rf"^{PREFIX}{name}\{{(.*)\}} ", text, re.MULTILINE)
        assert found is not None, name
        assert sorted(re.findall(r'(\w+)="', found[1])) == expected.split(), name
    assert 'fairness_id="team-7"' in text


def test_a_wished_ttft_is_read_in_the_unit_it_says() -> None:
    config = PartitionConfig.parse(document([]))
    caller = Caller(next(k for k in config.keys_by_sha256.values() if k.trusted), config.tenants["acme"])
    told = {"250": 0.25, "250ms": 0.25, "2s": 2.0, "1m": 60.0}
    for text, seconds in told.items():
        for header in ("x-llm-d-slo-ttft-ms", "x-gateway-slo-ttft-ms"):
            assert standing(config, caller, {header: text}).slo_ttft_s == seconds
    assert standing(config, caller, {"x-llm-d-inference-ttl": "2"}).ttl_s == 2.0


def test_what_is_left_of_a_removed_band_is_metered_as_itself() -> None:
    """With its own priority, and in one row with a band that took that priority over: two rows are no valid scrape."""
    scene = Scene(decode_limit=1, **narrow())
    metered = GatewayMetrics()
    for name in ("busy-1", "busy-2"):
        scene.arrive(name, "premium")
    for name in ("low-1", "low-2"):
        scene.arrive(name, "best-effort", ttl_s=1.0)
    bulk = scene.document["bands"][2] | {"name": "bulk"}
    objective = scene.document["objectives"][2] | {"name": "bulk", "band": "bulk"}
    scene.configure(
        bands=[*scene.document["bands"][:2], bulk], objectives=[*scene.document["objectives"][:2], objective]
    )
    scene.arrive("bulk-1", "bulk")
    text = render(metered, scene.now, scene.yard).decode()
    assert f'{PREFIX}queue_size{{inference_pool="test",priority="-10"}} 3.0' in text
    assert f'{PREFIX}capacity_utilization_requests{{inference_pool="test",priority="-10"}} 0.015' in text
    rows = [row.rsplit(" ", 1)[0] for row in text.splitlines() if not row.startswith("#")]
    assert len(rows) == len(set(rows))
    scene.wait(1.1)
    for name in ("low-1", "low-2"):
        metered.recorded(scene.yard, scene.record(name))
    text = render(metered, scene.now, scene.yard).decode()
    assert (count(text, "EvictedTTL", -10), count(text, "EvictedTTL", 0)) == (2, 0)


async def test_at_most_a_thousand_fairness_ids_are_metrics(tmp_path: Path) -> None:
    scene = Scene()
    for name in ("busy-1", "busy-2", "r"):
        scene.arrive(name, ttl_s=1.0)
    scene.wait(1.1)
    dropped = scene.record("r")
    async with world(tmp_path) as yard:
        counted = yard.serving.metrics
        for number in range(1500):
            record = dropped | {"flow_id": f"flow-{number}"}
            counted.recorded(yard.serving.yard, record)
        ids = set(re.findall(r'fairness_id="([^"]*)"', await metrics(yard)))
        assert len(ids) == 1001 and "other" in ids


@pytest.mark.parametrize(
    ("ttl_s", "leave", "outcome", "code"),
    [
        (1.0, False, "EvictedTTL", "rejected-ttl-expired"),
        (None, True, "EvictedContextCancelled", "rejected-context-cancelled"),
    ],
)
def test_the_requests_record_says_how_it_left_the_queue(
    ttl_s: float | None, leave: bool, outcome: str, code: str
) -> None:
    scene = Scene()
    for name in ("busy-1", "busy-2"):
        scene.arrive(name)
    scene.arrive("r", ttl_s=ttl_s)
    if leave:
        scene.feed(events.ClientGone("r"))
    else:
        scene.wait(1.1)
    record = scene.record("r")
    assert (record["flow_outcome"], record["drop_code"]) == (outcome, code)
    assert record["reason"] and record["queue_s"] is not None
    scene.prefilled("busy-1")
    scene.done("busy-1")
    assert (scene.record("busy-1")["flow_outcome"], scene.record("busy-1")["drop_code"]) == ("Dispatched", None)
