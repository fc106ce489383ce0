"""A real yard in which 2,000 requests of 200 flows wait, and its operator API over HTTP as a gateway has it."""

import json
import threading
import time
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import PromptHasher
from controlplane import redis_client as redis_names
from tests.yard.scene import node_state
from workers.yard import commands, events, inspection
from workers.yard.config import PartitionConfig
from workers.yard.yard import Yard

WAITING, FLOWS = 2000, 200
SENT_AT_ONCE = 8


class Crowd:
    """`snapshot` is what the next one says; each lets one request end and another one come."""

    def __init__(self, document):
        self.config = document
        self.yard = Yard(PartitionConfig.parse(document), time.time())
        self.hasher = PromptHasher("glm", "fp8", 64, 1)
        self.lock, self.made, self.sent, self.cancelled = threading.Lock(), 0, [], []
        self._report()
        for _ in range(WAITING + SENT_AT_ONCE):
            self._arrive()
        self.http = _serve(self)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def snapshot(self):
        with self.lock:
            self._configure()
            self._report()
            if self.sent:
                done = self.sent.pop(0)
                result = events.PrefillResult(0, 0, self.yard.requests[done].request.prompt.tokens, first_finish="stop")
                self._feed(events.PrefillFinished(done, result))
            self._arrive()
            return self.yard.snapshot(time.time())

    def _feed(self, event):
        for command in self.yard.handle(time.time(), event):
            if isinstance(command, commands.StartPrefill):
                self.sent.append(command.request_id)

    def _arrive(self):
        self.made += 1
        ids = array("I", range(10_000 * self.made, 10_000 * self.made + 30))
        self._feed(
            events.Arrived(
                events.YardRequest(
                    request_id=f"req-{self.made:06d}", tenant="acme", band=("standard", "premium")[self.made % 2],
                    flow_id=f"flow-{self.made % FLOWS}", bytes=1000, prompt=self.hasher.hash("acme", ids, 64 * 30),
                    output_tokens=100, received_at=time.time(), branch=BranchSignal(tenant="acme"), ttl_s=3000.0,
                )
            )
        )  # fmt: skip

    def _report(self):
        for name, node in self.yard.config.nodes.items():
            self._feed(events.NodeStatus(name, node_state(node.phase)))

    def _configure(self):
        newest = redis_names.read_json(redis_names.config_key(self.config["partition"]))
        if newest and newest["version"] > self.config["version"]:
            self.config = newest
            self._feed(events.Configured(PartitionConfig.parse(newest)))

    def answer(self, method, path, query):
        """As `workers.gateway.operator_api` answers: the same reads of the same yard."""
        with self.lock:
            now = time.time()
            if method == "GET":
                return inspection.living_requests(now, self.yard, query, None, int(query.get("limit", 100)))
            request_id = unquote(path.split("/")[-2])
            self.cancelled.append(request_id)
            self._feed(events.ClientGone(request_id))
            return {"cancelled": True}


def _serve(crowd):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self):
            split = urlsplit(self.path)
            body = json.dumps(crowd.answer(self.command, split.path, dict(parse_qsl(split.query)))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
