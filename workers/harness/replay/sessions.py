"""Recorded agent sessions, read from JSON lines (plain or gzip) and checked field by field.

The format is described in `data/PROVENANCE.md`. A sub-agent is recorded when it *finished*; here it is put where it was
launched, so that a replay can run it while its parent waits.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.harness.replay.blocks import SESSION_ID_BITS, Runs, count_blocks

PACKAGED_SESSIONS = Path(__file__).parent / "data" / "cc_sessions_excerpt.jsonl.gz"
LONGEST = 1e12


class SessionFileError(ValueError):
    """A recording that cannot be replayed: which file, line and field, and what was expected there."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One model call: `pause_s` after what came before it (an answer, or the last sub-agent), then the prompt."""

    prompt_tokens: int
    output_tokens: int
    blocks: Runs
    pause_s: float


@dataclass(frozen=True, slots=True)
class RecordedSubAgent:
    """A context that the session spawned `delay_s` after its last answer, and whose end it waited for."""

    name: str
    delay_s: float
    requests: tuple[RecordedRequest, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """Sub-agents that run at the same time, then (usually) the session's own next request."""

    subagents: tuple[RecordedSubAgent, ...]
    request: RecordedRequest | None


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    block_tokens: int
    turns: tuple[Turn, ...]

    @property
    def request_count(self) -> int:
        own = sum(turn.request is not None for turn in self.turns)
        return own + sum(len(subagent.requests) for turn in self.turns for subagent in turn.subagents)


def load_sessions(path: Path | None = None) -> list[Session]:
    """All sessions of a recording, in its order; the packaged excerpt unless `path` names another file.

    Raises `SessionFileError` for the first line that is not a session, `OSError` when the file cannot be read.
    """
    path = path or PACKAGED_SESSIONS
    sessions = [parse_session(line, f"{path.name} line {number}") for number, line in _lines(path)]
    if not sessions:
        raise SessionFileError(f"{path.name}: expected at least one session, found none")
    return sessions


def parse_session(line: str, where: str) -> Session:
    """One line of a recording. Raises `SessionFileError` that starts with `where`."""
    try:
        document = json.loads(line)
    except ValueError as problem:
        raise SessionFileError(f"{where}: expected a JSON object: {problem}") from None
    record = _Record(document, where)
    block_tokens = record.integer("block_size", minimum=1)
    return Session(record.text("id"), block_tokens, tuple(_turns(record, block_tokens)))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as probe:
        compressed = probe.read(2) == b"\x1f\x8b"
    opener = gzip.open if compressed else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:  # type: ignore[operator]
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as problem:
        raise SessionFileError(f"{path.name}: expected UTF-8 JSON lines, plain or gzip: {problem}") from None


def _turns(session: _Record, block_tokens: int) -> Iterator[Turn]:
    answered_at_s = 0.0
    waiting: list[RecordedSubAgent] = []
    waited_until_s = 0.0
    for entry in session.records("requests"):
        if "requests" in entry.document:
            finished_at_s = entry.number("t")
            calls = list(entry.records("requests"))
            last_answer_s = calls[-1].number("t") + calls[-1].number("api_time", default=0.0)
            launched_at_s = finished_at_s - entry.number("dur_ms", default=last_answer_s * 1000) / 1000
            requests = tuple(_request(call, block_tokens) for call in calls)
            waiting.append(RecordedSubAgent(entry.text("subagent"), max(0.0, launched_at_s - answered_at_s), requests))
            waited_until_s = max(waited_until_s, finished_at_s)
            continue
        request = _request(entry, block_tokens)
        started_at_s = entry.number("t")
        if waiting:
            pause_s = max(0.0, started_at_s - waited_until_s)
            request = RecordedRequest(request.prompt_tokens, request.output_tokens, request.blocks, pause_s)
        yield Turn(tuple(waiting), request)
        waiting, waited_until_s = [], 0.0
        answered_at_s = started_at_s + entry.number("api_time", default=0.0)
    if waiting:
        yield Turn(tuple(waiting), None)


def _request(entry: _Record, block_tokens: int) -> RecordedRequest:
    prompt_tokens = entry.integer("in", minimum=1)
    blocks = entry.runs("h")
    if count_blocks(blocks) * block_tokens > prompt_tokens:
        raise entry.error(
            "h", f"at most {prompt_tokens // block_tokens} blocks of {block_tokens} tokens", count_blocks(blocks)
        )
    return RecordedRequest(
        prompt_tokens=prompt_tokens,
        output_tokens=max(1, entry.integer("out", minimum=0)),
        blocks=blocks,
        pause_s=entry.number("think_time", default=0.0),
    )


class _Record:
    """One JSON object and where it stands; every read names the field that is wrong."""

    def __init__(self, document: Any, where: str) -> None:
        self.where = where
        if not isinstance(document, dict):
            raise SessionFileError(f"{where}: expected a JSON object, got {type(document).__name__}")
        self.document: dict[str, Any] = document

    def error(self, field: str, expected: str, got: Any) -> SessionFileError:
        return SessionFileError(f"{self.where}: {field}: expected {expected}, got {str(got)[:80]!r}")

    def text(self, field: str) -> str:
        value = self.document.get(field)
        if not isinstance(value, str) or not value:
            raise self.error(field, "a text", value)
        return value

    def integer(self, field: str, minimum: int) -> int:
        value = self.document.get(field)
        if type(value) is not int or value < minimum:
            raise self.error(field, f"a whole number of at least {minimum}", value)
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.document.get(field)
        if value is None and default is not None:
            return default
        unit = "milliseconds" if field.endswith("_ms") else "seconds"
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LONGEST:
            raise self.error(field, f"{unit} from 0 to {LONGEST:.0e}", value)
        return float(value)

    def records(self, field: str) -> Iterator[_Record]:
        value = self.document.get(field)
        if not isinstance(value, list) or not value:
            raise self.error(field, "a list of at least one request", value)
        for position, entry in enumerate(value):
            yield _Record(entry, f"{self.where}: {field}[{position}]")

    def runs(self, field: str) -> Runs:
        value = self.document.get(field)
        if not isinstance(value, list) or not value:
            raise self.error(field, "a list of at least one [first id, count]", value)
        for run in value:
            whole = isinstance(run, list) and len(run) == 2 and all(type(part) is int for part in run)
            if not whole or run[0] < 0 or run[1] < 1 or sum(run) > 1 << SESSION_ID_BITS:
                raise self.error(field, f"[first id, count] with ids under {1 << SESSION_ID_BITS}", run)
        return tuple((first, count) for first, count in value)
