"""What a workload is like by itself, before any system serves it: printed beside what it was meant to be.

Ideal hits count every block that some earlier request of the same sharing domain produced, prefill or decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from apps.kvcache.domain.hashing import HASH_BYTES
from workers.simulator.clients import Script
from workers.simulator.workloads.generators import parameters


@dataclass
class Statistics:
    """Sums over turns. `branch_turns`: turns of sub-agents, which live beside their parents."""

    block_tokens: int
    turns: int = 0
    prompt_tokens: int = 0
    ideal_tokens: int = 0
    output_tokens: int = 0
    pause_s: float = 0.0
    helper_turns: int = 0
    scripts: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def add(self, script: Script, helper: bool = False) -> None:
        """Walk a script, its helpers before the turn that waits for them."""
        self.scripts += not helper
        for turn in script:
            for inner in turn.helpers:
                self.add(inner, True)
            chain = turn.chain
            blocks = self._leading(chain)
            self.turns += 1
            self.helper_turns += helper
            self.prompt_tokens += turn.prompt_tokens
            self.ideal_tokens += min(blocks * self.block_tokens, turn.prompt_tokens - 1)
            self.output_tokens += turn.output_tokens
            self.pause_s += turn.pause_s
            whole = chain + turn.output_chain
            for at in range(blocks, len(whole) // HASH_BYTES):
                self._seen.add(whole[at * HASH_BYTES : (at + 1) * HASH_BYTES])

    def _leading(self, chain: bytes) -> int:
        low, high = 0, len(chain) // HASH_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            if chain[(middle - 1) * HASH_BYTES : middle * HASH_BYTES] in self._seen:
                low = middle
            else:
                high = middle - 1
        return low

    def figures(self) -> dict[str, float]:
        turns = max(1, self.turns)
        return {
            "requests": self.turns,
            "requests_per_agent": self.turns / max(1, self.scripts),
            "ideal_hit_pct": 100 * self.ideal_tokens / max(1, self.prompt_tokens),
            "prompt_tokens": self.prompt_tokens / turns,
            "ideal_uncached_tokens": (self.prompt_tokens - self.ideal_tokens) / turns,
            "output_tokens": self.output_tokens / turns,
            "pause_s": self.pause_s / turns,
            "helper_turns_pct": 100 * self.helper_turns / turns,
        }


def describe(scripts: Iterable[Script], block_tokens: int) -> dict[str, float]:
    """The figures of some scripts, taken together."""
    statistics = Statistics(block_tokens)
    for script in scripts:
        statistics.add(script)
    return statistics.figures()


def beside_target(workload: str, figures: dict[str, float]) -> list[tuple[str, Any, float]]:
    """(figure, what it was meant to be, what the generator gives) for the targets that a script alone has."""
    target: dict[str, Any] = parameters()[workload].get("target", {})
    return [(name, target[name], figures[name]) for name in figures if name in target]
