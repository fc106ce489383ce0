"""What the stages of a simulated node share: device memory, the agenda of things to come, contexts kept for hand-over.

Times are seconds of the event loop's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from workers.agent.engines.base import HANDOFF_PIN_S, Engine, EngineError
from workers.agent.engines.simulated_network import Nic
from workers.agent.engines.simulated_pool import SimulatedPool
from workers.agent.engines.simulated_timing import Timing
from workers.agent.spec import NodeSpec

Act = Callable[[float], None]


class Agenda:
    """Acts by the moment at which they are due."""

    def __init__(self) -> None:
        self._acts: list[tuple[float, int, Act]] = []
        self._count = 0

    def at(self, at: float, act: Act) -> None:
        """Have `act(at)` called once the time has come. Acts of one moment run in the order they were added."""
        self._count += 1
        heappush(self._acts, (at, self._count, act))

    def next_at(self) -> float | None:
        return self._acts[0][0] if self._acts else None

    def run_next(self) -> float:
        """Run the act that is due first; answers its moment."""
        at, _, act = heappop(self._acts)
        act(at)
        return at

    def clear(self) -> None:
        self._acts.clear()


@dataclass(slots=True)
class DeviceMemory:
    """KV tokens of the device: how many there are and how many are taken."""

    capacity_tokens: int
    used_tokens: int = 0

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - self.used_tokens

    def claim(self, tokens: int) -> bool:
        """Take `tokens`; False, and nothing taken, where there are not so many."""
        if tokens > self.free_tokens:
            return False
        self.used_tokens += tokens
        return True

    def release(self, tokens: int) -> None:
        self.used_tokens -= tokens

    def check_fits(self, tokens: int, field_name: str) -> None:
        """Raises EngineError 400 for a request that could never run here."""
        if tokens > self.capacity_tokens:
            message = f"expected at most {self.capacity_tokens} tokens of device KV, the request needs {tokens}"
            raise EngineError(400, "context-length", message, field_name)


@dataclass(slots=True)
class _Kept:
    pinned: bytes
    device_tokens: int


@dataclass(slots=True)
class SimulatedNode:
    """State of one node. `engines` are all nodes of the process by name; `nudge` tells the engine that memory became free."""

    spec: NodeSpec
    timing: Timing
    pool: SimulatedPool
    device: DeviceMemory
    base_url: str
    engines: Mapping[str, Engine]
    nic: Nic = field(default_factory=Nic)
    agenda: Agenda = field(default_factory=Agenda)
    closed: bool = False
    nudge: Callable[[], None] = lambda: None
    counters: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("fetched_tokens", "failed_fetch_tokens", "recomputed_tokens", "expired_handoffs", "aborted_requests"), 0
        )
    )
    _kept: dict[str, _Kept] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pool_name(self) -> str:
        return f"simulated-{self.name}"

    def is_local(self, name: str) -> bool:
        """Whether the node `name` runs in this process."""
        return name in self.engines

    def peer(self, name: str) -> SimulatedNode | None:
        """The simulated node `name` of this process, if it is running."""
        node = getattr(self.engines.get(name), "node", None)
        return node if isinstance(node, SimulatedNode) and not node.closed else None

    def output_limit(self, prompt_tokens: int, max_tokens: int) -> int:
        """Output tokens of a request: what it asked for, within the model's context."""
        return max(1, min(max_tokens, self.spec.model.context_tokens - prompt_tokens))

    # --- contexts kept for hand-over --------------------------------------------------------------------------

    def keep_handoff(self, now: float, request_id: str, chain: bytes, device_tokens: int) -> None:
        """Keep a computed context, with `device_tokens` already claimed, until it is released or `HANDOFF_PIN_S` passed."""
        self.release_handoff(request_id)
        kept = self._kept[request_id] = _Kept(self.pool.pin(chain), device_tokens)

        def expire(_at: float) -> None:
            if self._kept.get(request_id) is kept:
                self.counters["expired_handoffs"] += 1
                self.release_handoff(request_id)

        self.agenda.at(now + HANDOFF_PIN_S, expire)

    def keeps_handoff(self, request_id: str) -> bool:
        return request_id in self._kept

    def release_handoff(self, request_id: str) -> bool:
        """The decode node has the context, or nobody will fetch it. False where it is not kept (any more)."""
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return False
        self.pool.unpin(kept.pinned)
        self.device.release(kept.device_tokens)
        return True

    def kept_device_tokens(self) -> int:
        return sum(kept.device_tokens for kept in self._kept.values())

    def release_all_handoffs(self) -> None:
        for request_id in list(self._kept):
            self.release_handoff(request_id)
