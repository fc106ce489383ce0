"""Where work goes: the router, fed with what the yard knows of its nodes, and the load book that counts every decision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from apps.routing.domain.loads import LoadBook
from apps.routing.domain.router import Router
from apps.routing.domain.views import (
    DecodeChoice,
    DecodeQuery,
    NodeFacts,
    NodeView,
    PrefillChoice,
    PrefillQuery,
    QueuedWork,
    why_not_eligible,
)
from workers.yard.config import PartitionConfig
from workers.yard.nodes import KnownNode, NodeTable, Stage
from workers.yard.requests import RequestState


class Basis:
    """What the facts about the nodes were made of, compared with what is known of them now."""

    def __init__(self, nodes: NodeTable) -> None:
        self._of = [(node.status, node.config, node.health, node.breaker.is_open) for node in nodes]

    def holds(self, nodes: NodeTable) -> bool:
        if len(nodes.by_name) != len(self._of):
            return False
        for node, (status, config, health, is_open) in zip(nodes.by_name.values(), self._of, strict=True):
            if node.status is not status or node.config is not config:
                return False
            if node.health != health or node.breaker.is_open != is_open:
                return False
        return True


class Placement:
    """Chooses nodes and remembers what is placed where. Nodes to `avoid`, and those that have not reported lately, count
    only when nobody else can do it."""

    def __init__(self, config: PartitionConfig, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._router = Router(config.routing)
        self._block_tokens = config.model.block_tokens
        self.loads = LoadBook(config.network)
        self._known: dict[Stage, tuple[Basis, list[NodeFacts]]] = {}

    def configure(self, config: PartitionConfig) -> None:
        self._router.configure(config.routing)

    def views(self, now: float, stage: Stage, avoid: Collection[str] = ()) -> list[NodeView]:
        """The nodes with their loads, as the router sees them."""
        return [self.loads.view(now, facts) for facts in self.facts(stage, avoid)]

    def facts(self, stage: Stage, avoid: Collection[str] = ()) -> list[NodeFacts]:
        """The nodes as the router sees them, without their loads; the same list again as long as nothing changed. Silent ones
        are left out where others can do the work; those to avoid are then no candidates, but their pools may be read: a
        process that died leaves its pool behind."""
        if not avoid:
            known = self._known.get(stage)
            if known is None or not known[0].holds(self._nodes):
                known = self._known[stage] = (Basis(self._nodes), self._facts_now(stage, avoid))
            return known[1]
        return self._facts_now(stage, avoid)

    def _facts_now(self, stage: Stage, avoid: Collection[str]) -> list[NodeFacts]:
        nodes = list(self._nodes)
        others = [node for node in self._nodes.taking(stage) if node.name not in avoid]
        avoided = set(avoid) if others else set()
        if others and stage == "prefill":
            avoided.update(node.name for node in nodes if node.ends_outputs and node not in others)
        if any(node.health == "ok" for node in others or nodes if node.takes(stage)):
            nodes = [node for node in nodes if node.health != "stale" or not node.takes(stage)]
        return [self._facts(node, stage, node.name in avoided) for node in nodes]

    def _facts(self, node: KnownNode, stage: Stage, avoided: bool) -> NodeFacts:
        facts = node.facts(stage, self._block_tokens)
        return replace(facts, state="avoided") if avoided and facts.state == "ready" else facts

    def choose_prefill(
        self,
        now: float,
        state: RequestState,
        matches: Mapping[str, int],
        home: str | None,
        unseen: Callable[[float, Iterable[str]], Mapping[str, str]],
        takes_turn: bool = True,
    ) -> PrefillChoice:
        """The node for the prompt and the output so far. `unseen` tells of which nodes it is not known what they hold.
        `takes_turn` False only asks."""
        facts = self.facts("prefill", state.avoid)
        query = PrefillQuery(
            request_id=state.request_id,
            prompt_tokens=state.context_tokens,
            matches=matches,
            block_tokens=self._block_tokens,
            waited_s=now - state.arrived_at,
            home=home,
            unseen=unseen(now, [entry.name for entry in facts if why_not_eligible(entry, "prefill") is None]),
        )
        return self._router.decide_prefill(now, query, facts, self.loads, takes_turn)

    def choose_decode(self, now: float, state: RequestState, home: str | None) -> DecodeChoice:
        """The node for what is still to come; the request's own announcement does not stand in its way."""
        query = DecodeQuery(state.request_id, state.context_tokens, state.remaining_tokens, home)
        return self._router.decide_decode(now, query, self.facts("decode", state.avoid), self.loads)

    def place_prefill(self, now: float, state: RequestState, choice: PrefillChoice) -> None:
        """Counts the choice from now on. Requires a chosen node."""
        assert choice.node is not None and choice.chosen is not None
        row = choice.chosen
        work = QueuedWork(state.context_tokens - row.cached_tokens, row.cached_tokens, row.cached_tokens)
        self.loads.placed_prefill(now, state.request_id, choice.node, work, row.fetch_tokens)

    def announce_decode(self, state: RequestState, node: str) -> None:
        self.loads.announced_decode(state.request_id, node, state.context_tokens + state.remaining_tokens)

    def predicted_ttft_s(self, now: float) -> float | None:
        """How long a small request arriving now would wait for its first token on the best node."""
        candidates = [facts for facts in self.facts("prefill") if why_not_eligible(facts, "prefill") is None]
        waits = [self.loads.wait_s(now, facts) for facts in candidates]
        return min(waits, default=None)

    def view(self, now: float, node: KnownNode) -> NodeView:
        return self.loads.view(now, node.facts("prefill", self._block_tokens))

    def wait_s(self, now: float, node: KnownNode) -> float:
        """Seconds until a prefill placed on the node now would begin."""
        return self.loads.wait_s(now, node.facts("prefill", self._block_tokens))
