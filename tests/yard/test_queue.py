"""Who goes first: bands by priority, flows in turn, edits at once, and places that come back exactly once."""

from __future__ import annotations

import pytest

from tests.yard.scene import Scene
from workers.yard import commands, events


def busy(scene: Scene) -> Scene:
    """Both prefill nodes have the one request they may have."""
    scene.arrive("busy-1")
    scene.arrive("busy-2")
    assert scene.placed == ["busy-1", "busy-2"]
    return scene


def drain(scene: Scene) -> list[str]:
    """Prefills everything, always the request placed first; answers the order of what had waited."""
    position = 0
    while position < len(scene.placed):
        request_id = scene.placed[position]
        if request_id in scene.yard.requests:
            scene.prefilled(request_id)
            scene.done(request_id)
        position += 1
    return [name for name in scene.placed if not name.startswith("busy")]


def test_a_free_yard_places_a_request_in_the_step_it_arrives() -> None:
    scene = Scene()
    (start,) = [c for c in scene.arrive("r") if isinstance(c, commands.StartPrefill)]
    assert start.node in ("p1", "p2") and start.decode_node in ("d1", "d2")
    assert (start.attempt, start.queue_s) == (1, 0.0)
    assert start.predicted_ttft_s > 0.055 and start.node in start.reason


def test_two_requests_of_one_instant_go_to_different_nodes() -> None:
    scene = busy(Scene())
    assert {scene.prefill_node("busy-1"), scene.prefill_node("busy-2")} == {"p1", "p2"}


def test_waiting_requests_go_by_priority_then_by_arrival() -> None:
    scene = busy(Scene())
    for name, band in (("s1", "standard"), ("s2", "standard"), ("a1", "premium"), ("a2", "premium")):
        scene.arrive(name, band)
    assert drain(scene) == ["a1", "a2", "s1", "s2"]
    scene.assert_nothing_is_held()


def test_flows_of_a_band_take_turns() -> None:
    scene = busy(Scene())
    for name, flow in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
        scene.arrive(name, flow_id=flow)
    assert drain(scene).index("b1") <= 1


def test_a_changed_priority_decides_the_very_next_dispatch_and_loses_nobody() -> None:
    scene = busy(Scene())
    for name, band in (("a1", "premium"), ("a2", "premium"), ("s1", "standard"), ("s2", "standard")):
        scene.arrive(name, band)
    scene.prefilled("busy-1")
    assert scene.placed[-1] == "a1"
    bands = [dict(band) for band in scene.document["bands"]]
    bands[1]["priority"] = 500
    scene.configure(bands=bands)
    assert scene.yard.flow.totals.waiting == 3
    scene.prefilled("busy-2")
    assert scene.placed[-1] == "s1"
    scene.done("busy-1")
    scene.done("busy-2")
    assert drain(scene) == ["a1", "s1", "s2", "a2"]
    scene.assert_nothing_is_held()


def test_a_raised_limit_dispatches_at_once_and_a_lowered_one_stops_nobody_that_runs() -> None:
    scene = busy(Scene())
    for n in range(4):
        scene.arrive(f"r{n}")
    flow = scene.document["flow"]
    scene.configure(flow=flow | {"prefill": flow["prefill"] | {"limit_per_node": 2}})
    assert scene.placed[2:] == ["r0", "r1"]
    scene.configure(flow=flow)
    scene.prefilled("busy-1")
    assert len(scene.placed) == 4
    assert not scene.of(commands.AbortOnNode)


def test_a_client_that_leaves_the_queue_makes_room_and_costs_nothing() -> None:
    scene = busy(Scene())
    scene.arrive("r")
    assert scene.feed(events.ClientGone("r")) != []
    assert not scene.of(commands.AbortOnNode)
    assert scene.record("r")["outcome"] == "cancelled"
    assert scene.record("r")["drop_code"] == "rejected-context-cancelled"
    assert drain(scene) == []


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_client_that_leaves_gives_both_places_back(stage: str) -> None:
    scene = Scene(limit_per_node=1, decode_limit=1)
    for name in ("busy-1", "busy-2", "next"):
        scene.arrive(name)
    if stage == "decode":
        scene.prefilled("busy-1")
        scene.decoded("busy-1", 5)
        assert scene.placed == ["busy-1", "busy-2"], "both decode places are still taken"
    held_on = scene.prefill_node("busy-1") if stage == "prefill" else scene.decode_node("busy-1")
    scene.feed(events.ClientGone("busy-1"))
    (abort,) = scene.of(commands.AbortOnNode)
    assert (abort.node, abort.request_id, abort.stage) == (held_on, "busy-1", stage)
    assert scene.placed[-1] == "next"
    drain(scene)
    scene.assert_nothing_is_held()


def test_late_reports_about_an_ended_request_change_nothing() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.feed(events.ClientGone("r"))
    late = events.PrefillResult(0, 0, 641)
    for event in (
        events.PrefillFinished("r", late),
        events.PrefillFailed("r", True, "unreachable"),
        events.FirstToken("r"),
        events.DecodeProgress("r", 3),
        events.DecodeFinished("r", "length", 3),
        events.DecodeFailed("r", True, "unreachable"),
        events.AnswerEnded("r", 3),
        events.ClientGone("r"),
    ):
        assert scene.feed(event) == []
    scene.assert_nothing_is_held()


def test_what_waits_too_long_is_dropped_with_a_reason() -> None:
    scene = busy(Scene())
    scene.arrive("r", ttl_s=2.0)
    scene.wait(1.9)
    assert "r" in scene.yard.requests
    scene.wait(0.2)
    refusal = scene.refusal("r")
    assert (refusal.http_status, refusal.code) == (429, "rejected-ttl-expired")
    assert scene.record("r")["outcome"] == "dropped" and scene.record("r")["queue_s"] == pytest.approx(2.0, abs=0.01)


def test_shutting_down_refuses_what_waits_and_lets_the_rest_end() -> None:
    scene = busy(Scene())
    scene.arrive("r")
    scene.feed(events.ShutDown())
    assert scene.refusal("r").code == "rejected-shutting-down"
    scene.arrive("late")
    assert scene.refusal("late").http_status == 503
    for name in ("busy-1", "busy-2"):
        scene.prefilled(name)
        scene.done(name)
    assert scene.record("busy-1")["outcome"] == "completed"
    scene.assert_nothing_is_held()


def test_a_request_that_fits_on_no_decode_node_is_told_so() -> None:
    scene = Scene()
    for name in ("d1", "d2"):
        scene.report(name, kv_tokens=1000)
    scene.arrive("r", blocks=10, output_tokens=5000)
    assert (scene.refusal("r").http_status, scene.refusal("r").code) == (400, "request-too-large")
    scene.assert_nothing_is_held()


def test_a_first_token_that_ends_the_answer_needs_no_decode() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.prefilled("r", first_finish="stop")
    assert not scene.of(commands.StartDecode)
    assert (scene.record("r")["outcome"], scene.record("r")["output_tokens"]) == ("completed", 0)
    scene.assert_nothing_is_held()


def test_an_answer_ended_at_a_stop_string_frees_the_decode_node() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.prefilled("r")
    scene.decoded("r", 4)
    scene.feed(events.AnswerEnded("r", 5))
    assert scene.of(commands.AbortOnNode)[0].stage == "decode"
    assert (scene.record("r")["outcome"], scene.record("r")["output_tokens"]) == ("completed", 5)
    scene.assert_nothing_is_held()
