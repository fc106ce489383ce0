"""The planner's calls to node agents (docs/interfaces.md, section 7), answered as events of the phase machine."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx

from apps.planning.domain.phase_machine import AgentUnreachable, PushAnswered, PushPhase, StatusReported

TIMEOUT_S = 2.0


class Agents:
    """One HTTP client for all nodes. `urls` maps node names to their agents' addresses; use as a context manager."""

    def __init__(self, urls: dict[str, str], token: str) -> None:
        self._urls = urls
        headers = {"Authorization": f"Bearer {token}"}
        # Agents are neighbours: a proxy from the environment must not come between.
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Agents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def push(self, command: PushPhase) -> PushAnswered | AgentUnreachable:
        """Order a phase. An agent that is away or broken (5xx) is unreachable: the push is repeated."""
        body = {
            "phase": command.phase,
            "generation": command.generation,
            "drain_deadline_s": command.drain_deadline_s,
        }
        try:
            response = self._client.put(f"{self._urls[command.node]}/v1/phase", json=body)
        except httpx.HTTPError as error:
            return AgentUnreachable(command.node, _told(error))
        if response.status_code >= 500:
            return AgentUnreachable(command.node, f"the agent answered {response.status_code}")
        if response.is_success:
            return PushAnswered(command.node, command.generation)
        code, message = _error_of(response)
        return PushAnswered(command.node, command.generation, code, message)

    def status(self, node: str) -> StatusReported | AgentUnreachable:
        """What the agent says of itself."""
        try:
            said = self._status(node)
            return StatusReported(
                node, str(said["phase"]), str(said["target_phase"]), str(said["state"]), int(said["generation"])
            )
        except httpx.HTTPError as error:
            return AgentUnreachable(node, _told(error))
        except (ValueError, KeyError, TypeError) as error:
            return AgentUnreachable(node, f"the agent's status is not understood: {error}")

    def document(self, node: str) -> dict[str, Any] | None:
        """The agent's whole status; None when it does not answer."""
        try:
            said = self._status(node)
        except (httpx.HTTPError, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def _status(self, node: str) -> Any:
        response = self._client.get(f"{self._urls[node]}/v1/status")
        response.raise_for_status()
        return response.json()


def _error_of(response: httpx.Response) -> tuple[str, str]:
    try:
        error: Any = response.json()["error"]
        return str(error["code"]), str(error["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return f"http-{response.status_code}", f"the agent answered {response.status_code}"


def _told(error: httpx.HTTPError) -> str:
    """The kind of failure; an address or a header has no place in a reason."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"the agent answered {error.response.status_code}"
    kinds: dict[type[httpx.HTTPError], str] = {
        httpx.ConnectError: "no connection",
        httpx.ConnectTimeout: "no connection in time",
    }
    return kinds.get(type(error), f"no answer ({type(error).__name__})")
