"""Recorded agent sessions as scripts: closed-loop, with the recorded pauses; sub-agents run while their parent waits.

The format and its reader are the replay's (`workers/harness/replay/sessions.py`). Block ids are a session's own, so each
play of a session is other content than the play before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import HASH_BYTES
from workers.harness.replay.blocks import Runs, is_rewrite
from workers.harness.replay.sessions import RecordedRequest, RecordedSubAgent, Session
from workers.simulator.clients import Script, Turn
from workers.simulator.workloads.blocks import content


def block_tokens_of(sessions: Sequence[Session]) -> int:
    """The block size they were all recorded with. Raises ValueError for a mixture."""
    sizes = {session.block_tokens for session in sessions}
    if len(sizes) != 1:
        raise ValueError(f"block_size: expected one size in all sessions, got {sorted(sizes)}")
    return sizes.pop()


@dataclass(frozen=True)
class SessionScripts:
    """`maker(number)`: the script of one play; every session comes once before any comes again, in shuffled order."""

    sessions: Sequence[Session]
    seed: int = 0
    max_pause_s: float = 300.0
    pause_scale: float = 1.0

    def __call__(self, number: int) -> Script:
        round_number, place = divmod(number, len(self.sessions))
        order = list(range(len(self.sessions)))
        Random(f"{self.seed}:{round_number}:sessions").shuffle(order)
        session = self.sessions[order[place]]
        return _Play(session, f"{session.id}-{self.seed}-{number}", self.max_pause_s, self.pause_scale).script()


@dataclass
class _Play:
    session: Session
    name: str
    max_pause_s: float
    pause_scale: float

    def __post_init__(self) -> None:
        last = 0
        for turn in self.session.turns:
            requests = [*(r for subagent in turn.subagents for r in subagent.requests)]
            if turn.request is not None:
                requests.append(turn.request)
            last = max(last, *(first + count for r in requests for first, count in r.blocks), 0)
        self._ids = content(self.name, last)

    def _chain(self, runs: Runs) -> bytes:
        ids = self._ids
        return b"".join(ids[first * HASH_BYTES : (first + count) * HASH_BYTES] for first, count in runs)

    def _wait(self, pause_s: float) -> float:
        return min(pause_s * self.pause_scale, self.max_pause_s)

    def script(self) -> Script:
        """The session's own requests; sub-agents are helpers of the turn that waited for them."""
        own = [turn for turn in self.session.turns if turn.request is not None]
        requests = [turn.request for turn in own if turn.request is not None]
        branch = _Branch(self, self.name, None, 0.0)
        for turn, written in zip(own, branch.turns(requests), strict=True):
            helpers = tuple(self._helper(subagent) for subagent in turn.subagents)
            yield written._replace(helpers=helpers)

    def _helper(self, subagent: RecordedSubAgent) -> Script:
        branch = _Branch(self, f"{self.name}.{subagent.name}", self.name, self._wait(subagent.delay_s))
        return branch.turns(subagent.requests)


@dataclass
class _Branch:
    play: _Play
    name: str
    parent: str | None
    delay_s: float

    def turns(self, requests: Sequence[RecordedRequest]) -> Iterator[Turn]:
        """What was decoded counts as stored where the next prompt goes on with this one."""
        relation = "subagent" if self.parent is not None else None
        version = 0
        before: Runs = ()
        chains = [self.play._chain(request.blocks) for request in requests[:1]]
        for number, request in enumerate(requests):
            chain = chains[-1]
            following = self.play._chain(requests[number + 1].blocks) if number + 1 < len(requests) else b""
            if is_rewrite(before, request.blocks):
                version += 1
            before = request.blocks
            answer = b""
            if following.startswith(chain):
                until = (request.prompt_tokens + request.output_tokens) // self.play.session.block_tokens
                answer = following[len(chain) : until * HASH_BYTES]
            end = number == len(requests) - 1
            pause_s = self.play._wait(request.pause_s) + (self.delay_s if number == 0 else 0.0)
            yield Turn(
                pause_s,
                chain,
                request.prompt_tokens,
                request.output_tokens,
                BranchSignal(self.name, version, self.parent, relation, end, self.play.name, None, ""),  # type: ignore[arg-type]
                answer,
            )
            chains.append(following)
