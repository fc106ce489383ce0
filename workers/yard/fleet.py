"""The nodes as a whole: who serves what, whose word is old, what their event streams say, and what they worked."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from apps.flowcontrol.domain.events import NodeReport, PoolChanged
from apps.kvcache.domain import events as kv_events
from apps.kvcache.domain.machine import KvConfig, LeasePolicy, StreamEvent
from workers.yard.accounts import COST_WINDOW_S, CostAccount, LoadAccount
from workers.yard.commands import FetchSnapshot
from workers.yard.config import PartitionConfig
from workers.yard.events import NodeState
from workers.yard.nodes import REFUSALS_UNTIL_DOWN, STAGES, KnownNode, NodeTable, Stage
from workers.yard.recovery import NOBODY_THERE, Breaker, OrphanWatch, is_node_fault


def kv_config(config: PartitionConfig) -> KvConfig:
    """The KV machine's settings out of the partition's configuration."""
    lease = config.lease
    return KvConfig(lease=LeasePolicy(multiple=lease.multiple, floor_s=lease.floor_s, ceiling_s=lease.ceiling_s))


@dataclass(slots=True)
class Changes:
    """What the last look at the nodes found different. `draining` takes no more prefills but still runs some."""

    any: bool = False
    lost: list[KnownNode] = field(default_factory=list)
    draining: list[KnownNode] = field(default_factory=list)


class Fleet:
    """Keeps `NodeTable` current and turns what nodes report into facts for the other machines."""

    def __init__(self, config: PartitionConfig, now: float) -> None:
        self.nodes = NodeTable()
        self.load = LoadAccount(now)
        self._costs: dict[str, CostAccount] = {}
        self._costs_due_at = now + COST_WINDOW_S
        self._took: dict[tuple[str, Stage], bool] = {}
        self._pools: tuple[PoolChanged, ...] = ()
        self.judge_again = False
        self.next_change: float | None = None
        """When the nodes have to be judged again, nothing heard; not later than so, as of the last `refresh`."""
        self.nodes.configure(now, config)

    def configure(self, now: float, config: PartitionConfig) -> list[KnownNode]:
        """Takes the configuration over; answers nodes that are gone or moved to another address."""
        gone = self.nodes.configure(now, config)
        for node in gone:
            self._costs.pop(node.name, None)
            for stage in STAGES:
                self._took.pop((node.name, stage), None)
        return gone

    def takes(self, name: str, stage: Stage) -> bool:
        node = self.nodes.get(name)
        return node is not None and node.takes(stage)

    def alive(self, name: str | None) -> bool:
        """The node answers, so what its pool holds can be read."""
        node = self.nodes.get(name) if name is not None else None
        return node is not None and node.health != "down"

    def served(self, name: str | None) -> None:
        """The node did what it was asked for."""
        node = self.nodes.get(name) if name is not None else None
        if node is not None:
            node.breaker.succeeded()

    def failed(self, now: float, name: str | None, reason: str, retryable: bool) -> None:
        """A call to the node failed; what is its own fault counts against it, and where no process is, it is down."""
        node = self.nodes.get(name) if name is not None else None
        if node is None:
            return
        if reason == NOBODY_THERE and node.health != "down":
            node.refusals = REFUSALS_UNTIL_DOWN
            self.judge_again = True
        elif is_node_fault(reason, retryable) and node.breaker.failed(now):
            self.judge_again = True

    def t_acc(self, name: str | None) -> float:
        node = self.nodes.get(name) if name is not None else None
        return node.config.t_acc if node is not None else 1.0

    # ---- what nodes say -------------------------------------------------------------------------------------------

    def heard(self, now: float, node: KnownNode, status: NodeState) -> bool:
        """Takes a status; True when the node is new, came back, or is another process: its pool must be read afresh."""
        before = node.status
        another = before is None or before.boot_id != status.boot_id
        was_down = node.health == "down"
        node.status, node.status_at, node.refusals = status, now, 0
        if another:
            node.breaker, node.orphans = Breaker(), OrphanWatch()
        return another or (was_down and not node.stalled)

    def reports(self, now: float, node: KnownNode, status: NodeState) -> list[NodeReport]:
        """What the node says of its load in either stage. KV usage is that of the device."""
        used_ratio = 1.0 - status.kv_free_tokens / status.kv_tokens if status.kv_tokens else 0.0
        loads: dict[Stage, tuple[int, int]] = {
            "prefill": (status.queued_prefill, status.running_prefill),
            "decode": (status.queued_decode, status.running_decode),
        }
        return [
            NodeReport(node.name, stage, queued, used_ratio, now, running) for stage, (queued, running) in loads.items()
        ]

    def kv_events(
        self, now: float, node: KnownNode, batch: Sequence[Mapping[str, Any] | StreamEvent]
    ) -> Iterator[kv_events.Event | FetchSnapshot]:
        """The node's event stream in the KV machine's words; iterations are added to the accounts on the way."""
        name = node.name
        for event in batch:
            if not isinstance(event, Mapping):
                yield event
                continue
            seq, kind = int(event["seq"]), event["type"]
            if kind == "stored":
                parent = event.get("parent_b64")
                chain = b64decode(event["chain_b64"])
                yield kv_events.BlocksStored(name, seq, None if parent is None else b64decode(parent), chain)
            elif kind == "removed":
                yield kv_events.BlocksRemoved(name, seq, b64decode(event["hashes_b64"]))
            elif kind == "cleared":
                yield kv_events.NodeCleared(name, seq)
            elif kind == "phase":
                self._phase_event(node, event)
                yield kv_events.NodePhaseChanged(name, event["phase"], seq, event["generation"])
            elif kind == "gap":
                yield FetchSnapshot(name)
            else:
                if kind == "iterations":
                    self._iterations(now, node, event["rows"])
                yield kv_events.NodeSequence(name, seq)

    def worked(self, now: float, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Iterations of a node that did not come with its event stream."""
        node = self.nodes.get(name)
        if node is not None:
            self._iterations(now, node, rows)

    def _phase_event(self, node: KnownNode, event: Mapping[str, Any]) -> None:
        """Phase news travel by the stream first; the next status repeats them."""
        if node.status is not None and event["generation"] >= node.status.generation:
            node.status = replace(
                node.status,
                phase=event["phase"],
                target_phase=event.get("target_phase", node.status.target_phase),
                state=event["state"],
                generation=event["generation"],
            )

    def _iterations(self, now: float, node: KnownNode, rows: Sequence[Sequence[Any]]) -> None:
        account = self._costs.get(node.name)
        if account is None:
            boot_id = node.status.boot_id if node.status is not None else ""
            account = self._costs[node.name] = CostAccount(node.name, boot_id, self._costs_due_at - COST_WINDOW_S)
        account.switching = account.switching or node.switching
        account.add(rows)
        self.load.iterations(rows)

    # ---- what follows from it -------------------------------------------------------------------------------------

    def refresh(self, now: float) -> Changes:
        """Judges every node again; answers what is different since the last time."""
        changes = Changes()
        self.judge_again = False
        for node in self.nodes:
            was, node.health = node.health, node.judge(now)
            if node.health == "down" and was != "down":
                changes.lost.append(node)
            changes.any = changes.any or node.health != was
            for stage in STAGES:
                took = self._took.get((node.name, stage), False)
                takes = self._took[node.name, stage] = node.takes(stage)
                changes.any = changes.any or took != takes
                if stage == "prefill" and took and not takes and node.health != "down":
                    changes.draining.append(node)
        pools = tuple(self.pool(stage) for stage in STAGES)
        changes.any = changes.any or pools != self._pools
        self._pools = pools
        self.next_change = self.nodes.next_change()
        return changes

    def pool(self, stage: Stage) -> PoolChanged:
        """Who serves a stage, and what they say they take."""
        names = tuple(node.name for node in self.nodes.taking(stage))
        limit, tokens = self.nodes.reported_limit(stage), self.nodes.reported_tokens(stage)
        return PoolChanged(stage, len(names), limit, tokens, names)

    def due_records(self, now: float) -> list[dict[str, Any]]:
        """Telemetry records whose window is over."""
        records = []
        if now >= self.load.due_at:
            records.append(self.load.close(now, self.nodes.split(), self.nodes.stale_ratio()))
        if now >= self._costs_due_at:
            records += [account.record(now) for account in self._costs.values() if not account.empty]
            self._costs.clear()
            self._costs_due_at = now + COST_WINDOW_S
        return records

    def next_deadline(self) -> float:
        due = min(self.load.due_at, self._costs_due_at)
        return due if self.next_change is None else min(due, self.next_change)
