"""Sends requests to nodes: a place on a decode node is announced, then the prompt goes to a prefill node, then its context on."""

from __future__ import annotations

from apps.kvcache.domain import events as kv_events
from workers.yard import commands
from workers.yard.ends import Ends
from workers.yard.machines import Machines
from workers.yard.requests import RequestState, Stage


class Sending:
    """Places requests and asks for their calls."""

    def __init__(self, machines: Machines, ends: Ends) -> None:
        self._m = machines
        self._ends = ends

    def announce_decode(self, now: float, state: RequestState) -> bool:
        """Keeps a place on a decode node. Refuses a request that fits on none of them, ever.

        Where every node serves requests whole, the place is that of the prefill, which is chosen after this.
        """
        self._m.placement.loads.finished(now, state.request_id)
        if self._m.config.whole_only:
            return True
        choice = self._m.placement.choose_decode(now, state, self._m.home(state, "decode"))
        state.decode_node = choice.node
        if choice.node is not None:
            self._m.placement.announce_decode(state, choice.node)
            return True
        causes = {row.why_not for row in choice.terms if self._m.fleet.takes(row.node, "decode")}
        if causes == {"kv-too-small"}:
            message = f"The prompt and max_tokens together ({state.context_tokens + state.remaining_tokens} tokens) fit on no node."
            self._ends.refuse(now, state, 400, "request-too-large", message, None)
        return False

    def start_prefill(self, now: float, state: RequestState) -> bool:
        """Sends the prompt (and what was already answered) to the best node; False when there is none."""
        matches = state.matches if state.matches_at == now else self._m.kv.held(state.request.prompt)
        choice = self._m.placement.choose_prefill(
            now, state, matches, self._m.home(state, "prefill"), self._m.kv.unseen
        )
        if choice.node is None or choice.predicted_ttft_s is None:
            state.reason = choice.reason
            return False
        node = self._m.fleet.nodes.by_name[choice.node]
        state.whole = node.config.serves_whole
        if state.whole:
            self._m.placement.loads.finished(now, state.request_id)
            self._m.placement.announce_decode(state, choice.node)
            state.decode_node = choice.node
        self._m.placement.place_prefill(now, state, choice)
        state.expected_cached_tokens = choice.chosen.cached_tokens if choice.chosen is not None else 0
        state.attempts += 1
        state.move(now, Stage.PREFILLING, choice.reason)
        state.prefill_node, state.placed_at = choice.node, now
        if state.first_token_at is None:
            state.predicted_ttft_s, state.terms, state.reason = choice.predicted_ttft_s, choice.terms, choice.reason
            state.blind = tuple(lack.code for lack in choice.blind)
            self._m.outcomes.foresight.decided(state.blind)
        if state.branch_id is not None:
            self._m.tell_kv(now, kv_events.Homed(state.branch_id, "prefill", choice.node))
        fetch = None
        if choice.fetch is not None:
            fetch = commands.Fetch(choice.fetch.source_node, choice.fetch.from_block, choice.fetch.to_block)
        self._m.out.append(
            commands.StartPrefill(
                request_id=state.request_id,
                node=choice.node,
                url=node.config.url,
                generation=node.generation,
                fetch=fetch,
                decode_node=state.decode_node,
                attempt=state.attempts,
                resumed_tokens=state.sent_tokens,
                predicted_ttft_s=choice.predicted_ttft_s,
                queue_s=now - state.arrived_at,
                reason=choice.reason,
            )
        )
        return True

    def start_decode(self, now: float, state: RequestState, why: str | None = None) -> None:
        """Hands the computed context to the announced node, or to another one when that cannot take it any more."""
        announced = state.decode_node
        reason = why or f"{announced}: announced when the prefill was placed"
        if not self._can_take_decode(state, announced) and not (state.whole and announced == state.prefill_node):
            self._m.placement.loads.finished(now, state.request_id)
            choice = self._m.placement.choose_decode(now, state, self._m.home(state, "decode"))
            state.decode_node, reason = choice.node, choice.reason
            if choice.node is None:
                self._ends.wait(now, state, "decode", choice.reason)
                return
            self._m.placement.announce_decode(state, choice.node)
        assert state.decode_node is not None and state.prefill_node is not None
        node = self._m.fleet.nodes.by_name[state.decode_node]
        state.move(now, Stage.HANDING_OVER, reason)
        if state.branch_id is not None:
            self._m.tell_kv(now, kv_events.Homed(state.branch_id, "decode", node.name))
        self._m.out.append(
            commands.StartDecode(
                request_id=state.request_id,
                node=node.name,
                url=node.config.url,
                generation=node.generation,
                source=state.handed_over.node if state.handed_over is not None else state.prefill_node,
                reason=reason,
            )
        )

    def _can_take_decode(self, state: RequestState, node: str | None) -> bool:
        return node is not None and node not in state.avoid and self._m.fleet.takes(node, "decode")
