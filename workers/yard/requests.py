"""The life of one request, as a state machine whose every move is checked.

    queued -> prefilling -> handing-over -> decoding -> done
      ^           |  ^            |  ^          |
      +-----------+  +------------+--+----------+   a node failed: compute it again elsewhere, or hand it over again
                  |  ^            |             |
                  v  |            v             v
                 waiting (no node can take it now) -> prefilling or handing-over

From every living state a request may also end as failed, cancelled or dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from apps.flowcontrol.domain.commands import Outcome
from apps.routing.domain.views import CandidateTerms
from workers.yard.events import PrefillResult, YardRequest
from workers.yard.recovery import Attempts, HandedOver


class Stage(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing-over"
    DECODING = "decoding"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DROPPED = "dropped"

    @property
    def ended(self) -> bool:
        return self in _ENDS


_ENDS = frozenset((Stage.DONE, Stage.FAILED, Stage.CANCELLED, Stage.DROPPED))
_NEXT: dict[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset((Stage.PREFILLING,)),
    Stage.PREFILLING: frozenset((Stage.PREFILLING, Stage.HANDING_OVER, Stage.WAITING)),
    Stage.HANDING_OVER: frozenset((Stage.HANDING_OVER, Stage.DECODING, Stage.PREFILLING, Stage.WAITING)),
    Stage.DECODING: frozenset((Stage.HANDING_OVER, Stage.PREFILLING, Stage.WAITING)),
    Stage.WAITING: frozenset((Stage.PREFILLING, Stage.HANDING_OVER)),
}


Move = tuple[float, Stage, Stage, str]
"""When, from where, to where, and why."""


class InvalidTransition(Exception):
    """A move that the life of a request does not have; the message tells the request's story so far."""


@dataclass(slots=True)
class RequestState:
    """One living request. Times are the driver's clock; `sent_tokens` output tokens have gone to the client.

    `in_flow` says whether flow control still counts it, `holds_prefill` whether its prefill place is still taken: each is
    given back exactly once. `matches`: blocks of the prompt by node, as of `matches_at`. `whole`: the node that prefills it decodes it too, in one call. `broken`
    counts broken attempts, `failure` is what was said of the last one, `avoid` names the nodes they broke on.
    """

    request: YardRequest
    arrived_at: float
    uncached_estimate_tokens: int = 0
    branch_id: str | None = None
    branch_kind: str | None = None
    stage: Stage = Stage.QUEUED
    in_flow: bool = False
    holds_prefill: bool = False
    prefill_node: str | None = None
    decode_node: str | None = None
    placed_at: float = 0.0
    whole: bool = False
    attempts: int = 0
    broken: Attempts = field(default_factory=Attempts)
    failure: str = ""
    handed_over: HandedOver | None = None
    avoid: set[str] = field(default_factory=set)
    waiting_for: str = ""
    waiting_until: float = 0.0
    not_before: float = 0.0
    queue_s: float | None = None
    flow_outcome: Outcome | None = None
    predicted_ttft_s: float | None = None
    expected_cached_tokens: int = 0
    matches: Mapping[str, int] = field(default_factory=dict)
    matches_at: float = -1.0
    terms: Sequence[CandidateTerms] = ()
    blind: tuple[str, ...] = ()
    reason: str = ""
    result: PrefillResult | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    sent_tokens: int = 0
    lost_tokens: dict[str, int] = field(default_factory=dict)
    story: list[Move] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def context_tokens(self) -> int:
        """Prompt and output so far."""
        return self.request.prompt.tokens + self.sent_tokens

    @property
    def remaining_tokens(self) -> int:
        return max(1, self.request.output_tokens - self.sent_tokens)

    @property
    def look_at(self) -> float:
        """When a waiting request must be looked at even if nothing else happens."""
        return self.not_before or self.waiting_until

    def move(self, now: float, stage: Stage, why: str) -> None:
        """Goes to another stage. Raises `InvalidTransition` for a move that does not exist."""
        legal = not self.stage.ended and (stage.ended or stage in _NEXT[self.stage])
        if not legal:
            story = "; ".join([f"{at:.3f} {was} -> {then}: {said}" for at, was, then, said in self.story[-20:]])
            raise InvalidTransition(f"{self.request_id}: {self.stage} -> {stage} ({why}) is no move. So far: {story}")
        self.story.append((now, self.stage, stage, why))
        self.stage = stage
