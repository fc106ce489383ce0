"""Branches through the front door: headers, sessions, and what a harness says without a request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import KEY, World, prompt, world


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as running:
        yield running


async def call(yard: World, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with yard.http.request(method, f"{yard.url}/v1/branches/{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_a_branch_can_be_looked_at_by_its_own_tenant(yard: World) -> None:
    await yard.complete(prompt(4), x_switchyard_branch="b1", x_switchyard_branch_version="2")
    status, shown = await call(yard, "GET", "b1")
    assert status == 200
    assert {name: shown[name] for name in ("id", "version", "kind", "inferred", "open_requests")} == {
        "id": "b1", "version": 2, "kind": "new", "inferred": False, "open_requests": 0,
    }  # fmt: skip
    assert (await call(yard, "GET", "nobody"))[0] == 404


async def test_a_parent_may_be_announced_before_the_first_request(yard: World) -> None:
    await yard.complete(prompt(4), x_switchyard_branch="main")
    status, _ = await call(yard, "PUT", "child", {"parent": "main", "relation": "fork", "program": "run"})
    assert status == 200
    await yard.complete(prompt(5), x_switchyard_branch="child")
    _, shown = await call(yard, "GET", "child")
    assert (shown["kind"], shown["parent"], shown["program"]) == ("fork", "main", "run")


async def test_a_session_with_a_sub_agent_ends_as_one(yard: World) -> None:
    session = {"x_claude_code_session_id": "s1"}
    await yard.complete(prompt(6), **session)
    await yard.complete(prompt(4, first_id=100), **session, x_claude_code_agent_id="a1")
    _, sub = await call(yard, "GET", "s1%2Fa1")
    assert (sub["kind"], sub["parent"]) == ("subagent", "s1")
    status, _ = await call(yard, "POST", "s1/end", {})
    assert status == 200 and yard.serving.yard.kv.branches_live == 0
    assert (await call(yard, "POST", "s1/end", {}))[0] == 404


async def test_an_announced_compaction_makes_a_version(yard: World) -> None:
    session = {"x_claude_code_session_id": "s1"}
    await yard.complete(prompt(6), **session)
    await call(yard, "PUT", "s1", {"rewritten": True})
    await yard.complete(prompt(4, first_id=100), **session)
    _, shown = await call(yard, "GET", "s1")
    assert (shown["version"], shown["context_blocks"]) == (1, 4)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"relation": "cousin"}, "relation"),
        ({"parent": 7}, "parent"),
        ({"program": "x" * 201}, "program"),
        ({"rewritten": "yes"}, "rewritten"),
        ({"color": "red"}, "color"),
    ],
)
async def test_a_bad_announcement_is_named(yard: World, body: dict[str, Any], field: str) -> None:
    status, answer = await call(yard, "PUT", "b1", body)
    assert (status, answer["error"]["param"]) == (400, field)
