"""Whose turn it is among the lines of a band, when every line counts alike: `round-robin` and `global-strict`.

A policy says which line a request stands in (its flow, the whole band, its program ...) and picks the next line among
those that hold requests; it never sees an empty one, so idle flows cost nothing. It is told what each dispatched request
is expected to cost and later what it did cost, which is what the policies of `metered_fairness` count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from apps.flowcontrol.domain.events import FlowRequest
from apps.flowcontrol.domain.ordering import Line
from apps.flowcontrol.domain.waiting import Waiting


class FairnessPolicy(Protocol):
    """`explanation` ends the sentence "dispatched because ...". `next_line` is only called while a line holds requests."""

    explanation: str

    def line_key(self, request: FlowRequest) -> str:
        """The line this request waits in."""
        ...

    def filled(self, now: float, line: Line) -> None:
        """The line holds its first request."""
        ...

    def emptied(self, line: Line) -> None:
        """The line holds none any more."""
        ...

    def next_line(self) -> Line:
        """The line whose first request is next. Asking changes nothing."""
        ...

    def dispatched(self, now: float, line: Line, waiting: Waiting) -> None:
        """A request of this line was dispatched; `emptied` follows if it was the last."""
        ...

    def returned(self, now: float, line: Line, waiting: Waiting) -> None:
        """A dispatched request came back unserved, already at the head of its line (`filled` came before if needed)."""
        ...

    def shortened(self, now: float, line: Line) -> None:
        """A request left the line without being dispatched; others still wait there."""
        ...

    def settled(self, now: float, waiting: Waiting, tokens: int) -> None:
        """A dispatched request cost `tokens` more (or, below 0, fewer) than `waiting.service_tokens` said."""
        ...


class RoundRobin:
    """One request per flow in turn; a flow that starts to wait joins at the end of the round."""

    explanation = "its flow's turn"

    def __init__(self) -> None:
        self._round: OrderedDict[str, Line] = OrderedDict()

    def line_key(self, request: FlowRequest) -> str:
        return request.flow_id

    def filled(self, now: float, line: Line) -> None:
        self._round[line.key] = line

    def emptied(self, line: Line) -> None:
        del self._round[line.key]

    def next_line(self) -> Line:
        return next(iter(self._round.values()))

    def dispatched(self, now: float, line: Line, waiting: Waiting) -> None:
        self._round.move_to_end(line.key)

    def returned(self, now: float, line: Line, waiting: Waiting) -> None:
        self._round.move_to_end(line.key, last=False)

    def shortened(self, now: float, line: Line) -> None:
        """Its turn stays."""

    def settled(self, now: float, waiting: Waiting, tokens: int) -> None:
        """Counts requests only."""


class GlobalStrict:
    """One line for the whole band: only the ordering policy counts."""

    explanation = "first in the band's one line"

    def __init__(self) -> None:
        self._line: Line | None = None

    def line_key(self, request: FlowRequest) -> str:
        return ""

    def filled(self, now: float, line: Line) -> None:
        self._line = line

    def emptied(self, line: Line) -> None:
        self._line = None

    def next_line(self) -> Line:
        assert self._line is not None
        return self._line

    def dispatched(self, now: float, line: Line, waiting: Waiting) -> None:
        """Nothing to remember."""

    def returned(self, now: float, line: Line, waiting: Waiting) -> None:
        """Nothing to remember."""

    def shortened(self, now: float, line: Line) -> None:
        """Nothing to remember."""

    def settled(self, now: float, waiting: Waiting, tokens: int) -> None:
        """Counts nothing."""


PolicyMaker = Callable[[], FairnessPolicy]
