"""What the control plane may ask a gateway about its living requests and branches, and tell it to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import AGENT_TOKEN, KEY, World, prompt, until, world


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path, speed=1.0) as running:
        yield running


async def ask(yard: World, path: str, method: str = "GET", token: str = AGENT_TOKEN) -> tuple[int, Any]:
    async with yard.http.request(
        method, f"{yard.url}/operator/v1/{path}", headers={"Authorization": f"Bearer {token}"}
    ) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("token", ["", "wrong", KEY])
async def test_only_the_control_planes_token_opens_it(yard: World, token: str) -> None:
    for method, path in (("GET", "requests"), ("POST", "requests/x/cancel"), ("GET", "branches"), ("GET", "reuse")):
        status, body = await ask(yard, path, method, token)
        assert status == 401 and body["error"]["code"] == "bad_token"


async def test_a_living_request_is_listed_told_and_cancelled(yard: World) -> None:
    body = prompt(blocks=50, max_tokens=5000)
    client = asyncio.create_task(yard.complete(body, x_request_id="long", x_switchyard_branch="b1"))
    await until(lambda: "long" in yard.serving.yard.requests)
    status, found = await ask(yard, "requests?tenant=acme")
    assert (status, found["total"], found["rows"][0]["id"]) == (200, 1, "long")
    assert (await ask(yard, "requests?tenant=other"))[1]["rows"] == []
    assert (await ask(yard, "requests?only=other"))[1]["rows"] == []
    status, told = await ask(yard, "requests/long")
    assert status == 200 and told["branch"] == "acme/b1"
    assert [row["node"] for row in told["router_terms"]][:1] == ["n1"]
    assert (await ask(yard, "requests/long/cancel?why=test", "POST"))[0] == 200
    answer = await client
    assert answer.status == 403
    assert (await answer.json())["error"]["code"] == "cancelled_by_operator"
    await yard.idle()
    assert (await ask(yard, "requests/long"))[0] == 404
    assert yard.serving.yard.outcomes.counters.cancelled == 1


async def test_branches_form_a_tree_that_says_where_their_blocks_are(yard: World) -> None:
    await yard.complete(prompt(6), x_switchyard_branch="root")
    await yard.complete(prompt(8), x_switchyard_branch="child", x_switchyard_parent="root")
    status, found = await ask(yard, "branches")
    rows = {row["id"]: row for row in found["rows"]}
    assert status == 200 and found["live"] == 2
    assert rows["acme/child"]["parent"] == "acme/root" and rows["acme/child"]["kind"] == "fork"
    assert rows["acme/child"]["shared_blocks"] >= 6
    assert rows["acme/root"]["held"]["n1"] >= 6 and rows["acme/root"]["gone"] == {}
    assert rows["acme/root"]["lease_left_s"] > 0
    only_child = (await ask(yard, "branches?q=child"))[1]
    assert {row["id"] for row in only_child["rows"]} == {"acme/root", "acme/child"}, "a parent comes along"
    assert (await ask(yard, "branches?only=other"))[1]["rows"] == []


async def test_an_operator_ends_a_branch(yard: World) -> None:
    await yard.complete(prompt(6), x_switchyard_branch="root")
    assert (await ask(yard, "branch/end?id=acme/root", "POST"))[0] == 200
    assert (await ask(yard, "branch/end?id=acme/root", "POST"))[0] == 404
    found = (await ask(yard, "branches"))[1]
    assert found["rows"] == [] and found["closed"][0]["id"] == "acme/root" and found["closed"][0]["blocks"] >= 6


async def test_reuse_is_told_by_node_tenant_and_workload(yard: World) -> None:
    await yard.complete(prompt(6))
    await yard.complete(prompt(8))
    found = (await ask(yard, "reuse"))[1]
    assert found["total"]["actual_tokens"] == 6 * 64
    assert found["by"]["tenant"]["acme"]["actual_tokens"] == 6 * 64
    assert set(found["pools"]) == {"n1", "n2", "n3"}


@pytest.mark.parametrize("limit", ["0", "-1", "x", "100000"])
async def test_a_bad_limit_is_named(yard: World, limit: str) -> None:
    status, body = await ask(yard, f"requests?limit={limit}")
    assert status == 400 and body["error"]["param"] == "limit"
