"""What the yard knows of its nodes: the configuration's wish, the node's own last status, and how old that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from apps.routing.domain.views import NodeFacts, NodeState, Phase
from workers.yard import events
from workers.yard.config import NodeConfig, PartitionConfig
from workers.yard.recovery import Breaker, OrphanWatch

Stage = Literal["prefill", "decode"]
Health = Literal["ok", "stale", "down"]
STAGES: tuple[Stage, Stage] = ("prefill", "decode")
STALE_AFTER_S = 3.0
DOWN_AFTER_S = 6.0
REFUSALS_UNTIL_DOWN = 2
STALLED_DOWN_S = 30.0


def serves(phase: str, stage: Stage) -> bool:
    return phase in (stage, "mixed")


@dataclass(slots=True)
class KnownNode:
    """One node. `status` is None until it first answered. Times in seconds of the driver's clock."""

    config: NodeConfig
    added_at: float
    status: events.NodeState | None = None
    status_at: float = 0.0
    refusals: int = 0
    health: Health = "down"
    breaker: Breaker = field(default_factory=Breaker)
    orphans: OrphanWatch = field(default_factory=OrphanWatch)
    _facts: dict[Stage, tuple[tuple[object, ...], NodeFacts]] = field(default_factory=dict)

    @property
    def orphan_requests(self) -> int:
        """Requests that the node holds and nobody wants, by its own count and by ours."""
        return len(self.orphans.confirmed) + (self.status.orphans if self.status is not None else 0)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def generation(self) -> int:
        """The newest generation known of: what an agent must not find stale."""
        return max(self.config.generation, self.status.generation if self.status else 0)

    @property
    def switching(self) -> bool:
        """Between two phases, by its own word or by the configuration's wish."""
        return self.status is not None and (self.status.state != "ready" or self.status.phase != self.config.phase)

    def age_s(self, now: float) -> float | None:
        return None if self.status is None else max(0.0, now - self.status_at)

    @property
    def stalled(self) -> bool:
        """The node answers, but its engine has running work and makes no iteration."""
        return self.status is not None and self.status.stalled_s >= STALLED_DOWN_S

    def judge(self, now: float) -> Health:
        """Health by the age of the last status, by refused connections, and by whether the engine moves at all."""
        self.breaker.look(now)
        if self.status is None or self.refusals >= REFUSALS_UNTIL_DOWN or self.stalled:
            return "down"
        # The same sums as in `next_change`, or rounding could make a node due and not yet silent for ever.
        if now >= self.status_at + DOWN_AFTER_S:
            return "down"
        return "stale" if now >= self.status_at + STALE_AFTER_S else "ok"

    def next_change(self) -> float | None:
        """When silence alone would change the health, or time the breaker."""
        if self.status is None or self.health == "down":
            return self.breaker.open_until
        silent_at = self.status_at + (STALE_AFTER_S if self.health == "ok" else DOWN_AFTER_S)
        return silent_at if self.breaker.open_until is None else min(silent_at, self.breaker.open_until)

    def why_not(self, stage: Stage) -> str | None:
        """None when new work of `stage` may go here, else the reason's code."""
        if not self.config.enabled:
            return "disabled"
        if self.health == "down" or self.status is None:
            return "down"
        if self.breaker.is_open:
            return "circuit-open"
        if self.config.draining:
            return "draining"
        if not serves(self.config.phase, stage):
            return f"wanted-{self.config.phase}"
        if not serves(self.status.phase, stage):
            return f"phase-{self.status.phase}"
        if self.status.state != "ready" and not serves(self.status.target_phase, stage):
            return self.status.state
        if self.status.state == "switching":
            return "switching"
        return None

    def takes(self, stage: Stage) -> bool:
        return self.why_not(stage) is None

    @property
    def ends_outputs(self) -> bool:
        """Past its drain deadline: it serves prefill already, and its last outputs would hardly move between prompts."""
        status = self.status
        if status is None or status.phase != "mixed" or status.state != "draining":
            return False
        return not serves(status.target_phase, "decode") and status.running_decode + status.queued_decode > 0

    @property
    def leaves_decode(self) -> bool:
        """It is wanted elsewhere or is on its way: it gets no more outputs, and those that it has are better elsewhere."""
        status = self.status
        if status is None or not serves(status.phase, "decode"):
            return False
        wanted = self.config.enabled and not self.config.draining and serves(self.config.phase, "decode")
        return not wanted or not serves(status.target_phase, "decode")

    def facts(self, stage: Stage, block_tokens: int) -> NodeFacts:
        """The router's picture of the node for one stage; a node that may not get new work says so by its state. The same
        object again as long as nothing changed."""
        basis = (self.status, self.config, self.health, self.breaker.is_open, block_tokens)
        known = self._facts.get(stage)
        if known is None or any(now is not then for now, then in zip(basis, known[0], strict=True)):
            known = self._facts[stage] = (basis, self._facts_now(stage, block_tokens))
        return known[1]

    def _facts_now(self, stage: Stage, block_tokens: int) -> NodeFacts:
        status = self.status
        return NodeFacts(
            name=self.name,
            order=self.config.order,
            phase=self._phase(),
            prefill=self.config.prefill,
            decode=self.config.decode,
            state=self._state(stage),
            healthy=self.health != "down" and self.config.enabled,
            decode_limit=self.config.decode_limit,
            kv_capacity_tokens=status.kv_tokens or None if status else 0,  # an existing engine may not say it
            prefill_chunk_tokens=status.prefill_chunk_tokens if status else 0,
            pool_spare_tokens=status.pool_spare_blocks * block_tokens if status else None,
            pool_referenced_tokens=status.pool_referenced_blocks * block_tokens if status else 0,
        )

    def _phase(self) -> Phase:
        observed = self.status.phase if self.status else self.config.phase
        return "prefill" if observed == "prefill" else "decode" if observed == "decode" else "mixed"

    def _state(self, stage: Stage) -> NodeState:
        reason = self.why_not(stage)
        if reason is None:
            return "ready"
        if reason.startswith(("wanted-", "phase-")) and not serves(self._phase(), stage):
            return "ready"  # its phase says why it gets nothing
        if reason in ("down", "disabled"):
            return "down"
        return "switching" if reason == "switching" else "draining"


class NodeTable:
    """All nodes of a partition, in configuration order."""

    def __init__(self) -> None:
        self.by_name: dict[str, KnownNode] = {}

    def configure(self, now: float, config: PartitionConfig) -> list[KnownNode]:
        """Takes a new configuration over; answers the nodes that are gone."""
        gone = [node for name, node in self.by_name.items() if name not in config.nodes]
        known = self.by_name
        self.by_name = {}
        for item in sorted(config.nodes.values(), key=lambda node: (node.order, node.name)):
            node = known.get(item.name) or KnownNode(item, added_at=now)
            if node.config.url != item.url:
                node.status, node.refusals = None, 0
            node.config = item
            self.by_name[item.name] = node
        return gone

    def __iter__(self) -> Iterator[KnownNode]:
        return iter(list(self.by_name.values()))

    def get(self, name: str) -> KnownNode | None:
        return self.by_name.get(name)

    def taking(self, stage: Stage) -> list[KnownNode]:
        """Nodes that may get new work of a stage. One that still ends its outputs gets prompts where nobody else takes them."""
        found = [node for node in self.by_name.values() if node.takes(stage)]
        if stage == "decode" or not any(node.ends_outputs for node in found):
            return found
        return [node for node in found if not node.ends_outputs] or found

    def reported_limit(self, stage: Stage) -> int | None:
        """How many requests the engines of a stage say they take together; None for prefill, which has no such number."""
        if stage == "prefill":
            return None
        return sum(node.status.max_decode_batch for node in self.taking(stage) if node.status is not None)

    def reported_tokens(self, stage: Stage) -> int | None:
        """How many tokens they say they take together: a chunk to compute and one to wait for a prefill node, the KV that
        fits for a decode node. None while one of them has not said."""
        statuses = [node.status for node in self.taking(stage) if node.status is not None]
        tokens = [s.kv_tokens if stage == "decode" else 2 * s.prefill_chunk_tokens for s in statuses]
        return sum(tokens) if all(tokens) else None

    def next_change(self) -> float | None:
        changes = [at for at in (node.next_change() for node in self.by_name.values()) if at is not None]
        return min(changes, default=None)

    def stale_ratio(self) -> float:
        enabled = [node for node in self.by_name.values() if node.config.enabled]
        return sum(node.health != "ok" for node in enabled) / len(enabled) if enabled else 0.0

    def split(self) -> dict[str, int]:
        """How many nodes are in each phase now; nodes that are down count apart."""
        counts = {"prefill": 0, "decode": 0, "mixed": 0, "down": 0}
        for node in self.by_name.values():
            if node.config.enabled:
                counts["down" if node.health == "down" or node.status is None else node.status.phase] += 1
        return counts
