"""Reuse: how much of each prompt could have come from the cache, how much did, and why the rest did not.

Judged as of the moment the request was placed on a prefill node, in whole blocks, and leaving out the prompt's last token,
which must always be computed:
    ideal   tokens whose KV some earlier request of the same sharing domain produced (prefill or decode)
    actual  tokens found on the node or read from a peer
    lost    ideal - actual; each lost token has exactly one cause:
            fetch-failed  a fetch was started for it, and it was computed after all
            evicted       no node held it any more (or its node was lost), or the node let it go before the prompt's turn
            routed        another node held it, and it was neither fetched nor was the request sent there
            switched      its last copy went when a node changed phase or restarted empty
            never-stored  it was produced, but no node ever stored it
`ideal` is never below `actual`: what was reused was produced, even where this process did not see it. It is too low where
the memory of produced blocks (KvConfig.max_blocks) was full, and never too high.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from apps.kvcache.domain.directory import PrefixFacts
from apps.kvcache.domain.events import LOST_CAUSES, LostCause, RequestServed, ReuseTotals
from apps.kvcache.domain.hashing import HashedPrompt

Dimension: TypeAlias = Literal["node", "tenant", "workload"]
DIMENSIONS: tuple[Dimension, ...] = ("node", "tenant", "workload")

_MAX_NAMES = 1000
_OTHER = "other"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One request's reuse in tokens; the sum of `lost` is `ideal_tokens - actual_tokens`."""

    prompt_tokens: int
    ideal_tokens: int
    actual_tokens: int
    lost: dict[LostCause, int]


def judge(prompt: HashedPrompt, facts: PrefixFacts, served: RequestServed) -> Judgement:
    """What `served` reused of `prompt`, against what `facts` say was there when it was placed."""
    block_tokens = prompt.block_tokens
    actual = min(prompt.tokens, served.cached_tokens + served.fetched_tokens)
    reusable_blocks = min(facts.produced, max(0, prompt.tokens - 1) // block_tokens)
    ideal = max(actual, reusable_blocks * block_tokens)
    here = facts.held.get(served.node, 0)
    elsewhere = max((blocks for node, blocks in facts.held.items() if node != served.node), default=0)
    bounds: list[tuple[int, LostCause]] = [
        (actual + served.failed_fetch_tokens, "fetch-failed"),
        (here * block_tokens, "evicted"),
        (elsewhere * block_tokens, "routed"),
        *((block * block_tokens, cause) for block, cause in facts.fates),
        (ideal, "never-stored"),
    ]
    lost: dict[LostCause, int] = {}
    at = actual
    for bound, cause in bounds:
        until = min(bound, ideal)
        if until > at:
            lost[cause] = lost.get(cause, 0) + until - at
            at = until
    return Judgement(prompt.tokens, ideal, actual, lost)


@dataclass(slots=True)
class _Sum:
    prompt_tokens: int = 0
    ideal_tokens: int = 0
    actual_tokens: int = 0
    lost: dict[LostCause, int] = field(default_factory=lambda: dict.fromkeys(LOST_CAUSES, 0))

    def add(self, judgement: Judgement) -> None:
        self.prompt_tokens += judgement.prompt_tokens
        self.ideal_tokens += judgement.ideal_tokens
        self.actual_tokens += judgement.actual_tokens
        for cause, tokens in judgement.lost.items():
            self.lost[cause] += tokens

    def totals(self) -> ReuseTotals:
        return ReuseTotals(self.prompt_tokens, self.ideal_tokens, self.actual_tokens, dict(self.lost))


class ReuseAccounts:
    """Sums of judgements: in all, and by node, tenant and workload (names beyond the first 1000 go to `other`)."""

    def __init__(self) -> None:
        self._all = _Sum()
        self._by: dict[Dimension, dict[str, _Sum]] = {"node": {}, "tenant": {}, "workload": {}}

    def add(self, judgement: Judgement, served: RequestServed) -> None:
        self._all.add(judgement)
        names: dict[Dimension, str] = {"node": served.node, "tenant": served.tenant, "workload": served.workload}
        for dimension, name in names.items():
            sums = self._by[dimension]
            if name not in sums and len(sums) >= _MAX_NAMES:
                name = _OTHER
            sums.setdefault(name, _Sum()).add(judgement)

    def totals(self) -> ReuseTotals:
        return self._all.totals()

    def by(self, dimension: Dimension) -> dict[str, ReuseTotals]:
        return {name: entry.totals() for name, entry in self._by[dimension].items()}

    def check_integrity(self) -> None:
        """Raises AssertionError when causes do not add up, or the parts to the whole."""
        for entry in (self._all, *(entry for sums in self._by.values() for entry in sums.values())):
            assert sum(entry.lost.values()) == entry.ideal_tokens - entry.actual_tokens, "lost tokens do not add up"
        for dimension, sums in self._by.items():
            parts = sum(entry.prompt_tokens for entry in sums.values())
            assert parts == self._all.prompt_tokens, f"reuse by {dimension} does not add up"
