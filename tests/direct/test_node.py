"""One engine as the gateway sees it, over real sockets."""

import asyncio
import contextlib
from array import array

import pytest

from apps.kvcache.domain.events import BlocksRemoved, BlocksStored, NodeCleared
from apps.kvcache.domain.hashing import extend_chain, root_hash
from tests.direct.engine import Engine
from tests.yard.test_direct_config import direct, parsed
from workers.direct.kv_events import Removed, Stored
from workers.direct.node import DirectNode, role
from workers.http.client import Client
from workers.yard import events

ROOT = root_hash("m", "bf16", "engine")


@contextlib.asynccontextmanager
async def world(engine, monkeypatch, phase="mixed", **told):
    monkeypatch.setattr("workers.direct.node.POLL_EVERY_S", 0.02)
    port = await engine.listen()
    config = parsed(direct("v1", phase, engine.kind, **told) | {"url": f"http://127.0.0.1:{port}"})
    client, heard = Client(), []
    node = DirectNode(config.nodes["v1"], config.model, ROOT, client, heard.append, lambda: 1.0)
    node.start()
    try:
        yield node, heard
    finally:
        await node.close()
        await client.close()
        engine.close()


async def last(heard, kind):
    for _ in range(200):
        found = [event for event in heard if isinstance(event, kind)]
        if found:
            return found[-1]
        await asyncio.sleep(0.01)
    raise AssertionError(f"no {kind.__name__}")


async def test_vllm_tells_its_load_by_its_metrics(monkeypatch):
    async with world(Engine(running=3, waiting=2), monkeypatch) as (_, heard):
        status = (await last(heard, events.NodeStatus)).status
    assert (status.phase, status.running_decode, status.queued_prefill) == ("mixed", 3, 2)
    assert (status.kv_tokens, status.kv_free_tokens) == (6400, 4800)


async def test_a_vllm_server_plays_the_role_that_is_wished_for_at_once(monkeypatch):
    async with world(Engine(running=3), monkeypatch, "prefill") as (node, heard):
        assert (await last(heard, events.NodeStatus)).status.running_prefill == 3
        wish = parsed(direct("v1", "decode") | {"url": node.url, "generation": 7}).nodes["v1"]
        node.reconfigure(wish)
        heard.clear()
        status = (await last(heard, events.NodeStatus)).status
    assert (status.phase, status.generation) == ("decode", 7)


async def test_sglang_tells_its_load_and_its_live_role(monkeypatch):
    engine = Engine("sglang", role="prefill", running=1, waiting=4)
    async with world(engine, monkeypatch, "decode") as (_, heard):
        status = (await last(heard, events.NodeStatus)).status
    assert (status.phase, status.running_prefill, status.queued_prefill, status.kv_tokens) == ("prefill", 1, 4, 6400)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"/health": (503, b"")}, "/health answered 503"),
        ({"/metrics": (404, b"")}, "metrics must be on"),
        ({"/metrics": (200, b"up 1\n")}, "vllm:num_requests_running"),
    ],
)
async def test_an_engine_that_is_not_well_is_not_used_and_it_is_said_why(monkeypatch, answers, told):
    async with world(Engine(answers=answers), monkeypatch) as (_, heard):
        assert told in (await last(heard, events.NodeUnreachable)).reason


async def test_an_engine_that_is_gone_refuses(monkeypatch):
    engine = Engine()
    async with world(engine, monkeypatch) as (_, heard):
        await last(heard, events.NodeStatus)
        engine.close()
        assert (await last(heard, events.NodeUnreachable)).refused in (True, False)
        heard.clear()
        assert (await last(heard, events.NodeUnreachable)).refused


async def test_the_engines_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("ENGINE_KEY", "secret")
    async with world(Engine(token="secret"), monkeypatch, token_env="ENGINE_KEY") as (node, heard):
        await last(heard, events.NodeStatus)
        assert b"authorization: Bearer secret\r\n" in node.head("/v1/completions", "r1")


async def test_without_kv_events_a_prompt_that_was_served_is_assumed_to_be_there(monkeypatch):
    async with world(Engine(), monkeypatch) as (node, heard):
        await last(heard, events.NodeStatus)
        chain = extend_chain(ROOT, array("I", range(128)), 64)
        node.served(chain)
        (stored,) = (await last(heard, events.NodeEvents)).events
        assert stored == BlocksStored("v1", 1, None, chain)
        assert "assumed" in node.view
        node.resync()
        assert (await last(heard, events.NodeSnapshotTaken)).segments == [(None, chain)]


async def test_another_process_of_the_engine_has_nothing(monkeypatch):
    engine = Engine()
    async with world(engine, monkeypatch) as (node, heard):
        first = (await last(heard, events.NodeStatus)).status.boot_id
        node.served(extend_chain(ROOT, array("I", range(64)), 64))
        engine.started = 200.0
        await asyncio.sleep(0.1)
        assert (await last(heard, events.NodeEvents)).events == [NodeCleared("v1", 2)]
        assert (await last(heard, events.NodeStatus)).status.boot_id != first
        node.resync()
        assert (await last(heard, events.NodeSnapshotTaken)).segments == []


async def test_kv_events_are_numbered_and_lost_ones_take_everything_with_them(monkeypatch):
    async with world(Engine(), monkeypatch, kv_events={"endpoint": "tcp://127.0.0.1:9"}) as (node, heard):
        ids = list(range(64))
        node._kv_events([Stored([1], None, ids, 64, "device", True)])
        chain = extend_chain(ROOT, array("I", ids), 64)
        assert (await last(heard, events.NodeEvents)).events == [BlocksStored("v1", 1, None, chain)]
        node._kv_lost("2 messages are lost")
        assert (await last(heard, events.NodeEvents)).events == [BlocksRemoved("v1", 2, chain)]
        node._kv_events([Removed([1], "device")])
        assert node._seq == 2


async def test_events_that_cannot_be_used_are_told_of(monkeypatch):
    async with world(Engine(), monkeypatch, kv_events={"endpoint": "tcp://127.0.0.1:9"}) as (node, _):
        node._kv_events([Stored([1], None, [1, 2, 3], 3, "device", True)])
        assert "3 tokens" in node.view


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (b'{"internal_states":[{"disaggregation_mode":"decode"}]}', "decode"),
        (b'{"disaggregation_mode":"null"}', "mixed"),
        (b"{}", None),
        (b"nonsense", None),
        (b'{"internal_states":3}', None),
    ],
)
def test_sglangs_role_is_read_where_it_is_told(info, expected):
    assert role(info) == expected
