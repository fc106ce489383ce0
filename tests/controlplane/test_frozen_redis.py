"""A Redis that accepts connections and never answers: what people ask of the control plane ends in a few seconds."""

import os
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore
from django.db import connection
from kombu.exceptions import OperationalError

from apps.flowcontrol.models import Band
from apps.planning.models import PlannerPolicy, SwitchOrder
from controlplane import celery, redis_client
from tests.factories import make_partition, make_user
from tools.ports import free_port

# What one missed answer costs, what the page costs, and what a busy machine adds.
SOON_S = redis_client.ANSWER_WITHIN_S + 3.0


class Frozen(threading.Thread):
    """Takes every connection and says nothing."""

    def __init__(self):
        super().__init__(daemon=True)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.server.getsockname()[1]}/0"
        self.taken = []
        self.start()

    def run(self):
        try:
            while True:
                self.taken.append(self.server.accept()[0])
        except OSError:
            return

    def stop(self):
        self.server.close()
        for connection_ in self.taken:
            connection_.close()


@pytest.fixture
def frozen():
    server = Frozen()
    yield server
    server.stop()


@pytest.fixture
def web(transactional_db, redis_client, frozen):
    """A web process of its own over the test database; a client signed in as an administrator."""
    partition = make_partition("gb300", ("prefill", "prefill", "decode", "decode"))
    PlannerPolicy.objects.create(partition=partition, mode="approve", slo_ttft_s=1.0)
    user = make_user("administrator-person", "administrator")
    store = SessionStore()
    store[SESSION_KEY], store[HASH_SESSION_KEY] = str(user.pk), user.get_session_auth_hash()
    store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    store.create()
    parts = urlsplit(os.environ["DATABASE_URL"])
    database = urlunsplit(parts._replace(path=f"/{connection.settings_dict['NAME']}"))
    port = free_port()
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "DATABASE_URL": database,
           "REDIS_URL": frozen.url}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "controlplane.asgi:application", "--host", "127.0.0.1", "--port", str(port),
         "--log-level", "warning"], env=env,
    )  # fmt: skip
    base = f"http://127.0.0.1:{port}"
    client = httpx.Client(base_url=base, timeout=40, trust_env=False, cookies={"sessionid": store.session_key})
    try:
        deadline = time.monotonic() + 40
        while True:
            try:
                page = client.get("/p/gb300/settings/")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the web process did not start"
                time.sleep(0.2)
        client.headers["X-CSRFToken"] = client.cookies.get("csrftoken") or ""
        client.headers["Referer"] = f"{base}/"
        assert page.status_code == 200
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(20)


def asked(call, *arguments, **more):
    began = time.monotonic()
    answer = call(*arguments, **more)
    took = time.monotonic() - began
    assert took < SOON_S, f"{arguments[0]} took {took:.1f} s"
    return answer


def test_every_request_ends_soon_pages_say_that_redis_does_not_answer_and_edits_are_stored(web):
    for page in ("", "queues/", "nodes/?kind=prefill", "requests/", "audit/", "queues/flows/"):
        answer = asked(web.get, f"/p/gb300/{page}")
        assert answer.status_code == 200
        if page != "queues/flows/":
            assert "Redis does not answer" in answer.text
    problem = asked(web.get, "/api/v1/partitions/gb300/live")
    assert problem.status_code == 503
    assert problem.json()["code"] == "redis-away"
    assert "Redis" in problem.json()["detail"]
    health = asked(web.get, "/healthz")
    assert (health.status_code, health.json()["missing"]) == (503, ["redis"])
    with httpx.Client(base_url=web.base_url, timeout=40, trust_env=False) as stranger:
        stranger.get("/login/")
        data = {"username": "x", "password": "y", "csrfmiddlewaretoken": stranger.cookies["csrftoken"]}
        answer = asked(stranger.post, "/login/", data=data, headers={"Referer": f"{web.base_url}/"})
    assert answer.status_code == 422 and "password" in answer.text
    time.sleep(redis_client.PAUSE_S)
    csrf, rest = {"X-CSRFToken": web.cookies.get("csrftoken")}, "/api/v1"
    edit = {"max_requests": 77, "reason": "r"}
    answer = asked(web.patch, f"{rest}/partitions/gb300/bands/standard", json=edit, headers=csrf)
    assert answer.status_code == 200, answer.text
    assert Band.objects.get(name="standard").max_requests == 77
    time.sleep(redis_client.PAUSE_S)
    answer = asked(web.put, f"{rest}/split/gb300/force", json={"prefill_nodes": 3, "reason": "r"}, headers=csrf)
    assert answer.status_code == 200, answer.text
    assert SwitchOrder.objects.exists()


def test_a_task_is_not_sent_to_a_broker_that_does_not_answer(frozen):
    application = celery.Application("frozen", broker=celery.broker_url(frozen.url))
    celery.send_within(1.0, application)
    began = time.monotonic()
    with pytest.raises(OperationalError):
        application.send_task("some.task", ignore_result=True, retry=False)
    assert time.monotonic() - began < 4.0


def test_only_the_first_call_waits_for_an_answer(frozen, settings):
    settings.REDIS_URL = frozen.url
    waits = []
    for _ in range(4):
        began = time.monotonic()
        with pytest.raises(redis_client.redis.TimeoutError):
            redis_client.client().get("x")
        waits.append(time.monotonic() - began)
    assert redis_client.ANSWER_WITHIN_S <= waits[0] < SOON_S
    assert max(waits[1:]) < 0.5
    assert len(frozen.taken) == 1


def test_a_connection_that_redis_closed_is_replaced(redis_client):
    from controlplane import redis_client as own

    own.client().set("x", "1")
    own.client().connection_pool.disconnect()
    assert own.client().get("x") == b"1"
