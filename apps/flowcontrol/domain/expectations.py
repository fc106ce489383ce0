"""How many tokens a request will probably produce: what its flow produced lately, at most what it may."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

FIRST_GUESS_TOKENS: Final = 1024
NEWEST_WEIGHT: Final = 0.1
MAX_FLOWS: Final = 10_000


class OutputExpectation:
    """A running mean per flow, and one over all flows for those nothing is known of."""

    def __init__(self) -> None:
        self._by_flow: OrderedDict[str, float] = OrderedDict()
        self._overall: float | None = None

    def expect(self, flow_id: str, at_most_tokens: int) -> int:
        """Tokens a request of this flow will probably produce when it may produce `at_most_tokens`."""
        mean = self._by_flow.get(flow_id, self._overall)
        if mean is None:
            mean = FIRST_GUESS_TOKENS
        return at_most_tokens if at_most_tokens <= mean else max(1, round(mean))

    def learn(self, flow_id: str, tokens: int) -> None:
        """A request of this flow has ended after `tokens`."""
        self._overall = _blend(self._overall, tokens)
        self._by_flow[flow_id] = _blend(self._by_flow.get(flow_id), tokens)
        self._by_flow.move_to_end(flow_id)
        if len(self._by_flow) > MAX_FLOWS:
            self._by_flow.popitem(last=False)


def _blend(mean: float | None, tokens: int) -> float:
    return float(tokens) if mean is None else mean + NEWEST_WEIGHT * (tokens - mean)
