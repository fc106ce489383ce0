"""What happened in a stretch of time: requests summed up in slots of several lengths as they are stored.

A month is read from some 60 rows however many requests it had, any other stretch from at most a hundred. Times are kept
as histograms whose buckets grow by 5 %, so a percentile is within 2.5 % of the exact one, and percentiles of any stretch
come from adding its slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db.models import F, QuerySet

from apps.telemetry.models import RequestRecord, RequestSum
from apps.topology.models import Partition

_HOUR_S, _DAY_S = 3600.0, 86_400.0
# Length of a slot in seconds, and how long its sums are kept: a little longer than they are read.
SLOTS = {60: 3 * _HOUR_S, 900: 2 * _DAY_S, 7200: 9 * _DAY_S, 43_200: 32 * _DAY_S}
ROWS_READ = 100
TIMES = ("ttft", "e2e", "tpot", "queue")
TOKENS = ("prompt_tokens", "computed_tokens", "cached_tokens", "output_tokens")
LEAST_S, GROWTH = 1e-3, 1.05
_READ = ("at", "outcome", "band", "tenant", "queue_s", "ttft_s", "predicted_ttft_s", "e2e_s", *TOKENS)
Histogram = dict[str, int]
Slot = tuple[int, int]


@dataclass(slots=True)
class BandSums:
    """Of one band: requests by outcome, and a histogram of the seconds they waited for their turn."""

    outcomes: dict[str, int] = field(default_factory=dict)
    queue: Histogram = field(default_factory=dict)


@dataclass(slots=True)
class TenantSums:
    """Of one tenant: requests and tokens; the TTFT of `ttft_n` of them together, in whole microseconds."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_us: int = 0
    ttft_n: int = 0

    def count(self, request: Mapping[str, Any]) -> None:
        self.requests += 1
        self.prompt_tokens += request["prompt_tokens"]
        self.cached_tokens += request["cached_tokens"]
        self.output_tokens += request["output_tokens"]
        if request["ttft_s"] is not None:
            self.ttft_us += round(request["ttft_s"] * 1e6)
            self.ttft_n += 1

    def add(self, other: TenantSums) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def ttft_s(self) -> float | None:
        """Their mean."""
        return self.ttft_us / 1e6 / self.ttft_n if self.ttft_n else None


Tenants = dict[str, TenantSums]


@dataclass(slots=True)
class Sums:
    """Requests by outcome, tokens, tokens lost by cause; histograms of seconds and of the prediction's error ratio."""

    outcomes: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    times: dict[str, Histogram] = field(default_factory=dict)
    error: Histogram = field(default_factory=dict)
    bands: dict[str, BandSums] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Sums:
        """From what `as_dict` gave."""
        bands = {name: BandSums(**band) for name, band in data["bands"].items()}
        return cls(**{**data, "bands": bands})

    def as_dict(self) -> dict[str, Any]:
        """Plain values; its parts are this one's own, not copies."""
        bands = {name: _members(band) for name, band in self.bands.items()}
        return _members(self) | {"bands": bands}

    def count(self, request: Mapping[str, Any]) -> None:
        """One request: the columns of a record named in `_READ`, and what it `lost`."""
        outcome = request["outcome"] or "unknown"
        ttft_s, e2e_s, queue_s = request["ttft_s"], request["e2e_s"], request["queue_s"]
        tpot_s = None
        if e2e_s is not None and ttft_s is not None and request["output_tokens"] > 1:
            tpot_s = max(0.0, e2e_s - ttft_s) / (request["output_tokens"] - 1)
        _more(self.outcomes, outcome, 1)
        for name in TOKENS:
            _more(self.tokens, name, request[name])
        lost = request["lost"]
        for cause, tokens in lost.items() if isinstance(lost, Mapping) else ():
            if isinstance(tokens, int | float) and tokens > 0:
                _more(self.lost, str(cause), int(tokens))
        for name, seconds in zip(TIMES, (ttft_s, e2e_s, tpot_s, queue_s), strict=True):
            if seconds is not None:
                _more(self.times.setdefault(name, {}), _bucket(seconds), 1)
        if ttft_s is not None and request["predicted_ttft_s"] is not None:
            _more(self.error, _bucket(abs(request["predicted_ttft_s"] - ttft_s) / max(ttft_s, 1e-9)), 1)
        band = self.bands.setdefault(request["band"], BandSums())
        _more(band.outcomes, outcome, 1)
        if queue_s is not None:
            _more(band.queue, _bucket(queue_s), 1)

    def add(self, other: Sums) -> None:
        _add(self.outcomes, other.outcomes)
        _add(self.tokens, other.tokens)
        _add(self.lost, other.lost)
        _add(self.error, other.error)
        for name, found in other.times.items():
            _add(self.times.setdefault(name, {}), found)
        for name, theirs in other.bands.items():
            mine = self.bands.setdefault(name, BandSums())
            _add(mine.outcomes, theirs.outcomes)
            _add(mine.queue, theirs.queue)


@dataclass(frozen=True, slots=True)
class Period:
    """`start` and `end` (unix seconds) are whole slots around what was asked for, and not later than now."""

    start: float
    end: float
    sums: Sums

    @property
    def requests(self) -> int:
        return sum(self.sums.outcomes.values())

    @property
    def seconds(self) -> float:
        return max(1.0, self.end - self.start)


def between(partition: Partition, start: float, end: float, now: float) -> Period:
    """What ended in `[start, end)`, rounded out to whole slots: of the shortest length that is kept and few enough."""
    first, last, rows = _rows(partition, start, end, now)
    sums = Sums()
    for data in rows.values_list("data", flat=True):
        sums.add(Sums.read(data))
    return Period(float(first), min(float(last), now), sums)


def tenants_between(partition: Partition, start: float, end: float, now: float) -> Tenants:
    """What each tenant used in the time that `between` tells of."""
    found: Tenants = {}
    for data in _rows(partition, start, end, now)[2].values_list("tenants", flat=True):
        _add_tenants(found, _tenants(data))
    return found


def _rows(partition: Partition, start: float, end: float, now: float) -> tuple[int, int, QuerySet[RequestSum]]:
    """The first slot's beginning, the last one's end, and their rows."""
    fit = (s for s, kept_s in SLOTS.items() if end - start <= ROWS_READ * s and start >= now - kept_s)
    slot_s = next(fit, max(SLOTS))
    first, last = int(start // slot_s) * slot_s, math.ceil(end / slot_s) * slot_s
    rows = RequestSum.objects.filter(partition=partition, slot_s=slot_s, t0__gte=first, t0__lt=last)
    return first, last, rows.order_by()


def percentile(found: Mapping[str, int], share: float) -> float | None:
    """The value that `share` of a histogram does not exceed; None of an empty one."""
    left = share * sum(found.values())
    for bucket in sorted(map(int, found)):
        left -= found[str(bucket)]
        if left <= 0:
            return LEAST_S * GROWTH ** (bucket - 0.5) if bucket else 0.0
    return None


# ---- writing -------------------------------------------------------------------------------------------------------


def count_in(partition: Partition, records: Iterable[RequestRecord]) -> None:
    """Adds requests to their slots. Inside the transaction that stores them, under the partition's cursor lock."""
    found = _by_slot({name: getattr(r, name) for name in _READ} | {"lost": r.detail.get("lost")} for r in records)
    rows = RequestSum.objects.filter(partition=partition, t0__in={t0 for _, t0 in found})
    kept = {(row.slot_s, row.t0): row for row in rows.select_for_update(of=("self",))}
    changed, fresh = [], []
    for slot, (sums, tenants) in found.items():
        row = kept.get(slot)
        if row is None:
            fresh.append(RequestSum(partition=partition, slot_s=slot[0], t0=slot[1], **_columns(sums, tenants)))
            continue
        whole, every = Sums.read(row.data), _tenants(row.tenants)
        whole.add(sums)
        _add_tenants(every, tenants)
        row.data, row.tenants = _columns(whole, every).values()
        changed.append(row)
    RequestSum.objects.bulk_update(changed, ["data", "tenants"], batch_size=50)
    RequestSum.objects.bulk_create(fresh)


def counted(records: QuerySet[Any]) -> dict[Slot, dict[str, Any]]:
    """The columns of every slot that stored requests belong to, counted anew from their rows."""
    rows = records.order_by().values(*_READ, lost=F("detail__lost"))
    return {slot: _columns(*found) for slot, found in _by_slot(rows.iterator(chunk_size=2000)).items()}


def prune(partition: Partition, now: float) -> int:
    old = RequestSum.objects.filter(partition=partition)
    return sum(old.filter(slot_s=s, t0__lt=now - kept_s - s).delete()[0] for s, kept_s in SLOTS.items())


def _by_slot(requests: Iterable[Mapping[str, Any]]) -> dict[Slot, tuple[Sums, Tenants]]:
    found: dict[Slot, tuple[Sums, Tenants]] = {}
    for request in requests:
        at = request["at"].timestamp()
        for slot_s in SLOTS:
            sums, tenants = found.setdefault((slot_s, int(at // slot_s) * slot_s), (Sums(), {}))
            sums.count(request)
            tenants.setdefault(request["tenant"], TenantSums()).count(request)
    return found


def _members(sums: Sums | BandSums | TenantSums) -> dict[str, Any]:
    return {name: getattr(sums, name) for name in sums.__slots__}


def _columns(sums: Sums, tenants: Tenants) -> dict[str, Any]:
    return {"data": sums.as_dict(), "tenants": {name: _members(each) for name, each in tenants.items()}}


def _tenants(data: Mapping[str, Any]) -> Tenants:
    return {name: TenantSums(**each) for name, each in data.items()}


def _add_tenants(mine: Tenants, theirs: Tenants) -> None:
    for name, each in theirs.items():
        mine.setdefault(name, TenantSums()).add(each)


def _bucket(value: float) -> str:
    """0 is up to a thousandth; bucket n ends where n steps of 5 % more end."""
    return str(max(0, math.ceil(math.log(value / LEAST_S) / math.log(GROWTH)))) if value > LEAST_S else "0"


def _more(counts: dict[str, int], name: str, by: int) -> None:
    counts[name] = counts.get(name, 0) + by


def _add(counts: dict[str, int], others: Mapping[str, int]) -> None:
    for name, n in others.items():
        counts[name] = counts.get(name, 0) + n
