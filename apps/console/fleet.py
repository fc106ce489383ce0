"""Which of many nodes a page shows, in which order, and how many there are of each kind. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.console.present import NODES_SHOWN
from apps.telemetry.samples import KINDS, node_kind

Json = Mapping[str, Any]
ATTENTION = "attention"
_MOVING = ("draining", "switching")


def _ratio(part: float | None, whole: float | None) -> float:
    return (part or 0) / whole if whole else 0.0


# Name in the URL: what it is called, and what a node is sorted by, the smallest first; equal ones stay in node order.
ORDERS: dict[str, tuple[str, Callable[[Json], Any]]] = {
    ATTENTION: ("what needs a look first", lambda n: (n.get("health") == "ok", n.get("state") not in _MOVING)),
    "node": ("node order", lambda n: 0),
    "wait": ("longest predicted wait", lambda n: -(n.get("predicted_wait_s") or 0.0)),
    "prefill": ("most to prefill", lambda n: -((n.get("running_prefill") or 0) + (n.get("queued_prefill") or 0))),
    "decode": ("fullest decode batch", lambda n: -_ratio(n.get("running_decode"), n.get("decode_limit"))),
    "pool": ("fullest KV pool", lambda n: -_ratio(n.get("pool_used_blocks"), n.get("pool_capacity_blocks"))),
    "report": ("oldest report", lambda n: -(n["age_s"] if n.get("age_s") is not None else float("inf"))),
}


@dataclass(frozen=True, slots=True)
class Page:
    """At most `NODES_SHOWN` of `total` nodes, from the `first` (1 is the very first) to the `last`."""

    rows: Sequence[Json]
    total: int
    number: int

    @property
    def first(self) -> int:
        return (self.number - 1) * NODES_SHOWN + 1

    @property
    def last(self) -> int:
        return self.first + len(self.rows) - 1

    @property
    def previous(self) -> int | None:
        return self.number - 1 if self.number > 1 else None

    @property
    def next(self) -> int | None:
        return self.number + 1 if self.last < self.total else None


def named(nodes: Iterable[Json], part: str) -> list[Json]:
    """Nodes whose name contains `part`, whatever its case."""
    wanted = part.lower()
    return [node for node in nodes if wanted in str(node.get("name")).lower()]


def counts(nodes: Iterable[Json]) -> list[tuple[str, int]]:
    """How many there are of each kind that there is."""
    kinds = [node_kind(node) for node in nodes]
    return [(kind, kinds.count(kind)) for kind in KINDS if kind in kinds]


def page(nodes: Iterable[Json], order: str, number: int) -> Page:
    """A page of nodes in one of `ORDERS`; the last page where there is none of that number."""
    ordered = sorted(nodes, key=ORDERS[order][1])
    number = max(1, min(number, -(-len(ordered) // NODES_SHOWN)))
    return Page(ordered[(number - 1) * NODES_SHOWN : number * NODES_SHOWN], len(ordered), number)
