"""Stand-ins for SGLang servers: they answer at once with prepared bytes, so that only the gateway between is measured.

    python -m bench.gateway_workers --ports 9101,9102 [--tokens 16] [--itl-ms 50]

All ports are served by one process. `GET /counts` says how many connections and generations there were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial

import uvloop

from workers.http.exchange import Exchange
from workers.http.server import Limits, Server
from workers.http.wire import encode_headers

JSON = encode_headers({"content-type": "application/json"})
STREAM = encode_headers({"content-type": "text/event-stream"})
LOAD = {"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0, "max_total_num_tokens": 4_000_000}
HIGH_LIMITS = Limits(idle_s=3600.0)


def chunk(content: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": content, "logprobs": None, "finish_reason": finish_reason}
    document = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "bench", "choices": [choice]}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


class Workers:
    """`tokens` an answer; `itl_s` between them (0: as fast as they can be written)."""

    def __init__(self, tokens: int, itl_s: float) -> None:
        self.generations = 0
        self.connections: set[int] = set()
        self._itl_s = itl_s
        self._chunks = [chunk({"content": "tok "}, None) for _ in range(tokens)] + [chunk({}, "stop")]
        message = {"role": "assistant", "content": "tok " * tokens}
        usage = {"prompt_tokens": 10, "completion_tokens": tokens, "total_tokens": 10 + tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._whole = json.dumps(
            {"id": "c-1", "object": "chat.completion", "choices": [choice], "usage": usage}
        ).encode()

    def handle(self, role: str, exchange: Exchange) -> None:
        path = exchange.path
        if path == b"/v1/chat/completions":
            self._generate(exchange)
        elif path in (b"/health", b"/health_generate"):
            exchange.respond(200, b"", b"")
        elif path in (b"/v1/loads", b"/get_load"):
            exchange.respond(200, JSON, json.dumps({"loads": [LOAD]}).encode())
        elif path in (b"/server_info", b"/get_server_info"):
            info: dict[str, object] = {
                "internal_states": [{"disaggregation_mode": role}],
                "disaggregation_mode": role,
                "version": "0.5.23",
            }
            info |= {"model_path": "bench", "served_model_name": "bench", "tp_size": 1, "dp_size": 1, "status": "ready"}
            exchange.respond(200, JSON, json.dumps(info).encode())
        elif path in (b"/model_info", b"/get_model_info"):
            exchange.respond(200, JSON, b'{"model_path":"bench","served_model_name":"bench","is_generation":true}')
        elif path == b"/v1/models":
            exchange.respond(200, JSON, b'{"object":"list","data":[{"id":"bench","object":"model"}]}')
        elif path == b"/counts":
            told = {"generations": self.generations, "connections": len(self.connections)}
            exchange.respond(200, JSON, json.dumps(told).encode())
        else:
            exchange.respond(404, JSON, b"{}")

    def _generate(self, exchange: Exchange) -> None:
        self.generations += 1
        self.connections.add(id(exchange._connection))
        body = exchange.body
        if b'"stream":true' not in body[:300] and b'"stream":true' not in body[-600:]:
            exchange.respond(200, JSON, self._whole)
            return
        exchange.start(200, STREAM)
        self._next(exchange, 0)

    def _next(self, exchange: Exchange, at: int) -> None:
        if exchange.gone:
            return
        exchange.write(self._chunks[at])
        if at + 1 == len(self._chunks):
            exchange.end(b"data: [DONE]\n\n")
            return
        loop = asyncio.get_running_loop()
        if self._itl_s:
            loop.call_later(self._itl_s, self._next, exchange, at + 1)
        else:
            loop.call_soon(self._next, exchange, at + 1)


async def serve(arguments: argparse.Namespace) -> None:
    workers = Workers(arguments.tokens, arguments.itl_ms / 1000)
    for place in arguments.ports.split(","):
        port, _, role = place.partition(":")
        server = Server(
            partial(workers.handle, role or "null"), lambda exchange, *_: exchange.respond(400, b"", b""), HIGH_LIMITS
        )
        await server.listen("127.0.0.1", int(port))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", required=True, help="port[:role],... (role: prefill or decode)")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--itl-ms", type=float, default=0.0)
    uvloop.run(serve(parser.parse_args()))
