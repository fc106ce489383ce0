"""One stage of one request in the reference engine: a prompt to prefill, or an output to decode.

Ownership of a task's tokens, as half-open ranges of its ids:

    [0, computed)          keys and values are on the device
    [computed, wanted)     still to compute before the task answers (prefill) or decodes
    [wanted, len(ids))     decode: the newest token, fed into the next step; prefill: empty
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.agent.engines.base import (
    DecodeFinished,
    DecodeJob,
    EngineError,
    Handoff,
    PrefillJob,
    PrefillResult,
    Sampling,
    Stage,
    TokenChunk,
)
from workers.agent.engines.reference.kv import BlockTable
from workers.agent.pool import Missing
from workers.agent.shared_memory import HASH_BYTES, Floats

Emission = PrefillResult | TokenChunk | DecodeFinished | EngineError


@dataclass(frozen=True, slots=True)
class TailCopy:
    """A partial block that came with a hand-over: it follows `after_block` full blocks and has `tokens` tokens."""

    after_block: int
    tokens: int
    block: Floats


class PushNotes(Protocol):
    """Told by the engine's thread what of a context can be sent on."""

    def wrote(self, layer: int, blocks: Sequence[Missing]) -> None: ...

    def stored(self, blocks: int) -> None: ...

    def finish(self, tail: bytes | None, tail_tokens: int) -> None: ...


@dataclass(slots=True, eq=False)
class Task:
    """Mutable state of one stage. Owned by the event loop until `ready`, by the engine's thread from admission on.
    `chain` has the hashes of the full blocks of `ids`; `reserve_tokens` is the most the device must hold for it."""

    stage: Stage
    request_id: str
    ids: array[int]
    wanted: int
    chain: bytes
    sampling: Sampling
    reserve_tokens: int
    emit: Callable[[Emission], None]
    enqueued_at: float
    prompt_blocks: int
    prompt_tokens: int
    root: bytes = b""
    generated: int = 0
    tail_hash: bytes | None = None
    # fetching
    ready: bool = False
    pinned: bytes = b""
    fetch_wanted_blocks: int = 0
    fetched_blocks: int = 0
    fetch_s: float = 0.0
    tail: TailCopy | None = None
    push: PushNotes | None = None
    # running
    overtaken: int = 0
    aborted: bool = False
    ended: bool = False
    table: BlockTable | None = None
    started_at: float = 0.0
    computed: int = 0
    restored_tokens: int = 0
    stored_blocks: int = 0
    recomputed_tokens: int = 0

    @property
    def left_tokens(self) -> int:
        """Tokens still to compute before the task answers or decodes."""
        return max(0, self.wanted - self.computed)

    @property
    def blocks(self) -> int:
        return len(self.chain) // HASH_BYTES


def prefill_task(job: PrefillJob, emit: Callable[[Emission], None], now: float, block_tokens: int) -> Task:
    """The task of a prompt; the device holds the prompt alone, for its output is decoded elsewhere."""
    return Task(
        stage="prefill",
        request_id=job.request_id,
        ids=array("I", job.token_ids),
        wanted=job.prompt_tokens,
        chain=job.chain,
        sampling=job.sampling,
        reserve_tokens=job.prompt_tokens,
        emit=emit,
        enqueued_at=now,
        prompt_blocks=job.prompt_tokens // block_tokens,
        prompt_tokens=job.prompt_tokens,
        tail_hash=job.tail_hash,
    )


def decode_task(
    job: DecodeJob, chain: bytes, emit: Callable[[Emission], None], now: float, block_tokens: int, context_tokens: int
) -> Task:
    """The task of an output; the device holds room for its longest outcome, so a running task never lacks blocks."""
    return Task(
        stage="decode",
        request_id=job.request_id,
        ids=array("I", job.token_ids),
        wanted=len(job.token_ids) - 1,
        chain=chain,
        sampling=job.sampling,
        reserve_tokens=min(job.prompt_tokens + job.sampling.max_tokens, context_tokens),
        emit=emit,
        enqueued_at=now,
        prompt_blocks=job.prompt_tokens // block_tokens,
        prompt_tokens=job.prompt_tokens,
        root=job.root,
        generated=job.generated,
    )


def usable_handoff(handoff: Handoff | None, chain: bytes, block_tokens: int, tokens: int) -> Handoff | None:
    """The hand-over, if it is about these tokens; otherwise None, and the context is recomputed."""
    if handoff is None or not chain.startswith(handoff.chain):
        return None
    covered = len(handoff.chain) // HASH_BYTES * block_tokens + handoff.tail_tokens
    if covered != handoff.context_tokens or covered > tokens or handoff.tail_tokens >= block_tokens:
        return None
    return handoff
