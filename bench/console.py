"""`make bench-console`: 200 browsers on one partition's live feed, and each page's server time with much behind it.

The feed: uvicorn in a process of its own; 200 websockets of signed-in viewers in another; a snapshot of nine nodes twice a
second through Redis, as a gateway sends it. Latency is from publishing to the frame read; CPU is uvicorn's alone.
The pages: 768 nodes, 50 tenants with 200 flows, and 30 days of samples, sums, switches, alerts and edits (`console_seed`);
Django's own client, so neither network nor browser is in it. The value is the median of several requests; `-cpu` is the
mean CPU time of the web process and its database session, which says what a page costs where others use the machine too.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bench.console_seed import FLOWS, NODES, PARTITION, TENANTS, seed, snapshot
from bench.report import report
from tools.ports import free_port

CLIENTS = 200
SECONDS = 20
PER_S = 2
ROUNDS = 15
WARM = 2
TARGET_MS = 150.0
PAGES: tuple[tuple[str, dict[str, str]], ...] = (
    ("overview", {}), ("overview", {"range": "30d"}), ("queues", {}), ("nodes", {}), ("nodes", {"q": "9"}),
    ("nodes", {"span": "2592000"}), ("requests", {}), ("requests", {"tenant": "tenant-7", "range": "7d"}),
    ("requests", {"outcome": "failed", "range": "7d"}), ("requests", {"node": "bench-5", "range": "7d"}),
    ("requests", {"branch": "tenant-7/b107", "range": "7d"}), ("requests", {"q": "req-777", "range": "7d"}),
    ("branches", {}), ("reuse", {}), ("reuse", {"by": "node"}), ("split", {}), ("model", {}), ("whatif", {}),
    ("tenants", {}), ("alerts", {}), ("audit", {}), ("audit", {"actor": "rare"}), ("audit", {"q": "edit 17"}),
    ("audit", {"request_id": "none"}), ("settings", {}), ("timeline", {}), ("timeline", {"span": "2592000"}),
    ("node-list", {}), ("split-state", {}), ("alerts-state", {}), ("waiting", {}), ("flows", {}), ("palette", {}),
    ("history", {"range": "30d"}),
)  # fmt: skip


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as folder:
        os.environ["SWITCHYARD_DATA"] = folder
        os.environ["SWITCHYARD_SECRET_KEY"] = secrets.token_hex(32)
        os.environ["SWITCHYARD_AGENT_TOKEN"] = secrets.token_hex(16)
        for name in ("DATABASE_URL", "REDIS_URL"):
            os.environ.pop(name, None)
        os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
        from controlplane.embedded import EmbeddedServices

        services = EmbeddedServices(Path(folder), password=secrets.token_hex(8), durable=False)
        os.environ.update(services.urls())
        try:
            services.start()
            return _measured()
        finally:
            services.stop()


def _measured() -> int:
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    port = free_port()
    gateway = subprocess.Popen([sys.executable, "-m", "bench.console_gateway", str(port), str(NODES), str(TENANTS)])
    try:
        session = seed(f"http://127.0.0.1:{port}")
        met = [_feed(session), _pages()]
    finally:
        gateway.kill()
        gateway.wait()
    return 0 if all(met) else 1


# ---- pages -------------------------------------------------------------------------------------------------------


def _pages() -> bool:
    from django.contrib.auth.models import User
    from django.db import connection
    from django.test import Client

    from controlplane import redis_client

    import_module("controlplane.asgi")  # the web process loads every page's code at its start
    client = Client()
    client.force_login(User.objects.get(username="viewer"))
    live = redis_client.live_key(PARTITION)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        database = cursor.fetchone()[0]
    met = True
    for name, url in addresses():
        times, cpu = [], []
        for n in range(ROUNDS + WARM):
            redis_client.client().set(live, json.dumps(snapshot(NODES, FLOWS, 1)), ex=10)
            began, cpu_began = time.perf_counter(), time.process_time() + _cpu_s(database)
            answer = client.get(url)
            took, used = time.perf_counter() - began, time.process_time() + _cpu_s(database) - cpu_began
            assert answer.status_code == 200, (name, answer.status_code)
            if n >= WARM:
                times.append(took * 1000)
                cpu.append(used * 1000)
        times.sort()
        met &= bool(report(f"console-page-{name}", statistics.median(times), "ms", target=TARGET_MS, aim="at_most"))
        report(f"console-page-{name}-p95", times[int(0.95 * len(times))], "ms")
        report(f"console-page-{name}-cpu", statistics.fmean(cpu), "ms")
        report(f"console-page-{name}-size", len(answer.content) / 1000, "kB")
    return met


def addresses() -> list[tuple[str, str]]:
    """Every page, and those that can be narrowed down also narrowed to what is rare."""
    from django.urls import reverse

    return [
        (
            name + "".join(f"-{key}" for key in more),
            reverse(name, args=[PARTITION]) + (f"?{urlencode(more)}" if more else ""),
        )
        for name, more in PAGES
    ]


# ---- feed --------------------------------------------------------------------------------------------------------


def _feed(session: str) -> bool:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "controlplane.asgi:application", "--host", "127.0.0.1", "--port", str(port),
         "--loop", "uvloop", "--http", "httptools", "--ws", "websockets", "--ws-per-message-deflate", "false",
         "--log-level", "warning"],
    )  # fmt: skip
    try:
        found = asyncio.run(_watch(port, session, server.pid))
    finally:
        server.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)
        server.kill()
    latencies, missed, cpu = found
    latencies.sort()
    p99 = latencies[int(len(latencies) * 0.99)] * 1000 if latencies else None
    met = report("console-feed-missed", missed, "messages", target=0, aim="at_most")
    p99_met = report("console-feed-p99", p99, "ms", target=300.0, aim="at_most")
    report("console-feed-p50", latencies[len(latencies) // 2] * 1000 if latencies else None, "ms")
    cpu_met = report("console-feed-cpu", cpu, "cores", target=0.30, aim="at_most")
    return bool(met and p99_met and cpu_met)


async def _watch(port: int, session: str, pid: int) -> tuple[list[float], int, float]:
    """Latencies in seconds, messages that did not come, and the cores that uvicorn used meanwhile."""
    import websockets
    from channels.layers import get_channel_layer

    url = f"ws://127.0.0.1:{port}/ws/live/{PARTITION}/?form=view"
    headers = {"Cookie": f"sessionid={session}", "Origin": f"http://127.0.0.1:{port}"}
    await _until_open(port)
    sockets = [
        await websockets.connect(url, additional_headers=headers, compression=None, max_size=None)
        for _ in range(CLIENTS)
    ]
    sent: dict[int, float] = {}
    latencies: list[float] = []
    got = [set[int]() for _ in sockets]

    async def read(index: int, socket: Any) -> None:
        async for text in socket:
            now = time.perf_counter()
            at = text.find('"seq":', 0, 4000)
            seq = int(text[at + 6 : text.index(",", at)]) if at > 0 else 0
            if seq in sent:
                latencies.append(now - sent[seq])
                got[index].add(seq)

    readers = [asyncio.create_task(read(i, socket)) for i, socket in enumerate(sockets)]
    await asyncio.sleep(2)
    layer = get_channel_layer()
    cpu = _cpu_s(pid)
    began = time.perf_counter()
    for seq in range(1, SECONDS * PER_S + 1):
        data = snapshot(9, 3, seq)
        sent[seq] = time.perf_counter()
        await layer.group_send(f"live.{PARTITION}", {"type": "live.snapshot", "data": data})
        await asyncio.sleep(max(0.0, began + seq / PER_S - time.perf_counter()))
    await asyncio.sleep(1)
    used = (_cpu_s(pid) - cpu) / (time.perf_counter() - began)
    for reader in readers:
        reader.cancel()
    for socket in sockets:
        with suppress(Exception):
            await socket.close()
    return latencies, sum(len(sent) - len(seen) for seen in got), used


async def _until_open(port: int) -> None:
    for _ in range(300):
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("uvicorn did not start")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
