"""Measures how well branches are inferred where a harness sends no signals: `make proof-inference DATA=FILE`.

Recorded sessions are played to the KV machine at their own times, many at once and as one tenant, with every signal taken
away; what the ledger says is compared with what their block ids say afterwards (`inference_truth`). Three ways:

    as-recorded    no two sessions share a block
    shared-heads   sessions with equal tools and system prompt share those blocks, as they would in one service
    session-ids    the same, but each session sends its id, which its sub-agents share

Printed for each: precision and recall of versions, forks and ends; how late ends are noticed; CPU time a request.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path
from typing import Any, Literal

import numpy as np

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.hashing import HASH_BYTES, HashedPrompt
from apps.kvcache.domain.machine import KvConfig, KvMachine
from bench.inference_truth import TrueRequest, TrueSession, read_sessions
from bench.report import report
from workers.harness.replay.sessions import SessionFileError

ROOT = bytes(HASH_BYTES)
BLOCK_TOKENS = 64
KINDS = ("version", "fork", "subagent", "end")
Way = Literal["as-recorded", "shared-heads", "session-ids"]
WAYS: tuple[Way, ...] = ("as-recorded", "shared-heads", "session-ids")
START_EVERY_S = 60.0


@dataclass(slots=True)
class Score:
    """Of what was said, how much is true; of what is true, how much was said."""

    said: int = 0
    said_rightly: int = 0
    true: int = 0
    found: int = 0

    @property
    def precision(self) -> float | None:
        return self.said_rightly / self.said if self.said else None

    @property
    def recall(self) -> float | None:
        return self.found / self.true if self.true else None


@dataclass(slots=True)
class Result:
    """`confusion` counts (true kind, inferred kind) of requests; `end_delay_s` the time from each end to its notice."""

    requests: int = 0
    sessions: int = 0
    cpu_s: float = 0.0
    live_most: int = 0
    confusion: dict[tuple[str, str], int] = field(default_factory=dict)
    scores: dict[str, Score] = field(default_factory=lambda: {name: Score() for name in KINDS})
    end_delay_s: list[float] = field(default_factory=list)


def chain_of(request: TrueRequest, session_number: int, head_number: int, head_blocks: int) -> bytes:
    """The prompt's chain: an id stands for everything before it, so (context, id) is as good as a hash."""
    ids = np.concatenate([np.arange(first, first + count, dtype="<u8") for first, count in request.blocks])
    chain = np.empty((len(ids), 2), dtype="<u8")
    chain[:, 0] = np.where(ids <= head_blocks, (1 << 32) + head_number, session_number)
    chain[:, 1] = ids
    return chain.tobytes()


def _ends_s(session: TrueSession) -> list[float]:
    """When each request ends. Recorded times are rounded: one that seems to reach into the next request of its own
    branch ended just before that."""
    ends_s = [max(request.end_s, request.start_s + 0.001) for request in session.requests]
    latest: dict[int, int] = {}
    for index, request in enumerate(session.requests):
        before = latest.get(request.branch)
        if before is not None:
            ends_s[before] = min(ends_s[before], request.start_s)
        latest[request.branch] = index
    return ends_s


def measure(sessions: list[TrueSession], way: Way, config: KvConfig | None = None) -> Result:
    """Plays all sessions without signals and scores what the ledger said."""
    return _Play(sessions, way, config).run()


class _Play:
    def __init__(self, sessions: list[TrueSession], way: Way, config: KvConfig | None) -> None:
        self._sessions = sessions
        self._shared_heads = way != "as-recorded"
        self._session_ids = way == "session-ids"
        self._machine = KvMachine(config)
        self._result = Result(sessions=len(sessions))
        self._heads: dict[str, int] = {}
        self._carries: dict[str, tuple[int, int]] = {}  # inferred branch -> (session, epoch) of its last request
        self._carried: dict[tuple[int, int], str] = {}  # true (session, branch) -> inferred branch of its last request
        self._said_forks: list[tuple[int, TrueRequest]] = []
        self._closed_s: dict[tuple[int, int], float] = {}

    def run(self) -> Result:
        result = self._result
        for now, number, index, begins in self._timeline():
            while (due := self._machine.next_deadline()) is not None and due <= now:
                self._handle(due, ev.Tick())
            request = self._sessions[number].requests[index]
            name = f"{number}.{index}"
            if begins:
                self._seen(now, number, name, request)
            else:
                self._handle(now, ev.OutputStored(name, b""))
            result.live_most = max(result.live_most, self._machine.branches_live)
        while (due := self._machine.next_deadline()) is not None:
            self._handle(due, ev.Tick())
        self._score_forks()
        self._score_ends()
        return result

    def _timeline(self) -> Any:
        """(time, session, request, whether it begins or ends), in order of time; ends before beginnings."""
        for_each = []
        for number, session in enumerate(self._sessions):
            start_s = number * START_EVERY_S
            moments = [(start_s + r.start_s, 1, number, i) for i, r in enumerate(session.requests)]
            moments += [(start_s + end_s, 0, number, i) for i, end_s in enumerate(_ends_s(session))]
            for_each.append(sorted(moments))
        for at, begins, number, index in merge(*for_each):
            yield at, number, index, bool(begins)

    def _handle(self, now: float, event: ev.Event) -> list[ev.Command]:
        began = time.process_time()
        commands = self._machine.handle(now, event)
        self._result.cpu_s += time.process_time() - began
        for command in commands:
            if isinstance(command, ev.BranchClosed):
                self._ended(now, command.branch_id)
        return commands

    def _seen(self, now: float, number: int, name: str, request: TrueRequest) -> None:
        session, result = self._sessions[number], self._result
        head_number = self._heads.setdefault(session.head_name, len(self._heads))
        chain = chain_of(request, number, head_number, session.head_blocks if self._shared_heads else 0)
        prompt = HashedPrompt(len(chain) // HASH_BYTES * BLOCK_TOKENS + 1, BLOCK_TOKENS, ROOT, chain)
        signal = ev.BranchSignal(tenant="all", session=session.name if self._session_ids else None)
        commands = self._handle(now, ev.RequestSeen(name, signal, prompt))
        (resolved,) = (command for command in commands if isinstance(command, ev.BranchResolved))
        result.requests += 1
        true_kind = "subagent" if self._session_ids and request.subagent else request.kind
        self._score_subagent(true_kind, resolved.kind)
        pair = (true_kind, resolved.kind)
        result.confusion[pair] = result.confusion.get(pair, 0) + 1
        same_branch = self._carried.get((number, request.branch)) == resolved.branch_id
        self._score_version(request, resolved, same_branch)
        if resolved.kind == "fork":
            self._said_forks.append((number, request))
        self._carries[resolved.branch_id] = (number, request.epoch)
        self._carried[number, request.branch] = resolved.branch_id

    def _score_version(self, request: TrueRequest, resolved: ev.BranchResolved, same_branch: bool) -> None:
        score = self._result.scores["version"]
        right = request.kind == resolved.kind == "version" and same_branch
        score.true += request.kind == "version"
        score.said += resolved.kind == "version"
        score.said_rightly += right
        score.found += right

    def _score_subagent(self, true_kind: str, said: str) -> None:
        score = self._result.scores["subagent"]
        right = true_kind == said == "subagent"
        score.true += true_kind == "subagent"
        score.said += said == "subagent"
        score.said_rightly += right
        score.found += right

    def _score_forks(self) -> None:
        """A fork is found when both sides were carried by different branches in the end, and said rightly at either of
        its two sides: at first the ledger may take it for a new version, until the old side goes on."""
        score = self._result.scores["fork"]
        sides: set[tuple[int, int]] = set()
        for number, session in enumerate(self._sessions):
            branch_of = {request.epoch: request.branch for request in session.requests}
            for request in session.requests:
                if request.kind == "fork" and request.left is not None:
                    score.true += 1
                    mine, other = request.branch, branch_of[request.left]
                    score.found += self._carried[number, mine] != self._carried[number, other]
                    sides.update(((number, request.epoch), (number, request.left)))
        score.said = len(self._said_forks)
        score.said_rightly = sum((number, request.epoch) in sides for number, request in self._said_forks)

    def _ended(self, now: float, branch_id: str) -> None:
        """An end is right when nothing goes on with the context later."""
        carried = self._carries.pop(branch_id, None)
        if carried is None:
            return
        number, epoch = carried
        score = self._result.scores["end"]
        score.said += 1
        last_s = number * START_EVERY_S + self._sessions[number].last_of_epoch[epoch].start_s
        if now >= last_s:
            score.said_rightly += 1
            self._closed_s.setdefault(carried, now)

    def _score_ends(self) -> None:
        score = self._result.scores["end"]
        for number, session in enumerate(self._sessions):
            for epoch in session.final_epochs:
                score.true += 1
                closed_s = self._closed_s.get((number, epoch))
                if closed_s is not None:
                    score.found += 1
                    ended_s = number * START_EVERY_S + session.last_of_epoch[epoch].end_s
                    self._result.end_delay_s.append(closed_s - ended_s)


def print_result(way: str, result: Result) -> None:
    """One JSON line a number; the confusion of kinds goes to standard error, as a table."""
    name = f"inference.{way}"
    report(f"{name}.requests", result.requests, "requests")
    for kind, score in result.scores.items():
        if not score.true:
            continue
        report(f"{name}.{kind}.precision", score.precision, "ratio")
        report(f"{name}.{kind}.recall", score.recall, "ratio")
        report(f"{name}.{kind}.true", score.true, kind + "s")
    for quantile in (50, 95):
        report(f"{name}.end.delay_p{quantile}", float(np.percentile(result.end_delay_s or [0.0], quantile)), "s")
    report(f"{name}.live_most", result.live_most, "branches")
    report(f"{name}.cpu", result.cpu_s / max(1, result.requests) * 1e6, "us/request")
    for (true, inferred), count in sorted(result.confusion.items()):
        sys.stderr.write(f"{way:13} true {true:13} inferred {inferred:13} {count:7}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.inference", description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="recorded sessions, one a line of JSON, gzip")
    options = parser.parse_args(arguments)
    if options.data is None or not options.data.is_file():
        missing = "no recording was named" if options.data is None else f"{options.data} is not there"
        sys.stderr.write(f"inference: {missing}. Say which recording to use: make proof-inference DATA=FILE\n")
        return 2
    try:
        sessions = list(read_sessions(options.data))
    except (SessionFileError, OSError) as problem:
        sys.stderr.write(f"inference: {problem}\n")
        return 2
    for way in WAYS:
        print_result(way, measure(sessions, way))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
