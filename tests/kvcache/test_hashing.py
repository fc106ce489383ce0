"""Block hashes and the hasher that remembers branches."""

import hashlib
import random
import struct
import time
from array import array

import pytest

from apps.kvcache.domain import hashing
from apps.kvcache.domain.hashing import HashedPrompt, PromptHasher, extend_chain, root_hash, tail_hash


def ids_of(*values: int) -> array:
    return array("I", values)


def by_hand(parent: bytes, values: list[int]) -> bytes:
    return hashlib.sha256(parent + struct.pack(f"<{len(values)}I", *values)).digest()[:16]


def test_hashes_of_known_inputs_stay_what_they_are():
    root = root_hash("smollm2-135m-instruct", "f32", "demo")
    assert root.hex() == "adece0f19b43260c1b23a644cef99085"
    assert (
        extend_chain(root, ids_of(*range(4)), 2).hex()
        == "4a944ac1dd981dd465e6e31b763a464b453f7b5d0f2f49a2978a52353c84752f"
    )
    assert tail_hash(root, ids_of(7)).hex() == "a778d565ab4e7729a10d00fcbf356ee5"


def test_a_block_hash_is_sha256_of_parent_and_little_endian_ids():
    root = root_hash("m", "f32", "d")
    first = by_hand(root, [1, 2])
    second = by_hand(first, [3, 2**32 - 1])
    assert extend_chain(root, ids_of(1, 2, 3, 2**32 - 1, 9), 2) == first + second
    assert tail_hash(second, ids_of(9)) == by_hand(second, [9])


def test_a_chain_can_be_extended_in_steps():
    root = root_hash("m", "f32", "d")
    whole = extend_chain(root, ids_of(*range(12)), 4)
    head = extend_chain(root, ids_of(*range(4)), 4)
    assert head + extend_chain(head, memoryview(ids_of(*range(12)))[4:], 4) == whole


@pytest.mark.parametrize("other", [("m2", "f32", "d"), ("m", "f16", "d"), ("m", "f32", "d2"), ("mf", "32", "d")])
def test_model_dtype_and_sharing_domain_each_separate_all_blocks(other):
    assert root_hash("m", "f32", "d") != root_hash(*other)


def test_ids_of_another_width_are_refused():
    with pytest.raises(ValueError, match="32-bit"):
        extend_chain(b"\0" * 16, array("Q", [1, 2]), 1)


def hasher(**settings) -> PromptHasher:
    return PromptHasher("m", "f32", **({"block_tokens": 4, "ids_per_block": 4} | settings))


def test_a_prompt_has_a_hash_for_each_full_block_only():
    assert hasher().hash("d", ids_of(*range(3))).chain == b""
    assert hasher().hash("d", ids_of(*range(4))).blocks == 1
    prompt = hasher().hash("d", ids_of(*range(7)))
    assert prompt == HashedPrompt(7, 4, root_hash("m", "f32", "d"), prompt.chain) and prompt.blocks == 1


@pytest.mark.parametrize(
    "following",
    [
        list(range(40)),  # goes on
        list(range(20)),  # the same again
        list(range(9)),  # cut back
        [*range(10), 99, *range(11, 30)],  # diverges inside a block
        [*range(12), 99],  # diverges at a block's edge
        [99, *range(1, 20)],  # shares nothing
        [],
    ],
)
def test_a_remembered_branch_hashes_as_if_it_were_new(following):
    warm = hasher()
    warm.hash("d", ids_of(*range(20)), branch_id="b")
    for _ in range(2):
        assert warm.hash("d", ids_of(*following), branch_id="b") == hasher().hash("d", ids_of(*following))


def test_a_branch_is_not_taken_for_the_same_one_in_another_domain():
    warm = hasher()
    warm.hash("d", ids_of(*range(20)), branch_id="b")
    assert warm.hash("e", ids_of(*range(20)), branch_id="b") == hasher().hash("e", ids_of(*range(20)))


def test_memory_is_bounded_by_ids_and_counted_right_whatever_becomes_of_a_branch():
    warm = hasher(max_ids=40)
    for domain, length in (("d", 20), ("e", 20), ("e", 8), ("e", 12)):
        warm.hash(domain, ids_of(*range(length)), branch_id="b")
    warm.hash("d", ids_of(*range(28)), branch_id="c")
    assert set(warm._branches) == {"b", "c"} and warm._remembered_ids == 40
    warm.hash("d", ids_of(*range(29)), branch_id="c")
    assert set(warm._branches) == {"c"} and warm._remembered_ids == 29
    warm.hash("d", ids_of(*range(41)), branch_id="c")
    assert not warm._branches and warm._remembered_ids == 0


def test_the_callers_array_may_change_afterwards():
    warm, ids = hasher(), ids_of(*range(8))
    warm.hash("d", ids, branch_id="b")
    ids[0] = 77
    assert warm.hash("d", ids, branch_id="b") == hasher().hash("d", ids)


def test_forgotten_branches_hash_the_same():
    warm = hasher(max_branches=2)
    for name in "abc":
        warm.hash("d", ids_of(*range(8)), branch_id=name)
    warm.forget("c")
    warm.forget("unknown")
    for name in "abc":
        assert warm.hash("d", ids_of(*range(12)), branch_id=name) == hasher().hash("d", ids_of(*range(12)))


def test_one_id_may_stand_for_a_block_of_tokens():
    symbolic = hasher(block_tokens=64, ids_per_block=1)
    prompt = symbolic.hash("d", ids_of(5, 6), prompt_tokens=150)
    assert (prompt.tokens, prompt.blocks) == (150, 2)
    assert symbolic.hash("d", ids_of(5, 6)).tokens == 128
    with pytest.raises(ValueError, match="prompt_tokens: expected at least 128"):
        symbolic.hash("d", ids_of(5, 6), prompt_tokens=127)


def test_ids_per_block_must_divide_block_tokens():
    with pytest.raises(ValueError, match="ids_per_block"):
        hasher(block_tokens=6)


def test_a_turn_of_a_long_branch_hashes_only_what_is_new():
    warm = PromptHasher("m", "f32", 16, 16)
    ids = array("I", range(100_000))
    warm.hash("d", ids, branch_id="b")
    best_s = 1.0
    for _ in range(5):
        ids = ids + array("I", range(1000))
        started = time.perf_counter()
        warm.hash("d", ids, branch_id="b")
        best_s = min(best_s, time.perf_counter() - started)
    assert best_s < 0.0005


def test_prompts_without_a_branch_are_hashed_as_if_nothing_was_remembered() -> None:
    """Seeded: contexts that grow, share heads, diverge and repeat, more of them than are remembered."""
    rng = random.Random(9)
    hasher = PromptHasher("m", "f32", 4, 4, max_ids=4_000)
    root = root_hash("m", "f32", "acme")
    contexts = [[rng.randrange(4) for _ in range(rng.randrange(30))] for _ in range(40)]
    for step in range(1500):
        context = rng.choice(contexts)
        if rng.random() < 0.3:
            del context[rng.randrange(len(context) + 1) :]
        context += [rng.randrange(4) for _ in range(rng.randrange(12))]
        branch = rng.choice([None, None, f"b{step % 7}"])
        ids = array("I", context)
        assert hasher.hash("acme", ids, None, branch).chain == extend_chain(root, ids, 4)


def test_a_long_prompt_that_begins_like_another_is_hashed_from_where_they_differ() -> None:
    hashed = []
    hasher = PromptHasher("m", "f32", 16, 16)
    shared = array("I", range(16_000))
    hasher.hash("acme", shared + array("I", [1] * 40))
    with pytest.MonkeyPatch.context() as patched:
        real = hashing.sha256
        patched.setattr(hashing, "sha256", lambda data: hashed.append(data) or real(data))
        hasher.hash("acme", shared + array("I", [2] * 40))
        hasher.hash("acme", shared + array("I", [2] * 80), None, "a new branch")
    assert len(hashed) <= 10
