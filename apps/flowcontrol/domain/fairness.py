"""Whose turn it is among the lines of a band.

A policy says which line a request stands in (its flow, the whole band, its program ...) and picks the next line among
those that hold requests; it never sees an empty one. It is told what each dispatched request costs and when a request
ends, which is what policies that count tokens or service need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from apps.flowcontrol.domain.events import FlowRequest
from apps.flowcontrol.domain.ordering import Line


class FairnessPolicy(Protocol):
    """`explanation` ends the sentence "dispatched because ...". `next_line` is only called while a line holds requests."""

    explanation: str

    def line_key(self, request: FlowRequest) -> str:
        """The line this request waits in."""
        ...

    def filled(self, line: Line) -> None:
        """The line holds its first request."""
        ...

    def emptied(self, line: Line) -> None:
        """The line holds none any more."""
        ...

    def next_line(self) -> Line:
        """The line whose first request is next. Asking changes nothing."""
        ...

    def dispatched(self, line: Line, request: FlowRequest) -> None:
        """A request of this line was dispatched; `emptied` follows if it was the last."""
        ...

    def returned(self, line: Line, request: FlowRequest) -> None:
        """A dispatched request came back unserved, already at the head of its line (`filled` came before if needed)."""
        ...


class RoundRobin:
    """One request per flow in turn; a flow that starts to wait joins at the end of the round."""

    explanation = "its flow's turn"

    def __init__(self) -> None:
        self._round: OrderedDict[str, Line] = OrderedDict()

    def line_key(self, request: FlowRequest) -> str:
        return request.flow_id

    def filled(self, line: Line) -> None:
        self._round[line.key] = line

    def emptied(self, line: Line) -> None:
        del self._round[line.key]

    def next_line(self) -> Line:
        return next(iter(self._round.values()))

    def dispatched(self, line: Line, request: FlowRequest) -> None:
        self._round.move_to_end(line.key)

    def returned(self, line: Line, request: FlowRequest) -> None:
        self._round.move_to_end(line.key, last=False)


class GlobalStrict:
    """One line for the whole band: only the ordering policy counts."""

    explanation = "first in the band's one line"

    def __init__(self) -> None:
        self._line: Line | None = None

    def line_key(self, request: FlowRequest) -> str:
        return ""

    def filled(self, line: Line) -> None:
        self._line = line

    def emptied(self, line: Line) -> None:
        self._line = None

    def next_line(self) -> Line:
        assert self._line is not None
        return self._line

    def dispatched(self, line: Line, request: FlowRequest) -> None:
        """Nothing to remember."""

    def returned(self, line: Line, request: FlowRequest) -> None:
        """Nothing to remember."""


FAIRNESS: dict[str, Callable[[], FairnessPolicy]] = {"round-robin": RoundRobin, "global-strict": GlobalStrict}
