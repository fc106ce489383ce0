"""Who asked a node for what: the work under way, the hand-overs that wait to be fetched, and the leases of their owners.

An owner is a gateway process (header `x-switchyard-gateway`). Every call of it renews its lease; where it falls silent, what
it asked for is given up, for nobody will come back for it. Work without an owner lives as long as its connection.

Pure: time comes in as `now` (seconds, any origin that does not step back).
"""

from __future__ import annotations

from typing import NamedTuple

from workers.agent.phase import StageName

LEASE_S = 15.0
OVERDUE_S = 1.0
NOBODY = ""
Owners = dict[str, list[str]]


class GivenUp(NamedTuple):
    """Requests whose work must be aborted, and those whose hand-over must be released."""

    work: list[str]
    handoffs: list[str]


class Custody:
    """The node's book of requests. A request has at most one piece of work a stage and one hand-over."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self.leases_ended = 0
        self._heard: dict[str, float] = {}
        self._work: dict[StageName, dict[str, str]] = {"prefill": {}, "decode": {}}
        self._handoffs: dict[str, tuple[str, float]] = {}

    def heard(self, now: float, owner: str) -> None:
        """A call of `owner` came."""
        if owner != NOBODY:
            self._heard[owner] = now

    def overslept(self, seconds: float) -> None:
        """This process did not run for so long: nobody was silent, it was deaf."""
        self._heard = {owner: at + seconds for owner, at in self._heard.items()}

    def begin(self, stage: StageName, request_id: str, owner: str) -> None:
        self._work[stage][request_id] = owner

    def end(self, stage: StageName, request_id: str) -> None:
        self._work[stage].pop(request_id, None)

    def has(self, stage: StageName, request_id: str) -> bool:
        return request_id in self._work[stage]

    def count(self, stage: StageName) -> int:
        return len(self._work[stage])

    @property
    def handoffs(self) -> int:
        return len(self._handoffs)

    def keep_handoff(self, request_id: str, owner: str, expires_at: float) -> None:
        """A computed context waits for its decode node until `expires_at`."""
        self._handoffs[request_id] = (owner, expires_at)

    def drop_handoff(self, request_id: str) -> bool:
        """It is fetched, or nobody wants it any more; False where none was kept."""
        return self._handoffs.pop(request_id, None) is not None

    def give_up(self, now: float) -> GivenUp:
        """What has no owner any more: silent ones' work and hand-overs, and hand-overs past their time."""
        silent = {owner for owner, at in self._heard.items() if now - at > self.lease_s}
        for owner in silent:
            del self._heard[owner]
        work = [request_id for jobs in self._work.values() for request_id, owner in jobs.items() if owner in silent]
        self.leases_ended += bool(work)
        over = [name for name, (owner, until) in self._handoffs.items() if owner in silent or until <= now]
        for name in over:
            del self._handoffs[name]
        return GivenUp(list(dict.fromkeys(work)), over)

    def listing(self) -> dict[str, Owners]:
        """Request ids by stage (`handoff` too) and owner: by it a gateway finds what it does not know (any more)."""
        listed: dict[str, Owners] = {}
        for stage, jobs in self._work.items():
            listed[stage] = _by_owner(jobs)
        listed["handoff"] = _by_owner({name: owner for name, (owner, _) in self._handoffs.items()})
        return listed


def _by_owner(owned: dict[str, str]) -> Owners:
    owners: Owners = {}
    for request_id, owner in owned.items():
        owners.setdefault(owner, []).append(request_id)
    return owners


class OrphanGauge:
    """How many requests an engine holds that nobody waits for: those that outlived their caller by `OVERDUE_S`.

    An abort takes effect between two iterations, so a shorter surplus is no orphan.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._least = 0

    def observe(self, now: float, surplus: int) -> int:
        """`surplus`: requests in the engine less those asked for. Answers the orphans."""
        if surplus <= 0:
            self._since, self._least = None, 0
            return 0
        if self._since is None:
            self._since, self._least = now, surplus
        self._least = min(self._least, surplus)
        return self._least if now - self._since > OVERDUE_S else 0
