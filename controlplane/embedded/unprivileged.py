"""Run a command as an ordinary, named user: PostgreSQL refuses to run as root or as a user id without a name.

First choice: a user namespace in which root's own files belong to an ordinary user, so nothing changes owner and no folder
has to be opened up. Where the kernel or a container forbids that: the system's `nobody`. As a normal user: nothing to do.

Used as a launcher (`python -m controlplane.embedded.unprivileged MODE COMMAND...`) because a namespace can only be entered
by a process with one thread. The command also dies with the process that started it, so a killed supervisor leaves nothing.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal

Mode = Literal["plain", "namespace", "nobody"]

_CLONE_NEWUSER = 0x10000000
_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when the thread that started it ends. Linux only; elsewhere does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


def _enter_namespace() -> None:
    outside_uid, outside_gid = os.geteuid(), os.getegid()
    inside = pwd.getpwnam("nobody")
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUSER) != 0:
        raise PermissionError(ctypes.get_errno(), "a user namespace cannot be created here")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside.pw_uid} {outside_uid} 1")
    Path("/proc/self/gid_map").write_text(f"{inside.pw_gid} {outside_gid} 1")


def _become_nobody() -> None:
    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)


@cache
def mode() -> Mode:
    """How this process's children become an ordinary user here."""
    if os.geteuid() != 0 and _has_a_name(os.geteuid()):
        return "plain"
    probe = subprocess.run(wrap(["true"], "namespace"), capture_output=True, check=False)
    if probe.returncode == 0:
        return "namespace"
    return "nobody" if os.geteuid() == 0 else "plain"


def _has_a_name(user_id: int) -> bool:
    try:
        pwd.getpwuid(user_id)
    except KeyError:
        return False
    return True


def wrap(command: list[str], how: Mode, dies_by: int = signal.SIGTERM) -> list[str]:
    """`command` behind this launcher; `dies_by` is the signal it gets when its parent ends."""
    return [sys.executable, str(Path(__file__).resolve()), how, str(int(dies_by)), *command]


def reachable_by_others(path: Path) -> bool:
    """Whether a user with no rights of its own can get to `path` (every folder above it is open to pass through)."""
    return all(folder.stat().st_mode & 0o001 for folder in [path, *path.parents] if folder.is_dir())


def main(arguments: list[str]) -> None:
    how, dies_by, command = arguments[0], int(arguments[1]), arguments[2:]
    parent = os.getppid()
    if how == "namespace":
        _enter_namespace()
    elif how == "nobody":
        _become_nobody()
    die_with_parent(dies_by)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one has ended")
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
