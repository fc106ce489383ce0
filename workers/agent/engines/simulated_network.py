"""Links between simulated nodes: one transfer at a time in each direction of a node's NIC."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Nic:
    """When the last transfer so far ends, out of the node and into it (seconds of the loop's clock)."""

    out_until: float = 0.0
    in_until: float = 0.0


def earliest_end(now: float, source: Nic | None, target: Nic, transfer_s: float) -> float:
    """When a transfer asked for now would end, behind those already under way. `source` None: only the target's side is known."""
    starts_at = max(now, target.in_until, source.out_until if source is not None else now)
    return starts_at + transfer_s


def give_back(source: Nic, target: Nic, ends_at: float, until: float) -> None:
    """The transfer that was to end at `ends_at` stops at `until`. Links that are booked for later stay as they are."""
    if target.in_until == ends_at:
        target.in_until = until
    if source.out_until == ends_at:
        source.out_until = until


def occupy(source: Nic | None, target: Nic, ends_at: float) -> None:
    """Book the transfer that ends at `ends_at`."""
    target.in_until = ends_at
    if source is not None:
        source.out_until = ends_at
