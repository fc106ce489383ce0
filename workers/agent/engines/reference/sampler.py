"""Token choice: greedy, or temperature with top-k, top-p and min-p.

Random numbers depend on the request's seed and the token's position alone, so a request that continues on another node
draws the same ones.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from workers.agent.engines.base import Sampling, TokenLogprob
from workers.agent.engines.reference.weights import Floats


def sample(logits: Floats, sampling: Sampling, request_id: str, position: int) -> tuple[int, TokenLogprob | None]:
    """Choose the token at `position` (0 = first of the prompt) from its `[vocabulary]` logits."""
    token = int(np.argmax(logits)) if sampling.temperature == 0 else _draw(logits, sampling, request_id, position)
    if sampling.logprobs is None:
        return token, None
    return token, _logprob(logits, token, sampling.logprobs)


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
