"""What public projects got wrong in flow control, each by its name, and right here. On the machine where time matters,
through a real gateway where a client sees it."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from apps.flowcontrol.domain.commands import Dispatch, Outcome
from apps.flowcontrol.domain.config import BandConfig, StageConfig
from apps.flowcontrol.domain.events import Enqueue, NodeReport, PoolChanged, PredictedTtft, Reconfigure, StageReleased
from tests.flowcontrol.domain.driving import Cluster, flow_config, names, request
from tests.gateway.world import document, prompt, until, world

REASON = "x-llm-d-request-dropped-reason"


@pytest.mark.parametrize(
    "gate",
    [
        StageConfig(limit_per_node=4),
        StageConfig(mode="tokens", token_limit_per_node=40),
        StageConfig(mode="hybrid", limit_per_node=4, token_limit_per_node=10**6),
        StageConfig(detector="utilization", queue_threshold=4),
        StageConfig(detector="predicted-ttft", ttft_budget_s=1.0),
    ],
    ids=["requests", "tokens", "hybrid", "utilization", "predicted-ttft"],
)
def test_a_burst_over_many_flows_does_not_pass_the_gate(gate: StageConfig) -> None:
    cluster = Cluster(replace(flow_config(), prefill=gate), answer_s=None, nodes=0)
    for stage in ("prefill", "decode"):
        cluster.send(PoolChanged(stage, 1, nodes=("n1",)))
        cluster.send(NodeReport("n1", stage, 0, 0.0, 0.0))
    cluster.send(PredictedTtft(0.1))
    for number in range(500):
        cluster.enqueue(f"r{number}", flow=f"flow-{number}", uncached_tokens=10)
    assert cluster.most_running <= 4, "room is taken at the moment of dispatch"


def test_a_backlog_does_not_drain_one_request_per_tick() -> None:
    cluster = Cluster(flow_config(limit=1), answer_s=None)
    controller = cluster.controller
    for name in names("r", 10_001):
        controller.handle(0.0, Enqueue(request(name)))
    commands = controller.handle(0.0, Reconfigure(flow_config(limit=10**5, decode_limit=10**6)))
    assert len(commands) == 10_000, "all of it in the one pass that finds room"


def test_stale_metrics_from_one_node_do_not_stop_the_whole_pool() -> None:
    gate = StageConfig(detector="utilization", queue_threshold=4, stale_after_s=3.0)
    cluster = Cluster(replace(flow_config(), prefill=gate), answer_s=None, nodes=0)
    for stage in ("prefill", "decode"):
        cluster.send(PoolChanged(stage, 3, nodes=("n1", "n2", "n3")))
    for node in ("n1", "n2", "n3"):
        cluster.send(NodeReport(node, "prefill", 0, 0.0, 0.0))
    cluster.now = 60.0
    for node in ("n1", "n2"):
        cluster.send(NodeReport(node, "prefill", 0, 0.0, 60.0))
    cluster.enqueue(*names("r", 20))
    assert len(cluster.order) == 8, "the two that speak take four each, the silent one counts as full"


def test_a_negative_priority_request_is_not_promoted_because_its_band_is_unknown() -> None:
    cluster = Cluster(flow_config(limit=1), answer_s=None)
    cluster.enqueue("running")
    cluster.enqueue("nightly", band="nightly", priority=-50)
    cluster.enqueue("standard", band="standard")
    cluster.enqueue("best-effort", band="best-effort")
    for done in ("running", "standard", "best-effort"):
        cluster.release(done)
    assert cluster.order == ["running", "standard", "best-effort", "nightly"]
    bands = {band.name: band.priority for band in cluster.controller.snapshot(0.0).bands}
    assert bands["nightly"] == -50
    assert next(b for b in cluster.controller.config.bands if b.name == "best-effort").sheddable


def test_drop_reasons_can_be_told_apart() -> None:
    told = {
        outcome: (outcome.http_status, outcome.reason_code) for outcome in Outcome if outcome is not Outcome.DISPATCHED
    }
    assert told == {
        Outcome.REJECTED_CAPACITY: (429, "rejected-saturated"),
        Outcome.DISPLACED: (429, "evicted-priority"),
        Outcome.EVICTED_TTL: (429, "rejected-ttl-expired"),
        Outcome.REJECTED_NO_ENDPOINTS: (503, "rejected-no-endpoints"),
        Outcome.EVICTED_NO_ENDPOINTS: (503, "rejected-no-endpoints"),
        Outcome.EVICTED_CONTEXT_CANCELLED: (499, "rejected-context-cancelled"),
        Outcome.REJECTED_SHUTTING_DOWN: (503, "rejected-shutting-down"),
        Outcome.EVICTED_SHUTTING_DOWN: (503, "rejected-shutting-down"),
    }


def test_a_limit_is_not_really_a_rate() -> None:
    """However long it takes, no more than the limit are in flight; however short they are, all may pass."""
    cluster = Cluster(flow_config(limit=4), answer_s=None)
    cluster.enqueue(*names("long", 8))
    for hour in range(1, 25):
        cluster.tick(hour * 3600.0)
    assert len(cluster.order) == 4
    for name in names("long", 8):
        cluster.release(name)
    served = 0
    for number in range(5000):
        out = cluster.controller.handle(cluster.now, Enqueue(request(f"short{number}")))
        served += isinstance(out[0], Dispatch)
        cluster.controller.handle(cluster.now, StageReleased(f"short{number}", "decode"))
    assert served == 5000, "five thousand in one instant, one after the other"


def test_a_global_limit_full_of_batch_work_does_not_refuse_premium() -> None:
    bands = [BandConfig("premium", 100), BandConfig("batch", -10)]
    cluster = Cluster(flow_config(limit=1, bands=bands, max_requests=50), answer_s=None)
    cluster.enqueue("running", band="batch")
    cluster.enqueue(*names("batch", 50), band="batch", starts_branch=True)
    cluster.enqueue(*names("premium", 20), band="premium")
    assert {drop.outcome for _, drop in cluster.drops} == {"Displaced"}
    assert [drop.request_id for _, drop in cluster.drops] == [f"batch{n}" for n in range(49, 29, -1)], "newest first"
    assert all(drop.retry_after_s >= 1 for _, drop in cluster.drops)


def narrow(**band: Any) -> dict[str, Any]:
    """One request at a time, and bands as given."""
    parts = document([])
    one = {"detector": "concurrency", "mode": "requests", "limit_per_node": 1}
    return {"flow": parts["flow"] | {"prefill": one, "decode": one}, "bands": [item | band for item in parts["bands"]]}


async def test_a_queue_timeout_has_a_body_and_a_retry_after(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0, **narrow(ttl_s=0.3)) as yard:
        blocker = asyncio.create_task(yard.complete(prompt(2000, 400)))
        await until(lambda: yard.serving.yard.outcomes.counters.dispatched == 1)
        began = yard.serving.clock()
        response = await yard.complete(prompt(4, 4, 9000), x_request_id="late")
        assert 0.3 <= yard.serving.clock() - began < 0.3 + 0.15
        error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (429, "rate_limit_error", "rejected-ttl-expired")
        assert error["message"] and response.headers[REASON] == "rejected-ttl-expired"
        assert 1 <= int(response.headers["retry-after"]) <= 30
        row = next(row for row in yard.gateway.snapshot()["recent"] if row["id"] == "late")
        assert (row["outcome"], row["queue_s"]) == ("dropped", pytest.approx(0.3, abs=0.05)), "exact to 50 ms"
        blocker.cancel()
        await asyncio.gather(blocker, return_exceptions=True)


async def test_ten_client_errors_do_not_open_a_circuit_breaker(tmp_path: Path) -> None:
    async with world(tmp_path) as yard:
        for _ in range(10):
            assert (await yard.complete(prompt() | {"temperature": 9})).status == 400
        assert (await yard.complete(prompt(4, 1_000_000))).status == 400
        assert (await yard.complete()).status == 200
        assert {known.health for known in yard.serving.yard.fleet.nodes} == {"ok"}
        assert yard.serving.yard.flow.totals.dispatched == 1


async def test_configuration_is_not_only_read_at_start(tmp_path: Path, redis_client: redis.Redis) -> None:
    """Live within a second, and nobody who waits is lost or loses the order."""
    async with world(tmp_path, speed=1.0, redis_url=os.environ["REDIS_URL"], **narrow()) as yard:
        changed = yard.document | {"version": 2}
        blocker = asyncio.create_task(yard.complete(prompt(500, 400)))
        await until(lambda: yard.serving.yard.outcomes.counters.dispatched == 1)
        objectives = ["standard", "standard", "premium", "premium"]
        waiting = []
        for number, objective in enumerate(objectives):
            body = prompt(1, 2, 9000 + 100 * number)
            call = yard.complete(body, x_llm_d_inference_objective=objective, x_request_id=f"{objective}-{number}")
            waiting.append(asyncio.create_task(call))
            await until(lambda number=number: yard.serving.yard.flow.totals.waiting == number + 1)
        changed["bands"] = [band | {"priority": 100 - band["priority"]} for band in changed["bands"]]
        published_at = yard.serving.clock()
        redis_client.set("switchyard:test:config", json.dumps(changed))
        redis_client.publish("switchyard:test:config-changed", "2")
        await until(lambda: yard.serving.config.version == 2)
        assert yard.serving.clock() - published_at < 1.0
        assert yard.serving.yard.flow.totals.waiting == 4, "nobody was lost"
        blocker.cancel()
        answers = await asyncio.gather(*waiting)
        assert [answer.status for answer in answers] == [200] * 4
        ended = [row["id"] for row in yard.gateway.snapshot()["recent"] if row["outcome"] == "completed"]
        assert list(reversed(ended)) == ["standard-0", "standard-1", "premium-2", "premium-3"]
