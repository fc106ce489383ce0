"""Outputs whose blocks cannot follow their prompt: not taken, and the directory stays right."""

from __future__ import annotations

import pytest

from apps.kvcache.domain import events as ev
from tests.kvcache.kit import World, chain_of, prompt_of

FIRST = [1, 2, 3, 4, 5]


@pytest.fixture
def world() -> World:
    """A branch of five blocks, two of them output, held by p1 and d1; and an open request of another branch."""
    world = World()
    world.turn(FIRST[:3], FIRST[3:], branch_id="first")
    world.see([7, 8], request_id="b", branch_id="second")
    return world


WRONG = {
    "the end of another branch": chain_of([1, 2, 3, 4, 5])[4 * 16 :],
    "another branch's output": chain_of([1, 2, 3, 4, 5])[3 * 16 :],
    "blocks of its own prompt again": chain_of([7, 8])[16:],
    "a block twice": chain_of([7, 8, 9])[2 * 16 :] * 2,
}


@pytest.mark.parametrize("chain", WRONG.values(), ids=WRONG.keys())
def test_an_output_that_cannot_follow_its_prompt_is_not_taken(world: World, chain: bytes) -> None:
    machine = world.machine
    world.send(ev.OutputStored("b", chain))
    assert machine.refused_outputs == 1
    branch = machine.branch("second")
    assert branch is not None and branch.context_blocks == 2, "the branch is where its prompt ends"
    machine.check_integrity()


@pytest.mark.parametrize("chain", WRONG.values(), ids=WRONG.keys())
def test_the_branch_whose_blocks_were_claimed_goes_on_as_before(world: World, chain: bytes) -> None:
    machine = world.machine
    world.send(ev.OutputStored("b", chain))
    world.store("d1", [*FIRST, 6])
    assert machine.held(prompt_of([*FIRST, 6])) == {"p1": 3, "d1": 6}
    world.drop("d1", [*FIRST, 6], keep=2)
    assert machine.held(prompt_of([*FIRST, 6])) == {"p1": 3, "d1": 2}
    world.send(ev.BranchEnded("first"))
    world.send(ev.BranchEnded("second"))
    machine.check_integrity()


def test_a_sound_output_is_taken(world: World) -> None:
    world.send(ev.OutputStored("b", chain_of([7, 8, 9])[2 * 16 :]))
    branch = world.machine.branch("second")
    assert world.machine.refused_outputs == 0
    assert branch is not None and branch.context_blocks == 3
