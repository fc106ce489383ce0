"""What recorded sessions say about their own branches: the truth that the ledger's inference is measured against.

A recording has no signals, but its block ids tell afterwards what the ledger must tell at once. A request

    goes on with a context, its last few blocks aside       continuation
    shares a head with it, and nothing goes on with it any more     version: the context was compacted or edited
    ... and a later request goes on with what was left       fork: both lived
    shares nothing with any context of its session           new

An *epoch* is one version of one branch: it ends with the last request that went on with it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.harness.replay.blocks import TAIL_BLOCKS, Runs, common_prefix_blocks, count_blocks
from workers.harness.replay.sessions import parse_session


@dataclass(slots=True)
class TrueRequest:
    """`start_s`, `end_s` since the session's start. `branch` and `epoch` are numbers within the session; a fork's or
    version's `left` is the epoch that it left. `subagent`: the first request of a context of its own, spawned by the session."""

    start_s: float
    end_s: float
    blocks: Runs
    kind: str = "new"
    branch: int = 0
    epoch: int = 0
    left: int | None = None
    subagent: bool = False


@dataclass(slots=True)
class TrueSession:
    """`head_blocks`: tools and system prompt, `head_name` what they depend on: sessions of one name could share them."""

    name: str
    head_blocks: int
    head_name: str
    requests: list[TrueRequest]
    last_of_epoch: dict[int, TrueRequest] = field(default_factory=dict)
    final_epochs: set[int] = field(default_factory=set)


def read_sessions(path: Path) -> Iterator[TrueSession]:
    """Every session of a recording with its truth. Raises SessionFileError naming line and field, OSError."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            session = parse_session(line, f"{path.name} line {number}")
            yield _judged(json.loads(line), session.block_tokens)


def _judged(record: dict[str, Any], block_tokens: int) -> TrueSession:
    head_tokens = int(record.get("tool_tokens") or 0) + int(record.get("system_tokens") or 0)
    session = TrueSession(
        name=record["id"],
        head_blocks=head_tokens // block_tokens,
        head_name=json.dumps([record.get(name) for name in ("models", "tool_tokens", "system_tokens")]),
        requests=[],
    )
    numbers = _Numbers()
    own = [_request(entry, 0.0) for entry in record["requests"] if "requests" not in entry]
    _judge_context(own, numbers, session)
    for entry in record["requests"]:
        if "requests" in entry:
            calls = [_request(call, 0.0) for call in entry["requests"]]
            lasted_s = entry["dur_ms"] / 1000 if entry.get("dur_ms") is not None else calls[-1].end_s
            launched_s = max(0.0, entry["t"] - lasted_s)
            for call in calls:
                call.start_s += launched_s
                call.end_s += launched_s
            calls[0].subagent = True
            _judge_context(calls, numbers, session)
    session.requests.sort(key=lambda request: request.start_s)
    for request in session.requests:
        session.last_of_epoch[request.epoch] = request
    last_of_branch = {request.branch: request.epoch for request in session.requests}
    session.final_epochs = set(last_of_branch.values())
    return session


def _request(entry: dict[str, Any], offset_s: float) -> TrueRequest:
    start_s = float(entry["t"]) + offset_s
    blocks = tuple((first, count) for first, count in entry["h"])
    return TrueRequest(start_s, start_s + float(entry.get("api_time") or 0.0), blocks)


@dataclass(slots=True)
class _Numbers:
    branches: int = 0
    epochs: int = 0

    def branch(self) -> int:
        self.branches += 1
        return self.branches

    def epoch(self) -> int:
        self.epochs += 1
        return self.epochs


def _judge_context(requests: list[TrueRequest], numbers: _Numbers, session: TrueSession) -> None:
    """Labels the requests of one agent (the session itself, or a sub-agent), in order."""
    tips: list[TrueRequest] = []
    for index, request in enumerate(requests):
        session.requests.append(request)
        shared = [common_prefix_blocks(tip.blocks, request.blocks) for tip in tips]
        best = max(range(len(tips)), key=lambda at: (shared[at], at), default=None)
        if best is None or shared[best] == 0:
            request.branch, request.epoch = numbers.branch(), numbers.epoch()
            tips.append(request)
            continue
        tip = tips[best]
        if count_blocks(tip.blocks) - shared[best] <= TAIL_BLOCKS:
            request.kind, request.branch, request.epoch = "continuation", tip.branch, tip.epoch
            tips[best] = request
            continue
        request.left, request.epoch = tip.epoch, numbers.epoch()
        goes_on = any(
            count_blocks(tip.blocks) - common_prefix_blocks(tip.blocks, later.blocks) <= TAIL_BLOCKS
            for later in requests[index + 1 :]
        )
        if goes_on:
            request.kind, request.branch = "fork", numbers.branch()
            tips.append(request)
        else:
            request.kind, request.branch = "version", tip.branch
            tips[best] = request
