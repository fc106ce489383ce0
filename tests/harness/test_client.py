"""Branch signals: the headers a harness sends, and how a branch ends."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from workers.harness.client import AsyncHarnessClient, BranchError, HarnessClient

UNUSED = "http://127.0.0.1:9"


def test_a_new_branch_sends_its_id_and_version_zero() -> None:
    branch = HarnessClient(UNUSED, "key").branch("b1", program="run-7", objective="premium")
    assert branch.headers() == {
        "x-switchyard-branch": "b1",
        "x-switchyard-branch-version": "0",
        "x-switchyard-branch-sequence": "1",
        "x-switchyard-program": "run-7",
        "x-llm-d-inference-objective": "premium",
    }


def test_branches_without_a_name_get_different_ids() -> None:
    client = HarnessClient(UNUSED, "key")
    assert client.branch().branch_id != client.branch().branch_id


def test_each_rewrite_raises_the_version_by_one() -> None:
    branch = HarnessClient(UNUSED, "key").branch("b1")
    assert [branch.version(), branch.version()] == [1, 2]
    assert branch.headers()["x-switchyard-branch-version"] == "2"


@pytest.mark.parametrize("relation", ["fork", "subagent"])
def test_a_child_names_its_parent_and_relation_and_keeps_the_program(relation: str) -> None:
    parent = HarnessClient(UNUSED, "key").branch("b1", program="run-7")
    child = getattr(parent, relation)()
    headers = child.headers()
    assert (headers["x-switchyard-parent"], headers["x-switchyard-relation"]) == ("b1", relation)
    assert headers["x-switchyard-program"] == "run-7"
    assert child.branch_id != "b1"


def test_a_branch_ended_by_a_header_takes_no_more_requests() -> None:
    branch = HarnessClient(UNUSED, "key").branch("b1")
    assert branch.headers(end=True)["x-switchyard-branch-end"] == "true"
    with pytest.raises(BranchError, match="b1 has ended"):
        branch.headers()
    with pytest.raises(BranchError, match="b1 has ended"):
        branch.version()


@pytest.mark.parametrize("name", ["two\nlines", " padded", "ü", "x" * 201])
def test_a_name_that_cannot_be_a_header_is_refused(name: str) -> None:
    with pytest.raises(BranchError, match="branch_id: expected"):
        HarnessClient(UNUSED, "key").branch(name)


async def test_leaving_the_block_ends_the_branch_once(gateway) -> None:
    def work() -> None:
        with HarnessClient(gateway.url, "secret").branch("b 1/x") as branch:
            branch.headers()
            branch.end()

    await asyncio.to_thread(work)
    assert gateway.ended == ["b 1/x"]
    assert gateway.authorizations == {"Bearer secret"}


async def test_a_branch_whose_last_request_said_so_is_not_ended_again(gateway) -> None:
    async with aiohttp.ClientSession() as session, AsyncHarnessClient(gateway.url, "secret", session).branch("b1") as b:
        b.headers(end=True)
    assert gateway.ended == []


async def test_the_async_client_ends_branches_and_children(gateway) -> None:
    async with aiohttp.ClientSession() as session:
        branch = AsyncHarnessClient(gateway.url, "secret", session).branch("b1")
        async with branch, branch.fork("b1-fork"), branch.subagent("b1-helper"):
            pass
    assert gateway.ended == ["b1-helper", "b1-fork", "b1"]


async def test_an_unknown_branch_counts_as_ended_but_another_refusal_is_an_error(gateway) -> None:
    client = HarnessClient(gateway.url, "secret")
    gateway.end_status = 404
    await asyncio.to_thread(client.branch("b1").end)
    gateway.end_status = 401
    with pytest.raises(BranchError, match="answered 401: told to"):
        await asyncio.to_thread(client.branch("b2").end)


async def test_a_gateway_that_is_away_does_not_break_the_harness() -> None:
    with HarnessClient(UNUSED, "key").branch("b1"):
        pass
    async with aiohttp.ClientSession() as session, AsyncHarnessClient(UNUSED, "key", session).branch("b2"):
        pass
    with pytest.raises(BranchError, match="b3 was not ended"):
        HarnessClient(UNUSED, "key").branch("b3").end()


def test_every_request_has_the_next_number() -> None:
    branch = HarnessClient(UNUSED, "key").branch("b1")
    assert [branch.headers()["x-switchyard-branch-sequence"] for _ in range(3)] == ["1", "2", "3"]


async def test_a_branch_can_be_announced_by_both_clients(gateway) -> None:
    client = HarnessClient(gateway.url, "secret")
    await asyncio.to_thread(client.announce, "a/b", parent="a", relation="fork", program="run")
    async with aiohttp.ClientSession() as session:
        await AsyncHarnessClient(gateway.url, "secret", session).announce("a", rewritten=True)
    assert gateway.announced == [
        ("a/b", {"parent": "a", "relation": "fork", "program": "run"}),
        ("a", {"rewritten": True}),
    ]
