"""A closed loop of clients against one gateway; prints what it saw as one JSON object.

    python -m bench.gateway_load --port 8100 --size small|big --clients 32 --requests 2000 [--key KEY]

`big` bodies have about 120 kB. Bodies share 16 prefixes, as an agent fleet's do. Times are milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import time

import uvloop

SIZES = {"small": 200, "big": 120 * 1024}
PREFIXES = 16
TURNS = 8


def requests(size: str, key: str) -> list[bytes]:
    """Whole HTTP requests, shuffled."""
    rng = random.Random(11)
    found = []
    for prefix in range(PREFIXES):
        text = " ".join(f"w{rng.randrange(100_000)}" for _ in range(SIZES[size] // 6))
        for turn in range(TURNS):
            messages = [{"role": "system", "content": text}, {"role": "user", "content": f"turn {turn} of {prefix}"}]
            document = {"model": "bench", "stream": True, "max_tokens": 16, "temperature": 0, "messages": messages}
            body = json.dumps(document, separators=(",", ":")).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            head += f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
            found.append(head.encode() + body)
    rng.shuffle(found)
    return found


class Load:
    """Counts answers and their times. `gaps_ms`: the longest pause inside each stream."""

    def __init__(self, port: int, sent: list[bytes], total: int) -> None:
        self.left = total
        self.times_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self.failed = 0
        self._port = port
        self._sent = sent

    async def client(self, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        sock = writer.get_extra_info("socket")
        while self.left > 0:
            self.left -= 1
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            began = time.perf_counter()
            writer.write(self._sent[(number + self.left) % len(self._sent)])
            head = await reader.readuntil(b"\r\n\r\n")
            ended = b"chunked" in head.lower()
            last, longest, data = time.perf_counter(), 0.0, b""
            while ended and not data.endswith(b"0\r\n\r\n"):
                more = await reader.read(65_536)
                if not more:
                    raise ConnectionError("the stream was cut")
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                data = data[-8:] + more
            self.times_ms.append((time.perf_counter() - began) * 1000)
            self.gaps_ms.append(longest * 1000)
            if not head.startswith(b"HTTP/1.1 200") or not ended:
                raise ConnectionError(f"refused: {head[:60]!r}")
        writer.close()

    async def guarded(self, number: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        try:
            await self.client(number)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.failed += 1


async def run(arguments: argparse.Namespace) -> None:
    load = Load(arguments.port, requests(arguments.size, arguments.key), arguments.requests)
    began = time.perf_counter()
    apart_s = arguments.ramp_s / arguments.clients
    await asyncio.gather(*(load.guarded(number, number * apart_s) for number in range(arguments.clients)))
    seconds = time.perf_counter() - began
    times, gaps = sorted(load.times_ms) or [0.0], sorted(load.gaps_ms) or [0.0]
    told = {
        "answered": len(load.times_ms),
        "failed": load.failed,
        "per_s": len(load.times_ms) / seconds,
        "p50_ms": times[len(times) // 2],
        "p99_ms": times[len(times) * 99 // 100],
        "longest_gap_ms": gaps[-1],
        "gap_p99_ms": gaps[len(gaps) * 99 // 100],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--ramp-s", type=float, default=0.0, help="clients begin one after another over this time")
    parser.add_argument("--key", default="sk-bench")
    uvloop.run(run(parser.parse_args()))
