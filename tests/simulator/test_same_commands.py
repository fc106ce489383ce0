"""One scripted trace through the gateway's driver on a virtual clock gives the commands that the simulator's gave."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

import pytest

from tests.simulator.support import make_run, play, turns
from workers.gateway.driver import YardDriver
from workers.gateway.metrics import GatewayMetrics
from workers.simulator.systems import FIXED
from workers.yard import commands, events
from workers.yard.yard import Yard

END_S = 59.9


class VirtualSelector(selectors.SelectSelector):
    """Never waits: what a loop would sleep is added to its time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now


class Wire:
    """Stands for the gateway's calls: every command it is given is written down."""

    def __init__(self, seen: list[commands.Command]) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        def note(*given: Any) -> None:
            self._seen.extend(entry for entry in given if isinstance(entry, commands.Command))

        return note


class Node:
    def __init__(self, name: str, seen: list[commands.Command]) -> None:
        self._name, self._seen = name, seen

    def push_refs(self, changes: tuple[commands.RefChange, ...], reset: bool) -> None:
        self._seen.append(commands.PushRefs(self._name, changes, reset))

    def resync(self) -> None:
        self._seen.append(commands.FetchSnapshot(self._name))

    def release(self, request_id: str) -> None:
        self._seen.append(commands.ReleaseHandoff(self._name, request_id))


def recorded() -> tuple[list[tuple[float, events.Event]], list[commands.Command], Any]:
    """A simulated hour's worth of trouble in a minute: growth, forks, a crash, a node that comes back, a switch."""
    run = make_run(FIXED, prefill=2, decode=2, check_every=0)
    script: list[tuple[float, events.Event]] = []
    given: list[commands.Command] = []

    def note(now: float, event: events.Event, answer: list[commands.Command]) -> None:
        if not isinstance(event, events.Tick):
            script.append((now, event))
        given.extend(answer)

    run.partition.trace = note
    for n in range(6):
        play(run, turns(f"t{n}", [(80, 6)] * 5, pause_s=1.5), at=0.3 * n)
    run.partition.clock.run_until(6.0)
    run.partition.crash(6.0, "n1")
    run.partition.clock.run_until(14.0)
    run.partition.restart(14.0, "n1")
    run.partition.clock.run_until(20.0)
    run.orders.order(20.0, [("n3", "prefill")])
    run.partition.clock.run_until(END_S)
    assert run.partition.answered == 30
    return script, given, run


def told(given: list[commands.Command]) -> list[str]:
    """Commands as text; records by what they hold."""
    return [str(command.record) if isinstance(command, commands.Journal) else str(command) for command in given]


def test_the_gateways_driver_gives_the_same_commands_on_a_virtual_clock() -> None:
    script, expected, run = recorded()
    first = make_run(FIXED, prefill=2, decode=2, check_every=0)
    seen: list[commands.Command] = []
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        nodes = {name: Node(name, seen) for name in run.partition.nodes}
        yard = Yard(first.partition.config, 0.0)
        journal: list[dict[str, Any]] = []

        def keep(record: dict[str, Any]) -> None:
            journal.append(record)
            seen.append(commands.Journal(record))

        driver = YardDriver(yard, loop.time, keep, GatewayMetrics())
        driver.connect(Wire(seen), nodes)  # type: ignore[arg-type]

        async def drive() -> None:
            for at, event in [*script, (END_S, None)]:
                while loop.time() < at - 1e-9:
                    await asyncio.sleep(at - loop.time())
                loop.virtual.now = max(loop.virtual.now, at)
                if event is not None:
                    driver.feed(event)

        loop.run_until_complete(drive())
        driver.close()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    ours, theirs = told(expected), told(seen)
    assert len(ours) > 200
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        assert mine == other, f"command {position}"
    assert len(ours) == len(theirs)


def test_a_different_script_would_be_noticed() -> None:
    _, expected, _ = recorded()
    assert told(expected) != told(expected[:-1])
    with pytest.raises(AssertionError):
        assert told(expected)[0] == told(expected)[-1]
