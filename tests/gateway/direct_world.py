"""A gateway in front of doubles of existing engines, over real sockets."""

import contextlib
import json

import aiohttp

from tests.direct.engine import Engine
from tests.gateway.world import KEY, document, node, running_gateway, until
from tests.yard.test_direct_config import TEXT_MODEL


class DirectWorld:
    def __init__(self, gateway, url, http, engines):
        self.gateway, self.url, self.http, self.engines = gateway, url, http, engines

    @property
    def serving(self):
        return self.gateway.ready()

    @property
    def upstream(self):
        return self.serving.direct

    def chat(self, **fields):
        return {"model": "glm", "messages": [{"role": "user", "content": "hello there, engine"}]} | fields

    async def post(self, body, path="/v1/chat/completions", **headers):
        """Posts and reads the answer whole."""
        sent = {"authorization": f"Bearer {KEY}"} | headers
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.http.post(self.url + path, data=data, headers=sent)
        await response.read()
        return response

    async def idle(self):
        """Nothing is held anywhere."""
        await until(lambda: not self.serving.yard.requests and not any(engine.open for engine in self.engines.values()))
        assert not self.upstream.relays
        assert self.upstream.rooms.in_use == 0


@contextlib.asynccontextmanager
async def direct_world(folder, phases=None, kind="vllm", limit=8, told=None, **engine):
    """`phases`: names of servers and their roles; `engine`: fields of every double."""
    phases = phases or {"v1": "mixed"}
    engines = {name: Engine(kind, role={"mixed": "null"}.get(phase, phase), **engine) for name, phase in phases.items()}
    nodes = []
    for order, (name, phase) in enumerate(phases.items()):
        await engines[name].listen()
        described = node(name, order, phase, engines[name].url) | {"engine": kind, "url": engines[name].url}
        nodes.append(described | {"direct": {"bootstrap_port": 9000 + order} | (told or {})})
    written = document(nodes, model=TEXT_MODEL)
    written["flow"]["prefill"]["limit_per_node"] = limit
    written["flow"]["empty_pool_ttl_s"] = 0.5  # nobody waits long here for a node that comes back
    file = folder / "config.json"
    file.write_text(json.dumps(written))
    async with running_gateway(file) as (gateway, url), aiohttp.ClientSession() as http:
        await until(lambda: gateway.serving is not None, 10)
        await until(lambda: all(known.health == "ok" for known in gateway.ready().yard.fleet.nodes))
        yield DirectWorld(gateway, url, http, engines)
        gateway.ready().yard.check_integrity()
    for double in engines.values():
        double.close()


def events(text: bytes) -> list:
    """The documents of a stream; the closing mark as it is."""
    parts = [part.removeprefix(b"data: ") for part in text.split(b"\n\n") if part]
    return [part.decode() if part == b"[DONE]" else json.loads(part) for part in parts]


def text_of(stream: bytes) -> str:
    found = [event for event in events(stream) if isinstance(event, dict)]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in found if event.get("choices"))
