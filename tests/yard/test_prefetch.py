"""KV brought ahead for requests that wait in the central queue: to where routing would send them, within a budget, not in vain."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace

from tests.gateway.world import NETWORK
from tests.yard.scene import Scene
from workers.yard import commands, events
from workers.yard.config import PartitionConfig

BLOCKS = 200
CONTEXT_BYTES = BLOCKS * 64 * float(NETWORK["kv_bytes_per_token"])


def prefetching(scene: Scene, budget_bytes: float) -> Scene:
    scene.document = scene.document | {"version": scene.document["version"] + 1}
    config = PartitionConfig.parse(scene.document)
    scene.feed(events.Configured(replace(config, routing=replace(config.routing, prefetch_bytes=budget_bytes))))
    return scene


def held_by(scene: Scene, node: str, first_id: int, seq: int = 1) -> None:
    """The node holds the whole context of a request that `wait_for` sends."""
    scene.arrive("probe", blocks=BLOCKS, first_id=first_id)
    chain = scene.yard.requests["probe"].request.prompt.chain
    scene.feed(events.ClientGone("probe"))
    stored = {"seq": seq, "t": 0.0, "type": "stored", "parent_b64": None, "chain_b64": b64encode(chain).decode()}
    scene.feed(events.NodeEvents(node, [stored]))


def crowded(budget_bytes: float = 10 * CONTEXT_BYTES, contexts: int = 1) -> Scene:
    """Both prefill nodes are busy, the one that holds the contexts for longer; whoever comes has to wait."""
    scene = prefetching(Scene(), budget_bytes)
    for node in ("p1", "p2"):
        scene.feed(events.NodeSnapshotTaken(node, 0, []))
    scene.arrive("long", blocks=20_000, first_id=500_000)
    scene.arrive("short", blocks=2_000, first_id=700_000)
    for number in range(contexts):
        held_by(scene, scene.prefill_node("long"), 1 + 1000 * number, seq=1 + number)
    return scene


def wait_for(scene: Scene, request_id: str, first_id: int = 1) -> list[commands.Command]:
    return scene.arrive(request_id, blocks=BLOCKS, first_id=first_id)


def of_step(scene: Scene, kind: type) -> list[object]:
    return [command for command in scene.step if isinstance(command, kind)]


def test_a_waiting_requests_context_goes_to_the_node_that_routing_would_choose_now() -> None:
    scene = crowded()
    wait_for(scene, "r")
    assert "r" not in scene.placed
    fetch = commands.Fetch(scene.prefill_node("long"), 0, BLOCKS)
    assert of_step(scene, commands.Prefetch) == [commands.Prefetch("r", scene.prefill_node("short"), fetch)]


def test_nothing_is_fetched_ahead_unless_it_is_switched_on_or_for_who_need_not_wait() -> None:
    scene = crowded(budget_bytes=0.0)
    wait_for(scene, "r")
    scene.wait(1.0)
    assert not scene.of(commands.Prefetch)
    free = prefetching(Scene(), CONTEXT_BYTES)
    wait_for(free, "r")
    assert free.placed == ["r"] and not free.of(commands.Prefetch)


def test_no_more_than_the_budget_is_on_its_way_and_what_ended_gives_its_share_back() -> None:
    scene = crowded(budget_bytes=1.5 * CONTEXT_BYTES, contexts=2)
    wait_for(scene, "r", 1)
    wait_for(scene, "s", 1001)
    assert [c.request_id for c in scene.of(commands.Prefetch)] == ["r"]
    scene.feed(events.PrefetchEnded("r", scene.of(commands.Prefetch)[0].node))
    scene.wait(0.5)
    assert [c.request_id for c in scene.of(commands.Prefetch)] == ["r", "s"]
    small = crowded(budget_bytes=0.5 * CONTEXT_BYTES)
    wait_for(small, "r")
    assert not small.of(commands.Prefetch)


def test_what_is_on_its_way_ends_when_the_request_leaves_the_queue_elsewhere() -> None:
    scene = crowded()
    wait_for(scene, "r")
    (asked,) = scene.of(commands.Prefetch)
    scene.feed(events.ClientGone("r"))
    assert of_step(scene, commands.CancelPrefetch) == [commands.CancelPrefetch("r", asked.node)]
    assert not scene.of(commands.StartPrefill, "r")


def test_a_request_that_is_sent_where_its_context_is_going_takes_the_fetch_over() -> None:
    scene = crowded()
    wait_for(scene, "r")
    (asked,) = scene.of(commands.Prefetch)
    scene.prefilled("short")
    assert scene.prefill_node("r") == asked.node
    assert not scene.of(commands.CancelPrefetch)


def test_when_the_choice_changes_what_is_under_way_is_cancelled() -> None:
    scene = crowded()
    wait_for(scene, "r")
    (asked,) = scene.of(commands.Prefetch)
    scene.report(asked.node, state="draining", target_phase="decode")
    scene.wait(0.5)
    assert commands.CancelPrefetch("r", asked.node) in scene.log


def test_switching_it_off_cancels_what_is_under_way() -> None:
    scene = crowded()
    wait_for(scene, "r")
    (asked,) = scene.of(commands.Prefetch)
    prefetching(scene, 0.0)
    assert commands.CancelPrefetch("r", asked.node) in scene.log
