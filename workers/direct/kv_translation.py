"""An engine's KV events in our hashes: what it calls its blocks is its own, the tokens are not.

Keeps, for every block the engine holds, its hash in ours and what came before it. A block counts while any of the engine's
tiers holds it and everything before it: an engine may drop the middle of a context, whose end is of no use until the middle
is computed again. So the directory hears of prefixes only, and can be told the whole content at any time. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from apps.kvcache.domain.events import Tier
from apps.kvcache.domain.hashing import HASH_BYTES, extend_chain
from apps.kvcache.domain.segments import mirrored
from workers.direct.kv_events import EngineHash, Event, Removed, Stored


@dataclass(frozen=True, slots=True)
class OurStored:
    """`parent` None: the chain starts a context."""

    parent: bytes | None
    chain: bytes


@dataclass(frozen=True, slots=True)
class OurRemoved:
    """Blocks that are of no use any more, a context's last one first."""

    hashes: bytes


OurEvent = OurStored | OurRemoved


@dataclass(slots=True)
class _Block:
    """One engine block: its hashes in ours, the block before it, who holds it, and whether the directory was told."""

    before: EngineHash | None
    chain: bytes
    tiers: set[Tier] = field(default_factory=set)
    told: bool = False


class KvTranslation:
    """One engine's blocks. `root`: of the sharing domain that the server's tenants have in common; `block_tokens`: ours,
    of which the engine's block must be a multiple. `blind` says why events cannot be used, when they cannot."""

    def __init__(self, root: bytes, block_tokens: int) -> None:
        self.blind: str | None = None
        self.unknown_parents = 0  # runs whose beginning was never told of: left out
        self._root = root
        self._block_tokens = block_tokens
        self._blocks: dict[EngineHash, _Block] = {}
        self._after: dict[EngineHash, set[EngineHash]] = {}

    @property
    def told_blocks(self) -> int:
        """Engine blocks that the directory knows of."""
        return sum(block.told for block in self._blocks.values())

    def translate(self, events: Iterable[Event]) -> list[OurEvent]:
        out: list[OurEvent] = []
        for event in events:
            if isinstance(event, Stored):
                self._stored(event, out)
            elif isinstance(event, Removed):
                self._removed(event, out)
            else:
                out += self.clear()
        return out

    def clear(self) -> list[OurEvent]:
        """Everything is gone: the engine says so, is another process now, or cannot be followed any more."""
        first = [name for name, block in self._blocks.items() if block.told and not self._is_told(block.before)]
        gone = b"".join(self._untell(name) for name in first)
        self._blocks.clear()
        self._after.clear()
        return [OurRemoved(gone)] if gone else []

    def segments(self) -> list[tuple[bytes | None, bytes]]:
        """What the directory should know: (parent, chain), parents first."""
        first = [name for name, block in self._blocks.items() if block.told and not self._is_told(block.before)]
        return [(self._end_of(self._blocks[name].before), self._blocks[name].chain) for name in self._below(first)]

    # ---- events -----------------------------------------------------------------------------------------------------

    def _stored(self, event: Stored, out: list[OurEvent]) -> None:
        if event.block_tokens % self._block_tokens:
            told = f"{event.block_tokens} tokens, not a multiple of the model's {self._block_tokens}"
            self.blind = f"the engine's KV blocks are of {told}"
            return
        if not event.plain:
            return
        if event.parent is not None and event.parent not in self._blocks:
            self.unknown_parents += 1
            return
        parent = self._end_of(event.parent) or self._root
        chain = extend_chain(parent, array("I", event.token_ids), self._block_tokens)
        size = event.block_tokens // self._block_tokens * HASH_BYTES
        before = event.parent
        for index, name in enumerate(event.hashes):
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = _Block(before, chain[index * size : (index + 1) * size])
                if before is not None:
                    self._after.setdefault(before, set()).add(name)
            block.tiers.add(event.tier)
            before = name
        out += self._tell(event.hashes)

    def _removed(self, event: Removed, out: list[OurEvent]) -> None:
        gone = b""
        for name in event.hashes:
            block = self._blocks.get(name)
            if block is None:
                continue
            block.tiers.discard(event.tier)
            if not block.tiers:
                gone += self._untell(name)
                self._forget(name)
        if gone:
            out.append(OurRemoved(gone))

    # ---- what the directory knows -----------------------------------------------------------------------------------

    def _tell(self, names: Iterable[EngineHash]) -> Iterator[OurStored]:
        """Tells of these blocks, and of those after them that waited for them, where nothing before them is missing."""
        pending = list(names)[::-1]
        while pending:
            run: list[EngineHash] = []
            name: EngineHash | None = pending.pop()
            while name is not None:
                block = self._blocks[name]
                if block.told or not block.tiers or (block.before is not None and not self._is_told(block.before)):
                    break
                block.told = True
                run.append(name)
                after = [later for later in self._after.get(name, ()) if not self._blocks[later].told]
                pending += after[1:]
                name = after[0] if after else None
            if run:
                parent = self._end_of(self._blocks[run[0]].before)
                yield OurStored(parent, b"".join(self._blocks[item].chain for item in run))

    def _untell(self, name: EngineHash) -> bytes:
        """The block and those after it are of no use any more: their hashes, last ones first."""
        if not self._is_told(name):
            return b""
        order = list(self._below([name]))
        for item in order:
            self._blocks[item].told = False
        return b"".join(mirrored(self._blocks[item].chain) for item in reversed(order))

    def _below(self, first: Iterable[EngineHash]) -> Iterator[EngineHash]:
        """These blocks and all told ones after them, each after the one before it."""
        pending = list(first)
        while pending:
            name = pending.pop()
            yield name
            pending += [later for later in self._after.get(name, ()) if self._blocks[later].told]

    def _forget(self, name: EngineHash) -> None:
        """No tier holds it. It is remembered while blocks after it are held, in case it is computed again."""
        while not self._blocks[name].tiers and not self._after.get(name):
            self._after.pop(name, None)
            before = self._blocks.pop(name).before
            if before is None:
                return
            self._after[before].discard(name)
            name = before

    def _is_told(self, name: EngineHash | None) -> bool:
        return name is not None and self._blocks[name].told

    def _end_of(self, name: EngineHash | None) -> bytes | None:
        return None if name is None else self._blocks[name].chain[-HASH_BYTES:]
