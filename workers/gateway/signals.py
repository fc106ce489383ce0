"""Who is calling and what their headers say: API key -> tenant -> objective -> band, and the branch of the request.

Headers come by name in lower case.

`x-llm-d-*` headers (aliases `x-gateway-*`) count only from trusted keys; otherwise the tenant's own values are used.
Branch ids are kept apart by tenant, so one tenant can neither extend nor end another's branch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from apps.kvcache.domain.events import BranchSignal, Relation
from workers.gateway.errors import ApiError
from workers.yard.config import KeyConfig, PartitionConfig, TenantConfig

BRANCH_HEADERS = ("x-switchyard-branch", "x-dynamo-session-id")
SESSION_HEADERS = ("x-claude-code-session-id", "x-session-id")
PARENT_HEADERS = ("x-switchyard-parent", "x-dynamo-parent-session-id", "x-parent-session-id")
AGENT_HEADER, PARENT_AGENT_HEADER = "x-claude-code-agent-id", "x-claude-code-parent-agent-id"
END_HEADERS = ("x-switchyard-branch-end", "x-dynamo-session-final")
RELATIONS: Mapping[str, Relation] = {"fork": "fork", "subagent": "subagent"}
LLMD_HEADERS = {
    name: (f"x-llm-d-{name}", f"x-gateway-{name}")
    for name in ("inference-objective", "inference-fairness-id", "inference-ttl", "slo-ttft-ms")
}
MAX_NAME_LENGTH = 200
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0}


@dataclass(frozen=True, slots=True)
class Caller:
    key: KeyConfig
    tenant: TenantConfig


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the request will stand in the queue."""

    objective: str
    band: str
    flow_id: str
    ttl_s: float | None
    slo_ttft_s: float | None


def authenticate(config: PartitionConfig, headers: Mapping[str, str], now: float) -> Caller:
    """The caller behind `Authorization: Bearer <key>`, or Anthropic's `x-api-key: <key>`.

    Raises `ApiError` 401 (no or bad key) or 403 (paused tenant).
    """
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    secret = secret.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    if not secret:
        raise _unauthorized("You did not provide an API key: send it as 'Authorization: Bearer <key>'.")
    key = config.keys_by_sha256.get(hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest())
    if key is None:
        raise _unauthorized("Incorrect API key provided.")
    if key.expires_at is not None and key.expires_at <= now:
        raise _unauthorized("This API key has expired.")
    tenant = config.tenants[key.tenant]
    if tenant.paused:
        raise ApiError(403, f"The tenant '{tenant.name}' is paused by an operator.", code="tenant_paused")
    return Caller(key, tenant)


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def standing(config: PartitionConfig, caller: Caller, headers: Mapping[str, str]) -> Standing:
    """Objective, band and flow of a request. Raises `ApiError` 400 for a bad header, 403 for a forbidden objective."""
    trusted = headers if caller.key.trusted else {}
    name = _llmd(trusted, "inference-objective") or caller.tenant.default_objective
    objective = config.objectives.get(name)
    if objective is None:
        raise _bad_header("x-llm-d-inference-objective", f"the objective {name!r} does not exist")
    if not caller.key.allows(name):
        raise ApiError(403, f"This API key may not use the objective '{name}'.", code="objective_not_allowed")
    ttl_s = _duration_s("x-llm-d-inference-ttl", _llmd(trusted, "inference-ttl"))
    slo_ttft_s = _duration_s("x-llm-d-slo-ttft-ms", _llmd(trusted, "slo-ttft-ms"), unit="ms")
    if ttl_s is not None and objective.ttl_s is not None:
        ttl_s = min(ttl_s, objective.ttl_s)
    return Standing(
        objective=name,
        band=objective.band,
        flow_id=_llmd(trusted, "inference-fairness-id") or caller.tenant.name,
        ttl_s=objective.ttl_s if ttl_s is None else ttl_s,
        slo_ttft_s=objective.slo_ttft_s if slo_ttft_s is None else slo_ttft_s,
    )


def branch_signal(caller: Caller, headers: Mapping[str, str], session_id: str | None) -> BranchSignal:
    """The branch of the request, from its headers; `session_id` is what the body says. Raises `ApiError` 400.

    A branch's own id wins over a session's, which its sub-agents share. Claude Code names a sub-agent beside its session.
    """
    session = _first(headers, SESSION_HEADERS)
    branch, parent = _first(headers, BRANCH_HEADERS), _first(headers, PARENT_HEADERS)
    named_relation = headers.get("x-switchyard-relation") or None
    if named_relation is not None and named_relation not in RELATIONS:
        raise _bad_header("x-switchyard-relation", "it must be 'fork' or 'subagent'")
    relation = None if named_relation is None else RELATIONS[named_relation]
    agent = _named(AGENT_HEADER, headers.get(AGENT_HEADER))
    if branch is None and agent is not None and session is not None:
        parent_agent = _named(PARENT_AGENT_HEADER, headers.get(PARENT_AGENT_HEADER))
        branch = agent_branch(session, agent)
        parent, relation = parent or agent_branch(session, parent_agent), relation or "subagent"
    named_session = session or session_id
    return BranchSignal(
        branch_id=branch_key(caller, branch) if branch else None,
        version=_whole_number(headers, "x-switchyard-branch-version"),
        parent=branch_key(caller, parent) if parent else None,
        relation=relation,
        end=_says_end(headers),
        program=_named("x-switchyard-program", headers.get("x-switchyard-program")) or session,
        sequence=_whole_number(headers, "x-switchyard-branch-sequence"),
        tenant=caller.tenant.name,
        session=branch_key(caller, named_session) if named_session else None,
    )


def agent_branch(session: str, agent: str | None) -> str:
    """The branch of an agent in a session; the session's own without an agent."""
    return session if agent is None else f"{session}/{agent}"


def _says_end(headers: Mapping[str, str]) -> bool:
    end = (_first(headers, END_HEADERS) or "false").lower()
    if end not in ("true", "false", "1", "0"):
        raise _bad_header("x-switchyard-branch-end", "it must be 'true' or 'false'")
    return end in ("true", "1")


def _whole_number(headers: Mapping[str, str], name: str) -> int | None:
    value = headers.get(name) or None
    if value is not None and not (value.isascii() and value.isdigit() and len(value) < 10):
        raise _bad_header(name, "it must be a whole number of at least 0")
    return None if value is None else int(value)


def branch_key(caller: Caller, branch: str) -> str:
    """The yard's name of a tenant's branch."""
    name = _named("x-switchyard-branch", branch)
    if name is None:
        raise _bad_header("x-switchyard-branch", "it must not be empty")
    return f"{caller.tenant.name}/{name}"


def _llmd(headers: Mapping[str, str], name: str) -> str | None:
    """A header under its `x-llm-d-` name or its `x-gateway-` alias."""
    own, alias = LLMD_HEADERS[name]
    value = headers.get(own) or headers.get(alias)
    return _named(own, value) if value else None


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    for name in names:
        value = headers.get(name)
        if value:
            return _named(name, value)
    return None


def _named(header: str, value: str | None) -> str | None:
    if not value:
        return None
    value = value.strip()
    if len(value) > MAX_NAME_LENGTH:
        raise _bad_header(header, f"it must be at most {MAX_NAME_LENGTH} characters long")
    if not value.isprintable():  # also what is not UTF-8: it could be neither stored nor shown
        raise _bad_header(header, "it must be printable UTF-8 text")
    return value or None


def _duration_s(header: str, value: str | None, unit: str = "s") -> float | None:
    """`30s`, `500ms`, `2m`, or a bare number of `unit`."""
    if value is None:
        return None
    found = _DURATION.fullmatch(value)
    if found is None:
        raise _bad_header(header, "it must be a positive number, such as '30' or '30s'")
    return float(found[1]) * _UNITS_S[found[2] or unit]


def _bad_header(header: str, problem: str) -> ApiError:
    return ApiError(400, f"Bad header '{header}': {problem}.", code="invalid_header", param=header)
