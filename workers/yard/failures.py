"""What happens to requests when a call fails or a node goes: another attempt elsewhere, a pause, or the end.

`recovery.py` has the policy.
"""

from __future__ import annotations

from apps.kvcache.domain import events as kv_events
from apps.planning.domain.cost_model import decode_iteration_s, fetch_s
from workers.yard import commands
from workers.yard.ends import Ends
from workers.yard.machines import Machines
from workers.yard.nodes import KnownNode
from workers.yard.nodes import Stage as NodeStage
from workers.yard.recovery import MOMENTARY, PAUSE_S, REFUSALS, HandedOver, move_decode_s
from workers.yard.requests import RequestState, Stage
from workers.yard.sending import Sending

RETRY_AFTER_S = 2.0
MOVING_S = 2.0


class Failures:
    """Lets requests go on after failed attempts."""

    def __init__(self, machines: Machines, ends: Ends, sending: Sending) -> None:
        self._m = machines
        self._ends = ends
        self._sending = sending

    def retry(
        self, now: float, state: RequestState, node: str | None, retryable: bool, reason: str, message: str
    ) -> None:
        """Another attempt elsewhere, or the end with 502 when there were too many or a retry cannot help."""
        exhausted = state.broken.failed(state.sent_tokens, reason)
        self._m.fleet.failed(now, node, reason, retryable)
        if node is not None:
            state.avoid.add(node)
        told = f"{node} failed ({reason})"
        state.failure = message or told
        if not retryable:
            self._ends.refuse(
                now, state, 502, reason, message or f"The node {node} could not serve the request: {reason}.", None
            )
        elif exhausted:
            text = (
                f"The request failed {state.broken.in_a_row} times in a row, at last because of: {message or reason}."
            )
            self._ends.refuse(now, state, 502, "upstream-failed", text, RETRY_AFTER_S)
        else:
            self._m.outcomes.recovered(reason)
            if reason in MOMENTARY and not self._others_can(state):
                self._pause(now, state, told)
            else:
                self.go_on(now, state, told, refused=reason in REFUSALS)

    def _others_can(self, state: RequestState) -> bool:
        """A node that has not failed this request yet takes work of its stage."""
        stage: NodeStage = "prefill" if state.stage is Stage.PREFILLING else "decode"
        return any(node.name not in state.avoid for node in self._m.fleet.nodes.taking(stage))

    def _pause(self, now: float, state: RequestState, why: str) -> None:
        """Everyone refused it, perhaps for a moment only: tried again a little later."""
        stage = "prefill" if state.stage is Stage.PREFILLING else "decode"
        self._m.placement.loads.finished(now, state.request_id)
        self._ends.wait(now, state, stage, why)
        state.not_before = now + PAUSE_S

    def go_on(self, now: float, state: RequestState, why: str, refused: bool = False) -> None:
        """From the computed context on another decode node where that is near at hand, else by computing it again."""
        context = state.handed_over
        waits_there = state.stage is not Stage.PREFILLING and context is not None and self._m.fleet.alive(context.node)
        in_time = refused and state.stage is Stage.HANDING_OVER
        if context is not None and waits_there and (in_time or context.serves(now, state.context_tokens)):
            self._sending.start_decode(now, state)
        else:
            self._resume(now, state, why)

    def _resume(self, now: float, state: RequestState, why: str) -> None:
        """Computes the prompt and the output so far on another node; waits when no node can.

        A request that has begun to answer needs no prefill node: where none is left, a decode node computes its context.
        """
        self._m.placement.loads.finished(now, state.request_id)
        if not self._sending.announce_decode(now, state) and state.stage.ended:
            return
        if self._sending.start_prefill(now, state):
            return
        if state.handed_over is not None and self._m.fleet.nodes.taking("decode"):
            self._sending.start_decode(now, state)
        else:
            self._ends.wait(now, state, "prefill", why)

    def try_waiting(self, now: float) -> None:
        """Nodes or room came back, perhaps: places who waits for them, or ends who waited too long."""
        for state in list(self._ends.waiting.values()):
            if now < state.not_before:
                continue
            state.not_before = 0.0
            del self._ends.waiting[state.request_id]
            if now >= state.waiting_until:
                text = f"No node could take over the request within {self._m.config.flow.empty_pool_ttl_s:g} s."
                text += f" The last one: {state.failure}" if state.failure else ""
                self._ends.refuse(now, state, 503, "rejected-no-endpoints", text, RETRY_AFTER_S)
                continue
            self.go_on(now, state, "still no node", refused=state.waiting_for == "decode")
            if state.stage is Stage.WAITING:
                self._ends.waiting[state.request_id] = state

    def node_lost(self, now: float, node: KnownNode) -> None:
        """Every request there goes on elsewhere: prefills begin again, decodes continue from the tokens already sent."""
        self._m.tell_kv(now, kv_events.NodeLost(node.name))
        for request_id in self._m.placement.loads.node_lost(now, node.name):
            state = self._m.requests.get(request_id)
            if state is None:
                continue
            if state.stage is Stage.PREFILLING and state.prefill_node == node.name:
                self._m.out.append(commands.AbortOnNode(node.name, request_id, "prefill"))
                self.retry(now, state, node.name, True, "node-lost", f"The node {node.name} was lost.")
            elif state.stage in (Stage.HANDING_OVER, Stage.DECODING):
                self._m.out.append(commands.AbortOnNode(node.name, request_id, "decode"))
                self.retry(now, state, node.name, True, "node-lost", f"The node {node.name} was lost.")
            else:
                state.decode_node = None

    def node_restarted(self, node: KnownNode) -> None:
        """It is another process now: what broke on the former one may be tried there again."""
        for state in self._m.requests.values():
            state.avoid.discard(node.name)
            state.not_before = 0.0

    def drop_orphans(self, node: KnownNode) -> None:
        """Frees requests of ours that the node still holds and that are elsewhere or over."""
        assert node.status is not None
        listed = node.status.own_requests
        wanted = [name for name in listed if self._belongs(name, node.name)]
        for request_id in sorted(node.orphans.report(listed, wanted)):
            self._m.out.append(commands.DropOrphan(node.name, request_id))

    def _belongs(self, request_id: str, node: str) -> bool:
        state = self._m.requests.get(request_id)
        if state is None:
            return False
        context = state.handed_over
        keeps = context is not None and context.kept and context.node == node
        return keeps or node in (state.prefill_node, state.decode_node)

    def move_queued(self, now: float, node: KnownNode) -> None:
        """A node that takes no more prefills keeps what it computes; what only queues there moves to another one."""
        placed = [s for s in self._m.requests.values() if s.stage is Stage.PREFILLING and s.prefill_node == node.name]
        placed.sort(key=lambda state: state.placed_at)
        running = node.status.running_prefill if node.status is not None else 0
        if not self._m.fleet.nodes.taking("prefill") or node.config.direct is not None:
            return  # of an existing engine nobody knows which requests it has begun
        for state in placed[running:]:
            self._m.out.append(commands.AbortOnNode(node.name, state.request_id, "prefill"))
            self._m.placement.loads.finished_prefill(now, state.request_id)
            if not self._sending.start_prefill(now, state):
                self._ends.wait(now, state, "prefill", f"{node.name} is draining")

    def move_decodes(self, now: float, node: KnownNode) -> None:
        """A node that leaves decode need not be waited for: its outputs go on on other decode nodes, from the blocks in its
        pool, where that is done sooner than the output would be. The longest go first, as many as are copied until the next
        look; the others are not held up meanwhile."""
        if not self._m.config.moves_outputs or node.config.direct is not None or node.health != "ok":
            return
        here = [s for s in self._m.requests.values() if s.stage is Stage.DECODING and s.decode_node == node.name]
        here.sort(key=lambda state: -state.remaining_tokens)
        token_s = decode_iteration_s(node.config.decode, len(here)) / node.config.t_acc if here else 0.0
        copying_s = 0.0
        for state in here:
            if copying_s > MOVING_S:
                return
            choice = self._m.placement.choose_decode(now, state, None)
            if choice.node is None or choice.node == node.name:
                continue
            target = self._m.fleet.nodes.by_name[choice.node]
            block_tokens = self._m.config.model.block_tokens
            network = self._m.config.network
            move_s = move_decode_s(state.context_tokens, block_tokens, target.config.prefill, network)
            if copying_s + move_s < state.remaining_tokens * token_s:
                copying_s += fetch_s(state.context_tokens, state.context_tokens, 0, network)
                self._m.out.append(commands.AbortOnNode(node.name, state.request_id, "decode"))
                state.handed_over = HandedOver(node.name, now, state.context_tokens, kept=False)
                self._m.placement.loads.finished(now, state.request_id)
                self._m.placement.announce_decode(state, choice.node)
                state.decode_node = choice.node
                self._sending.start_decode(now, state, f"{node.name} leaves decode; {choice.reason}")
