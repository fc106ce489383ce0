"""What a node reports put in order: of its numbered events older ones are dropped, early ones wait, and a missing one is
noticed; of its phase, which statuses tell too, late news are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from apps.kvcache.domain.events import NodePhaseChanged

E = TypeVar("E")


class NodeStream(Generic[E]):
    """Push events as they come, pop those whose turn it is. Numbers go up by one; the first of a process is 0 or 1.

    `beat_s`: when the last heartbeat came, if the node sends any. At most `max_waiting` early events are kept; the snapshot that is then needed covers the others.
    """

    def __init__(self, max_waiting: int = 4096) -> None:
        self.last: int | None = None
        self.asked_at_s: float | None = None
        self.distrusted: str | None = None
        self.beat_s: float | None = None
        self._max_waiting = max_waiting
        self._waiting: dict[int, E] = {}

    @property
    def snapshot_reason(self) -> str | None:
        """Why only a snapshot helps (or a late event, after a gap); None while all is in order."""
        return self.distrusted or ("gap" if self._waiting else None)

    def unseen_reason(self, now: float, silent_after_s: float) -> str | None:
        """Why what is known of the node may be wrong: `no-events` (nothing came yet), the reason for which a snapshot is
        awaited, or `events-silent` (its heartbeat stopped); None while all is in order."""
        if self.last is None:
            return "no-events"
        if self.snapshot_reason is not None:
            return f"snapshot-awaited-{self.snapshot_reason}"
        silent = self.beat_s is not None and now - self.beat_s > silent_after_s
        return "events-silent" if silent else None

    def push(self, seq: int, event: E) -> None:
        if self.last is None and seq <= 1:
            self.last = seq - 1
        if (self.last is None or seq > self.last) and len(self._waiting) < self._max_waiting:
            self._waiting.setdefault(seq, event)

    def pop(self) -> E | None:
        """The next event in order, or None when there is none or what is known is not trusted."""
        if self.last is None or self.distrusted or self.last + 1 not in self._waiting:
            if self.snapshot_reason is None:
                self.asked_at_s = None
            return None
        self.last += 1
        return self._waiting.pop(self.last)

    def distrust(self, reason: str) -> None:
        """What was applied contradicts itself: hold everything back until a snapshot comes."""
        self.distrusted = reason

    def snapshot(self, seq: int) -> bool:
        """A snapshot as of event `seq` came. False when it is older than what was applied."""
        if self.last is not None and seq < self.last:
            return False
        self.last, self.asked_at_s, self.distrusted = seq, None, None
        self._waiting = {number: event for number, event in self._waiting.items() if number > seq}
        return True


@dataclass(frozen=True, slots=True)
class KnownPhase:
    """A node's last phase that was not `mixed` (empty: none yet). `left`: the phase it had before in this generation: it
    does not go back to that one without a new generation, so a status that says so is late."""

    phase: str = ""
    left: str = ""
    generation: int = 0

    def next(self, event: NodePhaseChanged) -> KnownPhase | None:
        """What is known after `event`, or None when it says nothing new."""
        generation = self.generation if event.generation is None else event.generation
        late = event.seq is None and event.generation == self.generation and event.phase == self.left
        if event.phase == "mixed" or generation < self.generation or late:
            return None
        left = self.left if generation == self.generation else ""
        return KnownPhase(event.phase, left if event.phase == self.phase else self.phase, generation)
