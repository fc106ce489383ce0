"""How a node is picked from the eligible ones: ours (`ttft`) and the baselines it is compared with, one interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from apps.routing.domain.board import DecodePredictions, Predictions
from apps.routing.domain.views import (
    CandidateTerms,
    DecodeQuery,
    DecodeTerms,
    NodeFacts,
    NodeView,
    PrefillQuery,
    RoutingPolicy,
)


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    view: NodeView
    terms: CandidateTerms


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    view: NodeView
    terms: DecodeTerms


@dataclass(frozen=True, slots=True)
class Pick:
    """The chosen node's name, a code a program matches and a sentence a person reads."""

    node: str
    code: str
    text: str


class Rotation:
    """Remembers when each node was last chosen, so that equal nodes take turns."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def key(self, facts: NodeFacts) -> tuple[int, int]:
        """Sorts the node that waited longest for its turn first, then by node order."""
        return (self._last.get(facts.name, 0), facts.order)

    def used(self, node: str) -> None:
        self._turn += 1
        self._last[node] = self._turn


class PlacementPolicy(Protocol):
    """Picks among eligible nodes (never an empty sequence). `fetches`: whether a node may copy a prefix from a peer."""

    fetches: bool

    def pick_prefill(self, query: PrefillQuery, candidates: Sequence[PrefillCandidate], turns: Rotation) -> Pick: ...

    def pick_decode(self, query: DecodeQuery, candidates: Sequence[DecodeCandidate], turns: Rotation) -> Pick: ...


def fewest_decoding(candidates: Sequence[DecodeCandidate], turns: Rotation) -> Pick:
    best = min(candidates, key=lambda c: (c.view.decode_requests, *turns.key(c.view.facts)))
    return Pick(best.view.name, "least-loaded", f"fewest decoding requests ({best.view.decode_requests})")


def fewest_prefilling(candidates: Sequence[PrefillCandidate], turns: Rotation) -> Pick:
    best = min(candidates, key=lambda c: (c.view.prefill_requests, *turns.key(c.view.facts)))
    return Pick(best.view.name, "least-loaded", f"fewest requests placed ({best.view.prefill_requests})")


class LeastTtft:
    """Ours: the least predicted TTFT; for decode the least predicted iteration time, the home node within a margin."""

    fetches = True

    def __init__(self, settings: RoutingPolicy) -> None:
        self._settings = settings

    def pick_prefill(self, query: PrefillQuery, candidates: Sequence[PrefillCandidate], turns: Rotation) -> Pick:
        limit_s = self._limit_s(min(c.terms.total_s for c in candidates))
        tied = [c for c in candidates if c.terms.total_s <= limit_s]
        best = min(tied, key=lambda c: (c.view.prefill_requests, *turns.key(c.view.facts)))
        others = [c.terms for c in candidates if c is not best]
        return self._say(best.terms, len(tied), min(others, key=lambda terms: terms.total_s, default=None))

    def pick_from_table(self, table: Predictions, turns: Rotation) -> Pick:
        """As `pick_prefill`, from columns; at least one node is eligible."""
        total_s = np.where(table.eligible, table.total_s, np.inf)
        tied = np.flatnonzero(total_s <= self._limit_s(float(total_s.min())))
        requests = table.requests[tied]
        fewest = tied[requests == requests.min()]
        best = min(fewest.tolist(), key=lambda row: turns.key(table.facts(row)))
        total_s[best] = np.inf
        second = int(total_s.argmin())
        return self._say(table[best], len(tied), table[second] if total_s[second] < np.inf else None)

    def _limit_s(self, least_s: float) -> float:
        return least_s * (1.0 + self._settings.tie_margin_ratio)

    @staticmethod
    def _say(best: CandidateTerms, tied: int, second: CandidateTerms | None) -> Pick:
        text = _explain(best)
        if tied > 1:
            return Pick(best.node, "least-ttft-tied", f"{text}; {tied} nodes are equal, its turn")
        if second is not None:
            text += f"; next {second.node} {second.total_s:.3f} s"
        return Pick(best.node, "least-ttft", text)

    def pick_decode(self, query: DecodeQuery, candidates: Sequence[DecodeCandidate], turns: Rotation) -> Pick:
        best = min(candidates, key=lambda c: (c.terms.iteration_s, c.terms.batch, *turns.key(c.view.facts)))
        return self._say_decode(best.terms, next((c.terms for c in candidates if c.terms.home), None))

    def pick_decode_from_table(self, table: DecodePredictions, turns: Rotation) -> Pick:
        """As `pick_decode`, from columns; at least one node has room."""
        iteration_s = np.where(table.fits, table.iteration_s, np.inf)
        least = np.flatnonzero(iteration_s == iteration_s.min())
        batch = table.batch[least]
        best = min(least[batch == batch.min()].tolist(), key=lambda row: turns.key(table.facts(row)))
        return self._say_decode(table[best], None if table.home is None else table[table.home])

    def _say_decode(self, best: DecodeTerms, home: DecodeTerms | None) -> Pick:
        best_ms = best.iteration_s * 1e3
        if home is not None and home.iteration_s <= best.iteration_s * (1.0 + self._settings.home_margin_ratio):
            text = f"home node, {home.iteration_s * 1e3:.1f} ms an iteration, best {best_ms:.1f} ms"
            return Pick(home.node, "home", text)
        text = f"least iteration time after joining: {best_ms:.1f} ms with {best.batch} running"
        return Pick(best.node, "least-iteration", text)


class RoundRobin:
    """The next node in turn, whatever it holds or does."""

    fetches = False

    def pick_prefill(self, query: PrefillQuery, candidates: Sequence[PrefillCandidate], turns: Rotation) -> Pick:
        return self._next([c.view for c in candidates], turns)

    def pick_decode(self, query: DecodeQuery, candidates: Sequence[DecodeCandidate], turns: Rotation) -> Pick:
        return self._next([c.view for c in candidates], turns)

    def _next(self, views: list[NodeView], turns: Rotation) -> Pick:
        return Pick(min(views, key=lambda view: turns.key(view.facts)).name, "round-robin", "next node in turn")


class LeastLoaded:
    """The node with the fewest requests."""

    fetches = False

    def pick_prefill(self, query: PrefillQuery, candidates: Sequence[PrefillCandidate], turns: Rotation) -> Pick:
        return fewest_prefilling(candidates, turns)

    def pick_decode(self, query: DecodeQuery, candidates: Sequence[DecodeCandidate], turns: Rotation) -> Pick:
        return fewest_decoding(candidates, turns)


class CacheAware(LeastLoaded):
    """SGLang's router: the longest cached prefix, unless it is short or the loads are too uneven."""

    def __init__(self, settings: RoutingPolicy) -> None:
        self._settings = settings

    def pick_prefill(self, query: PrefillQuery, candidates: Sequence[PrefillCandidate], turns: Rotation) -> Pick:
        loads = [c.view.prefill_requests for c in candidates]
        spread = max(loads) - min(loads)
        settings = self._settings
        if spread > settings.balance_abs_requests and max(loads) > settings.balance_rel_ratio * min(loads):
            node = fewest_prefilling(candidates, turns).node
            return Pick(node, "load-balance", f"loads differ by {spread} requests, so the fewest wins")
        best = min(candidates, key=lambda c: (-c.terms.cached_tokens, *turns.key(c.view.facts)))
        ratio = best.terms.cached_tokens / query.prompt_tokens
        if ratio > settings.cache_threshold_ratio:
            return Pick(best.view.name, "cache-hit", f"holds {ratio:.0%} of the prompt")
        node = fewest_prefilling(candidates, turns).node
        return Pick(node, "cache-miss", f"no node holds more than {ratio:.0%} of the prompt, so the fewest wins")


class Sticky(LeastLoaded):
    """A session stays on its home node; a new one goes where the fewest requests are."""

    def pick_prefill(self, query: PrefillQuery, candidates: Sequence[PrefillCandidate], turns: Rotation) -> Pick:
        if any(c.view.name == query.home for c in candidates):
            return Pick(str(query.home), "home", "the session's home node")
        return super().pick_prefill(query, candidates, turns)

    def pick_decode(self, query: DecodeQuery, candidates: Sequence[DecodeCandidate], turns: Rotation) -> Pick:
        if any(c.view.name == query.home for c in candidates):
            return Pick(str(query.home), "home", "the session's home node")
        return super().pick_decode(query, candidates, turns)


class DynamoKv:
    """Dynamo's KV router: least `overlap_weight * prefill blocks + active decode blocks`, at temperature 0."""

    fetches = False

    def __init__(self, settings: RoutingPolicy) -> None:
        self._settings = settings

    def pick_prefill(self, query: PrefillQuery, candidates: Sequence[PrefillCandidate], turns: Rotation) -> Pick:
        def cost(candidate: PrefillCandidate) -> float:
            new_tokens = query.prompt_tokens - candidate.terms.cached_tokens
            queued_tokens = sum(work.t_uc for work in candidate.view.queued)
            prefill_blocks = (new_tokens + queued_tokens) / query.block_tokens
            return self._settings.overlap_weight * prefill_blocks + candidate.view.kv_used_tokens / query.block_tokens

        best = min(candidates, key=lambda c: (cost(c), *turns.key(c.view.facts)))
        return Pick(best.view.name, "least-cost", f"least KV cost ({cost(best):.1f} blocks)")

    def pick_decode(self, query: DecodeQuery, candidates: Sequence[DecodeCandidate], turns: Rotation) -> Pick:
        best = min(candidates, key=lambda c: (c.view.kv_used_tokens, *turns.key(c.view.facts)))
        return Pick(best.view.name, "least-cost", f"fewest active KV tokens ({best.view.kv_used_tokens})")


def make_policy(settings: RoutingPolicy) -> PlacementPolicy:
    """The policy `settings.name` says (validated there)."""
    makers: dict[str, PlacementPolicy] = {
        "ttft": LeastTtft(settings),
        "round-robin": RoundRobin(),
        "least-loaded": LeastLoaded(),
        "cache-aware": CacheAware(settings),
        "sticky": Sticky(),
        "dynamo-kv": DynamoKv(settings),
    }
    return makers[settings.name]


def _explain(terms: CandidateTerms) -> str:
    parts = [f"service {terms.service_s:.3f}"]
    if terms.remaining_s + terms.queue_s > 0:
        parts.insert(0, f"wait {terms.remaining_s + terms.queue_s:.3f}")
    if terms.mode == "fetch":
        parts.append(f"fetch {terms.fetch_s:.3f} of which {terms.fetch_overflow_s:.3f} not hidden")
    predicted = f"predicted TTFT {terms.ttft_s:.3f} s ({', '.join(parts)})"
    if terms.duplicate_s > 0:
        return (
            f"least cost {terms.total_s:.3f} s: {predicted} and {terms.duplicate_s:.3f} s of later work lost to copies"
        )
    return f"least {predicted}"
