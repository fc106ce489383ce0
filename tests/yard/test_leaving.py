"""A node that leaves decode: its outputs go on elsewhere where that is sooner than waiting for them."""

from __future__ import annotations

from typing import Any

from tests.gateway.world import SYMBOLIC
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
