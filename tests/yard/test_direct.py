"""Existing engines: requests served whole, hand-overs, refusals of the engine itself."""

from typing import Any

from tests.gateway.world import node
from tests.yard.scene import Scene
from tests.yard.test_direct_config import TEXT_MODEL
from workers.yard import commands, events


class DirectScene(Scene):
    def __init__(self, phases: dict[str, str], **changes: Any) -> None:
        nodes = [
            node(name, order, phase, "http://h") | {"engine": "vllm", "direct": {}}
            for order, (name, phase) in enumerate(phases.items())
        ]
        super().__init__(phases, nodes=nodes, model=TEXT_MODEL, **changes)


def test_a_node_that_serves_whole_decodes_what_it_prefills() -> None:
    scene = DirectScene({"v1": "mixed", "v2": "mixed"})
    for name in ("r1", "r2"):
        scene.arrive(name)
    for name in ("r1", "r2"):
        scene.prefilled(name)
        assert scene.decode_node(name) == scene.prefill_node(name)
    assert {scene.prefill_node("r1"), scene.prefill_node("r2")} == {"v1", "v2"}
    for name in ("r1", "r2"):
        scene.decoded(name, 5)
        scene.done(name)
    scene.assert_nothing_is_held()


def test_a_request_goes_on_where_it_is_when_its_node_is_wished_elsewhere() -> None:
    scene = DirectScene({"v1": "mixed", "v2": "mixed"})
    scene.arrive("r1")
    first = scene.prefill_node("r1")
    nodes = [entry | {"draining": entry["name"] == first} for entry in scene.document["nodes"]]
    scene.configure(nodes=nodes)
    scene.prefilled("r1")
    assert scene.decode_node("r1") == first


def test_a_prefill_server_hands_over_to_a_decode_server() -> None:
    scene = DirectScene({"v1": "prefill", "v2": "decode"})
    scene.arrive("r1")
    scene.prefilled("r1")
    assert (scene.prefill_node("r1"), scene.decode_node("r1")) == ("v1", "v2")


def test_servers_of_both_kinds_serve_together() -> None:
    scene = DirectScene({"v1": "prefill", "v2": "decode", "v3": "mixed"})
    for name in ("r1", "r2", "r3", "r4"):
        scene.arrive(name)
    for name in ("r1", "r2"):
        scene.prefilled(name)
        assert scene.decode_node(name) == {"v1": "v2", "v3": "v3"}[scene.prefill_node(name)]
    assert {scene.prefill_node("r1"), scene.prefill_node("r2")} == {"v1", "v3"}


def test_an_engine_without_kv_events_is_never_fetched_from() -> None:
    scene = DirectScene({"v1": "prefill", "v2": "prefill", "v3": "decode"})
    assert scene.yard.config.routing.fetch is False


def test_what_the_engine_refuses_ends_the_request_and_says_nothing_against_the_node() -> None:
    scene = DirectScene({"v1": "mixed"})
    for number in range(12):
        name = f"r{number}"
        scene.arrive(name)
        scene.feed(events.EngineRefused(name, 400, "max_tokens is too large"))
        assert scene.record(name)["drop_code"] == "engine-400"
    assert not scene.of(commands.Refuse)
    scene.assert_nothing_is_held()
    scene.arrive("good")
    assert scene.prefill_node("good") == "v1"


def test_a_server_that_fails_is_left_for_another() -> None:
    scene = DirectScene({"v1": "mixed", "v2": "mixed"})
    scene.arrive("r1")
    first = scene.prefill_node("r1")
    scene.feed(events.PrefillFailed("r1", True, "engine-503", "busy"))
    assert scene.prefill_node("r1") != first
    scene.prefilled("r1")
    assert scene.decode_node("r1") == scene.prefill_node("r1")
    scene.done("r1")
    scene.assert_nothing_is_held()


def test_what_an_engine_had_cached_counts_when_it_tells_at_the_end() -> None:
    scene = DirectScene({"v1": "mixed"})
    scene.arrive("r1", blocks=10)
    scene.feed(events.PrefillFinished("r1", None))
    told = events.PrefillResult(cached_tokens=128, fetched_tokens=0, computed_tokens=513)
    scene.feed(events.DecodeFinished("r1", "stop", 7, result=told))
    assert scene.record("r1")["cached_tokens"] == 128
    assert scene.yard.kv.reuse_by("node")["v1"].actual_tokens == 128
    scene.assert_nothing_is_held()


def test_an_engine_that_tells_nothing_is_taken_to_have_done_what_was_predicted() -> None:
    scene = DirectScene({"v1": "mixed"})
    scene.arrive("r1", blocks=10)
    scene.feed(events.PrefillFinished("r1", None))
    scene.feed(events.DecodeFinished("r1", "stop", 7))
    assert scene.record("r1")["computed_tokens"] == scene.record("r1")["prompt_tokens"]
