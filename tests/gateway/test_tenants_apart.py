"""Two tenants, even in one sharing domain: neither can read, name, continue, rewrite or end the other's branches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import KEY, World, document, key, prompt, until, world

RIVAL = "sk-rival"
NAMES = (
    "b1",
    "acme%2Fb1",
    "rival%2F..%2Facme%2Fb1",
    "..%2Facme%2Fb1",
    "inferred-1",
    "s1",
    "s1%2Fa1",
    "s1~1",
    "acme%2Fs1",
    "%00",
)


@pytest.fixture(params=["one-domain", "own-domains"])
async def yard(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    described = document([])
    domain = "acme" if request.param == "one-domain" else "rival"
    tenant = described["tenants"][0] | {"name": "rival", "sharing_domain": domain}
    changes = {
        "tenants": [*described["tenants"], tenant],
        "keys": [*described["keys"], key(RIVAL, tenant="rival", trusted=True)],
    }
    async with world(tmp_path, **changes) as running:
        yield running


async def call(yard: World, secret: str, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with yard.http.request(method, f"{yard.url}/v1/branches/{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def state(yard: World) -> list[tuple[Any, ...]]:
    """Every branch of acme, as far as another may not change it."""
    views = sorted(yard.serving.yard.kv.branches(), key=lambda view: view.branch_id)
    return [
        (v.branch_id, v.version, v.sequence, v.kind, v.parent, v.program, v.context_blocks, v.homes, v.open_requests)
        for v in views
        if v.tenant == "acme"
    ]


async def acmes_branches(yard: World) -> None:
    """One named, one inferred, and a session with a sub-agent."""
    await yard.complete(prompt(8), x_switchyard_branch="b1", x_switchyard_branch_version="1")
    await yard.complete(prompt(6, first_id=100))
    await yard.complete(prompt(6, first_id=200), x_claude_code_session_id="s1")
    await yard.complete(prompt(4, first_id=300), x_claude_code_session_id="s1", x_claude_code_agent_id="a1")
    await yard.idle()


async def test_no_name_reaches_the_others_branches(yard: World) -> None:
    await acmes_branches(yard)
    before = state(yard)
    assert len(before) == 4
    for name in NAMES:
        assert (await call(yard, RIVAL, "GET", name))[0] in (400, 404), name
        assert (await call(yard, RIVAL, "POST", f"{name}/end", {}))[0] in (400, 404), name
        said = {"parent": "acme/b1", "relation": "subagent", "rewritten": True}
        assert (await call(yard, RIVAL, "PUT", name, said))[0] in (200, 400), name
    assert state(yard) == before
    assert (await call(yard, KEY, "GET", "b1"))[0] == 200


async def test_requests_of_the_same_names_and_prompts_are_branches_of_their_own(yard: World) -> None:
    await acmes_branches(yard)
    before = state(yard)
    again: list[tuple[dict[str, Any], dict[str, str]]] = [
        (prompt(9), {"x_switchyard_branch": "b1", "x_switchyard_branch_version": "7"}),
        (prompt(8), {"x_switchyard_branch": "acme/b1", "x_switchyard_branch_end": "true"}),
        (prompt(7, first_id=100), {}),
        (prompt(3, first_id=100), {"x_switchyard_parent": "b1", "x_switchyard_relation": "fork"}),
        (prompt(7, first_id=200), {"x_claude_code_session_id": "s1"}),
        (prompt(5, first_id=300), {"x_claude_code_session_id": "s1", "x_claude_code_agent_id": "a1"}),
        (prompt(6, first_id=200, user="s1"), {}),
    ]
    for body, headers in again:
        response = await yard.complete(body, secret=RIVAL, **headers)
        assert response.status == 200, await response.text()
    await yard.idle()
    assert state(yard) == before


async def test_the_others_cache_cannot_be_felt_outside_a_shared_domain(yard: World) -> None:
    await acmes_branches(yard)
    await until(lambda: not yard.serving.yard.blind(yard.serving.clock()))
    response = await yard.complete(prompt(8), secret=RIVAL)
    shared = {tenant["name"]: tenant["sharing_domain"] for tenant in yard.document["tenants"]}["rival"] == "acme"
    assert (int(response.headers["x-switchyard-cached-tokens"]) > 0) == shared
    await yard.idle()
    by_tenant = yard.serving.yard.kv.reuse_by("tenant")
    assert (by_tenant["rival"].ideal_tokens > 0) == shared


async def test_a_request_id_that_the_other_uses_takes_nothing_from_it(yard: World) -> None:
    running = asyncio.create_task(yard.complete(prompt(400, 200), x_request_id="mine"))
    await until(lambda: "mine" in yard.serving.yard.requests)
    other = await yard.complete(prompt(2, 2, 900), secret=RIVAL, x_request_id="mine")
    assert other.status == 200 and other.headers["x-request-id"] != "mine"
    response = await running
    assert (response.status, response.headers["x-request-id"]) == (200, "mine")
