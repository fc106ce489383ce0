"""The console in headless Chromium: a real uvicorn on a free port over the test database, and a publisher of snapshots."""

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvicorn
from channels.layers import get_channel_layer
from django.db import connections
from playwright.sync_api import sync_playwright

from apps.planning.models import PlannerPolicy
from controlplane import redis_client as redis_names
from controlplane.asgi import application
from tests.console.kit import node, snapshot
from tests.factories import make_partition, make_tenant, make_user
from tools import browser as chromium
from tools.ports import free_port

EXPECTED = re.compile("422|409|ERR_CONNECTION_REFUSED")
PASSWORD = "a long enough password"


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/browser" in str(item.path):
            item.add_marker(pytest.mark.browser)


def aside(work, *arguments, **more):
    """Runs the product's own services in another thread: Playwright keeps an event loop running in this one."""

    def run():
        try:
            return work(*arguments, **more)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


@pytest.fixture(scope="module")
def browser():
    """One Chromium for these tests; without one they fail, because `make test` brings it."""
    path = chromium.find()
    assert path, "no Chromium: run `python -m tools.browser`"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(path), args=list(chromium.FLAGS))
        yield started
        started.close()


@pytest.fixture
def partition(transactional_db, redis_client):
    return aside(_make)


def _make():
    partition = make_partition("gb300", ("prefill", "prefill", "decode", "decode"))
    PlannerPolicy.objects.create(partition=partition, mode="approve", slo_ttft_s=1.0)
    make_tenant("acme", title="Acme")
    for role in ("viewer", "operator", "administrator"):
        make_user(f"{role}-person", role)
    return partition


class Server(threading.Thread):
    """uvicorn, and what a gateway would publish: `state` is what the next snapshots say, `source()` all of them."""

    def __init__(self, partition):
        super().__init__(daemon=True)
        self.partition = partition
        self.state = {}
        self.source = None
        self.port = free_port()
        config = uvicorn.Config(
            application, port=self.port, log_level="warning", lifespan="off", ws_per_message_deflate=False
        )
        self.server = uvicorn.Server(config)
        self.url = f"http://127.0.0.1:{self.port}"

    def run(self):
        asyncio.run(self._serve())

    async def _serve(self):
        publishing = asyncio.create_task(self._publish())
        await self.server.serve()
        publishing.cancel()

    async def _publish(self):
        layer, client, seq = get_channel_layer(), redis_names.client(), 0
        while True:
            seq += 1
            config = redis_names.read_json(redis_names.config_key(self.partition)) or {"version": 1, "bands": []}
            nodes = [node(f"{self.partition}-{i}", "prefill" if i < 3 else "decode") for i in (1, 2, 3, 4)]
            data = snapshot(self.partition, seq, nodes=nodes, config_version=config["version"])
            priorities = {band["name"]: band["priority"] for band in config["bands"]}
            for band in data["bands"]:
                band["priority"] = priorities.get(band["name"], band["priority"])
            data |= self.source() if self.source else self.state
            client.set(redis_names.live_key(self.partition), json.dumps(data), ex=10)
            await layer.group_send(redis_names.live_group(self.partition), {"type": "live.snapshot", "data": data})
            await asyncio.sleep(0.2)

    def stop(self):
        self.server.should_exit = True
        self.join(10)


@pytest.fixture
def server(partition):
    server = Server(partition.name)
    server.start()
    deadline = time.monotonic() + 15
    while not server.server.started:
        assert time.monotonic() < deadline, "uvicorn did not start"
        time.sleep(0.05)
    yield server
    server.stop()


@pytest.fixture
def open_page(browser, server):
    """Opens a page as someone with a role; fails the test on any script error, refused script or broken request."""
    contexts, complaints = [], []

    def open_page(role, path="", theme="light", width=1280):
        context = browser.new_context(viewport={"width": width, "height": 900}, base_url=server.url)
        contexts.append(context)
        context.set_default_timeout(10_000)
        context.add_cookies([{"name": "theme", "value": theme, "url": server.url}])
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda said: said.type == "error" and not EXPECTED.search(said.text) and complaints.append(said.text),
        )
        page.goto("/login/")
        page.fill("#id_username", f"{role}-person")
        page.fill("#id_password", PASSWORD)
        page.click("button[type=submit]")
        page.wait_for_url("**/p/gb300/")
        if path:
            page.goto(f"/p/gb300/{path}/")
        page.wait_for_selector("body[data-feed=live]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
