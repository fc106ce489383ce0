"""A node that leaves decode: its outputs go on elsewhere where that is sooner than waiting for them."""

from __future__ import annotations

from typing import Any

from tests.gateway.world import NETWORK, SYMBOLIC
from tests.yard.scene import Scene
from workers.yard import commands

WITH_TEXT = SYMBOLIC | {"tokenizer": "gguf"}


def decoding(output_tokens: int = 400, sent: int = 5, **changes: Any) -> tuple[Scene, str]:
    """A request that decodes on one of two nodes; the scene and that node's name."""
    scene = Scene(**{"model": WITH_TEXT, **changes})
    scene.arrive("r", output_tokens=output_tokens)
    scene.prefilled("r")
    scene.decoded("r", sent)
    return scene, scene.decode_node("r")


def leave(scene: Scene, node: str) -> list[commands.Command]:
    return scene.report(node, target_phase="prefill", state="draining", running_decode=1)


def test_an_output_goes_on_on_the_other_decode_node_from_the_blocks_of_the_first() -> None:
    scene, node = decoding()
    step = leave(scene, node)
    aborts = [command for command in step if isinstance(command, commands.AbortOnNode)]
    (start,) = [command for command in step if isinstance(command, commands.StartDecode)]
    assert [(abort.node, abort.stage) for abort in aborts] == [(node, "decode")]
    assert start.node != node
    assert start.source == node
    assert start.reason.startswith(f"{node} leaves decode")
    scene.decoded("r", 395)
    scene.done("r", 400)
    assert scene.record("r")["outcome"] == "completed"
    scene.assert_nothing_is_held()


def test_an_output_that_ends_before_it_could_be_moved_is_waited_for() -> None:
    scene, node = decoding(output_tokens=7, sent=5)
    assert not [command for command in leave(scene, node) if isinstance(command, commands.StartDecode)]
    scene.done("r", 7)
    scene.assert_nothing_is_held()


def test_an_output_stays_where_no_other_node_takes_it() -> None:
    scene, node = decoding(phases={"p1": "prefill", "d1": "decode"})
    assert not [command for command in leave(scene, node) if isinstance(command, commands.AbortOnNode)]
    scene.done("r", 400)
    scene.assert_nothing_is_held()


def test_symbolic_outputs_stay_for_nobody_has_their_ids() -> None:
    scene, node = decoding(model=SYMBOLIC)
    assert not [command for command in leave(scene, node) if isinstance(command, commands.AbortOnNode)]


def test_a_moved_output_whose_new_node_is_lost_goes_on_again() -> None:
    scene, node = decoding()
    leave(scene, node)
    other = scene.decode_node("r")
    scene.report(node, phase="prefill", target_phase="prefill", state="ready", running_decode=0)
    scene.report(node, phase="decode", target_phase="decode", state="ready")
    scene.wait(20, silent=(other,))
    assert scene.decode_node("r") == node or scene.prefill_node("r")
    scene.yard.check_integrity()


def test_an_output_that_found_no_place_is_moved_as_soon_as_there_is_one() -> None:
    scene, node = decoding(phases={"p1": "prefill", "d1": "decode", "d2": "decode"})
    other = ({"d1", "d2"} - {node}).pop()
    scene.report(other, phase="prefill", state="switching")
    configured = [{**said, "draining": said["name"] == node} for said in scene.document["nodes"]]
    step = scene.configure(nodes=configured)
    assert not [command for command in step if isinstance(command, commands.StartDecode)]
    scene.report(other, phase="decode", state="ready")
    assert scene.decode_node("r") == other


def test_only_as_many_outputs_move_at_once_as_the_network_copies_meanwhile() -> None:
    """The longest first; the others go on until the next look."""
    scene = Scene(model=WITH_TEXT, limit_per_node=64, network=NETWORK | {"peer_bandwidth_bytes_s": 1e9})
    for number in range(12):
        scene.arrive(f"r{number}", output_tokens=40_000 + number, blocks=200)
        scene.prefilled(f"r{number}")
        scene.decoded(f"r{number}", 1)
    node = scene.decode_node("r0")
    here = [name for name in scene.yard.requests if scene.decode_node(name) == node]
    step = leave(scene, node)
    moved = [command.request_id for command in step if isinstance(command, commands.StartDecode)]
    assert 0 < len(moved) < len(here)
    assert moved == sorted(here, key=lambda name: -int(name[1:]))[: len(moved)]
    leave(scene, node)
    assert sum(scene.decode_node(name) != node for name in here) > len(moved)


def past_its_drain(scene: Scene, node: str) -> None:
    scene.report(node, phase="mixed", target_phase="prefill", state="draining", running_decode=3)


def test_a_node_that_still_ends_its_outputs_gets_no_prompts_while_another_takes_them() -> None:
    scene = Scene(phases={"p1": "prefill", "d1": "decode", "d2": "mixed"})
    past_its_drain(scene, "d2")
    scene.arrive("first")
    scene.arrive("second")
    assert scene.placed == ["first"]
    assert scene.prefill_node("first") == "p1"
    scene.prefilled("first")
    assert scene.prefill_node("second") == "p1"
    scene.wait(8, silent=("p1",))
    assert scene.prefill_node("second") == "d2", "better than nobody"
