"""The host pool: what it keeps, what peers can read, what survives a crash, and what happens without memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest

import workers.agent.shared_memory as shared_memory
from tests.agent.reference_support import RecordingSink
from workers.agent.pool import FRAME, TAIL_SLOTS, KvPool, open_pool
from workers.agent.shared_memory import Floats, PoolError, PoolFile, PoolGeometry, checksum

GEOMETRY = PoolGeometry(layers=2, kv_heads=1, head_dim=4, block_tokens=16, fingerprint=b"f" * 16)


def chain(length: int, name: str = "a") -> bytes:
    return b"".join(f"{name}{index:015d}".encode() for index in range(length))


def write(index: int, block: Floats) -> None:
    block[...] = index + 0.5


class Bench:
    def __init__(self, folder: Path, blocks: int) -> None:
        self.time = 1000.0
        self.sink = RecordingSink()
        self.folder = folder
        self.pool: KvPool
        self.lock: TextIO
        self.pool, self.lock = open_pool(folder, "n", GEOMETRY, blocks, "referenced", lambda: self.time, self.sink)

    def read(self, hashes: bytes) -> list[float]:
        values: list[float] = []
        pinned = self.pool.acquire(hashes)
        self.pool.load(pinned, lambda _index, block: values.append(float(block.mean())))
        self.pool.release(pinned)
        return values


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, 8)
    yield bench
    bench.time += 1e6
    bench.pool.expire()
    bench.pool.check_integrity(idle=True)
    bench.pool.close(unlink=True)
    bench.lock.close()


def test_stored_blocks_are_read_back_and_announced(bench: Bench) -> None:
    assert bench.pool.store(chain(3), write) == 3
    assert bench.read(chain(5)) == [0.5, 1.5, 2.5]
    assert b"".join(hashes for _, _, hashes in bench.sink.events) == chain(3)


def test_only_missing_blocks_are_written(bench: Bench) -> None:
    bench.pool.store(chain(3), write)
    written: list[int] = []

    def note(index: int, block: Floats) -> None:
        written.append(index)
        write(index, block)

    bench.pool.store(chain(5), note)
    assert written == [3, 4]


def test_a_write_that_fails_leaves_nothing_reserved(bench: Bench) -> None:
    def fail(index: int, block: Floats) -> None:
        if index == 2:
            raise RuntimeError("no")
        write(index, block)

    with pytest.raises(RuntimeError):
        bench.pool.store(chain(5), fail)
    assert (bench.pool.lookup(chain(5)), bench.pool.used_blocks) == (2, 2)


def test_blocks_held_for_a_hand_over_are_not_evicted_until_it_expires(bench: Bench) -> None:
    bench.pool.store(chain(6), write)
    assert bench.pool.hold_until(chain(6), bench.time + 30) == 6
    assert bench.pool.store(chain(8, "b"), write) == 2
    bench.time += 31
    bench.pool.expire()
    assert bench.pool.store(chain(8, "b"), write) == 8
    assert bench.pool.lookup(chain(6)) == 0
    assert bench.sink.held() == {chain(8, "b")[start : start + 16] for start in range(0, 128, 16)}


def test_a_flipped_bit_drops_the_block_and_all_after_it(bench: Bench) -> None:
    bench.pool.store(chain(5), write)
    slot = bench.pool.file.find([chain(5)[32:48]])[chain(5)[32:48]]
    bench.pool.file.block(slot).data.cast("B")[17] ^= 4
    assert bench.read(chain(5)) == [0.5, 1.5]
    assert (bench.pool.lookup(chain(5)), bench.pool.checksum_failures) == (2, 1)
    assert len(bench.sink.held()) == 2


def test_fetched_data_that_is_broken_or_unwritten_is_given_up(bench: Bench) -> None:
    missing = bench.pool.reserve(chain(3))
    block = np.full(GEOMETRY.shape, 7.0, np.float32)
    assert bench.pool.fill(missing[0], checksum(block), block)
    assert not bench.pool.fill(missing[1], checksum(block) ^ 1, block)
    bench.pool.give_up(b"".join(entry.block for entry in missing[1:]))
    assert (bench.pool.lookup(chain(3)), bench.pool.used_blocks, bench.pool.checksum_failures) == (1, 1, 1)


def test_a_tail_waits_for_its_hand_over_and_is_never_announced(bench: Bench) -> None:
    tail = b"t" * 16
    assert bench.pool.put_tail(tail, b"p" * 16, 5, lambda block: write(1, block), bench.time + 30)
    copy = bench.pool.tail(tail)
    assert copy is not None and float(copy.mean()) == 1.5
    frame = bench.pool.frame(tail)
    assert frame is not None and FRAME.unpack(frame[: FRAME.size])[:2] == (GEOMETRY.block_bytes, tail)
    assert bench.sink.events == []
    bench.time += 31
    bench.pool.expire()
    assert bench.pool.tail(tail) is None
    assert bench.pool.frame(tail) is None


def test_more_tails_than_slots_are_refused_not_dropped(bench: Bench) -> None:
    taken = [
        bench.pool.put_tail(f"t{index:015d}".encode(), b"p" * 16, 5, lambda block: write(1, block), bench.time + 30)
        for index in range(TAIL_SLOTS + 1)
    ]
    assert taken == [True] * TAIL_SLOTS + [False]


def test_a_broken_tail_is_not_handed_over(bench: Bench) -> None:
    tail = b"t" * 16
    bench.pool.put_tail(tail, b"p" * 16, 5, lambda block: write(1, block), bench.time + 30)
    slot = bench.pool.file.find([tail])[tail]
    bench.pool.file.block(slot).data.cast("B")[0] ^= 1
    assert bench.pool.tail(tail) is None
    assert bench.pool.checksum_failures == 1


def test_a_host_without_memory_refuses_the_write_instead_of_dying(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.pool.store(chain(2), write)
    monkeypatch.setattr(shared_memory, "_back", lambda *_: False)
    assert bench.pool.store(chain(5), write) == 2
    assert (bench.pool.refused_writes, bench.pool.used_blocks) == (1, 2)
    assert not bench.pool.put_tail(b"t" * 16, b"p" * 16, 5, lambda block: write(1, block), bench.time + 30)


def test_two_processes_cannot_run_one_node(bench: Bench) -> None:
    with pytest.raises(PoolError, match="already runs"):
        open_pool(bench.folder, "n", GEOMETRY, 8, "referenced", lambda: 0.0, RecordingSink())


def test_a_pool_left_by_a_crash_is_adopted_with_its_blocks(tmp_path: Path) -> None:
    script = f"""
import sys; sys.path.insert(0, {os.getcwd()!r})
import os, pathlib, signal
from tests.agent.test_pool import Bench, chain, write
bench = Bench(pathlib.Path({str(tmp_path)!r}), 8)
bench.pool.store(chain(4), write)
bench.pool.store(chain(2) + chain(3, "b"), write)
bench.pool.put_tail(b"t" * 16, chain(1), 3, lambda block: write(0, block), 1e9)
torn = bench.pool.reserve(chain(5))[0]
bench.pool.file.begin(torn.slot)
os.kill(os.getpid(), signal.SIGKILL)
"""
    crashed = subprocess.run([sys.executable, "-c", script], check=False)
    assert crashed.returncode == -9
    bench = Bench(tmp_path, 8)
    try:
        assert bench.pool.adopted_blocks == 7
        assert bench.read(chain(5)) == [0.5, 1.5, 2.5, 3.5], "the torn block is not taken over"
        assert bench.read(chain(2) + chain(3, "b")) == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert bench.pool.tail(b"t" * 16) is None
        assert bench.pool.store(chain(8, "c"), write) == 8, "adopted blocks can be evicted"
        bench.pool.check_integrity(idle=True)
    finally:
        bench.pool.close(unlink=True)
        bench.lock.close()


def test_a_former_pool_of_another_shape_is_replaced(tmp_path: Path) -> None:
    first = Bench(tmp_path, 8)
    name = first.pool.file.name
    first.pool.close(unlink=False)
    first.lock.close()
    second = Bench(tmp_path, 9)
    try:
        assert second.pool.adopted_blocks == 0
        with pytest.raises(PoolError):
            PoolFile.open(name)
    finally:
        second.pool.close(unlink=True)
        second.lock.close()


def test_a_file_that_is_no_pool_or_no_plain_name_is_refused(bench: Bench) -> None:
    with pytest.raises(PoolError, match="plain file name"):
        PoolFile.open("../etc/passwd")
    path = bench.pool.file.path.with_name(bench.pool.file.name + ".bad")
    try:
        path.write_bytes(b"SWYPOOL1")
        with pytest.raises(PoolError, match="no pool"):
            PoolFile.open(path.name)
        path.write_bytes(bench.pool.file.path.read_bytes()[:-1])
        with pytest.raises(PoolError, match="no pool"):
            PoolFile.open(path.name)
    finally:
        path.unlink()


def test_a_reader_sees_no_record_while_a_slot_is_being_written(bench: Bench) -> None:
    bench.pool.store(chain(1), write)
    peer = PoolFile.open(bench.pool.file.name)
    slot = peer.find([chain(1)])[chain(1)]
    assert peer.record(slot) is not None
    bench.pool.file.begin(slot)
    assert peer.record(slot) is None
    bench.pool.file.finish(slot, shared_memory.Record(chain(1), bytes(16), 16, checksum(peer.block(slot))))
    assert peer.record(slot) is not None
    peer.close()


def test_references_decide_what_is_evicted_first(bench: Bench) -> None:
    from workers.agent.engines.base import RefChange

    bench.pool.store(chain(4), write)
    bench.time += 1
    bench.pool.store(chain(4, "b"), write)
    bench.pool.apply_refs([RefChange(chain(4)[-16:], 4, 1)], reset=False)
    assert bench.pool.referenced_blocks == 4
    bench.time += 1
    bench.pool.store(chain(2, "c"), write)
    assert (bench.pool.lookup(chain(4)), bench.pool.lookup(chain(4, "b"))) == (4, 2)
    bench.pool.apply_refs([], reset=True)
    assert bench.pool.referenced_blocks == 0


def test_a_released_hand_over_gives_up_its_pins_and_its_tail(bench: Bench) -> None:
    bench.pool.store(chain(4), write)
    bench.pool.hold_until(chain(4), bench.time + 30, "r")
    bench.pool.put_tail(b"t" * 16, b"p" * 16, 5, lambda block: write(1, block), bench.time + 30, "r")
    bench.pool.put_tail(b"t" * 16, b"p" * 16, 5, lambda block: write(1, block), bench.time + 30, "other")
    assert bench.pool.release_handoff("r") and not bench.pool.release_handoff("r")
    assert bench.pool.tail(b"t" * 16) is not None, "another request still wants the same tail"
    assert bench.pool.release_handoff("other")
    assert bench.pool.tail(b"t" * 16) is None
    bench.pool.check_integrity(idle=True)
