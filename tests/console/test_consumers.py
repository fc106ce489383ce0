"""The live socket: who may open it, what it sends first, that a slow reader gets the newest, and events in order."""

import asyncio
import json
import time

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from channels.layers import get_channel_layer
from channels.routing import URLRouter
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.sessions.backends.db import SessionStore

from apps.console import live as feeds
from apps.console.routing import websocket_urlpatterns
from apps.tenancy.services import add_member
from controlplane.actors import SYSTEM
from tests.console.kit import band, publish_snapshot, snapshot
from tests.factories import make_partition, make_tenant, make_user

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def fresh_feeds():
    feeds._feeds.clear()


@pytest.fixture
def partition(transactional_db, redis_client):
    return make_partition("gb300")


@pytest.fixture
def viewer(partition):
    return make_user("vic", "viewer")


class Socket(ApplicationCommunicator):
    """A browser's end of the live socket. (`channels.testing` would need a second web server installed.)"""

    async def connect(self):
        await self.send_input({"type": "websocket.connect"})
        assert (await self.receive_output(timeout=5))["type"] == "websocket.accept"

    async def frame(self):
        return json.loads((await self.receive_output(timeout=5))["text"])

    async def disconnect(self):
        await self.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.wait(timeout=5)


def socket(user, partition="gb300", query=""):
    scope = {
        "type": "websocket",
        "path": f"/ws/live/{partition}/",
        "query_string": query.encode(),
        "user": user,
        "headers": [],
    }
    return Socket(URLRouter(websocket_urlpatterns), scope)


async def close_code(browser):
    await browser.connect()
    return (await browser.receive_output(timeout=5))["code"]


async def test_a_stranger_is_told_to_sign_in(partition):
    assert await close_code(socket(AnonymousUser())) == 4401


async def test_an_address_that_is_not_there_is_closed_like_a_partition_that_is_not_there(partition):
    scope = {"type": "websocket", "path": "/ws/other/", "query_string": b"", "user": AnonymousUser(), "headers": []}
    assert await close_code(Socket(URLRouter(websocket_urlpatterns), scope)) == 4404


async def test_someone_without_a_role_may_not_watch(partition):
    user = await sync_to_async(make_user)("nobody")
    assert await close_code(socket(user)) == 4403


def _tenant_user():
    user = make_user("tina", "tenant")
    add_member(make_tenant("acme"), user, SYSTEM)
    make_tenant("other")
    return user


def _two_tenants():
    flows = [{"id": "acme", "waiting": 2, "oldest_s": 3.0, "dispatched_total": 7}]
    flows.append({"id": "other", "waiting": 90, "oldest_s": 60.0, "dispatched_total": 8000})
    data = snapshot()
    theirs = {**data["recent"][0], "id": "req-of-other", "tenant": "other", "branch": "secret-branch"}
    return data | {"bands": [band("standard", 0, 92, flows=flows)], "recent": [*data["recent"], theirs]}


@pytest.mark.parametrize("form", ["view", "data"])
async def test_a_tenant_user_hears_of_the_own_tenant_alone(partition, redis_client, form):
    """On the first frame, on every later one, and in events: nothing of another tenant, of nodes or of decisions."""
    user = await sync_to_async(_tenant_user)()
    publish_snapshot(redis_client, _two_tenants())
    browser = socket(user, query=f"form={form}")
    await browser.connect()
    texts = [(await browser.receive_output(timeout=5))["text"]]
    layer = get_channel_layer()
    await layer.group_send("live.gb300", {"type": "live.event", "data": {"kind": "decision", "reason": "secret"}})
    await layer.group_send("live.gb300", {"type": "live.snapshot", "data": _two_tenants() | {"seq": 9}})
    texts.append((await browser.receive_output(timeout=5))["text"])
    for text in texts:
        assert "acme" in text
        for secret in ("other", "secret", "8000", "8,000", "gb300-1", ":92"):
            assert secret not in text
    frame = json.loads(texts[1])
    shown = frame["view"] if form == "view" else frame["data"]
    assert [flow["id"] for row in shown["bands"] for flow in row["flows"]] == ["acme"]
    await browser.disconnect()


async def test_a_tenant_user_of_no_tenant_hears_nothing_of_anybody(partition, redis_client):
    user = await sync_to_async(make_user)("tom", "tenant")
    publish_snapshot(redis_client, _two_tenants())
    browser = socket(user)
    await browser.connect()
    text = (await browser.receive_output(timeout=5))["text"]
    assert "acme" not in text and "other" not in text
    await browser.disconnect()


async def test_an_unknown_partition_is_said_so(viewer):
    assert await close_code(socket(viewer, "nowhere")) == 4404


async def test_the_last_snapshot_comes_at_once_and_newer_ones_follow(viewer, redis_client):
    publish_snapshot(redis_client, snapshot(seq=7))
    communicator = socket(viewer)
    await communicator.connect()
    first = await communicator.frame()
    assert (first["type"], first["data"]["seq"]) == ("snapshot", 7)
    await get_channel_layer().group_send("live.gb300", {"type": "live.snapshot", "data": snapshot(seq=8)})
    assert (await communicator.frame())["data"]["seq"] == 8
    await communicator.disconnect()


async def test_a_page_gets_history_and_ready_texts(viewer, redis_client):
    publish_snapshot(redis_client, snapshot())
    communicator = socket(viewer, query="form=view")
    await communicator.connect()
    assert await communicator.frame() == {"type": "history", "points": []}
    frame = await communicator.frame()
    assert frame["view"]["verdict"]["label"] == "Fine"
    await communicator.disconnect()
    again = socket(viewer, query="form=view")
    await again.connect()
    assert len((await again.frame())["points"]) == 1
    await again.disconnect()


async def test_events_reach_the_browser_in_order(viewer, redis_client):
    publish_snapshot(redis_client, snapshot())
    communicator = socket(viewer)
    await communicator.connect()
    await communicator.frame()  # it is in the group by then
    for number in range(3):
        event = {"type": "live.event", "data": {"kind": "switch", "n": number}}
        await get_channel_layer().group_send("live.gb300", event)
    frames = [await communicator.frame() for _ in range(3)]
    assert [(frame["type"], frame["data"]["n"]) for frame in frames] == [("event", 0), ("event", 1), ("event", 2)]
    await communicator.disconnect()


async def test_what_a_browser_sends_is_ignored(viewer, redis_client):
    publish_snapshot(redis_client, snapshot())
    communicator = socket(viewer)
    await communicator.connect()
    await communicator.send_input({"type": "websocket.receive", "text": "not json"})
    await communicator.frame()
    await get_channel_layer().group_send("live.gb300", {"type": "live.snapshot", "data": snapshot(seq=3)})
    assert (await communicator.frame())["data"]["seq"] == 3
    await communicator.disconnect()


async def test_a_slow_reader_gets_the_newest_snapshot_not_a_queue(viewer):
    from apps.console.consumers import LiveConsumer

    consumer = LiveConsumer()
    sent, free = [], asyncio.Event()

    async def send(text_data):
        sent.append(json.loads(text_data)["data"]["seq"])
        await free.wait()

    consumer.send = send
    consumer._events, consumer._latest, consumer._wake = [], None, asyncio.Event()
    consumer._feed, consumer._form, consumer._scope = feeds.Feed("gb300"), "data", None
    consumer._looked_at = time.monotonic()
    consumer.offer(snapshot(seq=0))
    task = asyncio.create_task(consumer._send_newest())
    await asyncio.sleep(0.02)
    for seq in range(1, 50):
        consumer.offer(snapshot(seq=seq))
    free.set()
    await asyncio.sleep(0.02)
    task.cancel()
    assert sent == [0, 49]


def test_one_snapshot_is_presented_once_for_all_browsers(monkeypatch):
    calls = []
    real = feeds.present
    monkeypatch.setattr(feeds, "present", lambda *a: calls.append(a) or real(*a))
    feed, data = feeds.Feed("gb300"), snapshot()
    texts = {feed.text(data, time.time(), "view") for _ in range(5)}
    assert (len(texts), len(calls)) == (1, 1)


def test_chart_points_are_kept_for_five_minutes_and_once_a_second():
    feed = feeds.Feed("gb300")
    for half_seconds in range(1400):
        feed.remember({"t": half_seconds / 2})
    assert feed.history[-1]["t"] - feed.history[0]["t"] <= feeds.HISTORY_S
    assert len(feed.history) == 301


def _closed(user):
    user.is_active = False
    user.save()


def _without_role(user):
    user.groups.clear()


def _new_password(user):
    user.set_password("quite another password")
    user.save()


@pytest.mark.parametrize(("what", "code"), [(_closed, 4401), (_new_password, 4401), (_without_role, 4403)])
async def test_an_open_socket_ends_for_who_may_not_watch_any_more(viewer, redis_client, monkeypatch, what, code):
    monkeypatch.setattr("apps.console.consumers.LOOK_AGAIN_S", 0.0)
    publish_snapshot(redis_client, snapshot(seq=7))
    browser = socket(viewer)
    await browser.connect()
    await browser.frame()
    await sync_to_async(what)(await sync_to_async(User.objects.get)(pk=viewer.pk))
    await get_channel_layer().group_send("live.gb300", {"type": "live.snapshot", "data": snapshot(seq=8)})
    assert (await browser.receive_output(timeout=5))["code"] == code


async def test_an_open_socket_ends_with_its_session(viewer, redis_client, monkeypatch):
    monkeypatch.setattr("apps.console.consumers.LOOK_AGAIN_S", 0.0)
    publish_snapshot(redis_client, snapshot(seq=7))
    session = SessionStore()
    await sync_to_async(session.create)()
    browser = socket(viewer)
    browser.scope["session"] = session
    await browser.connect()
    await browser.frame()
    await sync_to_async(SessionStore(session.session_key).delete)()
    await get_channel_layer().group_send("live.gb300", {"type": "live.snapshot", "data": snapshot(seq=8)})
    assert (await browser.receive_output(timeout=5))["code"] == 4401
