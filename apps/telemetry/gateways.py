"""Calls of the control plane to a running gateway (docs/interfaces.md, section 6b): living requests and branches."""

from __future__ import annotations

from functools import cache
from typing import Any
from urllib.parse import quote, unquote

import httpx
from django.conf import settings

from apps.telemetry.models import OperatorAction
from apps.topology.models import Partition
from controlplane.actors import Actor
from controlplane.audit import change
from controlplane.errors import InvalidField, NotFound, Unavailable

TIMEOUT_S = 3.0
_FILTERS = ("tenant", "band", "stage", "flow", "node", "kind", "q")


@cache
def _client() -> httpx.Client:
    return httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=1.0), trust_env=False)


def _call(partition: Partition, method: str, path: str, params: dict[str, Any] | None = None) -> Any:
    """The gateway's JSON. Raises NotFound (404), InvalidField (400), Unavailable for everything else."""
    url = f"{partition.gateway_url.rstrip('/')}/operator/v1/{path}"
    headers = {"Authorization": f"Bearer {settings.AGENT_TOKEN}"}
    try:
        answer = _client().request(method, url, params=params, headers=headers)
        body = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unavailable(f"the gateway of {partition.name} does not answer", "gateway-away") from error
    if answer.status_code == 200:
        return body
    message = str((body.get("error") or {}).get("message") or "")
    if answer.status_code == 404:
        kind, _, rest = path.partition("/")
        raise NotFound(kind.rstrip("s"), (params or {}).get("id") or unquote(rest.partition("/")[0]))
    if answer.status_code == 400:
        raise InvalidField(str((body.get("error") or {}).get("param") or "query"), message)
    raise Unavailable(f"the gateway of {partition.name} refused: {message or answer.status_code}", "gateway-refused")


def _params(narrow: dict[str, str], tenants: frozenset[str] | None, limit: int) -> dict[str, Any]:
    params: dict[str, Any] = {name: narrow[name] for name in _FILTERS if narrow.get(name)}
    if tenants is not None:
        params["only"] = ",".join(sorted(tenants))
    return params | {"limit": limit}


def living_requests(
    partition: Partition, narrow: dict[str, str], tenants: frozenset[str] | None = None, limit: int = 100
) -> dict[str, Any]:
    """Requests between arrival and end, longest here first; `tenants` are those that may be seen (None: all)."""
    found: dict[str, Any] = _call(partition, "GET", "requests", _params(narrow, tenants, limit))
    return found


def living_request(partition: Partition, request_id: str) -> dict[str, Any]:
    """Raises NotFound when it has ended."""
    found: dict[str, Any] = _call(partition, "GET", f"requests/{quote(request_id, safe='')}")
    return found


def branches(
    partition: Partition, narrow: dict[str, str], tenants: frozenset[str] | None = None, limit: int = 200
) -> dict[str, Any]:
    found: dict[str, Any] = _call(partition, "GET", "branches", _params(narrow, tenants, limit))
    return found


def branch(partition: Partition, branch_id: str) -> dict[str, Any]:
    """Raises NotFound when it does not live."""
    found: dict[str, Any] = _call(partition, "GET", "branch", {"id": branch_id})
    return found


def reuse(partition: Partition) -> dict[str, Any]:
    found: dict[str, Any] = _call(partition, "GET", "reuse")
    return found


def cancel_request(partition: Partition, request_id: str, actor: Actor, reason: str) -> None:
    """Ends one living request: its client is told, its nodes stop. Raises NotFound when it has ended."""
    with change(actor, reason, role="operator", needs_reason=True):
        _note(partition, "cancel-request", request_id, actor, reason)
        why = f"{reason} ({actor})"
        _call(partition, "POST", f"requests/{quote(request_id, safe='')}/cancel", {"why": why[:200]})


def end_branch(partition: Partition, branch_id: str, actor: Actor, reason: str) -> None:
    """Ends a live branch: its blocks become the first to be evicted. Raises NotFound when it does not live."""
    with change(actor, reason, role="operator", needs_reason=True):
        _note(partition, "end-branch", branch_id, actor, reason)
        _call(partition, "POST", "branch/end", {"id": branch_id})


def _note(partition: Partition, kind: str, subject: str, actor: Actor, reason: str) -> None:
    OperatorAction.objects.create(
        partition=partition, kind=kind, subject=subject[:300], actor=str(actor)[:160], reason=reason.strip()
    )
