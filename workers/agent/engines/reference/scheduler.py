"""What the engine's loop does next: who is admitted to the device, which prompt chunks and which outputs run.

Both stages share the verbs: `add`, `admit`, `next_chunks` / `decoding`, `remove`. First come, first served, except that a
task whose blocks are ready may overtake one that still fetches, at most MAX_OVERTAKES times each.
"""

from __future__ import annotations

from typing import NamedTuple

from workers.agent.engines.base import Stage
from workers.agent.engines.reference.kv import DeviceKv
from workers.agent.engines.reference.tasks import Task

MAX_OVERTAKES = 16


class Chunk(NamedTuple):
    """Compute tokens `[start, end)` of a task."""

    task: Task
    start: int
    end: int


class Scheduler:
    """Waiting and running tasks of one engine. For the engine's thread; the counts may be read from any."""

    def __init__(self, kv: DeviceKv, max_decode_batch: int, chunk_tokens: int) -> None:
        self._kv = kv
        self._max_decode_batch = max_decode_batch
        self._chunk_tokens = chunk_tokens
        self.waiting: dict[Stage, list[Task]] = {"prefill": [], "decode": []}
        self.running: dict[Stage, list[Task]] = {"prefill": [], "decode": []}

    def add(self, task: Task) -> None:
        self.waiting[task.stage].append(task)

    def remove(self, task: Task) -> None:
        """Forget a task and free its device blocks at once. Unknown tasks are left alone."""
        for tasks in (self.waiting[task.stage], self.running[task.stage]):
            if task in tasks:
                tasks.remove(task)
        if task.table is not None:
            self._kv.release(task.table)
            task.table = None

    def tasks(self) -> list[Task]:
        return [task for group in (self.waiting, self.running) for tasks in group.values() for task in tasks]

    def admit(self) -> Task | None:
        """The next task that gets its device blocks now, or None. Outputs go before prompts: they hold clients up."""
        if len(self.running["decode"]) < self._max_decode_batch:
            task = self._admit_from("decode")
            if task is not None:
                return task
        if sum(task.left_tokens for task in self.running["prefill"]) < self._chunk_tokens:
            return self._admit_from("prefill")
        return None

    def _admit_from(self, stage: Stage) -> Task | None:
        overtaken: list[Task] = []
        for task in self.waiting[stage]:
            if not task.ready:
                if task.overtaken >= MAX_OVERTAKES:
                    return None
                overtaken.append(task)
                continue
            table = self._kv.allocate(task.reserve_tokens)
            if table is None:
                return None
            for other in overtaken:
                other.overtaken += 1
            task.table = table
            self.waiting[stage].remove(task)
            self.running[stage].append(task)
            return task
        return None

    def next_chunks(self) -> list[Chunk]:
        """Chunks of at most `chunk_tokens` tokens in all: outputs that lack context first, then prompts in order."""
        left = self._chunk_tokens
        chunks = []
        for task in [*self.running["decode"], *self.running["prefill"]]:
            count = min(left, task.left_tokens)
            if count > 0:
                chunks.append(Chunk(task, task.computed, task.computed + count))
                left -= count
        return chunks

    def decoding(self) -> list[Task]:
        """Outputs whose context is complete: the next decode batch."""
        return [task for task in self.running["decode"] if not task.left_tokens]

    def queued_tokens(self) -> int:
        """Prompt tokens that wait, those of running prompts that are not yet computed included."""
        waiting = sum(task.left_tokens for task in list(self.waiting["prefill"]))
        return waiting + sum(task.left_tokens for task in list(self.running["prefill"]))

    def check_integrity(self) -> None:
        """Raises AssertionError where device blocks are lost, doubled or kept by nobody."""
        tables = [task.table for task in self.tasks() if task.table is not None]
        held = [block for table in tables for block in table.blocks.tolist()]
        assert len(held) == len(set(held)), "a device block has two owners"
        assert len(held) + self._kv.free_blocks == self._kv.capacity_blocks, "device blocks lost"
        assert all(task.table is None for tasks in self.waiting.values() for task in tasks), (
            "a waiting task holds blocks"
        )
