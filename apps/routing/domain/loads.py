"""Every node's load, counted from the moment of a decision rather than from the node's next report.

Two requests decided in the same instant therefore see each other. What a node reports corrects the facts, not this book.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from apps.planning.domain.cost_model import NetworkProfile
from apps.routing.domain.board import Board
from apps.routing.domain.ttft import prefill_s, queue_s
from apps.routing.domain.views import NodeFacts, NodeView, Phase, QueuedWork


@dataclass(slots=True)
class _NodeLoad:
    """`prefills` in queue order, its first one running since `head_since`; `announced` and `running` decodes with their
    KV tokens; the fetch link is busy until `link_free_at`."""

    prefills: dict[str, QueuedWork] = field(default_factory=dict)
    head_since: float = 0.0
    announced: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    kv_tokens: int = 0
    link_free_at: float = 0.0
    _prices: tuple[object, ...] | None = None
    _priced: tuple[float, float] = (0.0, 0.0)

    @property
    def decode_requests(self) -> int:
        """Requests that decode here or are announced to."""
        return len(self.announced) + len(self.running)

    def priced(self, facts: NodeFacts) -> tuple[float, float]:
        """(when the running prefill ends, seconds queued behind it), counted again only when something changed."""
        prices = (facts.prefill, facts.prefill_chunk_tokens)
        if self._prices != prices:
            self._prices = prices
            works = iter(self.prefills.values())
            head = next(works, None)
            head_until = -inf if head is None else self.head_since + prefill_s(facts, head)
            self._priced = head_until, queue_s(facts, works)
        return self._priced

    def touched(self) -> None:
        """The queue changed."""
        self._prices = None


class LoadBook:
    """Who is placed where. Calls about unknown requests change nothing, so late or repeated reports are harmless."""

    def __init__(self, network: NetworkProfile) -> None:
        self._network = network
        self._nodes: dict[str, _NodeLoad] = {}
        self._prefill_node: dict[str, str] = {}
        self._decode_node: dict[str, str] = {}
        self._boards: dict[Phase, Board] = {"prefill": Board("prefill"), "decode": Board("decode")}
        self._changed: dict[Phase, set[str]] = {"prefill": set(), "decode": set()}

    def placed_prefill(self, now: float, request_id: str, node: str, work: QueuedWork, fetch_tokens: int = 0) -> None:
        """The request joins the node's prefill queue; `fetch_tokens` will come over its link. Moves a placed request."""
        self.finished_prefill(now, request_id)
        load = self._load(node)
        if not load.prefills:
            load.head_since = now
        load.prefills[request_id] = work
        self._queue_changed(node, load)
        self._prefill_node[request_id] = node
        if fetch_tokens > 0:
            moved_bytes = fetch_tokens * self._network.kv_bytes_per_token
            load.link_free_at = max(now, load.link_free_at) + moved_bytes / self._network.peer_bandwidth_bytes_s

    def started_prefill(self, now: float, request_id: str) -> None:
        """The node says it computes this one now; without such reports the head of the queue is taken to run."""
        node = self._prefill_node.get(request_id)
        if node is None:
            return
        load = self._nodes[node]
        work = load.prefills.pop(request_id)
        load.prefills = {request_id: work, **load.prefills}
        load.head_since = now
        self._queue_changed(node, load)

    def finished_prefill(self, now: float, request_id: str) -> None:
        """The request left the node's prefill queue, computed or not."""
        node = self._prefill_node.pop(request_id, None)
        if node is None:
            return
        load = self._nodes[node]
        if next(iter(load.prefills)) == request_id:
            load.head_since = now
        del load.prefills[request_id]
        self._queue_changed(node, load)

    def announced_decode(self, request_id: str, node: str, kv_tokens: int) -> None:
        """The request will decode there and may grow to `kv_tokens`. Moves one that was placed elsewhere."""
        self._left_decode(request_id)
        load = self._load(node)
        load.announced[request_id] = kv_tokens
        load.kv_tokens += kv_tokens
        self._decode_node[request_id] = node
        self._load_changed(node)

    def started_decode(self, request_id: str) -> None:
        """An announced request decodes now."""
        node = self._decode_node.get(request_id)
        if node is not None and request_id in self._nodes[node].announced:
            load = self._nodes[node]
            load.running[request_id] = load.announced.pop(request_id)

    def finished(self, now: float, request_id: str) -> None:
        """The request is over, served or not: nothing of it is counted any more."""
        self.finished_prefill(now, request_id)
        self._left_decode(request_id)

    def node_lost(self, now: float, node: str) -> list[str]:
        """Forget a node's load; answers the requests that were placed on it, for either stage, in order."""
        load = self._nodes.get(node)
        if load is None:
            return []
        affected = list(dict.fromkeys([*load.prefills, *load.announced, *load.running]))
        for request_id in affected:
            if self._prefill_node.get(request_id) == node:
                self.finished_prefill(now, request_id)
            if self._decode_node.get(request_id) == node:
                self._left_decode(request_id)
        del self._nodes[node]
        self._load_changed(node)
        return affected

    def prefill_node(self, request_id: str) -> str | None:
        return self._prefill_node.get(request_id)

    def decode_node(self, request_id: str) -> str | None:
        return self._decode_node.get(request_id)

    def view(self, now: float, facts: NodeFacts) -> NodeView:
        """The node as the router should see it at `now`."""
        load = self._nodes.get(facts.name)
        if load is None:
            return NodeView(facts)
        works = tuple(load.prefills.values())
        head_until, queued_s = load.priced(facts)
        return NodeView(
            facts=facts,
            queued=works[1:],
            running_prefill=1 if works else 0,
            running_remaining_s=max(0.0, head_until - now),
            running_decode=len(load.running),
            announced_decode=len(load.announced),
            kv_used_tokens=load.kv_tokens,
            fetch_queue_bytes=max(0.0, load.link_free_at - now) * self._network.peer_bandwidth_bytes_s,
            queued_s=queued_s,
        )

    def wait_s(self, now: float, facts: NodeFacts) -> float:
        """Seconds until a prefill placed on the node now would begin."""
        load = self._nodes.get(facts.name)
        if load is None:
            return 0.0
        head_until, queued_s = load.priced(facts)
        return max(0.0, head_until - now) + queued_s

    def board(self, stage: Phase, facts: Sequence[NodeFacts]) -> Board:
        """All these nodes as columns, with the loads of this moment. `stage`: prefill or decode."""
        board, changed = self._boards[stage], self._changed[stage]
        board.sync(facts, self._nodes, changed)
        changed.clear()
        return board

    def check_integrity(self) -> None:
        """Raises `AssertionError` when the two ways of counting disagree."""
        placed = {r: name for name, load in self._nodes.items() for r in load.prefills}
        assert placed == self._prefill_node, "prefill places and index differ"
        decoding = {r: name for name, load in self._nodes.items() for r in (*load.announced, *load.running)}
        assert decoding == self._decode_node, "decode places and index differ"
        for name, load in self._nodes.items():
            expected = sum(load.announced.values()) + sum(load.running.values())
            assert load.kv_tokens == expected, f"{name}: kv tokens {load.kv_tokens}, counted {expected}"

    def _queue_changed(self, node: str, load: _NodeLoad) -> None:
        load.touched()
        self._load_changed(node)

    def _load_changed(self, node: str) -> None:
        for changed in self._changed.values():
            changed.add(node)

    def _load(self, node: str) -> _NodeLoad:
        load = self._nodes.get(node)
        if load is None:
            load = self._nodes[node] = _NodeLoad()
        return load

    def _left_decode(self, request_id: str) -> None:
        node = self._decode_node.pop(request_id, None)
        if node is None:
            return
        load = self._nodes[node]
        kv_tokens = load.announced.pop(request_id, None)
        load.kv_tokens -= load.running.pop(request_id) if kv_tokens is None else kv_tokens
        self._load_changed(node)
