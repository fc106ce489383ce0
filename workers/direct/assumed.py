"""What an engine that does not tell probably holds: the prompts it was sent, as far as its KV memory reaches.

An estimate, and said to be one: the engine evicts by its own rules and may have restarted. Pure.
"""

from __future__ import annotations

from apps.kvcache.domain.run_index import RunIndex
from workers.direct.kv_translation import OurEvent, OurRemoved, OurStored


class AssumedCache:
    """Prefixes in `capacity_blocks` of memory, least recently used first to go, as engines do."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._index = RunIndex(capacity_blocks, policy="lru")

    def served(self, now: float, chain: bytes) -> list[OurEvent]:
        """The engine computed this prompt or found it. Answers what changed, in order."""
        if not chain:
            return []
        change = self._index.store(now, chain)
        out: list[OurEvent] = []
        if change.evicted:
            out.append(OurRemoved(change.evicted))
        if change.stored is not None:
            out.append(OurStored(*change.stored))
        return out

    def segments(self) -> list[tuple[bytes | None, bytes]]:
        return self._index.segments()

    def clear(self) -> None:
        """The engine lost everything."""
        self._index.clear()
