"""Channels over REST: their secret is shown once, what is done to them is in the audit trail, a test says how it went."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from apps.telemetry import webhooks
from apps.telemetry.models import Channel, Delivery
from apps.tenancy.models import IdempotentCall

pytestmark = pytest.mark.django_db
CHANNEL = {"name": "pager", "url": "http://127.0.0.1:9/hook", "kinds": ["alert", "switch"], "reason": "for the night"}


@pytest.fixture
def receiver():
    """A local server that keeps what it got."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    got = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", got
    server.shutdown()
    server.server_close()


def test_a_channel_is_made_read_edited_and_deleted_and_its_secret_shown_once(rest):
    first = rest.answer("post", "/channels", CHANNEL, Idempotency_Key="k-1").json()
    again = rest.answer("post", "/channels", CHANNEL, Idempotency_Key="k-1").json()
    assert first["secret"] == Channel.objects.get().secret
    assert again == {**first, "secret": None}
    assert first["secret"] not in IdempotentCall.objects.get().body
    for path in ("/channels", "/channels/pager", "/channels/pager/deliveries"):
        status, told = rest("get", path, role="viewer")
        assert status == 200 and first["secret"] not in json.dumps(told)
    assert rest("post", "/channels", CHANNEL)[0] == 409
    assert rest("patch", "/channels/pager", {"enabled": False, "kinds": ["*"]})[1]["enabled"] is False
    assert (Channel.objects.get().kinds, Channel.objects.get().enabled) == (["*"], False)
    assert rest("delete", "/channels/pager")[0] == 204
    assert rest("get", "/channels/pager")[0] == 404


def test_a_rotated_secret_signs_from_then_on_and_the_old_one_does_not(rest, receiver):
    url, got = receiver
    old = rest("post", "/channels", CHANNEL | {"url": url})[1]["secret"]
    new = rest("post", "/channels/pager/rotate", {"reason": "it leaked"})[1]["secret"]
    assert new != old
    assert rest("post", "/channels/pager/test", {}) == (200, {"delivered": True, "status": "delivered"})
    headers, body = got[0]
    at = int(headers["X-Switchyard-Signature"].split(",")[0].removeprefix("t="))
    assert headers["X-Switchyard-Signature"] == webhooks.signature(new, at, body)
    assert headers["X-Switchyard-Signature"] != webhooks.signature(old, at, body)


def test_a_test_that_does_not_arrive_says_why(rest):
    rest("post", "/channels", CHANNEL)
    status, told = rest("post", "/channels/pager/test", {})
    assert (status, told["delivered"]) == (200, False)
    assert "ConnectError" in told["status"]
    (delivery,) = rest("get", "/channels/pager/deliveries", role="viewer")[1]["items"]
    assert delivery["given_up_at"] and delivery["kind"] == "test"


def test_everything_done_to_a_channel_is_in_the_audit_trail_without_its_secret(rest):
    rest("post", "/channels", CHANNEL)
    secret = rest("post", "/channels/pager/rotate", {"reason": "it leaked"})[1]["secret"]
    rest("patch", "/channels/pager", {"enabled": False, "reason": "too loud"})
    rest("delete", "/channels/pager?reason=gone")
    trail = [row for row in rest("get", "/partitions/gb300/audit", role="viewer")[1] if row["table"] == "channel"]
    assert [(row["done"], row["reason"]) for row in reversed(trail)] == [
        ("created", "for the night"), ("changed", "it leaked"), ("changed", "too loud"), ("removed", "gone"),
    ]  # fmt: skip
    assert secret not in json.dumps(trail)


def test_a_stale_edit_is_refused(rest):
    rest("post", "/channels", CHANNEL)
    tag = rest.answer("get", "/channels/pager")["ETag"]
    assert rest("patch", "/channels/pager", {"enabled": False}, If_Match=tag)[0] == 200
    assert rest("patch", "/channels/pager", {"enabled": True}, If_Match=tag)[0] == 412
    assert rest("delete", "/channels/pager", None, If_Match=tag)[0] == 412


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"url": "ftp://x"}, "url"), ({"kinds": []}, "kinds"), ({"kinds": ["all"]}, "kinds"), ({"name": "two words"}, "name"),
     ({"name": "x" * 64}, "name"), ({"url": "http://" + "x" * 300}, "url"), ({"secret": "mine"}, "secret"),
     ({"url": "https://me:hunter2@example.org/"}, "url")],
)  # fmt: skip
def test_what_is_wrong_is_named(rest, wrong, field):
    status, problem = rest("post", "/channels", CHANNEL | wrong)
    assert (status, problem["errors"][0]["field"]) == (422, field)
    assert not Channel.objects.exists() and not Delivery.objects.exists()
