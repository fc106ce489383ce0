"""How good the router's foresight is: predicted against actual TTFT of every request, and what decisions were made blind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from workers.yard.windows import SampleWindow

NODES_KEPT = 1000


class Foresight:
    """Errors of the last `window_s` seconds, in all and by prefill node; `blind` counts decisions since the start."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._ratio, self._bias_s = SampleWindow(window_s), SampleWindow(window_s)
        self._by_node: dict[str, tuple[SampleWindow, SampleWindow]] = {}
        self.decisions = 0
        self.blind: Counter[str] = Counter()

    def decided(self, blind: tuple[str, ...]) -> None:
        """A request was placed; `blind` says what its placement was made without."""
        self.decisions += 1
        for cause in blind:
            self.blind[cause] += 1

    def measured(self, now: float, node: str | None, predicted_s: float, actual_s: float) -> None:
        """The first token of a request came `actual_s` after its arrival."""
        ratio, bias_s = abs(predicted_s - actual_s) / max(actual_s, 1e-9), actual_s - predicted_s
        self._ratio.add(now, ratio)
        self._bias_s.add(now, bias_s)
        if node is None:
            return
        known = self._by_node.get(node)
        if known is None:
            if len(self._by_node) == NODES_KEPT:
                return
            known = self._by_node[node] = (SampleWindow(self._window_s), SampleWindow(self._window_s))
        known[0].add(now, ratio)
        known[1].add(now, bias_s)

    def error_ratio(self, now: float) -> dict[str, float | int | None]:
        """|predicted - actual| / actual: `{"p50", "p95", "n"}`."""
        return self._ratio.percentiles(now, (50, 95))

    def view(self, now: float, policy: str, unseen: Mapping[str, str]) -> dict[str, Any]:
        """What the snapshot shows of the router. `unseen`: nodes whose content is not known now, and why."""
        by_cause: dict[str, list[str]] = {}
        for node, cause in unseen.items():
            by_cause.setdefault(cause, []).append(node)
        return {
            "policy": policy,
            "decisions": self.decisions,
            "blind_decisions": dict(self.blind),
            "blind": [{"code": cause, "nodes": nodes} for cause, nodes in sorted(by_cause.items())],
            "prediction": {
                "window_s": self._window_s,
                "error_ratio": self.error_ratio(now),
                "bias_s": self._bias_s.percentiles(now, (50,)),
                "nodes": [self._node(now, name) for name in sorted(self._by_node)],
            },
        }

    def _node(self, now: float, name: str) -> dict[str, Any]:
        ratio, bias_s = (window.percentiles(now, (50,)) for window in self._by_node[name])
        return {"name": name, "n": ratio["n"], "error_ratio_p50": ratio["p50"], "bias_p50_s": bias_s["p50"]}
