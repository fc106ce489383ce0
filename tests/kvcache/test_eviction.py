"""What a node keeps in host memory, and what goes first."""

import random
from array import array

import pytest

from apps.kvcache.domain.eviction import HostIndex
from apps.kvcache.domain.hashing import extend_chain, root_hash

ROOT = root_hash("model", "f32", "tests")


def chain_of(*ids: int) -> bytes:
    return extend_chain(ROOT, array("I", ids), 1)


def after(chain: bytes, *ids: int) -> bytes:
    return extend_chain(chain[-16:], array("I", ids), 1)


def block(chain: bytes, index: int) -> bytes:
    return chain[16 * index : 16 * index + 16]


def store(index: HostIndex, now: float, chain: bytes, parent: bytes | None = None) -> bytes:
    """Reserve and commit; answers the evicted hashes."""
    reservation = index.reserve(now, parent, chain)
    index.commit(b"".join(block(chain, at) for at, _ in reservation.slots))
    index.check_integrity()
    return reservation.evicted


def test_blocks_can_be_found_once_committed_and_not_before():
    index = HostIndex(8)
    chain = chain_of(1, 2, 3)
    reservation = index.reserve(0.0, None, chain)
    assert [at for at, _ in reservation.slots] == [0, 1, 2] and reservation.stopped is None
    assert index.lookup(chain) == 0
    assert index.commit(chain[:32]) == [(None, chain[:32])]
    assert index.lookup(chain) == 2
    assert index.commit(chain[32:]) == [(chain[16:32], chain[32:])]
    assert index.slots(chain) == [slot for _, slot in reservation.slots]


def test_a_block_written_before_its_parent_becomes_readable_with_it():
    index = HostIndex(8)
    shared, tail = chain_of(1, 2), chain_of(1, 2, 3)
    index.reserve(0.0, None, shared)
    second = index.reserve(0.0, None, tail)
    assert [at for at, _ in second.slots] == [2]
    assert index.commit(tail[32:]) == []
    assert index.lookup(tail) == 0
    assert index.commit(shared) == [(None, tail)]
    assert index.lookup(tail) == 3


def test_oldest_use_goes_first_and_tails_before_their_parents():
    index = HostIndex(6)
    old, new = chain_of(1, 2, 3), chain_of(7, 8, 9)
    store(index, 1.0, old)
    store(index, 2.0, new)
    assert store(index, 3.0, chain_of(20, 21)) == block(old, 2) + block(old, 1)
    assert index.lookup(old) == 1 and index.lookup(new) == 3


def test_a_touched_context_is_younger_as_a_whole():
    index = HostIndex(6)
    first, second = chain_of(1, 2, 3), chain_of(7, 8, 9)
    store(index, 1.0, first)
    store(index, 2.0, second)
    index.touch(3.0, first)
    assert store(index, 4.0, chain_of(20, 21, 22, 23)) == (
        block(second, 2) + block(second, 1) + block(second, 0) + block(first, 2)
    )


def test_a_context_that_a_branch_counts_on_outlives_younger_ones():
    index = HostIndex(6)
    waiting, finished = chain_of(1, 2, 3), chain_of(7, 8, 9)
    store(index, 1.0, waiting)
    store(index, 2.0, finished)
    assert index.apply_refs(waiting[-16:], 3, 1) == 3
    assert index.referenced_blocks == 3
    assert store(index, 3.0, chain_of(20, 21, 22)) == block(finished, 2) + block(finished, 1) + block(finished, 0)
    index.apply_refs(waiting[-16:], 3, -1)
    assert store(index, 4.0, chain_of(30)) == block(waiting, 2)


def test_lru_does_not_look_at_references():
    index = HostIndex(4, "lru")
    old, new = chain_of(1, 2), chain_of(7, 8)
    store(index, 1.0, old)
    store(index, 2.0, new)
    index.apply_refs(old[-16:], 2, 1)
    assert store(index, 3.0, chain_of(20)) == block(old, 1)


def test_ttl_pin_keeps_what_was_used_lately_and_refuses_instead():
    index = HostIndex(2, "ttl-pin", ttl_s=10.0)
    old = chain_of(1, 2)
    store(index, 0.0, old)
    assert index.reserve(5.0, None, chain_of(9)).stopped == "full"
    assert store(index, 10.0, chain_of(9)) == block(old, 1)


def test_what_is_being_read_is_never_evicted():
    index = HostIndex(3)
    read = chain_of(1, 2, 3)
    store(index, 0.0, read)
    assert index.pin(read) == 3
    refused = index.reserve(1.0, None, chain_of(9))
    assert refused.slots == [] and refused.stopped == "full"
    index.unpin(read)
    assert store(index, 2.0, chain_of(9)) == block(read, 2)
    with pytest.raises(ValueError, match="not pinned"):
        index.unpin(block(read, 0))


def test_a_context_longer_than_the_pool_keeps_its_head():
    index = HostIndex(3)
    chain = chain_of(1, 2, 3, 4, 5)
    reservation = index.reserve(0.0, None, chain)
    assert [at for at, _ in reservation.slots] == [0, 1, 2] and reservation.stopped == "full"
    index.commit(chain[:48])
    assert index.lookup(chain) == 3


def test_a_context_never_evicts_its_own_head():
    index = HostIndex(3)
    head = chain_of(1, 2)
    store(index, 0.0, head)
    store(index, 5.0, chain_of(9))
    assert store(index, 6.0, after(head, 3, 4), parent=head[-16:]) == chain_of(9)
    assert index.lookup(head + after(head, 3, 4)) == 3


def test_nothing_is_stored_after_a_missing_parent():
    index = HostIndex(3)
    head = chain_of(1, 2)
    reservation = index.reserve(0.0, head[-16:], after(head, 3))
    assert reservation.slots == [] and reservation.stopped == "parent-missing"


def test_a_removed_block_takes_its_descendants_along():
    index = HostIndex(8)
    chain, sibling = chain_of(1, 2, 3), chain_of(1, 2, 4)
    store(index, 0.0, chain)
    store(index, 0.0, sibling)
    assert set(_each(index.remove(block(chain, 1)))) == {block(chain, 1), block(chain, 2), block(sibling, 2)}
    index.check_integrity()
    assert index.lookup(chain) == 1 and index.used_blocks == 1


def test_a_removed_block_that_is_read_keeps_its_slot_until_the_reader_is_done():
    index = HostIndex(4)
    chain = chain_of(1, 2)
    store(index, 0.0, chain)
    index.pin(chain)
    assert index.remove(block(chain, 0)) == block(chain, 1) + block(chain, 0)
    assert index.lookup(chain) == 0 and index.used_blocks == 2
    assert index.reserve(1.0, None, chain).stopped == "busy"
    index.unpin(chain)
    index.check_integrity()
    assert index.used_blocks == 0 and index.reserve(2.0, None, chain).stopped is None


def test_a_reservation_given_up_waits_for_the_writer_after_it():
    index = HostIndex(4)
    head, tail = chain_of(1), chain_of(1, 2)
    index.reserve(0.0, None, head)
    index.reserve(0.0, None, tail)
    assert index.remove(head) == b""
    index.check_integrity()
    assert index.used_blocks == 2
    assert index.commit(tail[16:]) == []
    index.check_integrity()
    assert index.used_blocks == 0


def test_a_count_for_a_run_whose_tail_just_went_reaches_the_rest():
    index = HostIndex(3)
    chain = chain_of(1, 2, 3)
    store(index, 0.0, chain)
    store(index, 1.0, chain_of(9))
    assert index.apply_refs(chain[-16:], 3, 1) == 2
    assert [index.refs(block(chain, at)) for at in range(3)] == [1, 1, 0]


def test_a_reset_leaves_no_references():
    index = HostIndex(4)
    chain = chain_of(1, 2)
    store(index, 0.0, chain)
    index.apply_refs(chain[-16:], 2, 3)
    index.reset_refs()
    assert index.referenced_blocks == 0 and index.refs(block(chain, 0)) == 0


def test_a_snapshot_lists_every_readable_block_once_with_parents_first():
    index = HostIndex(16)
    chains = [chain_of(1, 2, 3), chain_of(1, 2, 4, 5), chain_of(9)]
    for chain in chains:
        store(index, 0.0, chain)
    index.reserve(1.0, None, chain_of(30))
    seen: set[bytes] = set()
    for parent, run in index.segments():
        assert parent is None or parent in seen
        assert not seen & set(_each(run))
        seen |= set(_each(run))
    assert seen == {piece for chain in chains for piece in _each(chain)}


def test_clearing_leaves_an_empty_index():
    index = HostIndex(4)
    store(index, 0.0, chain_of(1, 2))
    store(index, 0.0, chain_of(1, 3))
    index.clear()
    index.check_integrity()
    assert index.used_blocks == 0 and index.segments() == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"capacity_blocks": 0}, "capacity_blocks"), ({"capacity_blocks": 1, "policy": "x"}, "policy")],
)
def test_bad_settings_are_named(arguments, field):
    with pytest.raises(ValueError, match=field):
        HostIndex(**arguments)


def _each(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 16] for at in range(0, len(hashes), 16)]


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_writers_readers_and_removals_keeps_order_and_balance(seed):
    """Against a naive model that sorts all tails at each eviction."""
    rng = random.Random(seed)
    index = HostIndex(40)
    held: dict[bytes, tuple[bytes | None, float]] = {}  # block -> parent, use (of itself and everything after it)
    refs: dict[bytes, int] = {}
    pins: list[bytes] = []
    chains = [chain_of(*(rng.randrange(3) for _ in range(rng.randrange(1, 14)))) for _ in range(60)]

    def naive_victim() -> bytes:
        parents = {parent for parent, _ in held.values()}
        pinned = {piece for run in pins for piece in _each(run)}
        tails = [piece for piece in held if piece not in parents and piece not in pinned]
        return min(tails, key=lambda piece: (refs.get(piece, 0) > 0, held[piece][1]))

    for step in range(3000):
        now, chain = float(step), rng.choice(chains)
        known = index.lookup(chain)
        action = rng.random()
        if action < 0.4:
            reservation = index.reserve(now, None, chain)
            used = _each(chain[: 16 * known])
            for piece in used:
                held[piece] = (held[piece][0], now)
            protected = chain[16 * known - 16 : 16 * known]
            pins.append(protected)
            for gone in _each(reservation.evicted):
                expected = naive_victim()
                assert (refs.get(gone, 0) > 0, held[gone][1]) == (refs.get(expected, 0) > 0, held[expected][1])
                del held[gone]
                refs.pop(gone, None)
            pins.remove(protected)
            for at, _ in reservation.slots:
                held[block(chain, at)] = (block(chain, at - 1) if at else None, now)
            index.commit(b"".join(block(chain, at) for at, _ in reservation.slots))
        elif action < 0.6:
            index.touch(now, chain)
            for piece in _each(chain[: 16 * known]):
                held[piece] = (held[piece][0], now)
        elif action < 0.75 and known:
            delta = rng.choice((1, -1))
            index.apply_refs(block(chain, known - 1), known, delta)
            for piece in _each(chain[: 16 * known]):
                refs[piece] = max(0, refs.get(piece, 0) + delta)
        elif action < 0.82 and known and len(pins) < 3:
            index.pin(chain)
            pins.append(chain[: 16 * known])
        elif action < 0.95 and pins:
            index.unpin(pins.pop(rng.randrange(len(pins))))
        elif action > 0.99 and known and not pins:
            for gone in _each(index.remove(block(chain, known - 1))):
                del held[gone]
                refs.pop(gone, None)
        index.check_integrity()
        assert index.used_blocks == len(held)
        assert index.referenced_blocks == sum(count > 0 for count in refs.values())
