"""Predicted TTFT of one request on one node, term by term.

    TTFT = remaining batch + queue + service + what fetching takes longer than waiting + work lost to the copies made

Seconds throughout. Each node may fetch the prefix a peer holds or compute it again; the cheaper one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from apps.planning.domain.cost_model import NetworkProfile, fetch_s, pairs, prefill_work_s
from apps.routing.domain.views import CandidateTerms, FetchPlan, NodeFacts, NodeView, PrefillQuery, QueuedWork


@dataclass(frozen=True, slots=True)
class Source:
    """A pool that holds the first `blocks` blocks of the prompt."""

    node: str
    blocks: int


def prefill_s(facts: NodeFacts, work: QueuedWork) -> float:
    """Seconds of one request's prefill on a node, computed in the node's chunks."""
    chunk_tokens = facts.prefill_chunk_tokens
    iterations = max(1, -(-work.t_uc // chunk_tokens)) if chunk_tokens else 1
    return prefill_work_s(facts.prefill, work.t_uc, pairs(work.t_uc, work.t_c), work.t_rst, iterations)


def queue_s(facts: NodeFacts, queued: Iterable[QueuedWork]) -> float:
    """Seconds of everything queued on a node."""
    return sum(prefill_s(facts, work) for work in queued)


def duplicate_s(
    copied_tokens: int, spare_tokens: int | None, referenced_tokens: int, recompute_s_per_token: float
) -> float:
    """Seconds of future work lost when a copy pushes out KV that somebody still needs.

    Copies first fill `spare_tokens` (free or worthless memory; None = not known, nothing is charged). What does not fit
    displaces referenced tokens, as many as there are, and each will be computed again.
    """
    if spare_tokens is None:
        return 0.0
    displaced_tokens = min(max(0, copied_tokens - spare_tokens), referenced_tokens)
    return displaced_tokens * recompute_s_per_token


def best_sources(matches: Mapping[str, int], views: Sequence[NodeView]) -> tuple[Source, ...]:
    """Pools to fetch from, longest prefix first, then node order. Any reachable node serves its pool, whatever its phase."""
    if not matches:
        return ()
    reachable = [view for view in views if view.facts.healthy and view.facts.state != "down"]
    holders = [view for view in reachable if matches.get(view.name, 0) > 0]
    holders.sort(key=lambda view: (-matches[view.name], view.facts.order))
    return tuple([Source(view.name, matches[view.name]) for view in holders])


def predict(
    query: PrefillQuery, view: NodeView, sources: Sequence[Source], network: NetworkProfile, may_fetch: bool
) -> CandidateTerms:
    """The row of one eligible node: computing with what its own pool holds, or fetching first where that is faster."""
    facts = view.facts
    waiting_s = queue_s(facts, view.queued) if view.queued_s is None else view.queued_s
    local_blocks = query.matches.get(view.name, 0)
    local_tokens = _usable_tokens(query, local_blocks)
    row = _row(query, view, waiting_s, local_tokens)
    source = next((s for s in sources if s.node != view.name), None) if may_fetch else None
    if source is None or source.blocks <= local_blocks:
        return row
    all_tokens = _usable_tokens(query, source.blocks)
    if all_tokens <= local_tokens:
        return row
    plan = FetchPlan(source.node, local_blocks, source.blocks)
    fetched = _fetch_row(query, view, waiting_s, local_tokens, all_tokens, plan, network)
    if fetched.total_s < row.total_s:
        return fetched
    return _row(query, view, waiting_s, local_tokens, recompute=True)


def _usable_tokens(query: PrefillQuery, blocks: int) -> int:
    """At least one token of every prompt is computed: its logits give the first output token."""
    return min(blocks * query.block_tokens, query.prompt_tokens - 1)


def _row(
    query: PrefillQuery, view: NodeView, waiting_s: float, cached_tokens: int, recompute: bool = False
) -> CandidateTerms:
    service_s = prefill_s(view.facts, QueuedWork(query.prompt_tokens - cached_tokens, cached_tokens, cached_tokens))
    return CandidateTerms(
        node=view.name,
        remaining_s=view.running_remaining_s,
        queue_s=waiting_s,
        service_s=service_s,
        total_s=view.running_remaining_s + waiting_s + service_s,
        cached_tokens=cached_tokens,
        mode="recompute" if recompute else "local",
    )


def _fetch_row(
    query: PrefillQuery,
    view: NodeView,
    waiting_s: float,
    local_tokens: int,
    all_tokens: int,
    plan: FetchPlan,
    network: NetworkProfile,
) -> CandidateTerms:
    facts = view.facts
    fetch_tokens = all_tokens - local_tokens
    queued_tokens = view.fetch_queue_bytes / network.kv_bytes_per_token
    seconds = fetch_s(fetch_tokens, fetch_tokens, queued_tokens, network)
    overflow_s = max(0.0, seconds - (view.running_remaining_s + waiting_s))
    service_s = prefill_s(facts, QueuedWork(query.prompt_tokens - all_tokens, all_tokens, all_tokens))
    lost_s = duplicate_s(
        fetch_tokens,
        facts.pool_spare_tokens,
        facts.pool_referenced_tokens,
        facts.prefill.c1 + facts.prefill.c2 * all_tokens,
    )
    return CandidateTerms(
        node=view.name,
        remaining_s=view.running_remaining_s,
        queue_s=waiting_s,
        service_s=service_s,
        fetch_s=seconds,
        fetch_overflow_s=overflow_s,
        duplicate_s=lost_s,
        total_s=view.running_remaining_s + waiting_s + service_s + overflow_s + lost_s,
        cached_tokens=all_tokens,
        fetch_tokens=fetch_tokens,
        mode="fetch",
        fetch=plan,
    )
