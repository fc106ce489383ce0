"""What the replay counted, and the one line it says every half minute."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

KEPT_TTFT_SAMPLES = 2000


@dataclass
class Summary:
    """Totals since the start, plus TTFT of the latest answers. Times are seconds."""

    sessions_started: int = 0
    sessions_finished: int = 0
    answered: int = 0
    in_flight: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    versions: int = 0
    subagents: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    unreachable: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    _ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TTFT_SAMPLES))
    _last_line: tuple[float, int] = (0.0, 0)

    def first_token_after(self, ttft_s: float) -> None:
        self._ttft_s.append(ttft_s)

    @property
    def failures(self) -> int:
        return self.failed.total()

    def line(self, now: float) -> str:
        """One line; the rate is that of the time since the last line. `now` is any clock that only moves forward."""
        then, answered_then = self._last_line
        rate = (self.answered - answered_then) / (now - then) if now > then else 0.0
        self._last_line = (now, self.answered)
        refused = ", ".join(f"{status} x{count}" for status, count in sorted(self.refused.items())) or "none"
        failed = ", ".join(f"{reason} x{count}" for reason, count in sorted(self.failed.items())) or "none"
        return (
            f"replay: {self.answered} answered ({rate:.1f}/s), {self.in_flight} in flight, TTFT {self._ttft_text()}; "
            f"sessions {self.sessions_finished} of {self.sessions_started} finished, {self.versions} rewrites, "
            f"{self.subagents} sub-agents; tokens {self.prompt_tokens} in, {self.output_tokens} out; "
            f"refused and sent again: {refused}; gateway unreachable: {self.unreachable}; failed: {failed}"
        )

    def _ttft_text(self) -> str:
        if not self._ttft_s:
            return "none yet"
        ordered = sorted(self._ttft_s)
        p50, p95 = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.95))
        return f"p50 {p50:.2f} s p95 {p95:.2f} s"
