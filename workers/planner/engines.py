"""Existing engines as the planner reaches them: without an agent, through what their gateway sees of them.

vLLM with a connector that is `kv_both` serves either phase at any time, so its switch is routing alone: the publication does
it, and the gateway's live snapshot shows when it is in force. SGLang changes its role itself (`POST /pd_role_switch`, from
0.5.21): only when idle, and its KV is lost; the planner waits for the first and counts the second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from apps.planning.domain.phase_machine import AgentUnreachable, PushAnswered, PushPhase, StatusReported
from apps.topology.choices import Engine, Phase
from apps.topology.models import Node

SWITCH_PATH = "/pd_role_switch"
# Shorter than a drive's budget: a switch that takes longer goes on in the engine, and is asked for again.
SWITCH_TIMEOUT_S = 3.0
ASK_EVERY_S = 1.0
# What the engines' own defaults are; they do not tell.
CHUNK_TOKENS = 8192
_NOT_YET = ("not idle", "in progress", "drain")

Live = Callable[[], Mapping[str, Any] | None]


class Engines:
    """The existing engines of one partition. `live` gives the gateway's newest snapshot, None while there is none."""

    def __init__(self, nodes: Sequence[Node], live: Live, block_tokens: int) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._live = live
        self._block_tokens = block_tokens
        self._client: httpx.Client | None = None  # made when first needed: that takes a tenth of a second
        self._asked_at: dict[str, float] = {}
        self._idle: set[str] = set()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def __contains__(self, name: str) -> bool:
        return name in self._nodes

    def push(self, command: PushPhase) -> PushAnswered | AgentUnreachable:
        """The order is in the published configuration already. SGLang's own switch follows with `progress`."""
        node = self._nodes[command.node]
        if node.engine == Engine.SGLANG and command.phase == Phase.MIXED:
            text = "SGLang changes between prefill and decode only; one that does both is started without a mode"
            return PushAnswered(node.name, command.generation, "not-supported", text)
        return PushAnswered(node.name, command.generation)

    def status(self, name: str) -> StatusReported | AgentUnreachable:
        """What the gateway sees of the node."""
        seen = self._seen(name)
        if isinstance(seen, AgentUnreachable):
            return seen
        phase, wanted = str(seen["phase"]), str(seen["target_phase"])
        state = "ready" if phase == wanted else "draining" if _running(seen) else "switching"
        return StatusReported(name, phase, wanted, state, int(seen["generation"]))

    def progress(self, name: str) -> StatusReported | PushAnswered | AgentUnreachable:
        """The status, after doing what is due: an SGLang server that is idle and drained is told its new role.

        The first answer of an idle server is only told, so that the time it serves nothing counts from there.
        """
        said = self.status(name)
        if not isinstance(said, StatusReported) or said.state != "switching":
            self._idle.discard(name)
            return said
        if self._nodes[name].engine != Engine.SGLANG:
            return said
        now = time.monotonic()
        if name not in self._idle:
            self._idle.add(name)
            return said
        if now - self._asked_at.get(name, -ASK_EVERY_S) < ASK_EVERY_S:
            return said
        self._asked_at[name] = now
        return self._switch(self._nodes[name], said) or said

    def document(self, name: str) -> dict[str, Any] | None:
        """What a simulation needs of a node, in the form of an agent's status; None while it does not answer."""
        seen = self._seen(name)
        if isinstance(seen, AgentUnreachable):
            return None
        blocks = int(seen["pool_capacity_blocks"])
        return {
            "pool": {"capacity_blocks": blocks},
            "limits": {"kv_tokens": blocks * self._block_tokens, "prefill_chunk_tokens": CHUNK_TOKENS},
        }

    def _seen(self, name: str) -> Mapping[str, Any] | AgentUnreachable:
        live = self._live()
        if live is None:
            return AgentUnreachable(name, "its gateway tells nothing: is it running, and Redis with it?")
        for node in live.get("nodes", []):
            if node["name"] == name:
                if node["health"] == "down":
                    return AgentUnreachable(name, "its gateway cannot reach it")
                seen: Mapping[str, Any] = node
                return seen
        return AgentUnreachable(name, "its gateway does not know it yet")

    def _switch(self, node: Node, said: StatusReported) -> PushAnswered | AgentUnreachable | None:
        """None when it is done or goes on; what stands against it otherwise."""
        if self._client is None:
            self._client = httpx.Client(timeout=SWITCH_TIMEOUT_S, trust_env=False)
        try:
            response = self._client.post(
                node.url.rstrip("/") + SWITCH_PATH, json={"new_role": said.target_phase}, headers=_key(node)
            )
        except httpx.TimeoutException:
            return None
        except httpx.HTTPError as error:
            return AgentUnreachable(node.name, f"no answer to {SWITCH_PATH} ({type(error).__name__})")
        told = _told(response)
        if response.is_success and told.get("success") is True:
            return None
        message = str(told.get("message") or told.get("detail") or "no reason was given")[:300]
        if response.status_code >= 500 or any(mark in message for mark in _NOT_YET):
            return AgentUnreachable(node.name, f"not yet: {message}")
        return PushAnswered(node.name, said.generation, "refused", _explained(node, response.status_code, message))


def _explained(node: Node, status: int, message: str) -> str:
    """Why the server does not change its role, and what would help."""
    if status in (404, 405):
        return (
            f"{node.name} has no {SWITCH_PATH}: it is older than SGLang 0.5.21; restart it with the other "
            "--disaggregation-mode"
        )
    if status in (401, 403):
        return f"{node.name} refuses the key of {(node.direct or {}).get('token_env') or 'nobody'} ({status})"
    if "enable-pd-role-switch" in message:
        return f"{node.name} was started without --enable-pd-role-switch; restart it with it, or in the other mode"
    return f"{node.name} answered {status}: {message}"


def _running(seen: Mapping[str, Any]) -> int:
    names = ("running_prefill", "queued_prefill", "running_decode", "announced_decode")
    return sum(int(seen.get(name) or 0) for name in names)


def _told(response: httpx.Response) -> dict[str, Any]:
    try:
        told = response.json()
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _key(node: Node) -> dict[str, str]:
    variable = (node.direct or {}).get("token_env")
    token = os.environ.get(variable, "") if variable else ""
    return {"authorization": f"Bearer {token}"} if token else {}
