"""Nodes that get lost, drain, switch or disappear: their work goes on elsewhere, and what their streams say is believed."""

from __future__ import annotations

from array import array
from base64 import b64encode
from typing import Any

import pytest

from apps.kvcache.domain.hashing import extend_chain, root_hash
from tests.yard.scene import Scene
from workers.yard import commands, events
from workers.yard.config import ConfigError, PartitionConfig

ROOT = root_hash("glm", "fp8", "acme")


def chain(first_id: int, blocks: int) -> bytes:
    return extend_chain(ROOT, array("I", range(first_id, first_id + blocks)), 1)


def stored(seq: int, blocks: bytes, parent: bytes | None = None) -> dict[str, Any]:
    parent_b64 = None if parent is None else b64encode(parent).decode()
    return {"seq": seq, "t": 0.0, "type": "stored", "parent_b64": parent_b64, "chain_b64": b64encode(blocks).decode()}


def silence(scene: Scene, name: str) -> list[commands.Command]:
    """The node says nothing until it counts as down."""
    return scene.wait(7.0, silent=(name,))


def test_a_node_lost_in_prefill_has_its_prompt_computed_elsewhere() -> None:
    scene = Scene()
    scene.arrive("r")
    lost = scene.prefill_node("r")
    silence(scene, lost)
    abort, again = scene.of(commands.AbortOnNode, "r")[0], scene.of(commands.StartPrefill, "r")[1]
    assert (abort.node, abort.stage) == (lost, "prefill")
    assert again.node != lost and again.attempt == 2 and again.resumed_tokens == 0
    scene.prefilled("r")
    scene.done("r")
    assert scene.record("r")["outcome"] == "completed" and scene.record("r")["prefill_node"] == again.node
    scene.assert_nothing_is_held()


def test_a_node_lost_in_decode_continues_from_the_tokens_already_sent() -> None:
    scene = Scene()
    scene.arrive("r", output_tokens=1000)
    scene.prefilled("r")
    scene.decoded("r", 300)
    lost = scene.decode_node("r")
    silence(scene, lost)
    again = scene.of(commands.StartPrefill, "r")[1]
    assert again.resumed_tokens == 301, "the first token and three hundred more"
    assert again.decode_node not in (None, lost)
    scene.prefilled("r")
    assert scene.decode_node("r") == again.decode_node
    scene.done("r", 100)
    assert scene.record("r")["output_tokens"] == 100
    scene.assert_nothing_is_held()


def test_a_refused_connection_twice_is_enough_to_count_as_lost() -> None:
    scene = Scene()
    scene.arrive("r")
    lost = scene.prefill_node("r")
    assert scene.feed(events.NodeUnreachable(lost, refused=True)) == []
    scene.feed(events.NodeUnreachable(lost, refused=True))
    assert scene.of(commands.StartPrefill, "r")[-1].node != lost


def test_a_hand_over_that_is_refused_goes_to_another_decode_node_without_a_new_prefill() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.prefilled("r")
    first = scene.decode_node("r")
    scene.feed(events.DecodeFailed("r", True, "draining"))
    assert scene.decode_node("r") != first
    assert len(scene.of(commands.StartPrefill, "r")) == 1


def test_a_request_that_breaks_nodes_ends_after_a_few_attempts() -> None:
    scene = Scene()
    scene.arrive("r")
    for _ in range(4):
        scene.feed(events.PrefillFailed("r", True, "connection-broken", "it broke"))
    refusal = scene.refusal("r")
    assert (refusal.http_status, refusal.code) == (502, "upstream-failed")
    assert scene.record("r")["outcome"] == "failed"
    scene.assert_nothing_is_held()


def test_what_no_other_node_can_do_better_fails_at_once() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.feed(events.PrefillFailed("r", False, "bad-field", "token_ids: too many"))
    assert (scene.refusal("r").http_status, scene.refusal("r").message) == (502, "token_ids: too many")
    scene.assert_nothing_is_held()


def test_without_another_node_the_request_waits_for_one_to_come_back() -> None:
    scene = Scene({"p1": "prefill", "d1": "decode"}, flow=_flow(empty_pool_ttl_s=20))
    scene.arrive("r")
    silence(scene, "p1")
    assert scene.yard.waiting_for_nodes == 1
    assert scene.yard.snapshot(scene.now)["verdict"]["level"] == "down"
    scene.report("p1", boot_id="boot-2")
    assert scene.of(commands.StartPrefill, "r")[-1].attempt == 2
    scene.prefilled("r")
    scene.done("r")
    scene.assert_nothing_is_held()


def test_waiting_for_a_node_has_an_end() -> None:
    scene = Scene({"p1": "prefill", "d1": "decode"}, flow=_flow(empty_pool_ttl_s=3))
    scene.arrive("r")
    scene.prefilled("r")
    scene.decoded("r", 3)
    scene.wait(6.5, silent=("p1", "d1"))
    scene.wait(3.5, silent=("p1", "d1"))
    assert (scene.refusal("r").http_status, scene.refusal("r").code) == (503, "rejected-no-endpoints")
    scene.assert_nothing_is_held()


def _flow(**changes: Any) -> dict[str, Any]:
    return Scene().document["flow"] | changes


def test_a_draining_node_finishes_what_it_computes_and_hands_back_what_it_queued() -> None:
    scene = Scene({"p1": "prefill", "d1": "decode"}, limit_per_node=3)
    for n in range(3):
        scene.arrive(f"r{n}")
    scene.report("p1", running_prefill=1, queued_prefill=2)
    nodes = scene.document["nodes"]
    scene.configure(nodes=[*nodes, nodes[0] | {"name": "p2", "order": 5, "url": "http://h/nodes/p2"}])
    scene.statuses["p2"] = scene.statuses["p1"]
    scene.report("p2", running_prefill=0, queued_prefill=0)
    drained = [scene.document["nodes"][0] | {"draining": True}, *scene.document["nodes"][1:]]
    scene.configure(nodes=drained)
    assert [(c.node, c.request_id) for c in scene.of(commands.AbortOnNode)] == [("p1", "r1"), ("p1", "r2")]
    assert [scene.prefill_node(name) for name in ("r0", "r1", "r2")] == ["p1", "p2", "p2"]
    scene.prefilled("r0")
    scene.arrive("later")
    assert scene.prefill_node("later") == "p2"
    for name in ("r1", "r2", "later"):
        scene.prefilled(name)
    for name in ("r0", "r1", "r2", "later"):
        scene.done(name)
        assert scene.record(name)["outcome"] == "completed"
    scene.assert_nothing_is_held()


def test_decoding_goes_on_while_its_node_drains() -> None:
    scene = Scene()
    scene.arrive("r")
    scene.prefilled("r")
    scene.decoded("r", 5)
    node = scene.decode_node("r")
    scene.report(node, state="draining", target_phase="prefill", generation=1)
    scene.arrive("next")
    assert scene.of(commands.StartPrefill, "next")[0].decode_node != node
    scene.decoded("r", 5)
    scene.done("r")
    assert scene.record("r")["decode_node"] == node
    assert not scene.of(commands.AbortOnNode, "r")


def test_a_node_that_switched_serves_its_new_phase_with_its_new_generation() -> None:
    scene = Scene({"p1": "prefill", "d1": "decode", "d2": "decode"})
    scene.arrive("one")
    nodes = [n | ({"phase": "prefill", "generation": 7} if n["name"] == "d2" else {}) for n in scene.document["nodes"]]
    scene.configure(nodes=nodes)
    event = {"type": "phase", "phase": "prefill", "target_phase": "prefill", "state": "ready", "generation": 7}
    scene.feed(events.NodeEvents("d2", [event | {"seq": 1, "t": 0.0}]))
    scene.arrive("two")
    start = scene.of(commands.StartPrefill, "two")[0]
    assert (start.node, start.generation) == ("d2", 7)
    assert scene.yard.snapshot(scene.now)["split"] == {"prefill": 2, "decode": 1, "mixed": 0, "down": 0}


def test_a_node_taken_out_of_the_configuration_loses_its_work_to_others() -> None:
    scene = Scene()
    scene.arrive("r")
    gone = scene.prefill_node("r")
    scene.configure(nodes=[n for n in scene.document["nodes"] if n["name"] != gone])
    assert scene.prefill_node("r") != gone
    assert gone not in {n["name"] for n in scene.yard.snapshot(scene.now)["nodes"]}


def test_another_partition_or_model_is_refused_and_the_old_configuration_stays() -> None:
    scene = Scene()
    for change in ({"partition": "x"}, {"model": scene.document["model"] | {"dtype": "f8"}}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            scene.feed(events.Configured(PartitionConfig.parse(scene.document | change)))
    assert scene.yard.config.partition == "test" and scene.yard.config.model.dtype == "fp8"


# ---- what event streams say


def test_blocks_a_node_stored_are_counted_and_prefer_it() -> None:
    scene = Scene(limit_per_node=8)
    scene.feed(events.NodeSnapshotTaken("p2", 4, []))
    scene.feed(events.NodeEvents("p2", [stored(5, chain(1, 50)), {"seq": 5, "t": 0.0, "type": "heartbeat"}]))
    (start,) = [c for c in scene.arrive("r", blocks=50, first_id=1) if isinstance(c, commands.StartPrefill)]
    assert start.node == "p2"
    record_terms = {row.node: row for row in scene.yard.requests["r"].terms}
    assert record_terms["p2"].cached_tokens == 50 * 64


def test_every_number_of_a_stream_counts_so_that_heartbeats_make_no_gap() -> None:
    scene = Scene()
    scene.feed(events.NodeSnapshotTaken("p1", 0, []))
    before = len(scene.of(commands.FetchSnapshot))
    rows = [["prefill", 640, 1.0, 0, 1, 0.1, 1]]
    batch = [
        stored(1, chain(1, 2)),
        {"seq": 2, "t": 0.0, "type": "iterations", "rows": rows},
        {"seq": 2, "t": 0.0, "type": "heartbeat"},
        stored(3, chain(100, 2)),
    ]
    scene.feed(events.NodeEvents("p1", batch))
    assert len(scene.of(commands.FetchSnapshot)) == before
    scene.feed(events.NodeEvents("p1", [stored(5, chain(200, 2))]))
    assert [c.node for c in scene.of(commands.FetchSnapshot)[before:]] == ["p1"]


def pushes(scene: Scene) -> list[tuple[str, bool, list[tuple[int, int]]]]:
    """References pushed in the last step: node, whether it is a reset, and (blocks, delta) of each change."""
    found = [c for c in scene.step if isinstance(c, commands.PushRefs)]
    return [(c.node, c.reset, [(change.blocks, change.delta) for change in c.changes]) for c in found]


def test_a_node_whose_content_is_read_again_is_told_all_its_references() -> None:
    scene = Scene()
    scene.feed(events.NodeSnapshotTaken("p1", 0, []))
    scene.feed(events.NodeEvents("p1", [stored(1, chain(1, 10))]))
    scene.arrive("r", blocks=10, first_id=1, branch="acme/b")
    assert pushes(scene) == [("p1", False, [(10, 1)])]
    scene.feed(events.NodeSnapshotTaken("p1", 9, [(None, chain(1, 4))]))
    assert pushes(scene) == [("p1", True, [(4, 1)])]


def test_a_restarted_node_is_read_afresh_and_nothing_counts_on_it_any_more() -> None:
    scene = Scene()
    scene.feed(events.NodeSnapshotTaken("p1", 0, []))
    scene.feed(events.NodeEvents("p1", [stored(1, chain(1, 10))]))
    scene.arrive("r", blocks=10, first_id=1, branch="acme/b")
    scene.report("p1", boot_id="boot-2")
    assert commands.FetchSnapshot("p1") in scene.step
    assert scene.yard.kv.node_usage("p1") == (0, 0)
    scene.feed(events.NodeSnapshotTaken("p1", 9, [(None, chain(1, 4))]))
    assert pushes(scene) == [("p1", True, [])]
    assert scene.yard.kv.node_usage("p1") == (4, 0)


def test_a_gap_that_the_node_tells_of_asks_for_a_snapshot() -> None:
    scene = Scene()
    assert scene.feed(events.NodeEvents("p1", [{"seq": 0, "t": 0.0, "type": "gap", "oldest": 9}])) == [
        commands.FetchSnapshot("p1")
    ]


def test_a_changed_lease_reaches_the_branches() -> None:
    scene = Scene(lease={"multiple": 1.0, "ceiling_s": 1000, "floor_s": 900})
    scene.configure(lease={"multiple": 1.0, "ceiling_s": 5.0, "floor_s": 1.0})
    scene.arrive("r", branch="acme/b")
    scene.prefilled("r")
    scene.done("r")
    scene.wait(10.0)
    assert scene.yard.kv.branch("acme/b") is None


def test_an_engine_that_does_not_say_how_much_kv_it_holds_is_not_taken_for_one_without_any() -> None:
    scene = Scene({"p1": "prefill", "d1": "decode"})
    scene.report("d1", kv_tokens=0, kv_free_tokens=0, pool_capacity_blocks=0)
    scene.arrive("r", blocks=2)
    assert scene.placed == ["r"]
    scene.prefilled("r")
    scene.done("r")
    assert scene.record("r")["outcome"] == "completed"


def test_a_node_of_the_other_phase_is_passed_over_for_its_phase_and_one_that_leaves_for_draining() -> None:
    scene = Scene()
    scene.arrive("r")
    assert {term.node: term.why_not for term in scene.yard.requests["r"].terms} == {
        "p1": None, "p2": None, "d1": "phase-decode", "d2": "phase-decode",
    }  # fmt: skip
    nodes = [dict(node) for node in scene.document["nodes"]]
    nodes[1]["phase"] = "decode"
    scene.configure(nodes=nodes)
    scene.prefilled("r")
    scene.done("r")
    scene.arrive("later")
    terms = {term.node: term.why_not for term in scene.yard.requests["later"].terms}
    assert terms == {"p1": None, "p2": "draining", "d1": "phase-decode", "d2": "phase-decode"}
