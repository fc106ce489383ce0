"""Long work that somebody asks for and a worker does later: its state, progress and answer in one JSON file, beside it a
file that cancels and one that is locked while the work goes on. Asker and worker share the folder."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAITING, RUNNING, DONE, FAILED, CANCELLED, INTERRUPTED = (
    "waiting", "running", "done", "failed", "cancelled", "interrupted",
)  # fmt: skip
OPEN = (WAITING, RUNNING)
Progress = Callable[[float, str], bool]
Json = dict[str, Any]


class Job:
    """One job by its id: letters, digits, - and _; ValueError for any other."""

    def __init__(self, folder: Path, job_id: str) -> None:
        if not job_id or any(not (letter.isalnum() or letter in "-_") for letter in job_id):
            raise ValueError(f"expected letters, digits, - and _, got {job_id!r}")
        self._path = folder / f"{job_id}.json"
        self._cancel = folder / f"{job_id}.cancel"
        self._lock = folder / f"{job_id}.lock"
        folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> Json | None:
        """What is known of it; None when nobody asked. `interrupted` says that its worker died, `stopping` that somebody
        cancelled what a worker has not let go of yet."""
        try:
            document: Json = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if document.get("state") == RUNNING and not self._is_held():
            document["state"] = INTERRUPTED
        elif document.get("state") == RUNNING and self._cancel.exists():
            document["stopping"] = True
        return document

    def ask(self, about: Mapping[str, Any]) -> None:
        """Note that it was asked for; a worker is told by other means."""
        self._cancel.unlink(missing_ok=True)
        self._write({"state": WAITING, "progress": 0.0, "step": "", "asked_at": time.time(), **about})

    def cancel(self) -> None:
        """Stop at the next step; what no worker has begun is over at once."""
        self._cancel.touch()
        known = self.read()
        if known is not None and known.get("state") in (WAITING, INTERRUPTED):
            self._write({**known, "state": CANCELLED, "finished_at": time.time()})

    def carry_out(self, about: Mapping[str, Any], work: Callable[[Progress], Json]) -> Json:
        """Does the work, unless it was cancelled before or another worker does it; returns what `read` says then.

        `progress(share, step)` answers False once somebody cancelled; the work then returns what it has so far. A failure
        is noted and raised again.
        """
        with self._held() as mine:
            known = self.read() or {}
            known.pop("stopping", None)
            if not mine or (known.get("state") == CANCELLED and self._cancel.exists()):
                return known
            base = {**known, **about, "began_at": time.time()}
            stopped = False

            def progress(share: float, step: str) -> bool:
                nonlocal stopped
                self._write({**base, "state": RUNNING, "progress": round(share, 3), "step": step})
                stopped = self._cancel.exists()
                return not stopped

            try:
                found = work(progress)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"[:500]
                self._write({**base, "state": FAILED, "problem": problem, "finished_at": time.time()})
                raise
            ended = {"state": CANCELLED} if stopped else {"state": DONE, "progress": 1.0}
            document = {**base, **ended, "step": "", "finished_at": time.time(), **found}
            self._write(document)
            self._cancel.unlink(missing_ok=True)
            return document

    def keep(self, found: Mapping[str, Any]) -> None:
        """Store an answer that was found elsewhere."""
        self._write({"state": DONE, "progress": 1.0, **found})

    @contextmanager
    def _held(self) -> Iterator[bool]:
        """True when nobody else does the work; the system lets go of it when this process ends."""
        with self._lock.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _is_held(self) -> bool:
        with self._held() as free:
            return not free

    def _write(self, document: Mapping[str, Any]) -> None:
        part = self._path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(document, indent=1), encoding="utf-8")
        part.replace(self._path)


def gently(work: Callable[[], Json]) -> Json:
    """Runs work that takes minutes of computing in a thread that yields to everything else on the machine."""
    found: list[Json] = []
    problem: list[BaseException] = []

    def run() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            found.append(work())
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=run, name="gently")
    thread.start()
    thread.join()
    if problem:
        raise problem[0]
    return found[0]
