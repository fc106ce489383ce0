"""Harnesses that play scripts closed-loop: the next request follows the answer and a pause, parents wait for sub-agents.

A *script* is an iterator of turns that never looks at time or at answers, so every system gets exactly the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from apps.kvcache.domain.events import BranchSignal
from workers.simulator.clock import ARRIVAL, Clock


class Turn(NamedTuple):
    """One request of a script: after `helpers` have ended and `pause_s` passed, this prompt. `output_chain`: full blocks
    that the output adds to the context, where the next prompt goes on with it."""

    pause_s: float
    chain: bytes
    prompt_tokens: int
    output_tokens: int
    signal: BranchSignal
    output_chain: bytes = b""
    helpers: tuple[Iterator[Turn], ...] = ()


Script = Iterator[Turn]


@dataclass(slots=True, eq=False)
class Player:
    """One script being played. `ended` is called when it is over."""

    script: Script
    workload: str
    tenant: str
    objective: str
    ended: Callable[[float, Player], None]
    parent: Player | None = None
    waiting_for: int = 0
    turn: Turn | None = None
    asked_at: float = 0.0
    number: int = field(default=0)


class Clients:
    """Plays scripts; `ask(now, player)` sends a player's current turn to the front door."""

    def __init__(self, clock: Clock, ask: Callable[[float, Player], None]) -> None:
        self._clock = clock
        self._ask = ask
        self._numbers = 0
        self.living = 0
        self.pauses: list[float] = [0.0, 0.0]

    def start(
        self,
        now: float,
        script: Script,
        workload: str,
        tenant: str,
        objective: str,
        ended: Callable[[float, Player], None],
        parent: Player | None = None,
    ) -> Player:
        """Begin to play a script; its first turn has its own pause."""
        self._numbers += 1
        player = Player(script, workload, tenant, objective, ended, parent, number=self._numbers)
        self.living += 1
        self._next(now, player)
        return player

    def answered(self, now: float, player: Player) -> None:
        """The player's request is over, one way or the other: go on."""
        self._next(now, player)

    def retry(self, now: float, player: Player, after_s: float) -> None:
        """The front door had no room: ask again later."""
        self._clock.at(now + after_s, ARRIVAL, self._send, player)

    def _next(self, now: float, player: Player) -> None:
        turn = player.turn = next(player.script, None)
        if turn is None:
            self.living -= 1
            player.ended(now, player)
            return
        if turn.helpers:
            player.waiting_for = len(turn.helpers)
            for helper in turn.helpers:
                self.start(now, helper, player.workload, player.tenant, player.objective, self._helper_ended, player)
            return
        self._pause(now, player, turn)

    def _helper_ended(self, now: float, helper: Player) -> None:
        parent = helper.parent
        assert parent is not None and parent.turn is not None
        parent.waiting_for -= 1
        if not parent.waiting_for:
            self._pause(now, parent, parent.turn)

    def _pause(self, now: float, player: Player, turn: Turn) -> None:
        self.pauses[0] += turn.pause_s
        self.pauses[1] += 1
        self._clock.at(now + turn.pause_s, ARRIVAL, self._send, player)

    def _send(self, now: float, player: Player) -> None:
        player.asked_at = now
        self._ask(now, player)
