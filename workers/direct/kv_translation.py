"""An engine's KV events in our hashes: what it calls its blocks is its own, the tokens are not.

Keeps, for every block the engine holds, its hash in ours and what came before it. So the directory can also be told the whole
content again, as an engine cannot. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from apps.kvcache.domain.events import Tier
from apps.kvcache.domain.hashing import HASH_BYTES, extend_chain
from workers.direct.kv_events import EngineHash, Event, Removed, Stored


@dataclass(frozen=True, slots=True)
class OurStored:
    """`parent` None: the chain starts a context."""

    tier: Tier
    parent: bytes | None
    chain: bytes


@dataclass(frozen=True, slots=True)
class OurRemoved:
    tier: Tier
    hashes: bytes


OurEvent = OurStored | OurRemoved


@dataclass(frozen=True, slots=True)
class _Held:
    parent: bytes | None
    chain: bytes


class KvTranslation:
    """One engine's blocks. `root`: of the sharing domain that the server's tenants have in common; `block_tokens`: ours,
    of which the engine's block must be a multiple. `blind` says why events cannot be used, when they cannot."""

    def __init__(self, root: bytes, block_tokens: int) -> None:
        self.blind: str | None = None
        self.unknown_parents = 0  # runs whose beginning was never told of: left out
        self._root = root
        self._block_tokens = block_tokens
        self._held: dict[Tier, dict[EngineHash, _Held]] = {"device": {}, "host": {}}
        self._last_of: dict[EngineHash, bytes] = {}  # our hash of an engine block's end, wherever it is held

    @property
    def blocks(self) -> int:
        """Engine blocks held, in all tiers."""
        return sum(len(held) for held in self._held.values())

    def translate(self, events: Iterable[Event]) -> list[OurEvent]:
        out: list[OurEvent] = []
        for event in events:
            if isinstance(event, Stored):
                out.extend(self._stored(event))
            elif isinstance(event, Removed):
                out.extend(self._removed(event))
            else:
                out.extend(self.clear())
        return out

    def clear(self) -> Iterator[OurRemoved]:
        """Everything is gone (the engine says so, or it is another process now)."""
        for tier, held in self._held.items():
            hashes = b"".join(_mirrored(block.chain) for block in reversed(held.values()))
            held.clear()
            if hashes:
                yield OurRemoved(tier, hashes)
        self._last_of.clear()

    def segments(self, tier: Tier) -> list[tuple[bytes | None, bytes]]:
        """What is held: (parent, chain), parents first."""
        return [(block.parent, block.chain) for block in self._held[tier].values()]

    def _stored(self, event: Stored) -> Iterator[OurEvent]:
        if event.block_tokens % self._block_tokens:
            told = f"{event.block_tokens} tokens, not a multiple of the model's {self._block_tokens}"
            self.blind = f"the engine's KV blocks are of {told}"
            return
        if not event.plain:
            return
        parent = None if event.parent is None else self._last_of.get(event.parent)
        if event.parent is not None and parent is None:
            self.unknown_parents += 1
            return
        chain = extend_chain(parent or self._root, array("I", event.token_ids), self._block_tokens)
        held = self._held[event.tier]
        size = event.block_tokens // self._block_tokens * HASH_BYTES
        before = parent
        for index, name in enumerate(event.hashes):
            block = chain[index * size : (index + 1) * size]
            held.pop(name, None)
            held[name] = _Held(before, block)
            self._last_of[name] = before = block[-HASH_BYTES:]
        yield OurStored(event.tier, parent, chain)

    def _removed(self, event: Removed) -> Iterator[OurEvent]:
        held = self._held[event.tier]
        gone = []
        for name in event.hashes:
            block = held.pop(name, None)
            if block is None:
                continue
            gone.append(_mirrored(block.chain))
            if not any(name in other for other in self._held.values()):
                del self._last_of[name]
        if gone:
            yield OurRemoved(event.tier, b"".join(gone))


def _mirrored(chain: bytes) -> bytes:
    """Blocks last one first: the order in which they can be dropped."""
    return b"".join(chain[at : at + HASH_BYTES] for at in range(len(chain) - HASH_BYTES, -1, -HASH_BYTES))
