"""A pushed context on the wire: what the prefill node of a request sends to its decode node while it still computes.

    length u32 LE, PushHead as JSON, then frames until the body ends:
    kind u8 | number u32 | first layer u16 | end layer u16 | slot u32 | checksum u64 | length u32 | bytes

LAYERS brings layers `[first, end)` of the chain's block `number`, SEAL says that the block is whole and what its checksum is,
TAIL brings the whole partial block after the chain (`number` of its tokens are real). A sender whose pool the receiver can map
sends no bytes (length 0): they are copied from `slot` of its pool. NOTHING says that the sender is alive. END
says that it is done; a body that ends without
it was broken off, and what it brought is kept only as any other block of the pool.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from typing import Annotated, NamedTuple, Protocol

import msgspec

LENGTH = struct.Struct("<I")
FRAME = struct.Struct("<BIHHIQI")
LAYERS, SEAL, TAIL, END, NOTHING = range(5)
MAX_HEAD_BYTES = 8 * 1024 * 1024
NO_SLOT = 0xFFFFFFFF


class PushTarget(NamedTuple):
    """The decode node `node` of the agent at `url`, with the pool `pool`, that a request's context goes to."""

    node: str
    url: str
    pool: str


class PushHead(msgspec.Struct, frozen=True):
    """What is pushed: blocks of `chain_b64` and the tail after it, for `request_id`. `pool` is the sender's where the bytes are
    to be copied from it, else null. `owner` is the gateway that asked for the request."""

    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    chain_b64: str
    pool: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,200}$")] | None = None
    tail_hash_b64: str | None = None
    owner: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{0,128}$")] = ""


class Piece(NamedTuple):
    """One frame without its bytes, which lie in the sender's slot `slot`."""

    kind: int
    number: int = 0
    first_layer: int = 0
    end_layer: int = 0
    slot: int = NO_SLOT
    checksum: int = 0


Pieces = AsyncIterator[Piece]
Read = Callable[[Piece], bytes]


class ByteStream(Protocol):
    """What a body is read from."""

    async def readexactly(self, n: int) -> bytes: ...


def encode(piece: Piece, data: bytes) -> bytes:
    return FRAME.pack(*piece, len(data)) + data
