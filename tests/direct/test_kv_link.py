"""Real ZMQ sockets: a publisher as vLLM's, with and without its replay service."""

import asyncio
import contextlib

import msgspec
import pytest
import zmq
import zmq.asyncio

from tools.ports import free_port
from workers.direct.kv_link import KvLink, binds
from workers.yard.config import KvEventsConfig

END = (-1).to_bytes(8, "big", signed=True)


def payload(number):
    event = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [number],
        "block_size": 1,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


class Publisher:
    """An engine's: connects to our subscriber, keeps what it sent from `kept_from` on for the replay service."""

    def __init__(self, context, port, replay_port):
        self.socket = context.socket(zmq.PUB)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.replay = context.socket(zmq.ROUTER)
        self.replay.bind(f"tcp://127.0.0.1:{replay_port}")
        self.sent = []
        self.kept_from = 0
        self.asked = []
        self.task = asyncio.create_task(self._serve())

    async def send(self, number, lost=False, raw=None):
        self.sent.append(number)
        if not lost:
            await self.socket.send_multipart([b"kv", number.to_bytes(8, "big"), raw or payload(number)])

    async def _serve(self):
        while True:
            client, _, first = await self.replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number in self.sent:
                if number >= max(self.asked[-1], self.kept_from):
                    await self.replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload(number)])
            await self.replay.send_multipart([client, b"", END, b""])


@contextlib.asynccontextmanager
async def world(replay=True):
    port, replay_port = free_port(), free_port()
    heard, lost = [], []
    config = KvEventsConfig(f"tcp://*:{port}", f"tcp://127.0.0.1:{replay_port}" if replay else None, "kv")
    link = KvLink("n", config, lambda events: heard.extend(event.hashes[0] for event in events), lost.append)
    link.start()
    context = zmq.asyncio.Context()
    publisher = Publisher(context, port, replay_port)
    await asyncio.sleep(0.25)
    try:
        yield publisher, link, heard, lost
    finally:
        publisher.task.cancel()
        await link.close()
        context.destroy(linger=0)


async def until(condition):
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


async def test_events_come_in_order():
    async with world() as (publisher, link, heard, lost):
        for number in range(5):
            await publisher.send(number)
        await until(lambda: link.heard == 5)
        assert heard == [0, 1, 2, 3, 4]
        assert (lost, publisher.asked) == ([], [])


async def test_a_gap_is_asked_for_again_before_what_follows_it():
    async with world() as (publisher, link, heard, lost):
        for number in range(6):
            await publisher.send(number, lost=number in (2, 3))
        await until(lambda: link.heard == 6)
        assert heard == [0, 1, 2, 3, 4, 5]
        assert (lost, publisher.asked) == ([], [2])


async def test_a_link_that_starts_late_asks_for_the_beginning():
    async with world() as (publisher, link, heard, lost):
        for number in range(4):
            await publisher.send(number, lost=number < 3)
        await until(lambda: link.heard == 4)
        assert heard == [0, 1, 2, 3]
        assert lost == []


async def test_what_the_engine_no_longer_keeps_makes_the_rest_void():
    async with world() as (publisher, link, heard, lost):
        publisher.kept_from = 3
        for number in range(5):
            await publisher.send(number, lost=number in (1, 2, 3))
        await until(lambda: link.heard == 3)
        assert heard == [0, 3, 4]
        assert lost == ["2 messages are lost"]
        assert link.lost == 2


async def test_without_a_replay_service_a_gap_makes_the_rest_void():
    async with world(replay=False) as (publisher, link, heard, lost):
        await publisher.send(0)
        await publisher.send(2)
        await until(lambda: link.heard == 2)
        assert (heard, link.lost, len(lost)) == ([0, 2], 1, 1)


async def test_a_number_that_goes_back_is_another_process():
    async with world() as (publisher, link, heard, lost):
        for number in (0, 1, 2):
            await publisher.send(number)
        await until(lambda: link.heard == 3)
        publisher.sent = []
        for number in (0, 1):
            await publisher.send(number)
        await until(lambda: link.heard == 5)
        assert heard == [0, 1, 2, 0, 1]
        assert len(lost) == 1
        assert "another process" in lost[0]


async def test_a_message_that_is_not_understood_makes_what_was_known_void_and_the_link_goes_on():
    async with world() as (publisher, link, heard, lost):
        await publisher.send(0)
        await publisher.send(1, raw=b"\xc1")
        await publisher.send(2)
        await until(lambda: 2 in heard)
        assert lost[0] == "a message was not understood"
        assert "expected form" in link.error


async def test_an_endpoint_that_cannot_be_bound_is_told_of():
    port = free_port()
    context = zmq.asyncio.Context()
    taken = context.socket(zmq.SUB)
    taken.bind(f"tcp://*:{port}")
    link = KvLink("n", KvEventsConfig(f"tcp://*:{port}"), lambda events: None, lambda why: None)
    link.start()
    await until(lambda: link.error is not None)
    assert str(port) in link.error
    await link.close()
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("endpoint", "bound"), [("tcp://*:5557", True), ("tcp://0.0.0.0:5557", True), ("tcp://gpu-1:5557", False)]
)
def test_an_endpoint_with_a_wildcard_is_bound(endpoint, bound):
    assert binds(endpoint) is bound
