"""What both stages of a simulated node share: its pool and device, its links, contexts kept for hand-over, what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apps.kvcache.domain import events as kv
from apps.kvcache.domain.hashing import HASH_BYTES
from apps.kvcache.domain.run_index import RunIndex
from workers.agent.engines.simulated_network import Nic
from workers.agent.engines.simulated_node import Agenda, DeviceMemory
from workers.agent.engines.simulated_prefill_loop import PrefillLoop
from workers.simulator.node_parts import Counters, Host, NodeSpec, WorkRow


@dataclass(slots=True)
class Kept:
    """A computed context that waits for its decode node."""

    pinned: bytes
    device_tokens: int
    started_at: float
    expires_at: float


class NodeCore:
    """`boot` counts the processes that the node has been; a new one starts empty."""

    def __init__(self, spec: NodeSpec, host: Host) -> None:
        self.spec = spec
        self.host = host
        self.alive = True
        self.boot = 1
        self.counters = Counters()
        self.name = spec.name
        self.plane = spec.plane
        self.timing = spec.timing
        self.seq = 0
        self.start_empty()

    def start_empty(self) -> None:
        spec = self.spec
        self.pool = RunIndex(spec.pool_blocks, self.plane.eviction)
        self.device = DeviceMemory(spec.device_tokens)
        self.nic = Nic()
        self.agenda = Agenda()
        self.prefill_loop = PrefillLoop(self.timing, spec.prefill_chunk_tokens)
        self.kept: dict[str, Kept] = {}
        self.outbox: list[Any] = []
        self.rows: dict[tuple[str, int], WorkRow] = {}

    def release(self, request_id: str) -> bool:
        """The decode node has the context, or nobody will fetch it. False where it is not kept (any more)."""
        kept = self.kept.pop(request_id, None)
        if kept is None:
            return False
        self.pool.unpin(kept.pinned)
        self.device.release(kept.device_tokens)
        return True

    def repin(self, pinned: bytes, chain: bytes) -> bytes:
        """Pin what is held of the chain by now, instead of what was."""
        again = self.pool.pin(chain)
        self.pool.unpin(pinned)
        return again

    def store(self, now: float, chain: bytes) -> int:
        """Put the chain into the pool; answers how many of its blocks are held, and tells of what changed."""
        change = self.pool.store(now, chain)
        if change.evicted:
            self.counters.evicted_blocks += len(change.evicted) // HASH_BYTES
            self.say(now, kv.BlocksRemoved(self.name, self.next_seq(), change.evicted))
        if change.stored is not None:
            parent, run = change.stored
            self.say(now, kv.BlocksStored(self.name, self.next_seq(), parent, run))
        return change.held

    def count_row(
        self, stage: str, batch: int, iterations: int, t_uc: int, pairs: float, t_rst: int, busy_s: float, done: int
    ) -> None:
        row = self.rows.get((stage, batch))
        if row is None:
            row = self.rows[stage, batch] = WorkRow()
        row.t_uc += t_uc
        row.pairs += pairs
        row.t_rst += t_rst
        row.busy_s += busy_s
        row.requests += done
        row.iterations += iterations

    def take_rows(self) -> list[tuple[Any, ...]]:
        """Iterations since the last call, `(stage, t_uc, pairs, t_rst, batch, busy_s, requests, iterations)`."""
        rows: list[tuple[Any, ...]] = [
            (stage, row.t_uc, row.pairs, row.t_rst, batch, row.busy_s, row.requests, row.iterations)
            for (stage, batch), row in self.rows.items()
        ]
        self.rows.clear()
        return rows

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def say(self, now: float, event: Any) -> None:
        self.outbox.append(event)
        if len(self.outbox) == 1:
            self.host.heard(now, self)
