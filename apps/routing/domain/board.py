"""Many nodes at once: facts and load of every node as columns, and the predicted TTFT of a request on all of them.

The same numbers as `ttft.predict` gives node by node (a test compares them), some thirty times faster for hundreds of nodes.
Rows of the reason table are made when somebody reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from apps.planning.domain.cost_model import NetworkProfile
from apps.routing.domain.views import (
    CandidateTerms,
    DecodeQuery,
    DecodeTerms,
    FetchPlan,
    NodeFacts,
    Phase,
    PrefillQuery,
    QueuedWork,
    why_not_eligible,
)

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Row = TypeVar("Row", CandidateTerms, DecodeTerms)

_FACTS = ("c0", "c1", "c2", "c3", "chunk", "spare", "referenced")
_LOADS = ("head_until", "queued_s", "requests", "link_free_at")
_DECODE_FACTS = ("d0", "d1", "d2", "missed_ratio", "t_fwd", "limit", "capacity")
_DECODE_LOADS = ("decoding", "kv_tokens")


class Load(Protocol):
    """A node's load as the board needs it: when its running prefill ends and seconds queued behind that, at its own prices."""

    @property
    def prefills(self) -> Mapping[str, QueuedWork]: ...

    @property
    def link_free_at(self) -> float: ...

    @property
    def kv_tokens(self) -> int: ...

    @property
    def decode_requests(self) -> int: ...

    def priced(self, facts: NodeFacts) -> tuple[float, float]: ...


class Board:
    """Columns for one stage, one row a node, in the order of `facts`. `sync` before each use; only what changed is written
    again."""

    def __init__(self, stage: Phase) -> None:
        self._stage = stage
        self.facts: list[NodeFacts] = []
        self.index: dict[str, int] = {}
        self.why_not: list[str | None] = []
        self._resize(0)

    def _resize(self, nodes: int) -> None:
        self.eligible: Flags = np.zeros(nodes, dtype=bool)
        self.reachable: Flags = np.zeros(nodes, dtype=bool)
        names = (*_FACTS, *_LOADS, *_DECODE_FACTS, *_DECODE_LOADS)
        self.columns: dict[str, Floats] = {name: np.zeros(nodes) for name in names}

    def sync(self, facts: Sequence[NodeFacts], loads: Mapping[str, Load], changed: Collection[str]) -> None:
        """Take over `facts`, and the loads of the nodes in `changed`."""
        if len(facts) != len(self.facts):
            self.facts, self.why_not = [], []
            self.index = {entry.name: row for row, entry in enumerate(facts)}
            self._resize(len(facts))
        if facts != self.facts:
            before: list[NodeFacts | None] = [*self.facts] or [None] * len(facts)
            self.facts = list(facts)
            self.why_not = self.why_not or [None] * len(facts)
            for row, entry in enumerate(facts):
                if entry is not before[row]:
                    self._write_facts(row, entry)
                    self._write_load(row, loads.get(entry.name))
            self.index = {entry.name: row for row, entry in enumerate(facts)}
        for name in changed:
            row_of = self.index.get(name)
            if row_of is not None:
                self._write_load(row_of, loads.get(name))

    def _write_facts(self, row: int, facts: NodeFacts) -> None:
        prefill, columns = facts.prefill, self.columns
        columns["c0"][row], columns["c1"][row] = prefill.c0, prefill.c1
        columns["c2"][row], columns["c3"][row] = prefill.c2, prefill.c3
        columns["chunk"][row] = facts.prefill_chunk_tokens or np.inf
        columns["spare"][row] = np.inf if facts.pool_spare_tokens is None else facts.pool_spare_tokens
        columns["referenced"][row] = facts.pool_referenced_tokens
        decode = facts.decode
        moe = decode.experts > 0 and decode.experts_per_token > 0
        columns["d0"][row], columns["d1"][row], columns["d2"][row] = decode.d0, decode.d1 if moe else 0.0, decode.d2
        columns["missed_ratio"][row] = max(0.0, 1.0 - decode.experts_per_token / decode.experts) if moe else 1.0
        columns["t_fwd"][row], columns["limit"][row] = decode.t_fwd, facts.decode_limit
        columns["capacity"][row] = np.inf if facts.kv_capacity_tokens is None else facts.kv_capacity_tokens
        self.why_not[row] = why_not_eligible(facts, self._stage)
        self.eligible[row] = self.why_not[row] is None
        self.reachable[row] = facts.healthy and facts.state != "down"

    def _write_load(self, row: int, load: Load | None) -> None:
        head_until, queued_s = (-np.inf, 0.0) if load is None else load.priced(self.facts[row])
        columns = self.columns
        columns["head_until"][row], columns["queued_s"][row] = head_until, queued_s
        columns["requests"][row] = 0 if load is None else len(load.prefills)
        columns["link_free_at"][row] = -np.inf if load is None else load.link_free_at
        columns["decoding"][row] = 0 if load is None else load.decode_requests
        columns["kv_tokens"][row] = 0 if load is None else load.kv_tokens

    def predict(self, now: float, query: PrefillQuery, network: NetworkProfile, may_fetch: bool) -> Predictions:
        """The terms of every node's predicted TTFT (seconds)."""
        held = np.zeros(len(self.facts))
        for name, blocks in query.matches.items():
            row = self.index.get(name)
            if row is not None:
                held[row] = blocks
        return Predictions(self, now, query, network, may_fetch, held)


class _Table(Sequence[Row]):
    """One row a node, made from columns when it is read."""

    _facts: list[NodeFacts]

    def _row(self, row: int) -> Row:
        raise NotImplementedError

    def facts(self, row: int) -> NodeFacts:
        return self._facts[row]

    def __len__(self) -> int:
        return len(self._facts)

    def __iter__(self) -> Iterator[Row]:
        return (self._row(row) for row in range(len(self._facts)))

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, at: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(at, slice):
            return tuple(self._row(row) for row in range(*at.indices(len(self))))
        return self._row(range(len(self))[at])


class DecodePredictions(_Table[DecodeTerms]):
    """The table of one decode choice: a row for every node, as columns until it is read."""

    def __init__(self, board: Board, query: DecodeQuery) -> None:
        columns, self._query = board.columns, query
        self._facts, self._why_not = board.facts, board.why_not
        self.batch = columns["decoding"] + 1
        phi = 1.0 - columns["missed_ratio"] ** (columns["t_fwd"] * self.batch)
        self.iteration_s = columns["d0"] + columns["d1"] * phi + columns["d2"] * self.batch
        self._free = columns["capacity"] - columns["kv_tokens"]
        needed = query.context_tokens + query.output_tokens
        self._needed, self._capacity, self._eligible = needed, columns["capacity"].copy(), board.eligible.copy()
        # What fits beside the running ones fits at all.
        self.fits: Flags = board.eligible & (needed <= self._free) & (self.batch <= columns["limit"])
        home = None if query.home is None else board.index.get(query.home)
        self.home = home if home is not None and self.fits[home] else None

    @property
    def full(self) -> bool:
        """Whether a node would do, had it room."""
        return bool((self._eligible & ~self.fits & (self._needed <= self._capacity)).any())

    def _why_no_room(self, row: int) -> str | None:
        if self.fits[row]:
            return None
        if self._needed > self._capacity[row]:
            return "kv-too-small"
        return "kv-full" if self._needed > self._free[row] else "batch-full"

    def _row(self, row: int) -> DecodeTerms:
        name, why_not = self._facts[row].name, self._why_not[row]
        if why_not is not None:
            return DecodeTerms(name, why_not=why_not)
        free = float(self._free[row])
        return DecodeTerms(
            node=name,
            iteration_s=float(self.iteration_s[row]),
            batch=int(self.batch[row]),
            kv_free_tokens=None if free == np.inf else int(free),
            home=name == self._query.home,
            why_not=self._why_no_room(row),
        )


class Predictions(_Table[CandidateTerms]):
    """The reason table of one decision: a row for every node, as columns until it is read."""

    def __init__(
        self, board: Board, now: float, query: PrefillQuery, network: NetworkProfile, may_fetch: bool, held: Floats
    ) -> None:
        columns, self._query = board.columns, query
        self._facts, self._index, self._why_not, self.eligible = board.facts, board.index, board.why_not, board.eligible
        self._held = held
        self.requests = columns["requests"]
        self._remaining_s = np.maximum(0.0, columns["head_until"] - now)
        self._queue_s = columns["queued_s"].copy()
        local = np.minimum(held * query.block_tokens, query.prompt_tokens - 1)
        waited_s = self._remaining_s + self._queue_s
        self._local_tokens, self._service_s = local, _prefill_s(columns, query.prompt_tokens, local)
        self.total_s = waited_s + self._service_s
        self._source: int | None = None
        self._better_source = np.zeros(len(held), dtype=bool)
        self._fetches = self._better_source
        if may_fetch and query.matches:
            self._consider_fetching(board, now, network, waited_s)

    def _consider_fetching(self, board: Board, now: float, network: NetworkProfile, waited_s: Floats) -> None:
        columns, query = board.columns, self._query
        reachable = np.where(board.reachable, self._held, 0.0)
        most = reachable.max()
        if most <= 0:
            return
        holders = np.flatnonzero(reachable == most)
        self._source = source = int(min(holders, key=lambda row: self._facts[row].order))
        self._all_tokens = all_tokens = min(float(most) * query.block_tokens, query.prompt_tokens - 1.0)
        tokens = all_tokens - self._local_tokens
        self._better_source = (tokens > 0) & (self._held < most)
        self._better_source[source] = False
        link_s = np.maximum(0.0, columns["link_free_at"] - now)
        queued_tokens = link_s * network.peer_bandwidth_bytes_s / network.kv_bytes_per_token
        moved_bytes = (tokens + queued_tokens) * network.kv_bytes_per_token
        self._fetch_s = network.latency_s + moved_bytes / network.peer_bandwidth_bytes_s
        self._fetch_s += tokens * network.kv_bytes_per_token / network.host_to_device_bytes_s
        self._overflow_s = np.maximum(0.0, self._fetch_s - waited_s)
        displaced = np.minimum(np.maximum(0.0, tokens - columns["spare"]), columns["referenced"])
        self._duplicate_s = displaced * (columns["c1"] + columns["c2"] * all_tokens)
        self._fetched_service_s = _prefill_s(columns, query.prompt_tokens, all_tokens)
        fetched_s = waited_s + self._fetched_service_s + self._overflow_s + self._duplicate_s
        self._fetches = self._better_source & (fetched_s < self.total_s)
        self.total_s = np.where(self._fetches, fetched_s, self.total_s)

    def of(self, node: str) -> CandidateTerms | None:
        """One node's row."""
        row = self._index.get(node)
        return None if row is None else self._row(row)

    def _row(self, row: int) -> CandidateTerms:
        name, why_not = self._facts[row].name, self._why_not[row]
        if why_not is not None:
            return CandidateTerms(name, why_not=why_not)
        fetches, local_tokens = bool(self._fetches[row]), int(self._local_tokens[row])
        remaining_s, queue_s, total_s = (
            float(self._remaining_s[row]),
            float(self._queue_s[row]),
            float(self.total_s[row]),
        )
        if not fetches:
            return CandidateTerms(
                node=name,
                remaining_s=remaining_s,
                queue_s=queue_s,
                service_s=float(self._service_s[row]),
                total_s=total_s,
                cached_tokens=local_tokens,
                mode="recompute" if self._better_source[row] else "local",
            )
        assert self._source is not None
        source = self._facts[self._source].name
        return CandidateTerms(
            node=name,
            remaining_s=remaining_s,
            queue_s=queue_s,
            service_s=float(self._fetched_service_s[row]),
            fetch_s=float(self._fetch_s[row]),
            fetch_overflow_s=float(self._overflow_s[row]),
            duplicate_s=float(self._duplicate_s[row]),
            total_s=total_s,
            cached_tokens=int(self._all_tokens),
            fetch_tokens=int(self._all_tokens) - local_tokens,
            mode="fetch",
            fetch=FetchPlan(source, int(self._held[row]), int(self._held[self._source])),
        )


def best_rows(table: Sequence[CandidateTerms], count: int) -> Sequence[CandidateTerms]:
    """The whole table when it is short, else its `count` best rows: least predicted TTFT first."""
    if len(table) <= count:
        return table
    if isinstance(table, Predictions):
        total_s = np.where(table.eligible, table.total_s, np.inf)
        return [table[int(row)] for row in np.argsort(total_s, kind="stable")[:count]]
    return sorted(table, key=lambda row: (row.why_not is not None, row.total_s))[:count]


def _prefill_s(columns: Mapping[str, Floats], prompt_tokens: int, cached: Floats | float) -> Floats:
    """`ttft.prefill_s` of one prompt on every node, with `cached` tokens there, all of them restored from host memory."""
    new = prompt_tokens - cached
    iterations: Floats = np.maximum(1.0, np.ceil(new / columns["chunk"]))
    pairs = new * cached + new * (new + 1) / 2
    seconds: Floats = columns["c0"] * iterations + columns["c1"] * new + columns["c2"] * pairs + columns["c3"] * cached
    return seconds
