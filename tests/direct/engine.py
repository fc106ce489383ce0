"""A double of an existing engine's HTTP side, built from the engines' documented formats: status, load, and generation."""

import asyncio
import json
from dataclasses import dataclass, field

from workers.http.exchange import Exchange
from workers.http.server import Server
from workers.http.wire import encode_headers

JSON = encode_headers({"content-type": "application/json"})
STREAM = encode_headers({"content-type": "text/event-stream"})
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [1, 2],
    "remote_engine_id": "e",
    "extra": 1.5,
}


@dataclass
class Engine:
    """`kind`: vllm or sglang. `answers` overrides paths with (status, body) or "hang"; `bodies` are the calls received.

    `texts` are the chunks of a generation, with whatever else comes between them (`_odd`); `fault` says what goes wrong: a
    status, "cut" after the first chunk, "hang", "no end" or "late cut" after the closing event.
    """

    kind: str = "vllm"
    role: str = "null"
    started: float = 100.0
    running: int = 0
    waiting: int = 0
    texts: list = field(default_factory=lambda: ["a", "b", "c"])
    fault: str = ""
    pause_s: float = 0.0
    token: str | None = None
    answers: dict = field(default_factory=dict)
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    tasks: list = field(default_factory=list)
    left: int = 0
    open: int = 0

    async def listen(self) -> int:
        self.server = Server(self.handle, lambda exchange, status, code, text: exchange.respond(status, JSON, b"{}"))
        self.port = await self.server.listen("127.0.0.1", 0)
        return self.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.server.close()

    def handle(self, exchange: Exchange) -> None:
        path = exchange.path.decode()
        if path in self.answers:
            status, body = self.answers[path]
            exchange.respond(status, JSON, body)
        elif self.token is not None and exchange.header(b"authorization") != f"Bearer {self.token}".encode():
            exchange.respond(401, JSON, b"{}")
        elif path == "/health":
            exchange.respond(200, b"", b"")
        elif path == "/metrics":
            exchange.respond(200, b"", self._metrics())
        elif path == "/v1/loads" and self.kind == "sglang":
            rank = {"num_running_reqs": self.running, "num_waiting_reqs": self.waiting, "max_total_num_tokens": 6400}
            exchange.respond(200, JSON, json.dumps({"loads": [rank]}).encode())
        elif path == "/server_info" and self.kind == "sglang":
            exchange.respond(200, JSON, json.dumps({"internal_states": [{"disaggregation_mode": self.role}]}).encode())
        elif path in ("/v1/chat/completions", "/v1/completions"):
            self._generate(exchange)
        else:
            exchange.respond(404, JSON, b'{"error":{"message":"not found"}}')

    def _metrics(self) -> bytes:
        return (
            f"process_start_time_seconds {self.started}\n"
            f'{self.kind}:num_requests_running{{a="b"}} {self.running}\n{self.kind}:num_requests_waiting{{a="b"}} {self.waiting}\n'
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1\nvllm:kv_cache_usage_perc 0.25\n'
        ).encode()

    def _generate(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        self.bodies.append(body)
        self.headers.append(dict(exchange.headers))
        if self.fault.isdigit():
            told = {"error": {"message": "forced", "type": "x", "code": int(self.fault)}}
            exchange.respond(int(self.fault), JSON, json.dumps(told).encode())
            return
        self.open += 1
        exchange.on_gone = self._gone
        self.tasks.append(asyncio.get_running_loop().create_task(self._answer(exchange, body)))

    def _gone(self) -> None:
        self.left += 1
        self.open -= 1

    async def _answer(self, exchange: Exchange, body: dict) -> None:
        usage = {
            "prompt_tokens": 40,
            "completion_tokens": len(self.texts),
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        if self.fault == "hang":
            return
        if self.pause_s:
            await asyncio.sleep(self.pause_s)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(self.texts)}
            told = {"id": "e1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
            if body.get("kv_transfer_params"):
                told["kv_transfer_params"] = PARAMS
            self._over(exchange)
            exchange.respond(200, JSON, json.dumps(told).encode())
            return
        exchange.start(200, STREAM)
        for index, text in enumerate(self.texts):
            if not isinstance(text, str):
                if await self._odd(exchange, text):
                    continue
                return
            exchange.write(event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}))
            if self.fault == "cut" and index == 0:
                await asyncio.sleep(0.02)
                exchange.break_off()
                self.open -= 1
                return
            await asyncio.sleep(self.pause_s)
        exchange.write(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        if (body.get("stream_options") or {}).get("include_usage"):
            exchange.write(event({"choices": [], "usage": usage}))
        if self.fault in ("no end", "late cut"):
            exchange.write(b"data: [DONE]\n\n")
            if self.fault == "late cut":
                await asyncio.sleep(0.02)
                self._over(exchange)
                exchange.break_off()
            return
        self._over(exchange)
        exchange.end(b"data: [DONE]\n\n")

    async def _odd(self, exchange: Exchange, piece: object) -> bool:
        """A pause in seconds, a document, bytes as they are, or `...`: it dies. False when it is over."""
        if isinstance(piece, float):
            await asyncio.sleep(piece)
        elif isinstance(piece, dict):
            exchange.write(event(piece))
        elif isinstance(piece, bytes):
            exchange.write(piece)
        else:
            await asyncio.sleep(0.02)
            exchange.break_off()
            self.open -= 1
            return False
        return True

    def _over(self, exchange: Exchange) -> None:
        if not exchange.gone:
            self.open -= 1


def event(document: dict) -> bytes:
    return b"data: " + json.dumps({"id": "e1", "object": "chat.completion.chunk"} | document).encode() + b"\n\n"
