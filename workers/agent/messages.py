"""Bodies of the agent's HTTP calls: decoding with errors that name the field, and encoding of answers."""

from __future__ import annotations

import re
from array import array
from base64 import b64decode, b64encode
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from workers.agent.engines.base import (
    DecodeJob,
    EngineError,
    FetchSource,
    Handoff,
    PrefillJob,
    PrefillResult,
    RefChange,
    Sampling,
    TokenLogprob,
)
from workers.agent.push import PushTarget
from workers.agent.spec import ModelSpec

HASH_BYTES = 16
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
GenerationNumber = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]  # what the control plane can store
PoolName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,200}$")]
AgentUrl = Annotated[str, msgspec.Meta(pattern=r"^https?://\S+$", max_length=2000)]
Body = TypeVar("Body", bound=msgspec.Struct)


class _Body(msgspec.Struct, frozen=True):
    pass


class SamplingBody(_Body, frozen=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1 << 40)] | None = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | bool | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = 1.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-100, le=100)] | None = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-100, le=100)] | None = 0.0
    output_from: Count | None = None

    def sampling(self) -> Sampling:
        logprobs = (0 if self.logprobs else None) if isinstance(self.logprobs, bool) else self.logprobs
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature or 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            output_from=self.output_from,
        )


class FetchBody(_Body, frozen=True):
    node: str
    url: AgentUrl
    pool: PoolName
    from_block: Count
    to_block: Count


class PushTargetBody(_Body, frozen=True):
    node: str
    url: AgentUrl
    pool: PoolName


class HandoffBody(_Body, frozen=True):
    node: str
    url: AgentUrl
    pool: PoolName
    chain_b64: str
    tail_tokens: Count
    context_tokens: Count
    expires_at: float
    tail_hash_b64: str | None = None

    def handoff(self) -> Handoff:
        return Handoff(
            node=self.node,
            url=self.url,
            pool=self.pool,
            chain=_hashes(self.chain_b64, "handoff.chain_b64"),
            tail_hash=_one_hash(self.tail_hash_b64, "handoff.tail_hash_b64"),
            tail_tokens=self.tail_tokens,
            context_tokens=self.context_tokens,
            expires_at=self.expires_at,
        )


class PrefillBody(_Body, frozen=True):
    request_id: RequestId
    token_ids: list[TokenId]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    chain_b64: str
    tail_hash_b64: str | None = None
    fetch: FetchBody | None = None
    push: PushTargetBody | None = None
    sampling: SamplingBody = SamplingBody()
    generation: GenerationNumber | None = None

    def job(self, model: ModelSpec, owner: str = "") -> PrefillJob:
        """The engine's job, asked for by the gateway `owner`. Raises EngineError 400 where the fields contradict each
        other."""
        chain = _hashes(self.chain_b64, "chain_b64")
        _check_lengths(len(self.token_ids), self.prompt_tokens, model)
        blocks = len(self.token_ids) // model.ids_per_block
        if len(chain) != HASH_BYTES * blocks:
            raise EngineError(400, "bad-field", f"expected the hashes of {blocks} full blocks", "chain_b64")
        fetch = self.fetch
        if fetch is not None and not fetch.from_block <= fetch.to_block <= blocks:
            raise EngineError(400, "bad-field", f"expected from_block <= to_block <= {blocks}", "fetch.to_block")
        return PrefillJob(
            request_id=self.request_id,
            token_ids=array("I", self.token_ids),
            prompt_tokens=self.prompt_tokens,
            chain=chain,
            tail_hash=_one_hash(self.tail_hash_b64, "tail_hash_b64"),
            fetch=None
            if fetch is None
            else FetchSource(fetch.node, fetch.url, fetch.pool, fetch.from_block, fetch.to_block),
            sampling=self.sampling.sampling(),
            push=None if self.push is None else PushTarget(self.push.node, self.push.url, self.push.pool),
            owner=owner,
        )


class DecodeBody(_Body, frozen=True):
    request_id: RequestId
    token_ids: list[TokenId]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    generated: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    root_b64: str
    handoff: HandoffBody | None = None
    sampling: SamplingBody = SamplingBody()
    generation: GenerationNumber | None = None

    def job(self, model: ModelSpec) -> DecodeJob:
        """The engine's job. Raises EngineError 400 where the fields contradict each other."""
        if model.tokens_per_id == 1:
            if len(self.token_ids) != self.prompt_tokens + self.generated:
                raise EngineError(
                    400,
                    "bad-field",
                    "expected prompt_tokens + generated ids (the first output token included)",
                    "token_ids",
                )
        else:
            _check_lengths(len(self.token_ids), self.prompt_tokens, model)
        root = _one_hash(self.root_b64, "root_b64")
        if root is None:
            raise EngineError(400, "bad-field", "expected 16 bytes in base64", "root_b64")
        return DecodeJob(
            request_id=self.request_id,
            token_ids=array("I", self.token_ids),
            prompt_tokens=self.prompt_tokens,
            generated=self.generated,
            handoff=None if self.handoff is None else self.handoff.handoff(),
            sampling=self.sampling.sampling(),
            root=root,
        )


class AbortBody(_Body, frozen=True):
    request_id: RequestId


class ReleaseBody(_Body, frozen=True):
    request_ids: Annotated[list[RequestId], msgspec.Meta(max_length=10_000)]


class PhaseBody(_Body, frozen=True):
    phase: Literal["prefill", "decode", "mixed"]
    generation: GenerationNumber
    drain_deadline_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 60.0


class RefChangeBody(_Body, frozen=True):
    last_b64: str
    blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    delta: Annotated[int, msgspec.Meta(ge=-(1 << 40), le=1 << 40)]


class RefsBody(_Body, frozen=True):
    seq: Count
    changes: list[RefChangeBody]
    reset: bool = False

    def ref_changes(self) -> list[RefChange]:
        changes = []
        for index, change in enumerate(self.changes):
            last = _one_hash(change.last_b64, f"changes[{index}].last_b64")
            if last is None:
                raise EngineError(400, "bad-field", "expected 16 bytes in base64", f"changes[{index}].last_b64")
            changes.append(RefChange(last, change.blocks, change.delta))
        return changes


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Decode a JSON body. Raises EngineError 400 naming the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        match = re.match(r"(?P<expected>.*) - at `\$\.?(?P<field>.*)`$", str(error))
        if match is None:
            raise EngineError(400, "bad-field", str(error)) from None
        raise EngineError(400, "bad-field", match["expected"], match["field"]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(400, "bad-json", f"expected a JSON object: {error}") from None
    except RecursionError:
        raise EngineError(400, "bad-json", "expected a JSON object that is not nested so deeply") from None


def encode_prefill_result(result: PrefillResult) -> dict[str, Any]:
    """The answer of `POST /v1/prefill`."""
    handoff = result.handoff
    document: dict[str, Any] = {
        "request_id": result.request_id,
        "first_token_id": result.first_token_id,
        "first_finish": result.first_finish,
        "cached_tokens": result.cached_tokens,
        "fetched_tokens": result.fetched_tokens,
        "computed_tokens": result.computed_tokens,
        "failed_fetch_tokens": result.failed_fetch_tokens,
        "timings": asdict(result.timings),
        "handoff": {
            "node": handoff.node,
            "url": handoff.url,
            "pool": handoff.pool,
            "chain_b64": b64encode(handoff.chain).decode(),
            "tail_hash_b64": None if handoff.tail_hash is None else b64encode(handoff.tail_hash).decode(),
            "tail_tokens": handoff.tail_tokens,
            "context_tokens": handoff.context_tokens,
            "expires_at": handoff.expires_at,
        },
    }
    if result.first_logprob is not None:
        document["first_logprob"] = encode_logprob(result.first_logprob)
    return document


def encode_logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"logprob": entry.logprob, "top": [[token, value] for token, value in entry.top]}


def _check_lengths(ids: int, prompt_tokens: int, model: ModelSpec) -> None:
    tokens = ids * model.tokens_per_id
    if tokens > prompt_tokens or (model.tokens_per_id == 1 and tokens != prompt_tokens):
        raise EngineError(
            400, "bad-field", f"expected ids for {prompt_tokens} tokens, got {tokens} tokens", "token_ids"
        )
    if prompt_tokens + 1 > model.context_tokens:
        raise EngineError(
            400, "context-length", f"expected at most {model.context_tokens - 1} prompt tokens", "prompt_tokens"
        )


def _hashes(text: str, field: str) -> bytes:
    try:
        data = b64decode(text, validate=True)
    except ValueError:
        raise EngineError(400, "bad-field", "expected base64", field) from None
    if len(data) % HASH_BYTES:
        raise EngineError(400, "bad-field", "expected 16 bytes a block", field)
    return data


def _one_hash(text: str | None, field: str) -> bytes | None:
    if text is None:
        return None
    data = _hashes(text, field)
    if len(data) != HASH_BYTES:
        raise EngineError(400, "bad-field", "expected 16 bytes in base64", field)
    return data
