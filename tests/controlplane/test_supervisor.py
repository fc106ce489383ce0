"""The supervisor keeps children up, prefixes what they say, and leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controlplane.supervisor import Child, ChildFailed, Supervisor


def _alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _python(name: str, code: str, **more: object) -> Child:
    return Child(name, [sys.executable, "-c", code], **more)  # type: ignore[arg-type]


async def _until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


async def test_output_carries_the_name_of_the_child() -> None:
    lines: list[str] = []
    await Supervisor(lines.append, colour=False).run_once(_python("greeter", "print('hello')"))
    assert lines == ["         greeter | hello\n"]


async def test_a_one_off_that_fails_says_its_exit_code() -> None:
    with pytest.raises(ChildFailed, match="exit code 3"):
        await Supervisor([].append).run_once(_python("broken", "raise SystemExit(3)"))


async def test_a_killed_child_is_started_again() -> None:
    supervisor = Supervisor([].append)
    await supervisor.start(_python("sleeper", "import time; time.sleep(60)"))
    await _until(lambda: supervisor.process_id("sleeper"))
    first = supervisor.process_id("sleeper")
    os.kill(first, signal.SIGKILL)
    await _until(lambda: supervisor.process_id("sleeper") not in (None, first))
    assert supervisor.restarts["sleeper"] == 1
    await supervisor.stop()


async def test_restarts_back_off() -> None:
    lines: list[str] = []
    supervisor = Supervisor(lines.append, colour=False)
    await supervisor.start(_python("crasher", "raise SystemExit(1)"))
    await _until(lambda: supervisor.restarts.get("crasher", 0) >= 2)
    await supervisor.stop()
    waits = [line.strip().rsplit(" ", 2)[1] for line in lines if "restarting in" in line]
    assert waits[:2] == ["0.5", "1.0"]


async def test_stop_ends_in_reverse_order_and_takes_grandchildren_along(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    code = (
        "import signal, subprocess, sys, time\n"
        "def end(*_):\n    open({marks!r}, 'a').write({name!r} + '\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "helper = subprocess.Popen(['sleep', '60'])\n"
        "open({pids!r}, 'w').write(str(helper.pid))\n"
        "time.sleep(60)\n"
    )
    supervisor = Supervisor([].append)
    for name in ("first", "second"):
        pids = tmp_path / f"{name}.pid"

        async def ready(path: Path = pids) -> bool:
            return path.exists() and path.read_text() != ""

        await supervisor.start(_python(name, code.format(marks=str(marks), name=name, pids=str(pids)), ready=ready))
    helpers = [int((tmp_path / f"{name}.pid").read_text()) for name in ("first", "second")]
    assert all(_alive(helper) for helper in helpers)

    await supervisor.stop()

    assert marks.read_text().split() == ["second", "first"]
    await _until(lambda: not any(_alive(helper) for helper in helpers))


async def test_a_child_that_ignores_the_signal_is_killed() -> None:
    supervisor = Supervisor([].append)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    lines: list[str] = []
    supervisor = Supervisor(lines.append, colour=False)
    await supervisor.start(_python("stubborn", code, stop_timeout_s=0.3))
    await _until(lambda: any("up" in line for line in lines))
    process = supervisor.process_id("stubborn")
    await supervisor.stop()
    assert not _alive(process)


async def test_a_child_that_never_serves_is_reported() -> None:
    async def never() -> bool:
        return False

    supervisor = Supervisor([].append)
    with pytest.raises(ChildFailed, match="not ready within"):
        await supervisor.start(_python("mute", "import time; time.sleep(60)", ready=never, ready_timeout_s=0.3))
    await supervisor.stop()


def test_children_of_a_killed_supervisor_end_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import asyncio, sys\n"
        "from controlplane.supervisor import Child, Supervisor\n"
        "async def main():\n"
        "    s = Supervisor()\n"
        "    await s.start(Child('c', [sys.executable, '-c', 'import time; time.sleep(60)']))\n"
        "    while not s.process_id('c'): await asyncio.sleep(0.01)\n"
        f"    open({str(pid_file)!r}, 'w').write(str(s.process_id('c')))\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    child = int(pid_file.read_text())
    assert _alive(child)
    time.sleep(0.3)  # the launcher asks the kernel for the signal before it becomes the command
    parent.kill()
    parent.wait()
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(child)
