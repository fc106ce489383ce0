"""In which mix and when agents come: a fixed number that are replaced as they end, a mix that changes, or open arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple

from workers.simulator.clients import Player, Script
from workers.simulator.clock import ARRIVAL
from workers.simulator.partition import Partition
from workers.simulator.workloads import generators

ScriptMaker = Callable[[int], Script]


class Population(NamedTuple):
    """From `at` seconds on, this many agents of each workload are active; those over are not replaced when they end."""

    at: float
    agents: dict[str, int]


class TenantShare(NamedTuple):
    tenant: str
    objective: str
    share: float


ONE_TENANT = (TenantShare("agents", "standard", 1.0),)


def generated(workload: str, seed: int, block_tokens: int, output_scale: float = 1.0) -> ScriptMaker:
    """Scripts of a generator by the agent's number."""

    def make(number: int) -> Script:
        return generators.agent(workload, seed, number, block_tokens, output_scale)

    return make


@dataclass
class ClosedLoop:
    """Keeps as many agents active as the plan says. The first ones start within `stagger_s`, somewhere in the middle of
    their lives when `mature` is set, as a system finds them that has run for long."""

    partition: Partition
    makers: dict[str, ScriptMaker]
    plan: Sequence[Population]
    seed: int = 0
    tenants: Sequence[TenantShare] = ONE_TENANT
    stagger_s: float = 60.0
    mature: bool = True
    started: dict[str, int] = field(default_factory=dict)
    active: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = count()
        self._rng = Random(f"{self.seed}:arrivals")
        self._target: dict[str, int] = {}
        self._given = {share.tenant: 0 for share in self.tenants}
        for population in self.plan:
            self.partition.clock.at(population.at, ARRIVAL, self._change, population)

    def _change(self, now: float, population: Population) -> None:
        self._target = dict(population.agents)
        for workload, wanted in sorted(population.agents.items()):
            for _ in range(max(0, wanted - self.active.get(workload, 0))):
                at = now + self._rng.random() * self.stagger_s
                self.active[workload] = self.active.get(workload, 0) + 1
                self.partition.clock.at(at, ARRIVAL, self._first, workload)

    def _first(self, now: float, workload: str) -> None:
        self._start(now, workload, self.mature)

    def set_target(self, now: float, workload: str, agents: int) -> None:
        """Another number of agents from now on."""
        self._change(now, Population(now, {**self._target, workload: agents}))

    def _start(self, now: float, workload: str, mature: bool) -> None:
        number = next(self._numbers)
        self.started[workload] = self.started.get(workload, 0) + 1
        script = self.makers[workload](number)
        if mature:
            script = _from_the_middle(self.makers[workload], number, script, self._rng)
        share = self._next_tenant()
        self.partition.clients.start(now, script, workload, share.tenant, share.objective, self._ended)

    def _next_tenant(self) -> TenantShare:
        """So that every prefix of the agents is as close to the shares as whole agents can be."""
        total = sum(self._given.values()) + 1
        chosen = max(self.tenants, key=lambda share: share.share * total - self._given[share.tenant])
        self._given[chosen.tenant] += 1
        return chosen

    def _ended(self, now: float, player: Player) -> None:
        workload = player.workload
        if self.active[workload] > self._target.get(workload, 0):
            self.active[workload] -= 1
            return
        self._start(now, workload, False)


def _from_the_middle(maker: ScriptMaker, number: int, script: Script, rng: Random) -> Script:
    """The rest of a script from a turn of it chosen evenly. Needs a second copy of the script to count its turns."""
    turns = sum(1 for _ in maker(number))
    return generators.skipped(script, int(rng.random() * turns))


@dataclass
class OpenLoop:
    """Agents arrive at random (Poisson), `per_minute` of them, and leave when their script ends."""

    partition: Partition
    maker: ScriptMaker
    workload: str
    per_minute: float
    seed: int = 0
    until: float = float("inf")
    tenants: Sequence[TenantShare] = ONE_TENANT
    started: int = 0
    ended: int = 0

    def __post_init__(self) -> None:
        if self.per_minute <= 0:
            raise ValueError(f"per_minute: expected a number above 0, got {self.per_minute}")
        self._rng = Random(f"{self.seed}:open")
        self._wait(0.0)

    def _wait(self, now: float) -> None:
        self.partition.clock.at(now + self._rng.expovariate(self.per_minute / 60), ARRIVAL, self._arrive)

    def _arrive(self, now: float, _: object) -> None:
        if now >= self.until:
            return
        share = self.tenants[self.started % len(self.tenants)]
        script = self.maker(self.started)
        self.started += 1
        self.partition.clients.start(now, script, self.workload, share.tenant, share.objective, self._left)
        self._wait(now)

    def _left(self, now: float, player: Player) -> None:
        self.ended += 1


def play_all(partition: Partition, scripts: Iterable[tuple[float, Script]], workload: str) -> None:
    """Every script from its own moment on, once: traces."""
    for at, script in scripts:

        def begin(now: float, one: Script) -> None:
            share = ONE_TENANT[0]
            partition.clients.start(now, one, workload, share.tenant, share.objective, lambda _now, _player: None)

        partition.clock.at(at, ARRIVAL, begin, script)
