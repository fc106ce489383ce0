"""A node's phase: what it takes, how it changes, and the generation that fences old orders.

    ready --order--> draining --old work ended--> switching --engine ready--> ready
                        \\--deadline--> draining, phase `mixed` --old work ended--> switching ...

Pure: time comes in as `now`. The agent performs the engine's switch and keeps `PhaseRecord` on disk.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

PhaseName = Literal["prefill", "decode", "mixed"]
StageName = Literal["prefill", "decode"]
StateName = Literal["ready", "draining", "switching"]
PHASES: tuple[PhaseName, ...] = ("prefill", "decode", "mixed")
STAGES: tuple[StageName, ...] = ("prefill", "decode")


class PhaseRefused(Exception):
    """An order or a piece of work the phase does not allow. `code`: stale-generation, wrong-phase, draining."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """What survives a restart: the phase last ordered and its generation."""

    phase: PhaseName
    generation: int


@dataclass(frozen=True, slots=True)
class LastSwitch:
    """The newest finished switch; times in unix seconds."""

    phase: PhaseName
    requested_at: float
    finished_at: float
    duration_s: float


class PhaseMachine:
    """One node's phase. `stage_work` given to `advance` is how many requests of each stage the node still holds."""

    def __init__(self, phase: PhaseName, generation: int) -> None:
        self.phase: PhaseName = phase
        self.target: PhaseName = phase
        self.state: StateName = "ready"
        self.generation = generation
        self.last_switch: LastSwitch | None = None
        self._from: PhaseName = phase
        self._requested_at = 0.0
        self._deadline: float | None = None

    @property
    def record(self) -> PhaseRecord:
        return PhaseRecord(self.target, self.generation)

    def next_deadline(self) -> float | None:
        """When draining must give way to `mixed`, if it is running."""
        return self._deadline if self.state == "draining" else None

    def order(self, now: float, phase: PhaseName, generation: int, drain_deadline_s: float) -> bool:
        """Take an order; True if it changed anything. Repeating the newest order is allowed and changes nothing.
        Raises PhaseRefused `stale-generation` for an older one, or for the same generation with another phase."""
        if generation < self.generation:
            raise PhaseRefused(
                "stale-generation", f"generation {generation} is older than {self.generation}, which this node has"
            )
        if generation == self.generation:
            if phase == self.target:
                return False
            raise PhaseRefused(
                "stale-generation", f"generation {generation} already ordered phase {self.target}, not {phase}"
            )
        self.generation = generation
        if phase == self.target:
            return True
        self.target = phase
        self._requested_at = now
        if self.state == "ready":
            self._from = self.phase
        if phase == self._from and self.state == "draining":
            self._finish_undo()
            return True
        if self.state != "switching":
            self.state = "draining"
        self._deadline = now + drain_deadline_s
        return True

    def _finish_undo(self) -> None:
        """The order was taken back before the engine switched: the node never left its phase."""
        self.phase = self._from
        self.state = "ready"
        self._deadline = None

    def advance(self, now: float, stage_work: dict[StageName, int]) -> PhaseName | None:
        """Move on where possible. A returned phase means: switch the engine to it now, then call `switched`."""
        if self.state != "draining":
            return None
        leaving = _stages(self._from) - _stages(self.target)
        if not any(stage_work.get(stage, 0) for stage in leaving):
            self.state = "switching"
            self._deadline = None
            return self.target
        if self._deadline is not None and now >= self._deadline:
            self.phase = "mixed"
            self._deadline = None
        return None

    def switched(self, now: float, phase: PhaseName) -> None:
        """The engine is ready for `phase`. If a newer order came meanwhile, draining goes on towards it."""
        self.phase = phase
        self._from = phase
        self.last_switch = LastSwitch(phase, self._requested_at, now, now - self._requested_at)
        self.state = "ready" if phase == self.target else "draining"

    def admit(self, stage: StageName, generation: int | None) -> None:
        """Raises PhaseRefused where work of `stage`, sent by someone who knows `generation`, may not start here."""
        if generation is not None and generation < self.generation:
            raise PhaseRefused(
                "stale-generation", f"the request knows generation {generation}, this node is at {self.generation}"
            )
        if stage not in _stages(self.phase):
            raise PhaseRefused("wrong-phase", f"this node is in phase {self.phase} and takes no {stage}")
        if self.state != "ready" and stage not in _stages(self.target):
            raise PhaseRefused("draining", f"this node is leaving {stage} for {self.target}")


def _stages(phase: PhaseName) -> frozenset[StageName]:
    if phase == "mixed":
        return frozenset(("prefill", "decode"))
    return frozenset((phase,))


def load_record(path: Path) -> PhaseRecord | None:
    """The kept record, or None where there is none that can be read."""
    try:
        document = json.loads(path.read_text())
        phase, generation = document["phase"], document["generation"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if phase not in PHASES or not isinstance(generation, int):
        return None
    return PhaseRecord(phase, generation)


def save_record(path: Path, record: PhaseRecord) -> None:
    """Replace the kept record at once and durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    with temporary.open("w") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
