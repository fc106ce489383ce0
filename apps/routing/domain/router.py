"""The router: which node prefills a request and which decodes it, with every node's row kept as the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apps.planning.domain.cost_model import decode_iteration_s
from apps.routing.domain.board import DecodePredictions
from apps.routing.domain.loads import LoadBook
from apps.routing.domain.policies import DecodeCandidate, LeastTtft, Pick, PrefillCandidate, Rotation, make_policy
from apps.routing.domain.ttft import best_sources, predict
from apps.routing.domain.views import (
    Blindness,
    CandidateTerms,
    DecodeChoice,
    DecodeQuery,
    DecodeTerms,
    NodeFacts,
    NodeView,
    Phase,
    PrefillChoice,
    PrefillQuery,
    RoutingPolicy,
    why_not_eligible,
)

COLUMNS_FROM_NODES = 24
"""From so many nodes on, columns are faster than rows."""

MOST_NAMED = 4
_FULL = ("batch-full", "kv-full")


class Router:
    """Chooses nodes. It only remembers whose turn it is among equals; load and facts come with each call.

    A choice is not counted anywhere until the caller tells the `LoadBook`.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self._prefill_turns = Rotation()
        self._decode_turns = Rotation()
        self.configure(policy)

    def configure(self, policy: RoutingPolicy) -> None:
        """Route by `policy` from the next choice on."""
        self.settings = policy
        self._policy = make_policy(policy)
        self._decode_policy = (
            self._policy if policy.decode is None else make_policy(replace(policy, name=policy.decode))
        )

    def decide_prefill(
        self,
        now: float,
        query: PrefillQuery,
        facts: Sequence[NodeFacts],
        loads: LoadBook,
        takes_turn: bool = True,
    ) -> PrefillChoice:
        """As `choose_prefill` on the nodes' views; of many nodes at once where the policy compares predicted TTFTs. The
        same `NodeFacts` objects in `facts` as the last time cost nothing. `takes_turn` False only asks what the choice
        would be."""
        if len(facts) < COLUMNS_FROM_NODES or not isinstance(self._policy, LeastTtft):
            return self.choose_prefill(now, query, _views(now, "prefill", facts, loads), takes_turn)
        table = loads.board("prefill", facts).predict(now, query, self.settings.network, self._may_fetch)
        if not table.eligible.any():
            return PrefillChoice(None, None, table, None, "no-node", _nobody("prefill", tuple(table)))
        pick = self._policy.pick_from_table(table, self._prefill_turns)
        return self._chosen(query, pick, table, table.of(pick.node), takes_turn)

    def choose_prefill(
        self, now: float, query: PrefillQuery, views: Sequence[NodeView], takes_turn: bool = True
    ) -> PrefillChoice:
        """The node that should compute the prompt, or None when no node is eligible."""
        sources = best_sources(query.matches, views)
        rows: list[CandidateTerms] = []
        candidates: list[PrefillCandidate] = []
        for view in views:
            why_not = why_not_eligible(view.facts, "prefill")
            if why_not is not None:
                rows.append(CandidateTerms(view.name, why_not=why_not))
                continue
            terms = predict(query, view, sources, self.settings.network, self._may_fetch)
            rows.append(terms)
            candidates.append(PrefillCandidate(view, terms))
        if not candidates:
            return PrefillChoice(None, None, tuple(rows), None, "no-node", _nobody("prefill", rows))
        pick = self._policy.pick_prefill(query, candidates, self._prefill_turns)
        chosen = next(c.terms for c in candidates if c.view.name == pick.node)
        return self._chosen(query, pick, tuple(rows), chosen, takes_turn)

    def _chosen(
        self,
        query: PrefillQuery,
        pick: Pick,
        rows: Sequence[CandidateTerms],
        chosen: CandidateTerms | None,
        takes_turn: bool,
    ) -> PrefillChoice:
        assert chosen is not None
        if takes_turn:
            self._prefill_turns.used(pick.node)
        predicted_s = query.waited_s + chosen.ttft_s
        blind = what_is_unseen(query)
        reason = f"{pick.node}: {pick.text}" + "".join(f"; blind: {lack.text}" for lack in blind)
        return PrefillChoice(pick.node, predicted_s, rows, chosen.fetch, pick.code, reason, chosen, blind)

    @property
    def _may_fetch(self) -> bool:
        return self._policy.fetches if self.settings.fetch is None else self.settings.fetch

    def decide_decode(
        self, now: float, query: DecodeQuery, facts: Sequence[NodeFacts], loads: LoadBook
    ) -> DecodeChoice:
        """As `choose_decode` on the nodes' views; of many nodes at once where the policy compares iteration times."""
        by_rows = len(facts) < COLUMNS_FROM_NODES or not self.settings.holds_back
        if by_rows or not isinstance(self._decode_policy, LeastTtft):
            return self.choose_decode(now, query, _views(now, "decode", facts, loads))
        table = DecodePredictions(loads.board("decode", facts), query)
        if not table.fits.any():
            return DecodeChoice(None, table, "no-room" if table.full else "no-node", _nobody("decode", tuple(table)))
        pick = self._decode_policy.pick_decode_from_table(table, self._decode_turns)
        self._decode_turns.used(pick.node)
        return DecodeChoice(pick.node, table, pick.code, f"{pick.node}: {pick.text}")

    def choose_decode(self, now: float, query: DecodeQuery, views: Sequence[NodeView]) -> DecodeChoice:
        """The node that should decode, or None when no eligible node has room for it now (ever, where nothing is held back)."""
        rows: list[DecodeTerms] = []
        candidates: list[DecodeCandidate] = []
        for view in views:
            terms = _decode_terms(query, view)
            rows.append(terms)
            if terms.why_not is None or (terms.why_not in _FULL and not self.settings.holds_back):
                candidates.append(DecodeCandidate(view, terms))
        if not candidates:
            full = any(row.why_not in _FULL for row in rows)
            return DecodeChoice(None, tuple(rows), "no-room" if full else "no-node", _nobody("decode", rows))
        pick = self._decode_policy.pick_decode(query, candidates, self._decode_turns)
        self._decode_turns.used(pick.node)
        return DecodeChoice(pick.node, tuple(rows), pick.code, f"{pick.node}: {pick.text}")


def _views(now: float, stage: Phase, facts: Sequence[NodeFacts], loads: LoadBook) -> list[NodeView]:
    """The nodes with their loads; of one that is no candidate nobody asks the load."""
    return [loads.view(now, entry) if why_not_eligible(entry, stage) is None else NodeView(entry) for entry in facts]


def what_is_unseen(query: PrefillQuery) -> tuple[Blindness, ...]:
    """What a choice is made without. The router then weighs load alone, at those nodes or at all, and must say so."""
    lacks = []
    if query.prompt_tokens < query.block_tokens:
        text = f"the prompt is shorter than a block of {query.block_tokens} tokens, so no cache can be looked up"
        lacks.append(Blindness("prompt-shorter-than-block", text))
    by_cause: dict[str, list[str]] = {}
    for node, cause in query.unseen.items():
        by_cause.setdefault(cause, []).append(node)
    for cause, nodes in sorted(by_cause.items()):
        named = ", ".join(nodes[:MOST_NAMED]) + (f" and {len(nodes) - MOST_NAMED} more" if nodes[MOST_NAMED:] else "")
        lacks.append(Blindness(cause, f"what {named} holds is not known ({cause})"))
    return tuple(lacks)


def _decode_terms(query: DecodeQuery, view: NodeView) -> DecodeTerms:
    why_not = why_not_eligible(view.facts, "decode")
    if why_not is not None:
        return DecodeTerms(view.name, why_not=why_not)
    facts = view.facts
    batch = view.decode_requests + 1
    needed_tokens = query.context_tokens + query.output_tokens
    free_tokens = view.kv_free_tokens
    if facts.kv_capacity_tokens is not None and needed_tokens > facts.kv_capacity_tokens:
        why_not = "kv-too-small"
    elif free_tokens is not None and needed_tokens > free_tokens:
        why_not = "kv-full"
    elif batch > facts.decode_limit:
        why_not = "batch-full"
    return DecodeTerms(
        node=view.name,
        iteration_s=decode_iteration_s(facts.decode, batch),
        batch=batch,
        kv_free_tokens=free_tokens,
        home=view.name == query.home,
        why_not=why_not,
    )


def _nobody(stage: Phase, rows: Sequence[CandidateTerms] | Sequence[DecodeTerms]) -> str:
    causes = ", ".join(f"{row.node} {row.why_not}" for row in rows) or "there are no nodes"
    return f"no node can {stage}: {causes}"
