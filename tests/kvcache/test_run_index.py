"""RunIndex holds and evicts exactly what HostIndex does, run by run instead of block by block."""

from __future__ import annotations

import random

import pytest

from apps.kvcache.domain.eviction import EvictionPolicy, HostIndex
from apps.kvcache.domain.hashing import HASH_BYTES
from apps.kvcache.domain.run_index import RunIndex


def chain(name: str, blocks: int) -> bytes:
    return b"".join(f"{name}-{index}".encode().ljust(HASH_BYTES)[:HASH_BYTES] for index in range(blocks))


def host_store(index: HostIndex, now: float, hashes: bytes) -> tuple[int, bytes]:
    reservation = index.reserve(now, None, hashes)
    if reservation.slots:
        first, last = reservation.slots[0][0], reservation.slots[-1][0]
        index.commit(hashes[first * HASH_BYTES : (last + 1) * HASH_BYTES])
    index.touch(now, hashes)
    return index.lookup(hashes), reservation.evicted


@pytest.mark.parametrize("policy", ["referenced", "lru", "ttl-pin"])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_events_evict_the_same_blocks_in_the_same_order(policy: EvictionPolicy, seed: int) -> None:
    rng = random.Random(seed)
    capacity = 120
    host, runs = HostIndex(capacity, policy, ttl_s=5.0), RunIndex(capacity, policy, ttl_s=5.0)
    contexts = [chain("root", rng.randrange(1, 9))]
    counted: list[tuple[bytes, int]] = []
    pinned: list[tuple[bytes, bytes]] = []
    for step in range(600):
        now = float(step)
        what = rng.random()
        if what < 0.6:
            base = rng.choice(contexts[-12:])
            keep = rng.randrange(len(base) // HASH_BYTES + 1) * HASH_BYTES if rng.random() < 0.3 else len(base)
            context = base[:keep] + chain(f"s{step}", rng.randrange(1, 12))
            contexts.append(context)
            held, evicted = host_store(host, now, context)
            change = runs.store(now, context)
            assert (change.held, change.evicted) == (held, evicted), f"step {step}"
        elif what < 0.7:
            context = rng.choice(contexts[-12:])
            host.touch(now, context)
            runs.touch(now, context)
        elif what < 0.85:
            context = rng.choice(contexts[-12:])
            held = host.lookup(context)
            assert runs.lookup(context) == held
            if held:
                last = context[(held - 1) * HASH_BYTES : held * HASH_BYTES]
                counted.append((last, held))
                assert runs.apply_refs(last, held, 1) == host.apply_refs(last, held, 1) == held
        elif what < 0.92 and counted:
            last, blocks = counted.pop(rng.randrange(len(counted)))
            if host.refs(last):
                host.apply_refs(last, blocks, -1)
                runs.apply_refs(last, blocks, -1)
        elif what < 0.96:
            context = rng.choice(contexts[-12:])
            held = host.lookup(context)
            tail = context[(held - 1) * HASH_BYTES : held * HASH_BYTES] if held else b""
            host.pin(tail)
            got = runs.pin(context)
            assert got == tail
            pinned.append((tail, got))
        elif pinned:
            tail, got = pinned.pop(0)
            host.unpin(tail)
            runs.unpin(got)
        host.check_integrity()
        runs.check_integrity()
        assert runs.used_blocks == host.used_blocks
        assert runs.referenced_blocks == host.referenced_blocks


def test_a_context_that_grows_turn_by_turn_stays_one_run() -> None:
    index = RunIndex(1000)
    context = b""
    for turn in range(50):
        context += chain(f"t{turn}", 3)
        index.store(float(turn), context)
    assert len(index.segments()) == 1
    assert index.lookup(context) == 150


def test_clearing_drops_everything_and_a_late_unpin_is_harmless() -> None:
    index = RunIndex(10)
    index.store(0.0, chain("a", 4))
    pinned = index.pin(chain("a", 4))
    index.clear()
    index.unpin(pinned)
    assert index.used_blocks == 0 and index.segments() == []
    index.check_integrity()


def test_a_pool_needs_room() -> None:
    with pytest.raises(ValueError, match="capacity_blocks"):
        RunIndex(0)
