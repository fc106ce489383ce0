"""The machines of one partition and the words that pass between them."""

from __future__ import annotations

from collections import deque
from typing import Any

from apps.flowcontrol.domain import commands as flow_commands
from apps.flowcontrol.domain import events as flow_events
from apps.flowcontrol.domain.controller import FlowController
from apps.kvcache.domain import events as kv_events
from apps.kvcache.domain.machine import KvMachine
from workers.yard import commands
from workers.yard.config import PartitionConfig
from workers.yard.fleet import Fleet, kv_config
from workers.yard.outcomes import Outcomes
from workers.yard.placement import Placement
from workers.yard.requests import RequestState

CLOSED_KEPT = 200


class Machines:
    """Flow control, KV machine, fleet, placement and statistics, with the living requests. `out` collects commands."""

    def __init__(self, config: PartitionConfig, now: float) -> None:
        self.config = config
        self.requests: dict[str, RequestState] = {}
        self.kv = KvMachine(kv_config(config))
        self.flow = FlowController(config.flow)
        self.fleet = Fleet(config, now)
        self.placement = Placement(config, self.fleet.nodes)
        self.outcomes = Outcomes(now)
        self.dispatched: deque[flow_commands.Dispatch] = deque()
        self.dropped: deque[flow_commands.Drop] = deque()
        self.closed_branches: deque[dict[str, Any]] = deque(maxlen=CLOSED_KEPT)
        self.out: list[commands.Command] = []

    def tell_flow(self, now: float, event: flow_events.Event) -> None:
        """Tells flow control; its dispatches and drops are kept for `life.py`."""
        for command in self.flow.handle(now, event):
            if isinstance(command, flow_commands.Dispatch):
                self.dispatched.append(command)
                continue
            self.dropped.append(command)

    def tell_kv(self, now: float, event: kv_events.Event) -> None:
        """Tells the KV machine; reference changes for the same node go out together."""
        for command in self.kv.handle(now, event):
            if isinstance(command, kv_events.RefsChanged):
                self._push_refs(command)
            elif isinstance(command, kv_events.RefsReset):
                self.out.append(commands.PushRefs(command.node, (), reset=True))
            elif isinstance(command, kv_events.SnapshotNeeded):
                self.out.append(commands.FetchSnapshot(command.node))
            elif isinstance(command, kv_events.BranchResolved):
                state = self.requests.get(command.request_id)
                if state is not None:
                    state.branch_id, state.branch_kind = command.branch_id, command.kind
            elif isinstance(command, kv_events.BranchClosed):
                row = {"id": command.branch_id, "t": now, "cause": command.cause, "blocks": command.context_blocks}
                self.closed_branches.appendleft(row)
            elif isinstance(command, kv_events.ReuseCounted):
                state = self.requests.get(command.request_id)
                if state is not None:
                    state.lost_tokens = {cause: tokens for cause, tokens in command.lost.items() if tokens}

    def _push_refs(self, command: kv_events.RefsChanged) -> None:
        change = commands.RefChange(command.last, command.blocks, command.delta)
        last = self.out[-1] if self.out else None
        if isinstance(last, commands.PushRefs) and last.node == command.node:
            self.out[-1] = commands.PushRefs(last.node, (*last.changes, change), last.reset)
        else:
            self.out.append(commands.PushRefs(command.node, (change,)))

    def home(self, state: RequestState, phase: str) -> str | None:
        return None if state.branch_id is None else self.kv.home(state.branch_id, phase)
