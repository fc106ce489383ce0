"""Flow control as the yard drives it: predictions after every placement, real token counts, engines' own limits, many flows."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from apps.flowcontrol.domain.events import Enqueue, StageReleased
from tests.flowcontrol.domain.driving import Cluster, flow_config, request
from tests.yard.scene import Scene

OFF = {"detector": "off"}


def scene_with(prefill: dict[str, Any] = OFF, decode: dict[str, Any] = OFF, **changes: Any) -> Scene:
    scene = Scene()
    scene.configure(flow=scene.document["flow"] | {"prefill": prefill, "decode": decode}, **changes)
    return scene


def test_predictions_follow_every_placement_so_a_backlog_goes_in_one_step() -> None:
    """Each prompt takes about half a second, so two nodes may have about two seconds of work each."""
    scene = scene_with({"detector": "predicted-ttft", "ttft_budget_s": 2.0})
    for number in range(40):
        scene.arrive(f"r{number}", blocks=150)
    placed = len(scene.placed)
    assert 4 <= placed < 20, "as many as the budget has room for"
    waits = [node["predicted_wait_s"] for node in scene.yard.snapshot(scene.now)["nodes"][:2]]
    assert all(1.2 < wait_s < 3.0 for wait_s in waits), waits
    for name in scene.placed[:placed]:
        scene.prefilled(name)
    assert len(scene.placed) >= 2 * placed - 2, "work that is done makes room for as much again"


def test_time_alone_opens_a_gate_that_looks_at_predictions() -> None:
    scene = scene_with({"detector": "predicted-ttft", "ttft_budget_s": 2.0})
    for name in ("p1", "p2"):
        scene.report(name, running_prefill=1)
    for number in range(40):
        scene.arrive(f"r{number}", blocks=150)
    placed = len(scene.placed)
    scene.wait(1.5)
    assert len(scene.placed) > placed, "predictions fall as the nodes work, and are looked at every 50 ms"


def test_tenants_weights_reach_token_fairness() -> None:
    scene = Scene()
    bands = [band | {"fairness": "token-fair"} for band in scene.document["bands"]]
    tenant = scene.document["tenants"][0]
    scene.configure(bands=bands, tenants=[tenant | {"weight": 3.0}, *scene.document["tenants"][1:]])
    scene.arrive("r")
    assert scene.yard.flow._requests["r"].request.weight == 3.0


def test_real_tokens_correct_what_is_expected_of_a_flow() -> None:
    scene = Scene()
    scene.arrive("r", output_tokens=5000)
    scene.prefilled("r")
    scene.done("r", output_tokens=30)
    scene.arrive("next", output_tokens=5000)
    assert scene.yard.flow._requests["next"].output_tokens == 30


def test_limits_follow_what_the_engines_report() -> None:
    tokens = {"detector": "concurrency", "mode": "hybrid", "limit_per_node": None, "token_limit_per_node": None}
    scene = scene_with(decode=tokens)
    stage = scene.yard.snapshot(scene.now)["stages"]["decode"]
    assert (stage["limit"], stage["token_limit"]) == (128, 10_000_000)
    scene.report("d1", max_decode_batch=10, kv_tokens=1000)
    stage = scene.yard.snapshot(scene.now)["stages"]["decode"]
    assert (stage["limit"], stage["token_limit"]) == (74, 5_001_000)


def test_a_silent_node_does_not_close_the_gate_of_the_others() -> None:
    scene = scene_with({"detector": "utilization", "queue_threshold": 2, "stale_after_s": 1.5})
    scene.wait(2.5, silent=("p1",))
    assert scene.yard.fleet.nodes.by_name["p1"].health != "down"
    for number in range(9):
        scene.arrive(f"r{number}")
    assert len(scene.placed) == 2, "the node that speaks takes two, the silent one counts as full"


def test_twenty_thousand_idle_flows_leave_nothing_to_look_through() -> None:
    cluster = Cluster(flow_config(limit=1), answer_s=None)
    controller = cluster.controller
    for number in range(20_000):
        controller.handle(0.0, Enqueue(request(f"r{number}", flow=f"flow-{number}")))
        controller.handle(0.0, StageReleased(f"r{number}", "decode"))
    band = controller._bands["standard"]
    assert len(band._lines) == 0 and len(band._fairness._round) == 0, "only flows that hold requests are visited"
    assert len(band.dispatched_by_flow) <= 1001
    controller.check_integrity()


@pytest.mark.parametrize("fairness", ["round-robin", "token-fair", "least-attained-service"])
def test_one_flow_per_agent_session_is_served_in_turn(fairness: str) -> None:
    config = flow_config(limit=1)
    bands = tuple(replace(band, fairness=fairness) for band in config.bands)
    cluster = Cluster(replace(config, bands=bands), answer_s=None)
    controller = cluster.controller
    for turn in range(2):
        for agent in range(2000):
            fields = {"program": f"agent-{agent}", "uncached_tokens": 100}
            controller.handle(0.0, Enqueue(request(f"{agent}.{turn}", flow=f"session-{agent}", **fields)))
    began = time.process_time()
    running, order = "0.0", []
    for _ in range(3999):
        (command,) = controller.handle(0.0, StageReleased(running, "decode"))
        running = command.request_id
        order.append(running)
    assert {name.split(".")[0] for name in order[:1999]} >= {str(agent) for agent in range(1, 2000)}
    assert time.process_time() - began < 4.0
