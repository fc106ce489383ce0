"""The HTTP side that engines see: kept connections, stale ones, broken answers, slow receivers, on real sockets."""

import asyncio
import contextlib

import pytest

from workers.http.client import CallError, Client, Origin
from workers.http.fetch import fetch

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Peer:
    """A server of raw sockets. `script(number_of_connection, request_number, writer)` answers one request."""

    def __init__(self, script):
        self.script = script
        self.connections = 0
        self.requests = []
        self.left = 0
        self.reset = asyncio.Event()

    async def serve(self, reader, writer):
        self.connections += 1
        connection, number = self.connections, 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                number += 1
                self.requests.append(head + body)
                if await self.script(connection, number, writer) is False:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def peer(script):
    served = Peer(script)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    client = Client(connect_s=0.5)
    port = server.sockets[0].getsockname()[1]
    try:
        yield served, client, Origin.parse(f"http://127.0.0.1:{port}/base/")
    finally:
        await client.close()
        server.close()
        await asyncio.sleep(0.01)


def answering(*pieces: bytes, close: bool = False, pause_s: float = 0.0):
    async def script(connection, number, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        return not close

    return script


def get(client, origin, **more):
    return fetch(client, origin, "GET", "/x", timeout_s=2, **more)


async def test_a_call_goes_to_the_origins_path_with_its_host_and_body():
    async with peer(answering(OK)) as (served, client, origin):
        answer = await fetch(client, origin, "POST", "/x?a=1", headers={"x-one": "1"}, body=b"hello", timeout_s=2)
        assert (answer.status, answer.body) == (200, b"ok")
        head = b"POST /base/x?a=1 HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nx-one: 1\r\ncontent-length: 5\r\n\r\nhello"
        assert served.requests == [head % origin.port]


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 200_000])
async def test_one_connection_serves_call_after_call(body):
    async with peer(answering(OK)) as (served, client, origin):
        for _ in range(20):
            await fetch(client, origin, "POST", "/x", body=body, timeout_s=2)
        assert (served.connections, client.opened, client.calls) == (1, 1, 20)


async def test_a_streamed_answer_keeps_its_connection_too():
    stream = (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n")
    async with peer(answering(*stream, pause_s=0.001)) as (served, client, origin):
        for _ in range(3):
            assert (await get(client, origin)).body == b"onetwo"
        assert served.connections == 1


async def test_calls_at_once_have_connections_of_their_own():
    async with peer(answering(OK, pause_s=0.05)) as (served, client, origin):
        await asyncio.gather(*(get(client, origin) for _ in range(5)))
        assert served.connections == 5
        await asyncio.gather(*(get(client, origin) for _ in range(5)))
        assert served.connections == 5


async def test_a_kept_connection_that_was_closed_meanwhile_is_tried_again_on_a_fresh_one():
    async def script(connection, number, writer):
        if connection == 1 and number == 2:
            return False  # closes without a word, as a server does whose keep-alive time ran out
        writer.write(OK)
        return True

    async with peer(script) as (served, client, origin):
        await get(client, origin)
        assert (await get(client, origin)).body == b"ok"
        assert served.connections == 2


async def test_a_call_that_must_not_be_repeated_fails_instead():
    async def script(connection, number, writer):
        if number == 2:
            return False
        writer.write(OK)
        return True

    class Receiver:
        def __init__(self):
            self.future = asyncio.get_running_loop().create_future()

        def head(self, call, status, headers): ...
        def data(self, call, data): ...

        def end(self, call):
            self.future.set_result(None)

        def failed(self, call, error):
            self.future.set_exception(error)

    async with peer(script) as (served, client, origin):
        await get(client, origin)
        receiver = Receiver()
        client.send(origin, origin.head("POST", "/x", {}), b"", receiver, repeatable=False)
        with pytest.raises(CallError) as told:
            await receiver.future
        assert told.value.reason == "connection-broken"
        assert served.connections == 1


async def test_a_fresh_connection_that_is_closed_without_an_answer_is_not_tried_again():
    async with peer(answering(close=True)) as (served, client, origin):
        with pytest.raises(CallError, match="without an answer"):
            await get(client, origin)
        assert served.connections == 1


async def test_an_answer_that_is_cut_is_an_error():
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"
    async with peer(answering(cut, close=True)) as (_, client, origin):
        with pytest.raises(CallError, match="in the middle"):
            await get(client, origin)


async def test_an_answer_without_a_length_lasts_to_the_end_of_its_connection():
    async with peer(answering(b"HTTP/1.1 200 OK\r\n\r\n", b"one", b"two", close=True, pause_s=0.01)) as (
        _,
        client,
        origin,
    ):
        assert (await get(client, origin)).body == b"onetwo"


async def test_a_server_that_closes_is_not_called_on_that_connection_again():
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    async with peer(answering(closing)) as (served, client, origin):
        await get(client, origin)
        await get(client, origin)
        assert served.connections == 2


async def test_interim_answers_are_passed_over():
    async with peer(answering(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", OK)) as (_, client, origin):
        assert (await get(client, origin)).body == b"ok"


@pytest.mark.parametrize(
    "sent",
    [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 400_000],
)
async def test_what_is_not_http_is_an_error(sent):
    async with peer(answering(*(sent[at : at + 50_000] for at in range(0, len(sent), 50_000)), pause_s=0.005)) as world:
        _, client, origin = world
        with pytest.raises(CallError) as told:
            await get(client, origin)
        assert told.value.reason == "not-http"


async def test_an_answer_that_nobody_asked_for_is_given_to_nobody_and_costs_the_connection():
    async with peer(answering(OK + b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad")) as (served, client, origin):
        for _ in range(2):
            assert (await get(client, origin)).body == b"ok"
        assert served.connections == 2


async def test_a_call_without_an_answer_in_time_closes_its_connection():
    async def script(connection, number, writer):
        await asyncio.sleep(5)

    async with peer(script) as (_, client, origin):
        with pytest.raises(CallError) as told:
            await fetch(client, origin, "GET", "/x", timeout_s=0.05)
        assert told.value.reason == "timeout"


async def test_an_answer_larger_than_allowed_is_an_error():
    async with peer(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000)) as world:
        _, client, origin = world
        with pytest.raises(CallError) as told:
            await get(client, origin, max_bytes=1000)
        assert told.value.reason == "too-large"


async def test_nobody_there_is_an_error():
    client = Client(connect_s=0.5)
    with pytest.raises(CallError) as told:
        await fetch(client, Origin.parse("http://127.0.0.1:9"), "GET", "/", timeout_s=2)
    assert told.value.reason == "unreachable"
    await client.close()


class Sink:
    def __init__(self):
        self.size = 0
        self.over = asyncio.get_running_loop().create_future()

    def head(self, call, status, headers): ...

    def data(self, call, data):
        self.size += len(data)

    def end(self, call):
        self.over.set_result("end")

    def failed(self, call, error):
        self.over.set_result(error.reason)


async def test_a_paused_call_takes_nothing_more_until_it_goes_on():
    total = 30_000_000

    async def script(connection, number, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for _ in range(total // 100_000):
            writer.write(b"x" * 100_000)
            await writer.drain()
        return True

    async with peer(script) as (served, client, origin):
        sink = Sink()
        call = client.send(origin, origin.head("GET", "/", {}), b"", sink)
        while not sink.size:
            await asyncio.sleep(0.001)
        call.pause(True)
        await asyncio.sleep(0.05)
        held = sink.size
        await asyncio.sleep(0.1)
        assert sink.size == held < total
        call.pause(False)
        assert await asyncio.wait_for(sink.over, 5) == "end"
        assert sink.size == total
        await get(client, origin)
        assert served.connections == 1


async def test_an_aborted_call_is_seen_by_the_server_and_tells_nobody():
    async def script(connection, number, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        return True

    async with peer(script) as (served, client, origin):
        sink = Sink()
        call = client.send(origin, origin.head("GET", "/", {}), b"", sink)
        while not sink.size:
            await asyncio.sleep(0.001)
        call.abort()
        await asyncio.sleep(0.05)
        assert served.left == 1
        assert not sink.over.done()


async def test_a_call_aborted_while_it_connects_is_never_sent():
    async with peer(answering(OK)) as (served, client, origin):
        sink = Sink()
        client.send(origin, origin.head("GET", "/", {}), b"", sink).abort()
        await asyncio.sleep(0.05)
        assert served.requests == []
        assert not sink.over.done()


@pytest.mark.parametrize("url", ["ftp://x", "x:1", "http://", ""])
def test_what_is_not_a_url_is_refused(url):
    with pytest.raises(ValueError, match="URL"):
        Origin.parse(url)


def test_a_header_cannot_break_out_of_its_line():
    with pytest.raises(ValueError, match="control"):
        Origin.parse("http://x").head("GET", "/", {"x": "a\r\nb: c"})
