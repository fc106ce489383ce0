"""Agents paused while the KV of all would not fit on the devices (ThunderAgent's program-level scheduling)."""

from __future__ import annotations

from collections import deque

from workers.simulator.clients import Player
from workers.simulator.clock import ARRIVAL
from workers.simulator.partition import Partition


class AgentPauses:
    """An agent's program is active from its first request until it ends or gives way. While the contexts of the active ones
    exceed what the prefill nodes' devices hold, a program that asks is paused; when room comes back the longest paused one
    goes on. A program that has a request running is never paused."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._active: dict[str, int] = {}  # program -> tokens of its newest context, longest unheard first
        self._running: dict[str, int] = {}
        self._paused: deque[tuple[float, Player]] = deque()
        self.paused_total = 0
        partition.admit = self.admit
        partition.on_ended.append(self._ended)

    @property
    def capacity_tokens(self) -> int:
        nodes = self._partition.nodes.values()
        return sum(node.spec.device_tokens for node in nodes if node.alive and node.phase.phase == "prefill")

    def admit(self, now: float, player: Player) -> bool:
        """False: the player waits here and is sent on later."""
        turn = player.turn
        assert turn is not None
        program = turn.signal.program or turn.signal.branch_id or ""
        if not self._fits(program, turn.prompt_tokens):
            self._paused.append((now, player))
            self.paused_total += 1
            return False
        self._active.pop(program, None)
        self._active[program] = turn.prompt_tokens
        self._running[program] = self._running.get(program, 0) + 1
        return True

    def _fits(self, program: str, tokens: int) -> bool:
        """Idle programs give way, longest unheard first, before this one is made to wait."""
        if program in self._active:
            return True
        total = sum(self._active.values()) + tokens
        for other in list(self._active):
            if total <= self.capacity_tokens:
                break
            if not self._running.get(other):
                total -= self._active.pop(other)
        return total <= self.capacity_tokens or not self._running

    def _ended(self, now: float, player: Player) -> None:
        turn = player.turn
        assert turn is not None
        program = turn.signal.program or turn.signal.branch_id or ""
        left = self._running.get(program, 0) - 1
        if left > 0:
            self._running[program] = left
        else:
            self._running.pop(program, None)
        if turn.signal.end and player.parent is None:
            self._active.pop(program, None)
        if self._paused:
            _, waiting = self._paused.popleft()
            self._partition.clock.at(now, ARRIVAL, self._again, waiting)

    def _again(self, now: float, player: Player) -> None:
        self._partition.ask(now, player)
