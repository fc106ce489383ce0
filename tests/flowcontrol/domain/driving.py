"""A cluster in virtual time around the flow controller: every dispatched request takes a fixed time to answer."""

from __future__ import annotations

import heapq
from collections import Counter

from apps.flowcontrol.domain.commands import Dispatch, Drop
from apps.flowcontrol.domain.config import BandConfig, FlowConfig, StageConfig
from apps.flowcontrol.domain.controller import FlowController
from apps.flowcontrol.domain.events import (
    Cancel,
    Enqueue,
    Event,
    FlowRequest,
    PoolChanged,
    Reconfigure,
    StageReleased,
    Tick,
    Withdraw,
)


class Cluster:
    """Drives one controller; `answer_s` after a dispatch the request leaves both stages (None: never by itself)."""

    def __init__(self, config: FlowConfig, answer_s: float | None = 2.0, nodes: int = 1) -> None:
        self.controller = FlowController(config)
        self.answer_s = answer_s
        self.now = 0.0
        self.running: set[str] = set()
        self.most_running = 0
        self.dispatches: list[tuple[float, Dispatch]] = []
        self.drops: list[tuple[float, Drop]] = []
        self._agenda: list[tuple[float, int, Event]] = []
        self._count = 0
        for stage in ("prefill", "decode"):
            self.send(PoolChanged(stage, nodes))

    def at(self, when: float, *events: Event) -> None:
        for event in events:
            self._count += 1
            heapq.heappush(self._agenda, (when, self._count, event))

    def send(self, event: Event) -> list:
        commands = self.controller.handle(self.now, event)
        for command in commands:
            if isinstance(command, Drop):
                self.drops.append((self.now, command))
                continue
            self.dispatches.append((self.now, command))
            self.running.add(command.request_id)
            self.most_running = max(self.most_running, len(self.running))
            if self.answer_s is not None:
                self.at(self.now + self.answer_s, StageReleased(command.request_id, "decode"))
        self.controller.check_integrity()
        return commands

    def enqueue(self, *names: str, band: str = "standard", flow: str = "a", **fields) -> None:
        for name in names:
            self.send(Enqueue(request(name, band, flow, **fields)))

    def release(self, *names: str) -> None:
        for name in names:
            self.running.discard(name)
            self.send(StageReleased(name, "decode"))

    def run(self, until: float = 1e9) -> None:
        """Events due come before deadlines of the same moment."""
        while True:
            due = self._agenda[0][0] if self._agenda else float("inf")
            deadline = self.controller.next_deadline()
            when = min(due, float("inf") if deadline is None else deadline)
            if when > until or when == float("inf"):
                return
            self.now = when
            if due <= when:
                event = heapq.heappop(self._agenda)[2]
                if isinstance(event, StageReleased):
                    self.running.discard(event.request_id)
                self.send(event)
            else:
                self.send(Tick())

    def tick(self, when: float) -> None:
        self.now = when
        self.send(Tick())

    def cancel(self, name: str) -> None:
        self.running.discard(name)
        self.send(Cancel(name))

    def withdraw(self, name: str) -> None:
        self.running.discard(name)
        self.send(Withdraw(name))

    def reconfigure(self, config: FlowConfig) -> None:
        self.send(Reconfigure(config))

    @property
    def order(self) -> list[str]:
        return [command.request_id for _, command in self.dispatches]

    def waves(self) -> list[int]:
        """How many were dispatched at each moment."""
        return list(Counter(when for when, _ in self.dispatches).values())

    def outcomes(self) -> dict[str, int]:
        """As clients saw them."""
        seen = Counter(str(drop.outcome) for _, drop in self.drops)
        return dict(seen, Dispatched=len(self.dispatches))


def request(name: str, band: str = "standard", flow: str = "a", **fields) -> FlowRequest:
    return FlowRequest(request_id=name, band=band, flow_id=flow, bytes=fields.pop("bytes", 10), **fields)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{index}" for index in range(count)]


def flow_config(limit: int | None = 4, decode_limit: int = 1000, bands=None, **fields) -> FlowConfig:
    if bands is None:
        bands = (BandConfig("premium", 100), BandConfig("standard", 0), BandConfig("best-effort", -10))
    off = StageConfig(detector="off")
    return FlowConfig(
        bands=tuple(bands),
        prefill=off if limit is None else StageConfig(limit_per_node=limit),
        decode=off if limit is None else StageConfig(limit_per_node=decode_limit),
        **fields,
    )
