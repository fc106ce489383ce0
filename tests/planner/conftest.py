"""A partition of real node agents (simulated engine) for the planner's tasks to talk to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import httpx
import msgspec
import pytest
from django.conf import settings

from apps.planning.models import PlannerPolicy
from apps.topology import services as topology
from apps.topology.models import Node
from controlplane.actors import SYSTEM
from tests.factories import COEFFICIENTS, MODEL, NETWORK, make_partition, make_tenant
from workers.agent.process import AgentProcess
from workers.agent.spec import AgentSpec

PHASES = ("prefill", "prefill", "decode", "decode")


class Yard:
    """Agents in a thread of their own; `restart` kills the process' state and starts anew from its data folder."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = 0
        self.process: AgentProcess | None = None
        self.start()

    def start(self) -> None:
        spec = {
            "host": "127.0.0.1",
            "port": self.port,
            "data_dir": str(self._folder),
            "speed": 20.0,
            "nodes": [
                {
                    "name": f"gb300-{index}",
                    "engine": "simulated",
                    "model": {**MODEL},
                    "phase": phase,
                    "generation": 0,
                    "pool_blocks": 1000,
                    "limits": {"max_decode_batch": 16, "kv_tokens": 1_000_000, "prefill_chunk_tokens": 8192},
                    "coefficients": COEFFICIENTS,
                    "network": NETWORK,
                }
                for index, phase in enumerate(PHASES, start=1)
            ],
        }

        async def build() -> AgentProcess:
            process = AgentProcess(msgspec.convert(spec, AgentSpec), settings.AGENT_TOKEN)
            await process.start()
            return process

        self.process = self.call(build())
        self.port = self.process.port

    def stop(self) -> None:
        if self.process is not None:
            self.call(self.process.close())
            self.process = None

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(20)

    def url(self, node: str) -> str:
        return f"http://127.0.0.1:{self.port}/nodes/{node}"

    def client(self) -> httpx.Client:
        return httpx.Client(headers={"Authorization": f"Bearer {settings.AGENT_TOKEN}"}, trust_env=False, timeout=20)

    def status(self, node: str) -> dict[str, Any]:
        with self.client() as client:
            return client.get(f"{self.url(node)}/v1/status").json()

    def push(self, node: str, phase: str, generation: int) -> int:
        body = {"phase": phase, "generation": generation, "drain_deadline_s": 60}
        with self.client() as client:
            return client.put(f"{self.url(node)}/v1/phase", json=body).status_code


@pytest.fixture
def yard(tmp_path):
    yard = Yard(tmp_path / "agents")
    yield yard
    yard.close()


@pytest.fixture
def partition(db, yard, redis_client):
    """Four real nodes, two in each phase, generation 0, mode approve."""
    partition = make_partition("gb300", PHASES)
    for node in Node.objects.filter(partition=partition):
        topology.update_node(node, SYSTEM, "where the agents are", url=yard.url(node.name))
    PlannerPolicy.objects.create(partition=partition, mode="approve", cooldown_s=30, drain_deadline_s=5)
    return partition


@pytest.fixture
def tenant(db):
    """Without a tenant there is nobody whose requests could be simulated."""
    return make_tenant()


@pytest.fixture
def wait_for() -> Callable[..., None]:
    def wait(true: Callable[[], bool], seconds: float = 10.0) -> None:
        import time

        ends = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < ends, "it did not happen in time"
            time.sleep(0.05)

    return wait


@pytest.fixture
def other_connection_holds(db):
    """A context manager that takes an advisory lock on another connection, as another worker would."""
    from contextlib import contextmanager

    from django.db import connection

    from workers.planner import locks

    @contextmanager
    def hold(kind: str, partition_id: int):
        import zlib

        key = zlib.crc32(f"switchyard.{kind}".encode()) - 2**31
        assert locks.partition_lock
        other = connection.copy()
        try:
            with other.cursor() as cursor:
                cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", [key, partition_id])
                assert cursor.fetchone()[0]
            yield
        finally:
            other.close()

    return hold
