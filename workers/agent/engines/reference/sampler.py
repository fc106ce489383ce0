"""Token choice: penalties first, then greedy, or temperature with top-k, min-p and top-p.

Random numbers depend on the request's seed and the token's position alone, so a request that continues on another node
draws the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from workers.agent.engines.base import Sampling, TokenLogprob
from workers.agent.engines.reference.weights import Floats


def sample(
    logits: Floats, sampling: Sampling, request_id: str, ids: Sequence[int], prompt_tokens: int
) -> tuple[int, TokenLogprob | None]:
    """Choose the token after `ids` (of which `prompt_tokens` are the prompt) from its `[vocabulary]` logits. Log
    probabilities are the model's own, before penalties and temperature."""
    position = len(ids)
    scores = _penalised(logits, sampling, ids, prompt_tokens) if sampling.penalises else logits
    token = int(np.argmax(scores)) if sampling.temperature == 0 else _draw(scores, sampling, request_id, position)
    if sampling.logprobs is None:
        return token, None
    return token, _logprob(logits, token, sampling.logprobs)


def _penalised(logits: Floats, sampling: Sampling, ids: Sequence[int], prompt_tokens: int) -> Floats:
    scores = logits.copy()
    history = np.asarray(ids, dtype=np.intp)
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(history)
        penalty = np.float32(sampling.repetition_penalty)
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    output = history[prompt_tokens if sampling.output_from is None else sampling.output_from :]
    seen, counts = np.unique(output, return_counts=True)
    scores[seen] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts.astype(
        np.float32
    )
    return scores


def _draw(logits: Floats, sampling: Sampling, request_id: str, position: int) -> int:
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    scaled = (logits[order].astype(np.float64) - float(logits[order[0]])) / sampling.temperature
    weights = np.exp(scaled)
    if sampling.min_p > 0:
        kept = weights >= sampling.min_p
        order, weights = order[kept], weights[kept]
    if sampling.top_p < 1:
        shares = np.cumsum(weights) / weights.sum()
        count = int(np.searchsorted(shares, sampling.top_p)) + 1
        order, weights = order[:count], weights[:count]
    cumulative = np.cumsum(weights)
    at = _uniform(sampling.seed, request_id, position) * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, at, side="right")), len(order) - 1)])


def _uniform(seed: int | None, request_id: str, position: int) -> float:
    """In `[0, 1)`, from the seed (the request's id where it has none) and the position."""
    name = f"seed {seed}" if seed is not None else f"request {request_id}"
    digest = hashlib.blake2b(f"{name} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / float(1 << 53)


def _logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    shifted: npt.NDArray[np.float64] = logits.astype(np.float64) - float(logits.max())
    normaliser = float(np.log(np.exp(shifted).sum()))
    best = np.argsort(-logits, kind="stable")[:top]
    entries = [(int(index), float(shifted[index]) - normaliser) for index in best]
    return TokenLogprob(float(shifted[token]) - normaliser, entries)
