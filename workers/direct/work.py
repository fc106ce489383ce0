"""What an engine worked, out of the totals it tells: rows for the cost model, as an agent's `iterations` events have them.

Totals say how long the device was busy and with how many tokens, not in how many prefill steps and with what context. So a
prefill row counts the requests as its steps, which makes c0 the cost of a request; and the work of attention is that of as
many equal requests, whose context is what the gateway sent. Decode rows are of steps, with their mean batch. Pure.
"""

from __future__ import annotations

from typing import Any

from apps.planning.domain.cost_model import pairs
from workers.direct.loads import EngineLoad

Row = list[Any]


class Work:
    """Keeps the totals last seen; `rows` gives what came on top of them."""

    def __init__(self) -> None:
        self._before: EngineLoad | None = None
        self._prompts = 0
        self._prompt_tokens = 0

    def prefilled(self, prompt_tokens: int) -> None:
        """The engine has computed a prompt of ours, or found it."""
        self._prompts += 1
        self._prompt_tokens += prompt_tokens

    def rows(self, load: EngineLoad) -> list[Row]:
        """The work since the last call; none for the first, and none where totals went back: another process."""
        before, self._before = self._before, load
        if before is None:
            return []
        return [row for row in (self._prefill(before, load), _decode(before, load)) if row is not None]

    def _prefill(self, before: EngineLoad, load: EngineLoad) -> Row | None:
        tokens = _more(before.prefill_uncached_tokens, load.prefill_uncached_tokens)
        busy_s = _more(before.prefill_busy_s, load.prefill_busy_s)
        if tokens <= 0 or busy_s <= 0:
            return None
        requests = max(1, self._prompts)
        cached = max(0.0, self._prompt_tokens - tokens)
        work = requests * pairs(round(tokens / requests), round(cached / requests))
        self._prompts = self._prompt_tokens = 0
        return ["prefill", round(tokens), work, 0, requests, busy_s, requests, requests]


def _decode(before: EngineLoad, load: EngineLoad) -> Row | None:
    steps = _more(before.decode_steps, load.decode_steps)
    requests = _more(before.decode_requests, load.decode_requests)
    busy_s = _more(before.decode_busy_s, load.decode_busy_s)
    if steps < 1 or busy_s <= 0 or requests <= 0:
        return None
    return ["decode", 0, 0.0, 0, max(1, round(requests / steps)), busy_s, 0, round(steps)]


def _more(before: float | None, now: float | None) -> float:
    """What was added since; 0 where a total began anew or is not told."""
    return max(0.0, now - (before or 0.0)) if now is not None else 0.0
