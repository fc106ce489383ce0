"""The HTTP side that clients see: framing, limits, keep-alive, pipelining, leaving and slow clients, on real sockets."""

import asyncio
import contextlib
import gzip
import random
import zlib

import pytest

from workers.http.exchange import Exchange
from workers.http.server import Limits, Server
from workers.http.wire import encode_headers

PLAIN = encode_headers({"content-type": "text/plain"})
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def echo(exchange: Exchange) -> None:
    told = b"%s %s?%s %s" % (exchange.method.encode(), exchange.path, exchange.query, exchange.body)
    exchange.respond(200, PLAIN, told)


def refuse(exchange: Exchange, status: int, code: str, message: str) -> None:
    exchange.respond(status, PLAIN, message.encode())


@contextlib.asynccontextmanager
async def serving(application=echo, **limits):
    server = Server(application, refuse, Limits(**limits))
    port = await server.listen("127.0.0.1", 0)
    try:
        yield port, server
    finally:
        server.close()
        await asyncio.sleep(0)


async def exchange_bytes(port: int, *sent: bytes, half_close: bool = False) -> bytes:
    """Sends the pieces one after another and reads until the server closes, or for as long as it says something."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for piece in sent:
            writer.write(piece)
            await asyncio.sleep(0.005)
        while data := await asyncio.wait_for(reader.read(65536), 0.15):
            answer += data
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return answer


def bodies(answer: bytes) -> list[bytes]:
    """The bodies of answers that have a Content-Length."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        found.append(rest[:length])
        answer = rest[length:]
    return found


def asking(*sent: bytes, application=echo, run=asyncio.run, **limits) -> bytes:
    async def go():
        async with serving(application, **limits) as (port, _):
            return await exchange_bytes(port, *sent)

    return run(go())


def test_a_request_is_answered_with_its_length_and_a_date(run):
    answer = asking(GET, run=run)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\ndate: " in answer
    assert bodies(answer) == [b"GET /? "]


def test_one_connection_serves_many_requests(run):
    async def go():
        async with serving() as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(3):
                writer.write(GET)
                await reader.readuntil(b"GET /? ")
            assert len(server.connections) == 1
            writer.close()

    run(go())


def test_requests_sent_ahead_are_answered_in_order(run):
    sent = b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(200))
    assert bodies(asking(sent, run=run)) == [b"GET /%d? " % number for number in range(200)]


def test_requests_sent_ahead_wait_for_a_slow_answer(run):
    def application(exchange):
        delay = 0.05 if exchange.path == b"/slow" else 0.0
        asyncio.get_running_loop().call_later(delay, echo, exchange)

    answer = asking(
        b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nGET /fast HTTP/1.1\r\nhost: x\r\n\r\n", application=application, run=run
    )
    assert bodies(answer) == [b"GET /slow? ", b"GET /fast? "]


def test_a_request_may_come_byte_by_byte(run):
    request = b"POST /p?q=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
    assert bodies(asking(*(request[at : at + 1] for at in range(len(request))), run=run)) == [b"POST /p?q=1 hello"]


def test_a_chunked_body_is_put_together_and_its_trailers_go_nowhere(run):
    seen = []

    def application(exchange):
        seen.append(exchange.headers)
        echo(exchange)

    sent = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nauthorization: x\r\n\r\n"
    assert bodies(asking(sent, application=application, run=run)) == [b"POST /? abcde"]
    assert b"authorization" not in dict(seen[0])


def test_a_body_is_unpacked_from_its_encoding(run):
    packed = gzip.compress(b"hello " * 100)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    assert bodies(asking(head + packed, run=run)) == [b"POST /? " + b"hello " * 100]


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        (b"gzip", b"not gzip", b"400"),
        (b"gzip", gzip.compress(b"cut")[:-4], b"400"),
        (b"gzip", gzip.compress(b"\0" * 5_000_000), b"413"),
        (b"deflate", zlib.compress(b"\0" * 5_000_000), b"413"),
        (b"br", b"x", b"415"),
    ],
)
def test_a_body_that_cannot_be_unpacked_is_refused(run, encoding, body, status):
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-encoding: %s\r\ncontent-length: %d\r\n\r\n" % (encoding, len(body))
    assert asking(head + body, body_bytes=1_000_000, run=run).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"GET x HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", b"505"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", b"400"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nbad header: 1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: a\r\n folded: 1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\nhost: a\n\n", b"400"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 20_000, b"431"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2000000\r\n\r\n", b"413"),
        (
            b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"f4240\r\n"
            + b"x" * 1_000_000
            + b"\r\n1\r\nx",
            b"413",
        ),
    ],
)
def test_what_http_forbids_is_refused_and_the_connection_ends(run, sent, status):
    answer = asking(sent, body_bytes=1_000_000, run=run)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close\r\n" in answer


def test_a_header_without_end_is_cut_off(run):
    assert asking(b"GET / HTTP/1.1\r\nhost: a\r\nx: ", *([b"y" * 40_000] * 4), run=run).startswith(b"HTTP/1.1 431")


def test_a_trailer_without_end_is_cut_off(run):
    sent = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "
    assert asking(sent, *([b"y" * 40_000] * 4), run=run).startswith(b"HTTP/1.1 431")


def test_good_requests_before_a_bad_one_are_answered_first(run):
    answer = asking(GET + b"nonsense\r\n\r\n", run=run)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 400" in answer


def test_a_large_body_that_is_refused_does_not_hide_the_answer(run):
    """The client may still be sending: its answer must not be lost in a reset."""
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 4000000\r\n\r\n"
    assert asking(head, *([b"x" * 400_000] * 5), body_bytes=1_000_000, run=run).startswith(b"HTTP/1.1 413")


def test_another_protocol_that_is_offered_is_not_taken(run):
    sent = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nhi"
    assert bodies(asking(sent, run=run)) == [b"POST /? hi"]


def test_continue_is_said_when_it_is_asked_for(run):
    head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    answer = asking(head, b"hi", run=run)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


def test_continue_is_not_said_for_a_body_that_is_too_large(run):
    head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2000\r\n\r\n"
    assert asking(head, body_bytes=1000, run=run).startswith(b"HTTP/1.1 413")


def stream(exchange: Exchange) -> None:
    exchange.start(200, PLAIN)
    exchange.write(b"one")
    exchange.write(b"two")
    exchange.end(b"three")


def test_a_stream_is_chunked(run):
    answer = asking(GET, application=stream, run=run)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"


def test_a_stream_to_http_1_0_ends_with_the_connection(run):
    answer = asking(b"GET / HTTP/1.0\r\n\r\n", application=stream, run=run)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert body == b"onetwothree"


def test_http_1_0_keeps_its_connection_when_it_asks(run):
    request = b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    answer = asking(request, request, run=run)
    assert answer.count(b"connection: keep-alive\r\n") == 2


@pytest.mark.parametrize("application", [echo, stream])
def test_head_is_answered_without_a_body(run, application):
    answer = asking(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", application=application, run=run)
    assert answer.endswith(b"\r\n\r\n")
    assert b"one" not in answer


def test_an_application_that_fails_is_answered_for_and_the_server_goes_on(run):
    def application(exchange):
        if exchange.path == b"/bad":
            raise RuntimeError("secret")
        echo(exchange)

    answer = asking(b"GET /bad HTTP/1.1\r\nhost: x\r\n\r\n" + GET, application=application, run=run)
    assert answer.startswith(b"HTTP/1.1 500")
    assert b"secret" not in answer
    assert b"GET /? " in answer


def test_a_stream_broken_off_is_not_taken_for_a_whole_one(run):
    def application(exchange):
        exchange.start(200, PLAIN)
        exchange.write(b"one")
        exchange.break_off()

    assert not asking(GET, application=application, run=run).endswith(b"0\r\n\r\n")


def test_a_header_cannot_break_out_of_its_line():
    with pytest.raises(ValueError, match="control"):
        encode_headers({"x": "a\r\nset-cookie: b"})
    with pytest.raises(ValueError, match="name"):
        encode_headers({"x y": "a"})


def test_a_client_that_leaves_is_noticed_at_once(run):
    async def go():
        gone = asyncio.Event()
        held = []

        def application(exchange):
            exchange.on_gone = gone.set
            held.append(exchange)

        async with serving(application) as (port, server):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await asyncio.sleep(0.02)
            assert not gone.is_set()
            writer.close()
            await asyncio.wait_for(gone.wait(), 0.5)
            held[0].respond(200, PLAIN, b"too late")
            assert not server.connections

    run(go())


def test_a_slow_reader_blocks_its_own_stream_and_is_dropped_in_the_end(run):
    async def go():
        told = []
        held = []

        def application(exchange):
            exchange.on_blocked = told.append
            exchange.on_gone = lambda: told.append("gone")
            exchange.start(200, PLAIN)
            held.append(exchange)

        async with serving(application, unread_s=0.3) as (port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(GET)
            await asyncio.sleep(0.02)
            written = 0
            while not held[0].blocked and written < 50_000_000:
                held[0].write(b"x" * 65_536)
                written += 65_536
                await asyncio.sleep(0)
            assert told == [True]
            assert written < 20_000_000
            await asyncio.sleep(1.2)
            assert told == [True, "gone"]
            writer.close()

    run(go())


def test_a_reader_that_catches_up_is_told_of(run):
    async def go():
        told, held = [], []

        def application(exchange):
            exchange.on_blocked = told.append
            exchange.start(200, PLAIN)
            held.append(exchange)

        async with serving(application) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(GET)
            await asyncio.sleep(0.02)
            while not held[0].blocked:
                held[0].write(b"x" * 65_536)
                await asyncio.sleep(0)
            while held[0].blocked:
                await reader.read(1 << 20)
            assert told == [True, False]
            held[0].end(b"last")
            got = b""
            while not got.endswith(b"4\r\nlast\r\n0\r\n\r\n"):
                got = got[-50:] + await asyncio.wait_for(reader.read(1 << 20), 1)
            writer.write(GET)
            await asyncio.sleep(0.02)
            assert len(held) == 2  # the connection serves on
            writer.close()

    run(go())


@pytest.mark.parametrize(("sent", "answer"), [(b"GET / HT", b"HTTP/1.1 408"), (b"", b"")])
def test_a_client_that_does_not_go_on_is_not_waited_for(run, sent, answer):
    async def go():
        async with serving(head_s=0.1, idle_s=0.1) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            got = await asyncio.wait_for(reader.read(), 2)
            writer.close()
            return got

    assert run(go()).startswith(answer)


def test_a_body_that_stops_coming_is_not_waited_for(run):
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhe"

    async def go():
        async with serving(body_silence_s=0.1) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            got = await asyncio.wait_for(reader.read(), 2)
            writer.close()
            return got

    assert run(go()).startswith(b"HTTP/1.1 408")


def test_a_server_that_stops_lets_answers_end(run):
    async def go():
        held = []
        async with serving(held.append) as (port, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET)
            await asyncio.sleep(0.02)
            server.stop_listening()
            echo(held[0])
            got = await asyncio.wait_for(reader.read(), 1)
            writer.close()
            return got

    assert b"GET /? " in run(go())


def test_random_damage_never_breaks_the_server(run):
    """Seeded: valid requests with bytes changed, cut, doubled. Each gets an answer of HTTP or a closed connection."""
    rng = random.Random(5)
    valid = [
        GET,
        b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello",
        b"POST /b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"GET /c HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    ]

    async def one(port: int, sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 3)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def go():
        failures = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with serving() as (port, _):
            for _ in range(600):
                sent = bytearray(b"".join(rng.choices(valid, k=rng.randint(1, 3))))
                for _ in range(rng.randint(1, 6)):
                    at = rng.randrange(len(sent))
                    kind = rng.randrange(3)
                    if kind == 0:
                        sent[at] = rng.randrange(256)
                    elif kind == 1:
                        del sent[at : at + rng.randint(1, 8)]
                    else:
                        sent[at:at] = sent[at : at + rng.randint(1, 20)]
                    if not sent:
                        sent += GET
                got = await one(port, bytes(sent))
                assert not got or got.startswith(b"HTTP/1.1 ")
            assert bodies(await exchange_bytes(port, GET)) == [b"GET /? "]
            await asyncio.sleep(0.01)
        assert failures == []

    run(go())
