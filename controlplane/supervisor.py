"""Runs a set of child processes: prefixed logs, restart with back-off, clean stop in reverse order, nothing left behind.

A child runs in a session of its own, so Ctrl-C reaches only the supervisor, which then stops the children in turn. Should
the supervisor itself be killed, the kernel ends the children (see `embedded.unprivileged`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from controlplane.embedded import unprivileged

BACKOFF_FIRST_S = 0.5
BACKOFF_LONGEST_S = 30.0
HEALTHY_AFTER_S = 30.0
_LINE_LIMIT_BYTES = 1 << 20


@dataclass(slots=True)
class Child:
    """One process to keep running.

    `ready` answers whether it serves; `wait_ready` fails after `ready_timeout_s`. `stop_signal` asks it to end,
    `stop_timeout_s` later its whole process group is killed.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], Awaitable[bool]] | None = None
    ready_timeout_s: float = 120.0
    stop_signal: int = signal.SIGTERM
    stop_timeout_s: float = 15.0
    before_start: Callable[[], None] | None = None
    folder: str | None = None


class ChildFailed(RuntimeError):
    """A child did not become ready."""


class Supervisor:
    """Starts children in order with `start`, keeps them up, and ends them all with `stop`."""

    def __init__(self, write: Callable[[str], None] | None = None, colour: bool | None = None) -> None:
        self._write = write or _to_stdout
        self._colour = sys.stdout.isatty() if colour is None else colour
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._children: dict[str, Child] = {}
        self._stopping: set[str] = set()
        self.restarts: dict[str, int] = {}

    def say(self, text: str, name: str = "switchyard") -> None:
        for line in text.splitlines():
            self._write(f"{self._prefix(name)} {line}\n")

    def process_id(self, name: str) -> int | None:
        """The child's process id while it runs."""
        process = self._processes.get(name)
        return process.pid if process and process.returncode is None else None

    async def start(self, child: Child) -> None:
        """Start and wait until ready. Raises ChildFailed when it is not ready in time; it is then stopped."""
        self._children[child.name] = child
        self._tasks[child.name] = asyncio.create_task(self._keep_running(child), name=f"child {child.name}")
        if child.ready is None:
            return
        deadline = time.monotonic() + child.ready_timeout_s
        while not await child.ready():
            if time.monotonic() > deadline or self._tasks[child.name].done():
                raise ChildFailed(f"{child.name} was not ready within {child.ready_timeout_s:.0f} s")
            await asyncio.sleep(0.1)

    async def run_once(self, child: Child) -> None:
        """Run to its end, with its output under the child's prefix. Raises ChildFailed on an exit code other than 0."""
        process = await self._spawn(child)
        try:
            code = await self._follow(child, process)
        except asyncio.CancelledError:
            await self._end(child, process)
            raise
        if code != 0:
            raise ChildFailed(f"{child.name} ended with exit code {code}")

    async def stop(self) -> None:
        """End every child, the last started first. Effects: no process of ours is left."""
        for name in reversed(list(self._tasks)):
            self._stopping.add(name)
            process = self._processes.get(name)
            if process and process.returncode is None:
                await self._end(self._children[name], process)
            self._tasks[name].cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tasks[name]
        self._tasks.clear()

    async def _keep_running(self, child: Child) -> None:
        delay_s = BACKOFF_FIRST_S
        while child.name not in self._stopping:
            started = time.monotonic()
            try:
                if child.before_start:
                    child.before_start()
                process = await self._spawn(child)
            except (OSError, RuntimeError) as error:
                self.say(f"cannot start: {error}", child.name)
            else:
                self._processes[child.name] = process
                code = await self._follow(child, process)
                if child.name in self._stopping:
                    return
                self.say(f"ended with exit code {code}", child.name)
            if time.monotonic() - started > HEALTHY_AFTER_S:
                delay_s = BACKOFF_FIRST_S
            self.restarts[child.name] = self.restarts.get(child.name, 0) + 1
            self.say(f"restarting in {delay_s:.1f} s", child.name)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, BACKOFF_LONGEST_S)

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *unprivileged.wrap(child.command, "plain", dies_by=child.stop_signal),
            env={**os.environ, **child.environment, "PYTHONUNBUFFERED": "1"},
            cwd=child.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=_LINE_LIMIT_BYTES,
        )

    async def _follow(self, child: Child, process: asyncio.subprocess.Process) -> int:
        """Copy the output until the child has ended; returns its exit code. Helpers it left behind are killed."""
        copying = asyncio.create_task(self._copy_output(child.name, process))
        try:
            code = await _exit_code(process, every_s=0.1)
            _kill_group(process.pid)
            await copying
        finally:
            copying.cancel()
        return code

    async def _copy_output(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the limit
                continue
            if not line:
                return
            self.say(line.decode(errors="replace").rstrip("\n"), name)

    async def _end(self, child: Child, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(child.stop_signal)
        try:
            await asyncio.wait_for(_exit_code(process, every_s=0.02), child.stop_timeout_s)
        except TimeoutError:
            self.say(f"did not stop within {child.stop_timeout_s:.0f} s; killed", child.name)
        _kill_group(process.pid)
        await _exit_code(process, every_s=0.02)

    def _prefix(self, name: str) -> str:
        text = f"{name:>16} |"
        if not self._colour:
            return text
        hue = 31 + sum(name.encode()) % 6
        return f"\x1b[{hue}m{text}\x1b[0m"


async def _exit_code(process: asyncio.subprocess.Process, every_s: float) -> int:
    """Wait for the process itself; asyncio's own wait also waits for helpers that hold its output open."""
    while process.returncode is None:
        await asyncio.sleep(every_s)
    return process.returncode


def _kill_group(leader: int) -> None:
    """Kill what is left of the session that this child led. The id is ours: the child was its leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _to_stdout(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(text)
        sys.stdout.flush()
