"""Signed webhooks: what a receiver can check, tries that pause longer and end, and who may set them up."""

import hashlib
import hmac
import json
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from django.utils import timezone

from apps.telemetry import webhooks
from apps.telemetry.models import Delivery
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Forbidden
from tests.factories import actor_with

ADMIN = actor_with("administrator")


@pytest.fixture
def receiver():
    """A local server that keeps what it got and answers `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.got.append((dict(self.headers), body))
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.got, server.status = [], 204
    server.url = f"http://127.0.0.1:{server.server_port}/hook"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_receiver_can_check_who_sent_it(db, receiver):
    made = webhooks.create_channel("pager", receiver.url, ADMIN)
    webhooks.tell("alert", {"rule": "node-down"})
    assert webhooks.deliver_due() == 1
    headers, body = receiver.got[0]
    parts = dict(part.split("=") for part in headers["X-Switchyard-Signature"].split(","))
    expected = hmac.new(made.secret.encode(), f"{parts['t']}.".encode() + body, hashlib.sha256).hexdigest()
    assert parts["v1"] == expected
    assert json.loads(body)["data"] == {"rule": "node-down"}
    assert webhooks.deliver_due() == 0, "delivered once"


def test_a_failed_try_is_repeated_later_under_the_same_id_and_given_up_in_the_end(db, receiver):
    receiver.status = 500
    webhooks.create_channel("pager", receiver.url, ADMIN)
    webhooks.tell("alert", {})
    moment = timezone.now()
    for _ in range(10):
        webhooks.deliver_due(moment)
        moment += timedelta(hours=2)
    delivery = Delivery.objects.get()
    assert delivery.given_up_at and delivery.last_error == "answered 500"
    assert len(receiver.got) == len(webhooks.PAUSES_S) + 1
    assert len({headers["X-Switchyard-Delivery"] for headers, _ in receiver.got}) == 1


def test_a_channel_gets_only_what_it_wants(db, receiver):
    webhooks.create_channel("decisions", receiver.url, ADMIN, kinds=["decision"])
    assert webhooks.tell("alert", {}) == 0
    assert webhooks.tell("decision", {}) == 1


def test_a_channel_can_be_tested_at_once(db, receiver):
    channel = webhooks.create_channel("pager", receiver.url, ADMIN).channel
    assert webhooks.test_channel(channel, ADMIN) == "delivered"
    receiver.status = 404
    assert webhooks.test_channel(channel, ADMIN) == "answered 404"


def test_only_administrators_set_up_channels_and_mistakes_are_named(db):
    with pytest.raises(Forbidden):
        webhooks.create_channel("pager", "http://127.0.0.1:9/", actor_with("operator"))
    with pytest.raises(InvalidField, match="url"):
        webhooks.create_channel("pager", "ftp://x", ADMIN)
    with pytest.raises(InvalidField, match="kinds"):
        webhooks.create_channel("pager", "http://127.0.0.1:9/", ADMIN, kinds=["everything"])
    webhooks.create_channel("pager", "http://127.0.0.1:9/", ADMIN)
    with pytest.raises(Conflict):
        webhooks.create_channel("pager", "http://127.0.0.1:9/", ADMIN)
