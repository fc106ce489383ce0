"""What every engine offers its node agent, in one set of types.

An engine owns the queue of its work, the device KV and the host pool of one node. The agent owns phase, admission,
the event log and HTTP. Time in these types is unix seconds; token ids are `array('I')` (uint32); hashes are the bytes
of `docs/interfaces.md` section 2 (16 bytes a block, concatenated).
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from workers.agent.push import ByteStream, PushHead, PushTarget

Phase = Literal["prefill", "decode", "mixed"]
Stage = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length", "abort"]
HANDOFF_PIN_S = 30.0


class EngineError(Exception):
    """Work an engine refuses or cannot finish. `status` is the HTTP status, `code` is for programs, `field` the bad input."""

    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. `temperature` 0 is greedy. `max_tokens` counts the whole output of the request, the token
    sampled by the prefill node included. A token of `stop_token_ids` (or the model's end token, unless `ignore_eos`)
    ends the request and is not sent.

    `repetition_penalty` divides (multiplies, where negative) the logits of all tokens seen so far; `presence_penalty` and
    `frequency_penalty` are subtracted from those of output tokens, once and for each occurrence. Output begins at
    `output_from` (an index of the ids; None: after the prompt), so that an answer continued as a prompt goes on alike."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    output_from: int | None = None

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class FetchSource:
    """Blocks `[from_block, to_block)` of the prompt's chain that the node `node` holds: its agent's `url`, its pool's name."""

    node: str
    url: str
    pool: str
    from_block: int
    to_block: int


@dataclass(frozen=True, slots=True)
class Handoff:
    """Where a computed context waits: tokens `[0, context_tokens)` of the request, as the full blocks of `chain` and,
    where `tail_tokens > 0`, a partial block `tail_hash`. Pinned at the sender until `expires_at` (unix seconds)."""

    node: str
    url: str
    pool: str
    chain: bytes
    tail_hash: bytes | None
    tail_tokens: int
    context_tokens: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Compute the prompt's KV and sample its first output token. `token_ids` holds `prompt_tokens` tokens in ids of
    `tokens_per_id` tokens; `chain` its full blocks; `tail_hash` its partial block, where there is one. With `push` the context is
    sent to that decode node while it is computed; `owner` is the gateway that asks, which the decode node is told."""

    request_id: str
    token_ids: array[int]
    prompt_tokens: int
    chain: bytes
    tail_hash: bytes | None
    fetch: FetchSource | None
    sampling: Sampling
    push: PushTarget | None = None
    owner: str = ""


class BlockLocations(NamedTuple):
    """`port` of the node's transfer engine, and (hash, address, checksum) of each block."""

    port: int
    blocks: list[tuple[bytes, int, int]]


@dataclass(frozen=True, slots=True)
class PushReceived:
    """A finished push: the first `blocks` blocks of its chain are here, and its `tail` if it had one, pinned until
    `expires_at` (unix seconds) or `release_handoff`."""

    blocks: int
    tail: bool
    expires_at: float


@dataclass(frozen=True, slots=True)
class PrefillTimings:
    """Seconds waited in the queue, of which fetching, and computing."""

    queued_s: float
    fetch_s: float
    prefill_s: float


class TokenLogprob(NamedTuple):
    """Natural log probability of the sent token, and of the most likely ones as (token id, logprob)."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """A computed prompt. cached + fetched + computed = prompt tokens; `failed_fetch_tokens` are among the computed ones."""

    request_id: str
    first_token_id: int
    first_finish: Literal["stop", "length"] | None
    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    failed_fetch_tokens: int
    timings: PrefillTimings
    handoff: Handoff
    first_logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Continue a request: `token_ids` = prompt + the `generated` tokens so far (symbolic engines: the prompt's ids alone).
    `handoff` None means that the context comes from the node's own pool or is recomputed."""

    request_id: str
    token_ids: array[int]
    prompt_tokens: int
    generated: int
    handoff: Handoff | None
    sampling: Sampling
    root: bytes


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """`count` new tokens in order. Simulated engines send ids of 0."""

    ids: list[int]
    count: int
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class DecodeTimings:
    """Seconds until the context was on the device (`queued_s`, of which `fetch_s`), and decoding."""

    queued_s: float
    fetch_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """Last item of a decode stream. `output_tokens` counts the whole output, earlier tokens included. `stored_chain` are
    the full blocks after the prompt's last full block that the node's pool now holds."""

    finish_reason: FinishReason
    output_tokens: int
    stored_chain: bytes
    timings: DecodeTimings
    recomputed_tokens: int = 0


class RefChange(NamedTuple):
    """Add `delta` to the reference count of `last` and of the `blocks - 1` blocks above it."""

    last: bytes
    blocks: int
    delta: int


class Segment(NamedTuple):
    """A run of held blocks: `chain` follows `parent` (None: it starts a prompt, or its parent is not held)."""

    parent: bytes | None
    chain: bytes


class IterationSample(NamedTuple):
    """One engine iteration, for the cost model.

    prefill: `t_uc` computed tokens, `pairs` attended (query, key) pairs of them, `t_rst` tokens restored from the host
    pool, `batch` requests in it, `requests` that finished prefill in it. decode: `batch` sequences, `t_uc` = `batch`
    times tokens per forward, `pairs` = context tokens attended, `requests` that finished in it."""

    phase: Stage
    t_uc: int
    pairs: float
    t_rst: int
    batch: int
    busy_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Numbers of this moment. Queued work is accepted and not started; `queued_tokens` are prompt tokens waiting."""

    model: str
    running_prefill: int
    running_decode: int
    queued_prefill: int
    queued_decode: int
    queued_tokens: int
    pool_name: str
    pool_capacity_blocks: int
    pool_used_blocks: int
    pool_referenced_blocks: int
    block_tokens: int
    max_decode_batch: int
    kv_tokens: int
    prefill_chunk_tokens: int
    kv_free_tokens: int
    counters: dict[str, float] = field(default_factory=dict)


class EngineSink(Protocol):
    """Where an engine reports. Every call is safe from any thread. Change state first, then report, and in the order of
    the changes: a snapshot followed by the events after its sequence number then always ends in the true state."""

    def stored(self, parent: bytes | None, chain: bytes) -> None:
        """Blocks of `chain` (after `parent`) can now be read from the host pool."""

    def removed(self, hashes: bytes) -> None:
        """Blocks left the host pool."""

    def cleared(self) -> None:
        """The host pool is empty."""

    def iteration(self, sample: IterationSample) -> None:
        """One iteration ended."""


@dataclass(slots=True)
class EngineContext:
    """What the process gives each engine. `engines` holds all nodes of the process by name (filled before `start`)."""

    data_dir: Path
    models_dir: Path
    base_url: str
    token: str
    speed: float
    engines: dict[str, Engine]


class Engine(Protocol):
    """One node's engine. All methods are called on the event loop; none may block it for more than milliseconds."""

    async def start(self, sink: EngineSink) -> None:
        """Load, allocate, begin. The sink may be called from here on."""

    async def close(self) -> None:
        """Abort all work, release everything. Idempotent."""

    async def prefill(self, job: PrefillJob) -> PrefillResult:
        """Run one prompt. Cancelling the call aborts the job. Raises EngineError (409 `aborted` after `abort`)."""

    def decode(self, job: DecodeJob) -> AsyncIterator[TokenChunk | DecodeFinished]:
        """Stream one output; ends with DecodeFinished (reason `abort` after `abort`). Closing the iterator aborts."""

    def abort(self, request_id: str) -> bool:
        """End the request's work in either stage and free what it holds. False if the engine does not know it."""

    def release_handoff(self, request_id: str) -> bool:
        """Stop keeping the request's computed context for its decode node. False where none is kept."""

    async def switch_phase(self, phase: Phase) -> None:
        """Called once the old phase has drained. Returns when the engine is ready for `phase`; keeps the pool."""

    def status(self) -> EngineStatus: ...

    def snapshot(self) -> Sequence[Segment]:
        """All blocks that can be read from the host pool."""

    def apply_refs(self, changes: Sequence[RefChange], reset: bool) -> None:
        """Change reference counts of held blocks; `reset` sets all to zero first. Unknown blocks are skipped."""

    def read_blocks(self, hashes: bytes) -> AsyncIterator[bytes]:
        """Frames (`length u32 LE, hash 16, checksum u64 LE, bytes`) of the blocks held among `hashes`, tail blocks too.
        Engines without bytes raise EngineError 400 `no-kv-bytes`."""

    def locate_blocks(self, hashes: bytes) -> BlockLocations:
        """Where the blocks held among `hashes` lie for Mooncake's transfer engine. Raises EngineError 400 `no-mooncake` where the
        node does not run it."""

    def held_blocks(self, chain: bytes) -> int:
        """Leading blocks of `chain` in the host pool. Engines without bytes raise as `read_blocks`."""

    async def receive_push(self, head: PushHead, stream: ByteStream) -> PushReceived:
        """Take in a context that its prefill node pushes here, and keep it for its decode. Raises EngineError; engines
        without bytes as `read_blocks`."""
