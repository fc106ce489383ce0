"""Everything of a gateway that exists once there is a configuration: yard, driver, nodes and the calls to them."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from array import array
from collections.abc import Container

import aiohttp

from apps.kvcache.domain.events import BranchSignal
from apps.kvcache.domain.hashing import HashedPrompt, PromptHasher, root_hash
from workers.direct import sglang
from workers.direct.node import DirectNode
from workers.gateway.direct_upstream import DirectUpstream
from workers.gateway.driver import Clock, YardDriver
from workers.gateway.errors import ApiError
from workers.gateway.live import Publisher
from workers.gateway.metrics import GatewayMetrics
from workers.gateway.nodes import NodeClient
from workers.gateway.session import Session
from workers.gateway.signals import Caller, Standing
from workers.gateway.text import TextCodec
from workers.gateway.upstream import Upstream
from workers.http.client import Client
from workers.yard import events
from workers.yard.config import ConfigError, PartitionConfig
from workers.yard.yard import Yard

DRAIN_S = 5.0
ENGINE_DOMAIN = "engine"  # an existing engine's memory is shared by all who use it


class Serving:
    """Made on the event loop by `Gateway`. `direct` carries requests to existing engines, `sessions` are those of agents."""

    def __init__(
        self, config: PartitionConfig, codec: TextCodec, token: str, http: aiohttp.ClientSession, publisher: Publisher
    ) -> None:
        self.config = config
        self.codec = codec
        self.clock = Clock()
        self.process_id = secrets.token_hex(16)
        self.metrics = GatewayMetrics()
        self.sessions: dict[str, Session] = {}
        self.nodes: dict[str, NodeClient] = {}
        self.engines: dict[str, DirectNode] = {}
        model = config.model
        self.hasher = PromptHasher(model.name, model.dtype, model.block_tokens, model.ids_per_block)
        self.yard = Yard(config, self.clock())
        self.upstream_http = http
        self.direct: DirectUpstream | None = None
        self.driver = YardDriver(self.yard, self.clock, publisher.journal, self.metrics)
        self.upstream: Upstream | DirectUpstream
        if _is_direct(config):
            self.direct = self.upstream = DirectUpstream(
                Client(), self.engines, sglang.Rooms(_draw), self.driver.feed, self.driver.feed_all
            )
            self.driver.connect(self.direct, self.engines)
        else:
            self.upstream = Upstream(model, self.sessions, self.nodes, self.driver.feed)
            self.driver.connect(self.upstream, self.nodes)
        self._living: Container[str] = self.sessions if self.direct is None else self.direct.relays
        self._token = token
        self._closing: set[asyncio.Task[None]] = set()
        self._sync_nodes(config)
        self.driver.feed(events.Tick())

    def apply(self, config: PartitionConfig) -> None:
        """Puts a new configuration in force. Raises ConfigError where the running process cannot take it."""
        if config.nodes and _is_direct(config) != (self.direct is not None):
            raise ConfigError("nodes", "the kind of nodes this process was started with (restart it to change that)")
        self.driver.feed(events.Configured(config))
        self.config = config
        self._sync_nodes(config)

    def _sync_nodes(self, config: PartitionConfig) -> None:
        for name, client in list(self.nodes.items()):
            wanted = config.nodes.get(name)
            if wanted is None or wanted.url != client.url:
                self._close_later(self.nodes.pop(name))
        for name, engine in list(self.engines.items()):
            wanted = config.nodes.get(name)
            if wanted is None or (wanted.url, wanted.direct) != (engine.url, engine.direct):
                self._close_later(self.engines.pop(name))
        for name, node in config.nodes.items():
            if name in self.engines:
                self.engines[name].reconfigure(node)
            elif self.direct is not None:
                root = root_hash(config.model.name, config.model.dtype, ENGINE_DOMAIN)
                self.engines[name] = DirectNode(
                    node, config.model, root, self.direct.client, self.driver.feed, self.clock
                )
                self.engines[name].start()
            elif name not in self.nodes:
                self.nodes[name] = NodeClient(
                    name, node.url, self.upstream_http, self._token, self.driver.feed, self.process_id
                )
                self.nodes[name].start()

    def _close_later(self, client: NodeClient | DirectNode) -> None:
        task = asyncio.create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served here."""
        if name != self.config.model.name and name not in self.config.model.served_names:
            raise ApiError(404, f"The model '{name}' does not exist here.", code="model_not_found", param="model")

    def check_vocabulary(self, ids: array[int]) -> None:
        """Raises ApiError 400 when an id lies outside the model's vocabulary."""
        vocabulary = self.codec.vocabulary
        if vocabulary is not None and max(ids, default=0) >= vocabulary:
            text = f"'prompt' holds a token id that the model does not have (it has {vocabulary})."
            raise ApiError(400, text, code="invalid_value", param="prompt")

    def own_id(self, wanted: str) -> str:
        """The client's request id, unless a request of that id is still here."""
        return secrets.token_hex(16) if wanted in self.yard.requests or wanted in self._living else wanted

    def enqueue(
        self,
        request_id: str,
        caller: Caller,
        place: Standing,
        branch: BranchSignal,
        prompt: HashedPrompt,
        output_tokens: int,
        body_bytes: int,
        received_at: float,
    ) -> None:
        """Hands a request that was read to the yard. Its session or relay is there already."""
        began = time.perf_counter()
        arrived = events.YardRequest(
            request_id=request_id,
            tenant=caller.tenant.name,
            band=place.band,
            flow_id=place.flow_id,
            bytes=body_bytes,
            prompt=prompt,
            output_tokens=output_tokens,
            received_at=received_at,
            branch=branch,
            ttl_s=place.ttl_s,
            slo_ttft_s=place.slo_ttft_s,
            objective=place.objective,
        )
        self.driver.feed(events.Arrived(arrived))
        self.metrics.enqueued(self.yard, time.perf_counter() - began)

    def cancel(self, request_id: str, error: ApiError) -> bool:
        """Ends a request with this error; False when it is not here."""
        if request_id not in self.yard.requests:
            return False
        if self.direct is not None:
            return self.direct.cancel(request_id, error)
        session = self.sessions.get(request_id)
        if session is None:
            return False
        session.fail(error)
        return True

    async def close(self) -> None:
        """Refuses what waits, gives what runs a moment, then closes."""
        self.driver.feed(events.ShutDown())
        deadline = time.monotonic() + DRAIN_S
        while self.yard.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self.driver.close()
        clients: list[NodeClient | DirectNode] = [*self.nodes.values(), *self.engines.values()]
        await asyncio.gather(*(client.close() for client in clients))
        await self.upstream.close()


_rng = random.Random(secrets.randbits(256))


def _draw(limit: int) -> int:
    return int(_rng.random() * limit)


def _is_direct(config: PartitionConfig) -> bool:
    return any(node.direct is not None for node in config.nodes.values())
