"""Request traces: Mooncake (block ids, no sessions), Azure (lengths alone), and agentic Mooncake (sessions and what waits
for what). Open traces keep their own times, scaled in rate; rows that wait for others are played closed-loop.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from apps.kvcache.domain.events import BranchSignal
from workers.simulator.clients import Script, Turn
from workers.simulator.workloads.blocks import content

NO_SIGNAL = BranchSignal()


class TraceError(ValueError):
    """A trace that cannot be played: which file, line and field, and what was expected there."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. `at_s` from the trace's start, where it has a time of its own; `waits_for` names requests
    whose answers come first, `pause_s` what passes after them."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] | None = None
    request_id: str = ""
    session: str = ""
    waits_for: tuple[str, ...] = ()
    pause_s: float = 0.0


def _open(path: Path) -> IO[str]:
    with path.open("rb") as probe:
        compressed = probe.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if compressed else path.open(encoding="utf-8")


def _whole(document: dict[str, Any], names: tuple[str, ...], where: str, least: int = 0) -> int:
    for name in names:
        value = document.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise TraceError(f"{where}: {name}: expected a whole number of at least {least}, got {value!r}")
            return value
    raise TraceError(f"{where}: {names[0]}: expected a whole number of at least {least}, got nothing")


def _number(document: dict[str, Any], names: tuple[str, ...], where: str) -> float | None:
    for name in names:
        value = document.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise TraceError(f"{where}: {name}: expected milliseconds of at least 0, got {value!r}")
            return float(value)
    return None


def read_mooncake(path: Path, limit: int | None = None) -> list[Row]:
    """Mooncake's JSON lines, agentic ones too: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`, and where it
    has sessions `session_id`, `request_id`, `wait_for`, `delay` and `tool_wait_ms`. Raises TraceError, OSError."""
    rows: list[Row] = []
    last_of: dict[str, str] = {}
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if limit is not None and len(rows) >= limit:
                break
            where = f"{path.name} line {number}"
            row = _mooncake_row(line, where, number, last_of)
            rows.append(row)
    if not rows:
        raise TraceError(f"{path.name}: expected at least one request, found none")
    return rows


def _mooncake_row(line: str, where: str, number: int, last_of: dict[str, str]) -> Row:
    try:
        document = json.loads(line)
    except ValueError as problem:
        raise TraceError(f"{where}: expected a JSON object: {problem}") from None
    if not isinstance(document, dict):
        raise TraceError(f"{where}: expected a JSON object, got {type(document).__name__}")
    blocks = document.get("hash_ids")
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise TraceError(f"{where}: hash_ids: expected a list of whole numbers, got {str(blocks)[:60]!r}")
    request_id = str(document.get("request_id") or f"line-{number}")
    session = str(document.get("session_id") or "")
    at_ms = _number(document, ("timestamp", "created_time"), where)
    delay_ms = (_number(document, ("delay", "delay_ms"), where) or 0.0) + (
        _number(document, ("tool_wait_ms",), where) or 0.0
    )
    waits_for = document.get("wait_for") or []
    if not isinstance(waits_for, list):
        raise TraceError(f"{where}: wait_for: expected a list of request ids, got {waits_for!r}")
    # A turn of a session follows the turn before it, unless it says what it waits for.
    if session and not waits_for and session in last_of:
        waits_for = [last_of[session]]
    if session:
        last_of[session] = request_id
    if at_ms is None and not waits_for:
        raise TraceError(f"{where}: timestamp: expected milliseconds, or wait_for, got neither")
    return Row(
        (at_ms or 0.0) / 1000,
        _whole(document, ("input_length", "input_tokens"), where, 1),
        max(1, _whole(document, ("output_length", "output_tokens"), where)),
        tuple(blocks),
        request_id,
        session,
        tuple(str(name) for name in waits_for),
        delay_ms / 1000,
    )


def read_azure(path: Path, limit: int | None = None) -> list[Row]:
    """Azure's LLM inference traces: `TIMESTAMP,ContextTokens,GeneratedTokens`. Raises TraceError, OSError."""
    rows: list[Row] = []
    first: datetime | None = None
    with _open(path) as lines:
        for number, entry in enumerate(csv.DictReader(lines), start=2):
            if limit is not None and len(rows) >= limit:
                break
            where = f"{path.name} line {number}"
            try:
                at = datetime.fromisoformat(entry["TIMESTAMP"][:26])
                prompt, output = int(entry["ContextTokens"]), int(entry["GeneratedTokens"])
            except (KeyError, TypeError, ValueError):
                expected = "TIMESTAMP, ContextTokens and GeneratedTokens"
                raise TraceError(f"{where}: expected {expected}, got {str(entry)[:80]!r}") from None
            first = first or at
            rows.append(Row((at - first).total_seconds(), max(1, prompt), max(1, output)))
    if not rows:
        raise TraceError(f"{path.name}: expected at least one request, found none")
    return rows


@dataclass
class TraceScripts:
    """A trace as scripts with their moments, for `mixes.play_all`. `rate` 2 is twice as fast. `block_tokens`: the size of the
    trace's blocks (of the partition's, where it has none)."""

    rows: list[Row]
    block_tokens: int
    rate: float = 1.0
    name: str = "trace"
    _children: dict[str, list[Row]] = field(default_factory=dict)

    def scripts(self) -> Iterator[tuple[float, Script]]:
        """Rows that wait for nothing start a script; what waits for a row goes on after it: the first as the same script,
        others as its helpers."""
        known = {row.request_id for row in self.rows if row.request_id}
        roots: list[Row] = []
        for row in self.rows:
            waits = [name for name in row.waits_for if name in known]
            if waits:
                self._children.setdefault(waits[-1], []).append(row)
            else:
                roots.append(row)
        for number, row in enumerate(roots):
            yield row.at_s / self.rate, self._follow(row, number)

    def _follow(self, row: Row, number: int) -> Script:
        here: Row | None = row
        helpers: tuple[Script, ...] = ()
        while here is not None:
            yield self._turn(here, number, helpers)
            following = self._children.get(here.request_id, [])
            own = next((child for child in following if child.session == here.session), None)
            others = [child for child in following if child is not own]
            helpers = tuple(self._follow(child, number) for child in others)
            if own is None and helpers:
                # Nobody of this session goes on; the helpers still have their turn.
                for helper in helpers:
                    yield from helper
            here = own

    def _turn(self, row: Row, number: int, helpers: tuple[Script, ...]) -> Turn:
        if row.blocks is None:
            chain = content(f"{self.name}/{number}", row.prompt_tokens // self.block_tokens)
        else:
            full = min(len(row.blocks), row.prompt_tokens // self.block_tokens)
            chain = b"".join(content(f"{self.name}/block/{block}", 1) for block in row.blocks[:full])
        signal = NO_SIGNAL
        if row.session:
            signal = BranchSignal(f"{self.name}-{row.session}", None, None, None, False, row.session, None, "")
        return Turn(
            row.pause_s if row.waits_for else 0.0, chain, row.prompt_tokens, row.output_tokens, signal, b"", helpers
        )


def span_s(rows: Iterable[Row]) -> float:
    """The trace's own length."""
    return max((row.at_s for row in rows), default=0.0)
