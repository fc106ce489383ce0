"""Random events against a plain model that keeps everything in dictionaries: what flow control promises, checked at every
command. `python -m tests.flowcontrol.domain.random_events EVENTS` proves it on that many events (`make proof-flow`)."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from apps.flowcontrol.domain.commands import Command, Dispatch, Drop
from apps.flowcontrol.domain.config import (
    FAIRNESS_POLICIES,
    ORDERING_POLICIES,
    BandConfig,
    CeilingConfig,
    FlowConfig,
    StageConfig,
)
from apps.flowcontrol.domain.controller import FlowController
from apps.flowcontrol.domain.events import (
    Cancel,
    Enqueue,
    Event,
    FlowRequest,
    PoolChanged,
    Reconfigure,
    StageReleased,
    Tick,
    Withdraw,
)
from apps.flowcontrol.domain.metered_fairness import MAX_HANDICAP_S
from apps.flowcontrol.domain.ordering import CONTINUE_LEAD_S, UNSTATED_SLO_S

PRIORITIES = (100, 0, -10, -20)
FEW_SHEDDABLE = (100, 50, 0, -10)
SHARES = {"b0": 0.3, "b1": 0.15, "b3": 0.05}
SHARE_SLACK = 2.0
BANDS = ("b0", "b1", "b2", "b3")
PREFILL_LIMIT, DECODE_LIMIT, TOKEN_LIMIT = 2, 5, 1000
BAND_PLACES, ALL_PLACES, ALL_BYTES = 12, 24, 1300
TTL_S, EMPTY_TTL_S, COLD_START_TTL_S = 20.0, 5.0, 45.0
WEIGHTS = (0.5, 1.0, 3.0)
MOST_TOKENS = 900
EPSILON = 1e-6
FATES = ("rejected", "expired", "displaced", "cancelled")
_FATE = {
    "RejectedCapacity": "rejected", "RejectedNoEndpoints": "rejected", "EvictedTTL": "expired",
    "EvictedNoEndpoints": "expired", "Displaced": "displaced", "EvictedContextCancelled": "cancelled",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class Known:
    """A request as the model knows it."""

    request: FlowRequest
    order: int
    at: float
    deadline: float
    line: str
    rank: float
    withdrawn: int = 0
    back_at: float = float("-inf")


@dataclass
class Setting:
    """What a run is about. `few_sheddable`: a global limit is often full of what may not be displaced. `shares`: bands with
    a guaranteed share. `cold_start`: an empty pool is waited for longer than a full one."""

    fairness: str
    ordering: str
    tokens: bool = False
    ceilings: bool = False
    withdrawals: bool = False
    few_sheddable: bool = False
    shares: bool = False
    cold_start: bool = False

    @property
    def priorities(self) -> tuple[int, ...]:
        return FEW_SHEDDABLE if self.few_sheddable else PRIORITIES

    @property
    def empty_ttl_s(self) -> float:
        return COLD_START_TTL_S if self.cold_start else EMPTY_TTL_S

    def share(self, band: str) -> float:
        return SHARES.get(band, 0.0) if self.shares else 0.0

    def config(self, priorities: list[int]) -> FlowConfig:
        bands = tuple(
            BandConfig(
                name, priority, self.fairness, self.ordering, max_requests=BAND_PLACES, min_share=self.share(name)
            )
            for name, priority in zip(BANDS, priorities, strict=True)
        )
        mode = "hybrid" if self.tokens else "requests"
        return FlowConfig(
            bands=bands,
            prefill=StageConfig(mode=mode, limit_per_node=PREFILL_LIMIT, token_limit_per_node=TOKEN_LIMIT),
            decode=StageConfig(limit_per_node=DECODE_LIMIT),
            max_requests=ALL_PLACES,
            max_bytes=ALL_BYTES,
            default_ttl_s=TTL_S,
            empty_pool_ttl_s=self.empty_ttl_s,
            ceilings=CeilingConfig("priority-holdback" if self.ceilings else "static", 0.4),
        )


@dataclass
class Model:
    """What must be true, kept the slow way."""

    setting: Setting
    priority: dict[str, int]
    waiting: dict[str, dict[str, Known]] = field(default_factory=lambda: {band: {} for band in BANDS})
    prefill: dict[str, Known] = field(default_factory=dict)
    decode: dict[str, Known] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    nodes: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    empty_since: float | None = float("-inf")
    filled_at: float = float("-inf")
    owed: dict[str, float] = field(default_factory=dict)
    """For each band with a share that waits: the dispatches it is owed since it began to wait."""
    ahead: Counter = field(default_factory=Counter)
    """By band: dispatches for its share alone, less what accrued since; bounds any stretch of time."""
    passed: dict[str, dict[str, float]] = field(default_factory=dict)
    """For each line that waits, by "band line": the tokens (or requests) others of its band got since it was served."""

    @property
    def waiting_count(self) -> int:
        return sum(map(len, self.waiting.values()))

    def ceiling(self, band: str) -> float:
        if not self.setting.ceilings:
            return 1.0
        rank = sorted(self.priority.values(), reverse=True).index(self.priority[band])
        return 1.0 - 0.6 * rank / 3

    def saturation(self) -> float:
        """Before a dispatch, by requests and tokens."""
        if not all(self.nodes.values()):
            return float("inf")
        by_prefill = len(self.prefill) / (PREFILL_LIMIT * self.nodes["prefill"])
        by_decode = (len(self.prefill) + len(self.decode)) / (DECODE_LIMIT * self.nodes["decode"])
        by_tokens = self.prefill_tokens() / (TOKEN_LIMIT * self.nodes["prefill"]) if self.setting.tokens else 0.0
        return max(by_prefill, by_decode, by_tokens)

    def prefill_tokens(self) -> int:
        return sum(known.request.uncached_tokens for known in self.prefill.values())

    # --- commands ------------------------------------------------------------------------------------------------

    def dispatched(self, command: Dispatch) -> None:
        saturation = self.saturation()
        assert saturation < 1.0, f"dispatched at {saturation}"
        band = command.band
        assert saturation < self.ceiling(band) + EPSILON, f"{band} dispatched above its ceiling"
        for other, members in self.waiting.items():
            may_go = saturation < self.ceiling(other)
            higher = members and may_go and self.priority[other] > self.priority[band]
            assert not higher or command.reason_code == "min-share", f"{other} was to go first"
        self._check_shares(command)
        known = self._leave(band, command.request_id)
        assert known is not None
        if self.setting.tokens and self.prefill:
            room = TOKEN_LIMIT * self.nodes["prefill"] - self.prefill_tokens()
            assert known.request.uncached_tokens <= room, "more tokens than there is room for"
        self._check_line(band, known)
        if not self.setting.withdrawals:
            self._check_fairness(band, known)
        self.prefill[command.request_id] = known
        self.counts["dispatched"] += 1

    def _leave(self, band: str, request_id: str) -> Known | None:
        known = self.waiting[band].pop(request_id, None)
        if not self.waiting[band]:
            self.owed.pop(band, None)
        return known

    def _check_shares(self, command: Dispatch) -> None:
        """No band with a share waits without getting it, and none gets more than it over those above it."""
        band, by_share = command.band, command.reason_code == "min-share"
        assert self.setting.share(band) or not by_share, f"{band} has no share"
        for other in SHARES:
            share = self.setting.share(other)
            self.ahead[other] = max(0.0, self.ahead[other] - share)
            if not self.waiting[other]:
                continue
            got = 1.0 if other == band else 0.0
            self.owed[other] = max(0.0, self.owed.get(other, 0.0) + share - got)
            assert self.owed[other] <= SHARE_SLACK, f"{other} is owed {self.owed[other]} dispatches"
        if by_share:
            self.ahead[band] += 1.0
            assert self.ahead[band] <= SHARE_SLACK, f"{band} got {self.ahead[band]} dispatches more than its share"

    def _check_line(self, band: str, known: Known) -> None:
        mine = (not known.withdrawn, -known.withdrawn if self._fcfs else known.rank, known.rank, known.order)
        for other in self.waiting[band].values():
            if other.line == known.line:
                rank = -other.withdrawn if self._fcfs else other.rank
                assert mine <= (not other.withdrawn, rank, other.rank, other.order), "not the first of its line"

    @property
    def _fcfs(self) -> bool:
        return self.setting.ordering == "fcfs"

    def _check_fairness(self, band: str, known: Known) -> None:
        """No line is passed beyond its policy's bound."""
        fairness = self.setting.fairness
        if fairness == "global-strict":
            return
        mine = f"{band} {known.line}"
        if fairness == "least-attained-service":
            if self._fcfs:
                oldest = min((other.at for other in self.waiting[band].values()), default=known.at)
                assert known.at <= oldest + MAX_HANDICAP_S + EPSILON, "passed by who came much later"
            return
        amount = 1.0 if fairness == "round-robin" else known.request.uncached_tokens / known.request.weight
        for line in {other.line for other in self.waiting[band].values()} - {known.line}:
            got = self.passed.setdefault(f"{band} {line}", {})
            got[mine] = got.get(mine, 0.0) + amount
            bound = 1.0
            if fairness == "token-fair":
                bound = MOST_TOKENS / weight_of(line) + MOST_TOKENS / known.request.weight
            assert got[mine] <= bound + EPSILON, f"{line} was passed {got[mine]} times, at most {bound}"
        self.passed.pop(mine, None)

    def dropped(self, now: float, command: Drop, newcomer: FlowRequest | None) -> None:
        fate = _FATE[command.outcome]
        self.counts[fate] += 1
        known = self._leave(command.band, command.request_id)
        if fate == "rejected":
            assert known is None and newcomer is not None and newcomer.request_id == command.request_id
            self._check_rejected(newcomer, command)
        elif fate == "expired":
            assert known is not None and abs(self.ends_at(known) - now) < EPSILON, "not at the end of its time"
            assert (command.outcome == "EvictedTTL") == (self.empty_since is None), "the wrong reason"
        elif fate == "displaced":
            assert known is not None and newcomer is not None
            self._check_displaced(command.band, known, newcomer)
        if known is not None and not any(w.line == known.line for w in self.waiting[command.band].values()):
            self.passed.pop(f"{command.band} {known.line}", None)

    def ends_at(self, known: Known) -> float:
        """When waiting ends; for one that came back after its time that is when it came back."""
        empty_ttl_s = self.setting.empty_ttl_s
        if self.empty_since is not None:
            ends = max(known.at, self.empty_since) + empty_ttl_s
        else:
            ends = max(known.at, self.filled_at) + TTL_S
        ends = min(ends, known.at + max(TTL_S, empty_ttl_s))
        if known.request.ttl_s is not None:
            ends = min(ends, known.at + known.request.ttl_s)
        return max(ends, known.back_at)

    def _check_rejected(self, request: FlowRequest, command: Drop) -> None:
        places, size = self._too_many(request)
        lower = [w.request for band in BANDS if self._gives_way(band, request) for w in self.waiting[band].values()]
        full = len(lower) < places or sum(r.bytes for r in lower) < size
        assert len(self.waiting[request.band]) >= BAND_PLACES or full, f"there was room for {request.request_id}"
        assert command.retry_after_s is not None and 1 <= command.retry_after_s <= 30

    def _too_many(self, request: FlowRequest) -> tuple[int, int]:
        """How many places and bytes are missing for this request beside all that wait."""
        others = [w.request for band in self.waiting.values() for w in band.values() if w.request is not request]
        return len(others) + 1 - ALL_PLACES, sum(r.bytes for r in others) + request.bytes - ALL_BYTES

    def _gives_way(self, band: str, request: FlowRequest) -> bool:
        return self.priority[band] < min(0, self.priority[request.band])

    def _check_displaced(self, band: str, known: Known, newcomer: FlowRequest) -> None:
        assert self.priority[band] < 0, "only sheddable bands give way"
        assert self._gives_way(band, newcomer), "only to a higher band"
        places, size = self._too_many(newcomer)
        assert places + 1 > 0 or size + known.request.bytes > 0, "nobody gives way while there is room"
        assert newcomer.request_id in self.waiting[newcomer.band], "nobody gives way to one who is refused"
        rest = self.waiting[band].values()
        worth = (not known.request.starts_branch, bool(known.withdrawn))
        for w in rest:
            other = (not w.request.starts_branch, bool(w.withdrawn))
            newer = w.order > known.order and not known.withdrawn
            assert other > worth or (other == worth and not newer), "another one was to go first"
        lower = [b for b in BANDS if self.priority[b] < self.priority[band] and self.waiting[b]]
        assert not lower, "a lower band was to go first"


def _rejected(command: Command) -> bool:
    return isinstance(command, Drop) and _FATE[command.outcome] == "rejected"


def weight_of(line: str) -> float:
    return WEIGHTS[int(line[1:]) % len(WEIGHTS)]


class Run:
    """One controller and its model, driven by one seed."""

    def __init__(self, seed: int, setting: Setting) -> None:
        self.rng = random.Random(f"{seed} {setting}")
        self.setting = setting
        priorities = self.rng.sample(setting.priorities, 4)
        self.model = Model(setting, dict(zip(BANDS, priorities, strict=True)))
        self.controller = FlowController(setting.config(priorities))
        self.now = 0.0
        self.count = 0
        for stage in ("prefill", "decode"):
            self._pool(stage, 1)

    def go(self, events: int, check_every: int = 1) -> Counter:
        """Drives so many events; answers how many requests met which fate."""
        for step in range(events):
            self.now += self.rng.choice((0.0, 0.0, 0.01, 0.3))
            self._keep_deadlines()
            self._one(step)
            totals, model = self.controller.totals, self.model
            counted = {fate: getattr(totals, fate) for fate in (*FATES, "dispatched", "arrived")}
            assert all(model.counts[fate] == number for fate, number in counted.items()), (counted, model.counts)
            assert totals.waiting == model.waiting_count, (step, totals, model.counts)
            assert totals.arrived == sum(counted[fate] for fate in (*FATES, "dispatched")) + totals.waiting
            if step % check_every == 0:
                self._look_closely()
        return self.model.counts

    def _keep_deadlines(self) -> None:
        for _ in range(1000):
            deadline = self.controller.next_deadline()
            if deadline is None or deadline > self.now:
                return
            later, self.now = self.now, max(deadline, self.now - 1.0)
            self._send(Tick())
            self.now = later
        raise AssertionError("a deadline does not pass")

    def _look_closely(self) -> None:
        self.controller.check_integrity()
        model = self.model
        assert all(model.ends_at(w) >= self.now - EPSILON for band in model.waiting.values() for w in band.values())
        sums = {band.name: (band.waiting, band.waiting_bytes) for band in self.controller.snapshot(self.now).bands}
        for band, members in model.waiting.items():
            assert sums[band] == (len(members), sum(w.request.bytes for w in members.values()))

    def _send(self, event: Event) -> None:
        self._check(self.controller.handle(self.now, event))

    def _check(self, commands: list[Command], newcomer: FlowRequest | None = None) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                self.model.dispatched(command)
            else:
                self.model.dropped(self.now, command, newcomer)

    def _one(self, step: int) -> None:
        rng, model, draw = self.rng, self.model, self.rng.random()
        if draw < 0.45:
            self._enqueue(f"r{step}")
        elif draw < 0.68:
            self._finish_prefill()
        elif draw < 0.90:
            self._finish_decode()
        elif draw < 0.93:
            self._cancel()
        elif draw < 0.96:
            stage = rng.choice(("prefill", "decode"))
            self._pool(stage, rng.choice((0, 1, 1, 2, 2, 3)))
        elif draw < 0.97:
            priorities = rng.sample(self.setting.priorities, 4)
            model.priority = dict(zip(BANDS, priorities, strict=True))
            self._send(Reconfigure(self.setting.config(priorities)))
        else:
            self._send(Tick())

    def _enqueue(self, name: str) -> None:
        rng = self.rng
        flow = f"f{rng.randrange(6)}"
        request = FlowRequest(
            request_id=name,
            band=rng.choice(BANDS),
            flow_id=flow,
            bytes=rng.randrange(100),
            uncached_tokens=rng.randrange(1, MOST_TOKENS),
            received_at=self.now,
            ttl_s=rng.choice((None, 0.5, 4.0, 100.0)),
            slo_ttft_s=rng.choice((None, 0.2, 3.0)),
            starts_branch=rng.random() < 0.5,
            weight=weight_of(flow),
        )
        self.count += 1
        deadline = self.now + min(TTL_S, request.ttl_s or TTL_S)
        ranks = {
            "fcfs": 0.0,
            "edf": deadline,
            "slo-deadline": self.now + (UNSTATED_SLO_S if request.slo_ttft_s is None else request.slo_ttft_s),
            "continue-first": self.now + (CONTINUE_LEAD_S if request.starts_branch else 0.0),
        }
        line = "" if self.setting.fairness == "global-strict" else flow
        known = Known(request, self.count, self.now, deadline, line, ranks[self.setting.ordering])
        self.model.counts["arrived"] += 1
        commands = self.controller.handle(self.now, Enqueue(request))
        if not any(command.request_id == name and _rejected(command) for command in commands):
            self.model.waiting[request.band][name] = known
        self._check(commands, request)

    def _finish_prefill(self) -> None:
        model, rng = self.model, self.rng
        if not model.prefill:
            return
        name = rng.choice(list(model.prefill))
        if self.setting.withdrawals and rng.random() < 0.2:
            self._withdraw(name)
        else:
            model.decode[name] = model.prefill.pop(name)
            self._send(StageReleased(name, "prefill"))

    def _finish_decode(self) -> None:
        if self.model.decode:
            name = self.rng.choice(list(self.model.decode))
            del self.model.decode[name]
            self._send(StageReleased(name, "decode"))

    def _withdraw(self, name: str) -> None:
        known = self.model.prefill.pop(name)
        known.withdrawn = self.count = self.count + 1
        known.back_at = self.now
        self.model.waiting[known.request.band][name] = known
        self.model.counts["dispatched"] -= 1
        self._send(Withdraw(name))

    def _cancel(self) -> None:
        model = self.model
        names = [name for band in model.waiting.values() for name in band] + list(model.prefill) + list(model.decode)
        if not names:
            return
        name = self.rng.choice(names)
        model.prefill.pop(name, None)
        model.decode.pop(name, None)
        self._send(Cancel(name))

    def _pool(self, stage: str, nodes: int) -> None:
        model = self.model
        model.nodes[stage] = nodes
        empty = not all(model.nodes.values())
        if not empty:
            if model.empty_since is not None:
                model.filled_at = self.now
            model.empty_since = None
        elif model.empty_since is None:
            model.empty_since = self.now
        self._send(PoolChanged(stage, nodes))


VARIANTS = ("", "tokens", "ceilings", "withdrawals", "few_sheddable", "shares", "cold_start")
SETTINGS = [
    Setting(fairness, ordering, **({variant: True} if variant else {}))
    for variant in VARIANTS
    for fairness in FAIRNESS_POLICIES
    for ordering in ORDERING_POLICIES
]


def main(events: int) -> None:
    began, counts = time.process_time(), Counter()
    each = max(1, events // len(SETTINGS))
    for number, setting in enumerate(SETTINGS):
        counts += Run(number, replace(setting)).go(each, check_every=50)
    told = ", ".join(f"{fate} {number:,}" for fate, number in sorted(counts.items()))
    print(f"{each * len(SETTINGS):,} events in {len(SETTINGS)} settings, {time.process_time() - began:.0f} s: {told}")
    print("every promise kept")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3_000_000)
