"""Block hashes. A block's hash stands for its tokens and everything before them, in one model and sharing domain.

    hash(block) = sha256(parent hash + token ids as little-endian uint32)[:16]
    root        = sha256 of model, dtype and sharing domain, each length-prefixed, [:16]

So equal hashes mean equal prefixes, and a tenant of another domain can neither find nor time the block.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

import numpy as np

HASH_BYTES = 16
ID_BYTES = 4

Ids: TypeAlias = "array[int] | memoryview"


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt as the cache sees it: `chain` has the hashes of its full blocks, the tail of `tokens` beyond them has none."""

    tokens: int
    block_tokens: int
    root: bytes
    chain: bytes

    @property
    def blocks(self) -> int:
        return len(self.chain) // HASH_BYTES


def root_hash(model: str, dtype: str, sharing_domain: str) -> bytes:
    """The 16-byte parent of every first block of `model` at `dtype` in `sharing_domain`."""
    digest = sha256(b"switchyard kv root")
    for part in (model, dtype, sharing_domain):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()[:HASH_BYTES]


def extend_chain(parent: bytes, ids: Ids, ids_per_block: int) -> bytes:
    """Hashes of the full blocks of `ids` that follow `parent`; ids beyond the last full block are left out.

    Raises ValueError when `ids` are not 32-bit or `ids_per_block` is not positive.
    """
    if ids_per_block < 1:
        raise ValueError(f"ids_per_block: expected a positive number, got {ids_per_block}")
    raw = _little_endian(ids)
    step = ids_per_block * ID_BYTES
    hashes = []
    for start in range(0, len(raw) - step + 1, step):
        parent = sha256(parent + raw[start : start + step]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return b"".join(hashes)


def tail_hash(parent: bytes, ids: Ids) -> bytes:
    """The id of a partly filled block of `ids` after `parent`."""
    return sha256(parent + _little_endian(ids)).digest()[:HASH_BYTES]


def _checked(ids: Ids) -> memoryview:
    view = memoryview(ids)
    if view.itemsize != ID_BYTES:
        raise ValueError(f"ids: expected 32-bit token ids (array('I')), got {view.itemsize * 8}-bit")
    return view


def _little_endian(ids: Ids) -> bytes:
    view = _checked(ids)
    if sys.byteorder == "little":
        return view.tobytes()
    return np.asarray(view).astype("<u4").tobytes()


@dataclass(slots=True)
class _Remembered:
    """A branch's last prompt: its ids in the machine's byte order, and the hashes of its full blocks."""

    root: bytes
    ids: bytearray
    chain: bytes

    @property
    def length(self) -> int:
        return len(self.ids) // ID_BYTES


class _Heads:
    """Prompts lately seen, by their first block: who begins alike most likely goes on alike. At most `MAX_ALIKE` a head."""

    MAX_ALIKE = 16

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._ids = 0
        self._by_head: OrderedDict[bytes, list[_Remembered]] = OrderedDict()

    def nearest(self, head: bytes, raw: memoryview) -> tuple[_Remembered | None, int]:
        """The prompt with the most leading bytes in common, and how many. One that `raw` goes on from is found first."""
        found, most = None, 0
        for known in reversed(self._by_head.get(head, ())):
            end = len(known.ids)
            if most < end <= len(raw) and known.ids.endswith(raw[max(0, end - 256) : end]):
                same = _common_prefix(known.ids, raw)
                if same > most:
                    found, most = known, same
        if found is None:
            for known in reversed(self._by_head.get(head, ())[-4:]):
                same = _common_prefix(known.ids, raw)
                if same > most:
                    found, most = known, same
                if 10 * most > 9 * len(raw):
                    break
        return found, most

    def add(self, head: bytes, known: _Remembered) -> None:
        alike = self._by_head.setdefault(head, [])
        self._by_head.move_to_end(head)
        alike.append(known)
        self._ids += known.length
        if len(alike) > self.MAX_ALIKE:
            self._ids -= alike.pop(0).length
        while self._ids > self._max_ids and len(self._by_head) > 1:
            self._ids -= sum(entry.length for entry in self._by_head.popitem(last=False)[1])

    def grew(self, ids: int) -> None:
        self._ids += ids


class PromptHasher:
    """Hashes prompts; remembers each branch's last one and hashes only what differs from it.

    A prompt without a branch, or of a new one, begins where one that was seen lately begins (`_Heads`).

    Remembers at most `max_branches` branches and `max_ids` ids in all (4 bytes each), the longest unused go first. For a
    branch it has forgotten the answer is the same, only slower.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        block_tokens: int,
        ids_per_block: int,
        max_branches: int = 20_000,
        max_ids: int = 64_000_000,
    ) -> None:
        if ids_per_block < 1 or block_tokens < ids_per_block or block_tokens % ids_per_block:
            raise ValueError(f"ids_per_block: expected a divisor of block_tokens ({block_tokens}), got {ids_per_block}")
        self._model, self._dtype = model, dtype
        self._block_tokens = block_tokens
        self._ids_per_block = ids_per_block
        self._tokens_per_id = block_tokens // ids_per_block
        self._max_branches, self._max_ids = max_branches, max_ids
        self._branches: OrderedDict[str, _Remembered] = OrderedDict()
        self._remembered_ids = 0
        self._heads = _Heads(max_ids // 4)
        self._roots: dict[str, bytes] = {}

    def hash(
        self, sharing_domain: str, ids: Ids, prompt_tokens: int | None = None, branch_id: str | None = None
    ) -> HashedPrompt:
        """Hash `ids`. `prompt_tokens`: the prompt's real length where ids stand for more than one token each.

        Raises ValueError when `prompt_tokens` is less than what `ids` stand for.
        """
        known_tokens = len(ids) * self._tokens_per_id
        tokens = known_tokens if prompt_tokens is None else prompt_tokens
        if tokens < known_tokens:
            raise ValueError(f"prompt_tokens: expected at least {known_tokens} for {len(ids)} ids, got {tokens}")
        root = self._root(sharing_domain)
        view = _checked(ids)
        if branch_id is None:
            return HashedPrompt(tokens, self._block_tokens, root, self._by_head(root, view).chain)
        known = self._branches.get(branch_id)
        if known is None or known.root != root:
            self.forget(branch_id)
            alike = self._by_head(root, view)
            known = _Remembered(root, bytearray(alike.ids), alike.chain)
            self._remembered_ids += known.length
        chain = self._rehash(known, view)
        self._branches[branch_id] = known
        self._branches.move_to_end(branch_id)
        while len(self._branches) > self._max_branches or self._remembered_ids > self._max_ids:
            self.forget(next(iter(self._branches)))
        return HashedPrompt(tokens, self._block_tokens, root, chain)

    def forget(self, branch_id: str) -> None:
        """Free what is remembered of a branch; nothing happens for an unknown one."""
        gone = self._branches.pop(branch_id, None)
        if gone is not None:
            self._remembered_ids -= gone.length

    def _root(self, sharing_domain: str) -> bytes:
        root = self._roots.get(sharing_domain)
        if root is None:
            root = self._roots[sharing_domain] = root_hash(self._model, self._dtype, sharing_domain)
        return root

    def _by_head(self, root: bytes, ids: memoryview) -> _Remembered:
        """The prompt, hashed from where it differs from one that begins alike; it is remembered for the next."""
        raw = ids.cast("B")
        head = root + raw[: self._ids_per_block * ID_BYTES].tobytes()
        alike, same_bytes = self._heads.nearest(head, raw)
        if alike is not None and same_bytes == len(alike.ids):
            before = alike.length
            self._extend(alike, ids, same_bytes)
            self._heads.grew(alike.length - before)
            return alike
        known = _Remembered(root, bytearray(raw[:same_bytes]), b"")
        if alike is not None:
            known.chain = alike.chain[: same_bytes // (self._ids_per_block * ID_BYTES) * HASH_BYTES]
        self._extend(known, ids, same_bytes)
        self._heads.add(head, known)
        return known

    def _rehash(self, known: _Remembered, ids: memoryview) -> bytes:
        """Make `known` that of `ids`; only blocks that differ from it are hashed, only ids that differ are copied."""
        before = known.length
        self._extend(known, ids, _common_prefix(known.ids, ids.cast("B")))
        self._remembered_ids += known.length - before
        return known.chain

    def _extend(self, known: _Remembered, ids: memoryview, same_bytes: int) -> None:
        done = same_bytes // (self._ids_per_block * ID_BYTES)
        chain = known.chain[: done * HASH_BYTES]
        chain += extend_chain(chain[-HASH_BYTES:] or known.root, ids[done * self._ids_per_block :], self._ids_per_block)
        known.ids[same_bytes:] = ids.cast("B")[same_bytes:]
        known.chain = chain


def _common_prefix(known: bytearray, ids: memoryview) -> int:
    """How many leading bytes are equal, to within one id. Compares runs, without copying them."""
    low, high = 0, min(len(known), len(ids)) // ID_BYTES
    probe = high
    while low < high:
        if known.startswith(ids[low * ID_BYTES : probe * ID_BYTES], low * ID_BYTES):
            low = probe
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    return low * ID_BYTES
