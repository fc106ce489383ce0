"""One partition's machines composed: flow control -> routing -> KV ledger and directory -> load book.

Nodes and time are looked after here, requests in `life.py`, on the machines of `machines.py`. Drivers report facts (`events.py`) and carry out what it asks
for (`commands.py`); it does no I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from apps.flowcontrol.domain import events as flow_events
from apps.kvcache.domain import events as kv_events
from workers.yard import commands, events
from workers.yard.config import ConfigError, PartitionConfig
from workers.yard.fleet import kv_config
from workers.yard.life import RequestLife
from workers.yard.machines import Machines
from workers.yard.nodes import STAGES
from workers.yard.requests import Stage
from workers.yard.snapshot import take_snapshot

PREDICT_EVERY_S = 0.05


class Yard:
    """`handle` takes one event and answers what to do; `next_deadline` says when to come back with a `Tick`."""

    def __init__(self, config: PartitionConfig, now: float = 0.0) -> None:
        self.started_at = now
        self._m = machines = Machines(config, now)
        self._life = RequestLife(machines)
        self.requests, self.kv, self.flow = machines.requests, machines.kv, machines.flow
        self.fleet, self.placement, self.outcomes = machines.fleet, machines.placement, machines.outcomes
        self.closed_branches = machines.closed_branches
        self._snapshot_seq = 0
        self._handlers: dict[type, Callable[[float, Any], None]] = {
            events.Arrived: self._life.arrived,
            events.ClientGone: self._life.client_gone,
            events.AnswerEnded: self._life.answer_ended,
            events.PrefetchEnded: self._life.prefetch_ended,
            events.PrefillFinished: self._life.prefill_finished,
            events.PrefillFailed: self._life.prefill_failed,
            events.FirstToken: self._life.first_token,
            events.DecodeProgress: self._life.decode_progress,
            events.DecodeFinished: self._life.decode_finished,
            events.DecodeFailed: self._life.decode_failed,
            events.EngineRefused: self._life.engine_refused,
            events.NodeStatus: self._node_status,
            events.NodeStatuses: self._node_statuses,
            events.NodeEvents: self._node_events,
            events.NodeSnapshotTaken: self._node_snapshot,
            events.NodeUnreachable: self._node_unreachable,
            events.BranchEnd: self._branch_end,
            events.BranchAnnounced: self._branch_announced,
            events.Configured: self._configured,
            events.ShutDown: self._shut_down,
            events.Tick: self._tick,
        }
        self._pools_changed(now)

    # ---- the machine's surface ------------------------------------------------------------------------------------

    def handle(self, now: float, event: events.Event) -> list[commands.Command]:
        """Takes one event at `now` (seconds); answers what the driver must do, in order.

        Late or repeated reports about requests that have ended change nothing.
        """
        return self.handle_all(now, [event])

    def handle_all(self, now: float, together: Sequence[events.Event]) -> list[commands.Command]:
        """As `handle`, of events that came in one moment: what follows from them is looked at once, after the last."""
        self._watch_time(now)
        for event in together:
            self._handlers[type(event)](now, event)
            if self.fleet.judge_again:
                self._nodes_changed(now)
        self._life.settle(now)
        answer, self._m.out = self._m.out, []
        return answer

    def next_deadline(self) -> float | None:
        """When the next `Tick` is due (seconds of the driver's clock)."""
        earliest = self.fleet.next_deadline()
        for deadline in (self.flow.next_deadline(), self.kv.next_deadline(), self._life.prefetching.next_deadline()):
            if deadline is not None and deadline < earliest:
                earliest = deadline
        for state in self._life.waiting.values():
            earliest = min(earliest, state.look_at)
        if self.flow.wants_predictions:
            earliest = min(earliest, self._life.predicted_at + PREDICT_EVERY_S)
        return earliest

    def snapshot(self, now: float) -> dict[str, Any]:
        """The live snapshot (docs/interfaces.md, section 9). The driver adds what it alone knows under `gateway`."""
        self._snapshot_seq += 1
        return take_snapshot(now, self, self._snapshot_seq)

    def blind(self, now: float) -> dict[str, str]:
        """Nodes of which it is not known what they hold, and why. One that is down is no candidate, so it does not count."""
        alive = [node.name for node in self.fleet.nodes if node.health != "down" and node.config.enabled]
        return self.kv.unseen(now, alive)

    def check_integrity(self) -> None:
        """Raises AssertionError when the machines disagree about who is where."""
        self.kv.check_integrity()
        self.flow.check_integrity()
        self.placement.loads.check_integrity()
        self._life.prefetching.check_integrity()
        for request_id, state in self.requests.items():
            assert not state.stage.ended, f"{request_id} has ended ({state.stage}) and is still here"
            assert (state.stage is Stage.WAITING) == (request_id in self._life.waiting), f"{request_id}: waiting list"
            placed = self.placement.loads.prefill_node(request_id)
            assert (placed is not None) == (state.stage is Stage.PREFILLING), f"{request_id}: {state.stage} on {placed}"

    @property
    def config(self) -> PartitionConfig:
        return self._m.config

    @property
    def waiting_for_nodes(self) -> int:
        """Admitted requests that no node can take at the moment."""
        return len(self._life.waiting)

    # ---- nodes ----------------------------------------------------------------------------------------------------

    def _node_status(self, now: float, event: events.NodeStatus) -> None:
        if self._heard(now, event):
            self._nodes_changed(now)

    def _node_statuses(self, now: float, event: events.NodeStatuses) -> None:
        for name, rows in event.worked:
            self.fleet.worked(now, name, rows)
        known = [self._heard(now, report) for report in event.reports]
        if any(known):
            self._nodes_changed(now)

    def _heard(self, now: float, event: events.NodeStatus) -> bool:
        """Takes one node's status; False for a node that is not configured."""
        node = self.fleet.nodes.get(event.node)
        if node is None:
            return False
        before = node.status
        if self.fleet.heard(now, node, event.status):
            if before is None or before.boot_id != event.status.boot_id:
                self._life.failures.node_restarted(node)
            self._m.tell_kv(now, kv_events.NodeLost(node.name))
            self._m.out.append(commands.FetchSnapshot(node.name))
        phase = kv_events.NodePhaseChanged(node.name, event.status.phase, None, event.status.generation)
        self._m.tell_kv(now, phase)
        for report in self.fleet.reports(now, node, event.status):
            self._m.tell_flow(now, report)
        self._life.failures.drop_orphans(node)
        return True

    def _node_unreachable(self, now: float, event: events.NodeUnreachable) -> None:
        node = self.fleet.nodes.get(event.node)
        if node is not None:
            node.refusals = node.refusals + 1 if event.refused else node.refusals
            self._nodes_changed(now)

    def _node_events(self, now: float, event: events.NodeEvents) -> None:
        node = self.fleet.nodes.get(event.node)
        if node is None:
            return
        before = node.status
        for kv_event in self.fleet.kv_events(now, node, event.events):
            if isinstance(kv_event, commands.FetchSnapshot):
                self._m.out.append(kv_event)
            else:
                self._m.tell_kv(now, kv_event)
        if node.status is not before:
            self._nodes_changed(now)

    def _node_snapshot(self, now: float, event: events.NodeSnapshotTaken) -> None:
        if self.fleet.nodes.get(event.node) is not None:
            self._m.tell_kv(now, kv_events.NodeSnapshot(event.node, event.seq, list(event.segments)))

    def _nodes_changed(self, now: float) -> None:
        """Health, phases or wishes may have changed: move work away from where it cannot stay, open or close the gates."""
        changed = self.fleet.refresh(now)
        for node in changed.lost:
            self._life.failures.node_lost(now, node)
        for node in changed.draining:
            self._life.failures.move_queued(now, node)
        for node in self.fleet.nodes:
            # Each time that something is heard of the nodes, for outputs that found no place elsewhere until now.
            if node.leaves_decode:
                self._life.failures.move_decodes(now, node)
        if changed.any:
            self._pools_changed(now)
        self._life.room_changed()

    def _pools_changed(self, now: float) -> None:
        for stage in STAGES:
            self._m.tell_flow(now, self.fleet.pool(stage))

    # ---- the rest -------------------------------------------------------------------------------------------------

    def _branch_end(self, now: float, event: events.BranchEnd) -> None:
        self._m.tell_kv(now, kv_events.BranchEnded(event.branch_id))

    def _branch_announced(self, now: float, event: events.BranchAnnounced) -> None:
        said = kv_events.BranchAnnounced(event.branch_id, event.parent, event.relation, event.program, event.rewritten)
        self._m.tell_kv(now, said)

    def _configured(self, now: float, event: events.Configured) -> None:
        """A new configuration, in force from the next decision on. Raises ConfigError where it cannot change while running."""
        config = event.config
        if config.partition != self.config.partition:
            raise ConfigError("partition", f"{self.config.partition!r}, which this process serves")
        if config.model != self.config.model:
            raise ConfigError("model", "the model this process was started with (restart it to change the model)")
        self._m.config = config
        for node in self.fleet.configure(now, config):
            self._life.failures.node_lost(now, node)
        self.placement.configure(config)
        self.kv.reconfigure(kv_config(config))
        self._m.tell_flow(now, flow_events.Reconfigure(config.flow))
        self._nodes_changed(now)

    def _shut_down(self, now: float, event: events.ShutDown) -> None:
        self._m.tell_flow(now, flow_events.Drain())

    def _tick(self, now: float, event: events.Tick) -> None:
        self._m.tell_flow(now, flow_events.Tick())

    def _watch_time(self, now: float) -> None:
        """What time alone brings, before anything else happens at `now`."""
        kv_deadline = self.kv.next_deadline()
        if kv_deadline is not None and now >= kv_deadline:
            self._m.tell_kv(now, kv_events.Tick())
        for record in self.fleet.due_records(now):
            self._m.out.append(commands.Journal(record))
        health_change = self.fleet.next_change
        waiting = self._life.waiting
        waited_out = bool(waiting) and any(now >= state.look_at for state in waiting.values())
        if waited_out or (health_change is not None and now >= health_change):
            self._nodes_changed(now)
