"""The simulated node's host pool: which blocks it holds, without any bytes.

A block is protected from eviction by the blocks after it, so pinning the last block of a prefix protects all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from apps.kvcache.domain.eviction import EvictionPolicy, HostIndex
from apps.kvcache.domain.hashing import HASH_BYTES
from workers.agent.engines.base import EngineSink, RefChange, Segment


class SimulatedPool:
    """Prefixes of chains in the host memory of one node, `block_tokens` tokens a block. Reports to `sink` once it is set."""

    def __init__(self, capacity_blocks: int, block_tokens: int, policy: EvictionPolicy) -> None:
        self.index = HostIndex(capacity_blocks, policy)
        self.block_tokens = block_tokens
        self.sink: EngineSink | None = None
        self.evicted_blocks = 0

    def held_blocks(self, chain: bytes) -> int:
        """How many leading blocks of `chain` are here."""
        return self.index.lookup(chain)

    def held_tokens(self, chain: bytes) -> int:
        """The same in tokens."""
        return self.held_blocks(chain) * self.block_tokens

    def store(self, now: float, chain: bytes) -> int:
        """Keep the blocks of `chain`, evicting others where it must; answers how many leading blocks are here now."""
        reservation = self.index.reserve(now, None, chain)
        if reservation.evicted and self.sink is not None:
            self.evicted_blocks += len(reservation.evicted) // HASH_BYTES
            self.sink.removed(reservation.evicted)
        if reservation.slots:
            first, last = reservation.slots[0][0], reservation.slots[-1][0]
            for parent, run in self.index.commit(chain[first * HASH_BYTES : (last + 1) * HASH_BYTES]):
                if self.sink is not None:
                    self.sink.stored(parent, run)
        self.index.touch(now, chain)
        return self.index.lookup(chain)

    def pin(self, chain: bytes) -> bytes:
        """Protect the leading held blocks of `chain`; answers what `unpin` takes (nothing where none is held)."""
        held = self.index.lookup(chain)
        last = chain[(held - 1) * HASH_BYTES : held * HASH_BYTES] if held else b""
        self.index.pin(last)
        return last

    def unpin(self, pinned: bytes) -> None:
        self.index.unpin(pinned)

    def apply_refs(self, changes: Sequence[RefChange], reset: bool) -> None:
        if reset:
            self.index.reset_refs()
        for change in changes:
            self.index.apply_refs(change.last, change.blocks, change.delta)

    def segments(self) -> list[Segment]:
        return [Segment(parent, chain) for parent, chain in self.index.segments()]
