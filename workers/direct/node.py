"""One existing engine as the gateway sees it: is it well, how busy is it, which role does it play, what does it hold."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence

import msgspec
import structlog

from apps.kvcache.domain.events import BlocksRemoved, BlocksStored, NodeCleared
from apps.kvcache.domain.hashing import HASH_BYTES
from apps.kvcache.domain.machine import StreamEvent
from workers.direct.assumed import AssumedCache
from workers.direct.kv_events import Event
from workers.direct.kv_link import KvLink
from workers.direct.kv_translation import KvTranslation, OurEvent, OurStored
from workers.direct.loads import BadLoad, EngineLoad, from_loads, from_metrics
from workers.direct.work import Work
from workers.http.client import CallError, Client, Origin
from workers.http.fetch import Answer, fetch
from workers.yard import events
from workers.yard.commands import RefChange
from workers.yard.config import ModelConfig, NodeConfig
from workers.yard.events import NodeState

POLL_EVERY_S = 1.0
POLL_TIMEOUT_S = 2.0
POST_TIMEOUT_S = 10.0
ROLE_EVERY_POLLS = 5
_STARTED = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})?[ \t]+(\S+)", re.MULTILINE)
_ROLES = {"prefill": "prefill", "decode": "decode", "null": "mixed"}
logger = structlog.get_logger("switchyard.direct")
Feed = Callable[[events.Event], None]


class DirectNode:
    """Polls an engine and follows its KV events; reports to the yard through `feed`. Start and close it on the event loop.

    An engine without KV events is assumed to hold what it was sent (`AssumedCache`); `view` says which it is.
    """

    pool_name = ""  # nobody else can read an engine's KV

    def __init__(
        self,
        config: NodeConfig,
        model: ModelConfig,
        root: bytes,
        client: Client,
        feed: Feed,
        clock: Callable[[], float],
    ) -> None:
        assert config.direct is not None
        self.config = config
        self.direct = config.direct
        self.name = config.name
        self.url = config.url
        self.origin = Origin.parse(config.url)
        self.restarts = 0
        self._model = model
        self._client = client
        self._feed = feed
        self._clock = clock
        self._headers = _headers(self.direct.token_env)
        self._heads: dict[str, bytes] = {}
        self._seq = 0
        self._load = EngineLoad(0, 0, 0.0)
        self._heard = False
        self._work = Work()
        self._role: str | None = None
        self._started = self._started_seen = ""
        self._translation = KvTranslation(root, model.block_tokens)
        self._assumed: AssumedCache | None = None
        self._link: KvLink | None = None
        if self.direct.kv_events is not None:
            self._link = KvLink(self.name, self.direct.kv_events, self._kv_events, self._kv_lost)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._poll(), name=f"poll {self.name}")
        if self._link is not None:
            self._link.start()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    def reconfigure(self, config: NodeConfig) -> None:
        """A new wish, such as another phase: routing follows it at once."""
        changed = (config.phase, config.generation) != (self.config.phase, self.config.generation)
        self.config = config
        if changed and self._heard:
            self._feed(events.NodeStatus(self.name, self._state()))

    def head(self, path: str, request_id: str) -> bytes:
        """The head of a call to the engine, but for its length. `request_id` was checked when the request was read."""
        constant = self._heads.get(path)
        if constant is None:
            constant = self._heads[path] = self.origin.head("POST", path, self._headers)
        return b"%bx-request-id: %b\r\n" % (constant, request_id.encode())

    @property
    def view(self) -> str:
        """How it is known what the engine holds."""
        if self._link is None:
            return "assumed from what it was sent: no KV events are configured"
        if self._translation.blind is not None:
            return f"not known: {self._translation.blind}"
        if self._link.error is not None:
            return f"not known: {self._link.error}"
        return f"told by {self._link.heard} messages of its KV events"

    # ---- what only agents do ----------------------------------------------------------------------------------------

    def push_refs(self, changes: tuple[RefChange, ...], reset: bool) -> None:
        """An engine evicts by its own rules: it cannot be told what is still needed."""

    def release(self, request_id: str) -> None:
        """A hand-over that nobody fetches is let go by the engine itself, after its lease."""

    # ---- status -----------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        polls = 0
        while True:
            try:
                await self._look(with_role=polls % ROLE_EVERY_POLLS == 0 or self._role != self.config.phase)
                self._heard = True
                report = events.NodeStatus(self.name, self._state())
                rows = self._work.rows(self._load)
                self._feed(events.NodeStatuses([report], [(self.name, rows)]) if rows else report)
            except CallError as error:
                self._feed(events.NodeUnreachable(self.name, error.reason == "unreachable", error.message))
            except BadLoad as error:
                self._feed(events.NodeUnreachable(self.name, False, str(error)))
            except Exception:
                logger.exception("the poll of an engine failed", node=self.name)
            polls += 1
            await asyncio.sleep(POLL_EVERY_S)

    async def _look(self, with_role: bool) -> None:
        """Health, load and role. Raises CallError or BadLoad."""
        health = await self._get("/health")
        if health.status != 200:
            raise CallError("unhealthy", f"/health answered {health.status}")
        if self.config.engine == "sglang":
            await self._look_sglang(with_role)
        else:
            await self._look_metrics("vllm")
        self._restarted_when_changed()

    async def _look_sglang(self, with_role: bool) -> None:
        loads = await self._get("/v1/loads")
        if loads.status == 200:
            self._load = from_loads(loads.body)
        else:
            await self._look_metrics("sglang")
        if with_role:
            info = await self._get("/server_info")
            if info.status == 200:
                self._took_role(role(info.body))

    async def _look_metrics(self, kind: str) -> None:
        metrics = await self._get("/metrics")
        if metrics.status != 200:
            raise BadLoad(f"/metrics answered {metrics.status}: the engine's metrics must be on")
        self._load = from_metrics(kind, metrics.body)
        started = _STARTED.search(metrics.body)
        if started is not None:
            self._started_seen = started[1].decode("ascii", "replace")

    def _took_role(self, told: str | None) -> None:
        """A server that changes its role while it runs begins with an empty memory."""
        before, self._role = self._role, told
        if before is not None and told != before:
            logger.info("an engine changed its role", node=self.name, role=told)
            self._lost_kv()

    def _restarted_when_changed(self) -> None:
        if self._started and self._started_seen != self._started:
            self._restarted("it is another process now")
        self._started = self._started_seen

    async def post(self, path: str, body: bytes) -> Answer:
        """One call that is awaited whole. Raises CallError."""
        return await fetch(
            self._client, self.origin, "POST", path, headers=self._headers, body=body, timeout_s=POST_TIMEOUT_S
        )

    async def _get(self, path: str) -> Answer:
        return await fetch(
            self._client, self.origin, "GET", path, headers=self._headers, timeout_s=POLL_TIMEOUT_S, max_bytes=2**24
        )

    def _state(self) -> NodeState:
        load, wish = self._load, self.config
        phase = self._role if self._role is not None and self.config.engine == "sglang" else wish.phase
        kv_tokens = load.kv_tokens or self.direct.kv_tokens or 0
        prefills = phase == "prefill"
        return NodeState(
            phase=phase,
            target_phase=phase,
            state="ready",
            generation=wish.generation,
            boot_id=f"{self._started}-{self.restarts}",
            running_prefill=load.running if prefills else 0,
            queued_prefill=load.waiting if phase != "decode" else 0,
            running_decode=0 if prefills else load.running,
            queued_decode=load.waiting if phase == "decode" else 0,
            queued_tokens=load.waiting_tokens,
            pool_used_blocks=round(load.kv_used_ratio * kv_tokens) // self._model.block_tokens,
            pool_capacity_blocks=kv_tokens // self._model.block_tokens,
            pool_referenced_blocks=0,
            kv_free_tokens=round((1.0 - load.kv_used_ratio) * kv_tokens),
            max_decode_batch=load.max_running or wish.decode_limit,
            event_seq=self._seq,
            kv_tokens=kv_tokens,
        )

    # ---- what the engine holds --------------------------------------------------------------------------------------

    def resync(self) -> None:
        """Tells the yard the whole content again."""
        if self._link is not None:
            segments = self._translation.segments()
        else:
            segments = self._assumed.segments() if self._assumed is not None else []
        self._feed(events.NodeSnapshotTaken(self.name, self._seq, segments))

    def served(self, chain: bytes) -> None:
        """The engine has computed this prompt, or found it: without KV events that is all there is to know."""
        self._work.prefilled(len(chain) // HASH_BYTES * self._model.block_tokens)
        if self._link is None and self._capacity_blocks:
            if self._assumed is None or self._assumed.capacity_blocks != self._capacity_blocks:
                self._assumed = AssumedCache(self._capacity_blocks)
            self._report(self._assumed.served(self._clock(), chain))

    @property
    def _capacity_blocks(self) -> int:
        return (self._load.kv_tokens or self.direct.kv_tokens or 0) // self._model.block_tokens

    def _kv_events(self, batch: Sequence[Event]) -> None:
        self._report(self._translation.translate(batch))

    def _kv_lost(self, why: str) -> None:
        logger.info("KV events begin anew", node=self.name, why=why)
        if "another process" in why:
            self._restarted(why)
        else:
            self._report(self._translation.clear())

    def _restarted(self, why: str) -> None:
        logger.info("an engine was restarted", node=self.name, why=why)
        self.restarts += 1
        self._lost_kv()

    def _lost_kv(self) -> None:
        """Whatever the engine held, it holds no more."""
        self._translation.clear()
        if self._assumed is not None:
            self._assumed.clear()
        self._seq += 1
        self._feed(events.NodeEvents(self.name, [NodeCleared(self.name, self._seq)]))

    def _report(self, changes: Sequence[OurEvent]) -> None:
        if changes:
            self._feed(events.NodeEvents(self.name, [self._numbered(change) for change in changes]))

    def _numbered(self, change: OurEvent) -> StreamEvent:
        self._seq += 1
        if isinstance(change, OurStored):
            return BlocksStored(self.name, self._seq, change.parent, change.chain)
        return BlocksRemoved(self.name, self._seq, change.hashes)


def role(server_info: bytes) -> str | None:
    """The live role that SGLang's `/server_info` tells; None when it does not."""
    try:
        told = msgspec.json.decode(server_info)
        states = told.get("internal_states") or [{}]
        mode = states[0].get("disaggregation_mode") or told.get("disaggregation_mode")
    except (msgspec.DecodeError, AttributeError, IndexError, TypeError):
        return None
    return _ROLES.get(str(mode))


def _headers(token_env: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    token = os.environ.get(token_env, "") if token_env is not None else ""
    return headers | {"authorization": f"Bearer {token}"} if token else headers
