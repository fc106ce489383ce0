"""The proof of the reference counts in its short form; `make proof-directory` is the long one."""

import pytest

from bench.directory import Proof, node_blocks


@pytest.mark.parametrize("seed", [2, 3])
def test_random_events_end_with_every_count_right(seed):
    proof = Proof(seed)
    proof.run(8000, check_every=400)
    assert proof.wrong == []
    assert proof.told >= 8000 and proof.counted["lost on a wire"] > 5 and proof.counted["snapshots asked for"] > 5
    assert sum(node.index.referenced_blocks > 0 for node in proof.nodes.values()) > 2


def test_a_count_that_is_off_by_one_is_found():
    proof = Proof(4)
    proof.run(1000, check_every=500)
    name, node = next(iter(proof.nodes.items()))
    node.index.apply_refs(node_blocks(node)[0], 1, 1)
    proof.check("now")
    assert proof.wrong == [f"{name}: 1 of {node.index.used_blocks} blocks have a wrong count now"]


def test_a_block_that_the_machine_was_not_told_of_is_found():
    proof = Proof(5)
    proof.run(1000, check_every=500)
    name = next(name for name, node in proof.nodes.items() if node.index.used_blocks > 1)
    node = proof.nodes[name]
    node.index.remove(node_blocks(node)[-1])
    proof.check("now")
    assert any(text.startswith(f"{name}: the machine knows") for text in proof.wrong)
