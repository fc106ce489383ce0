"""Block ids that stand for content: 16 bytes a block, drawn from a name, so that the same name is the same content."""

from __future__ import annotations

from hashlib import shake_128
from random import Random

from apps.kvcache.domain.hashing import HASH_BYTES


def content(name: str, blocks: int) -> bytes:
    """`blocks` ids for the content called `name`. Equal names and lengths are equal content; no two names share an id."""
    return shake_128(name.encode()).digest(HASH_BYTES * blocks) if blocks > 0 else b""


def whole_blocks(rng: Random, tokens: float, block_tokens: int, least: int = 0) -> int:
    """`tokens` in whole blocks, rounded up or down by chance so that the mean stays."""
    return max(least, int(tokens / block_tokens + rng.random()))
