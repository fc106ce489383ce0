"""What the planner decides of measured load is told to a real receiver, which checks it exactly as docs/webhooks.md says."""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from django.conf import settings

from apps.planning.models import Decision, SwitchOrder
from apps.telemetry import webhooks
from apps.telemetry.models import Channel
from tests.factories import actor_with
from tests.planner.telemetry import load, make_watched_partition, run
from workers.planner import alerts

pytestmark = pytest.mark.django_db
ADA = actor_with("administrator", "ada")


def genuine():
    """The function that the document tells receivers to use, out of the document."""
    text = (Path(settings.BASE_DIR) / "docs" / "webhooks.md").read_text()
    (code,) = re.findall(r"(?m)^    import hashlib.*\n(?:(?:    .*)?\n)*?    +return .*$", text)
    names = {}
    exec("\n".join(line.removeprefix("    ") for line in code.splitlines()), names)
    return names["genuine"]


class Receiver(HTTPServer):
    """Keeps what is genuine by its own secret, refuses anything else."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.genuine, self.secret, self.got, self.refused = genuine(), "", [], 0
        self.url = f"http://127.0.0.1:{self.server_port}/hook"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        known = self.server.genuine(self.server.secret, self.headers["X-Switchyard-Signature"], body)
        if known:
            self.server.got.append(json.loads(body))
        else:
            self.server.refused += 1
        self.send_response(204 if known else 403)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def receiver():
    server = Receiver()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def partition(redis_client):
    return make_watched_partition()


def test_a_decision_and_the_switch_it_orders_reach_a_receiver_that_checks_the_signature(partition, receiver):
    receiver.secret = webhooks.create_channel("yard", receiver.url, ADA, kinds=["decision", "switch"]).secret
    load(partition)
    assert run(partition) == "switch (switch): ordered"
    assert receiver.got == [], "nothing is sent while the planner decides"
    alerts.watch_all()
    decision, order = Decision.objects.get(action="ordered"), SwitchOrder.objects.get()
    told = {message["event"]: message["data"] for message in receiver.got}
    assert told["decision"] == {
        "partition": "gb300", "decision": decision.pk, "verdict": "switch", "rule": "switch", "reason": decision.reason,
        "action": "ordered",
    }  # fmt: skip
    assert (told["switch"]["order"], told["switch"]["state"]) == (order.pk, "ordered")
    assert receiver.refused == 0
    assert len({message["id"] for message in receiver.got}) == len(receiver.got)


def test_a_receiver_that_knows_another_secret_refuses_and_gets_it_once_it_knows_the_new_one(partition, receiver):
    receiver.secret = "whsec_of-somebody-else"
    channel = webhooks.create_channel("yard", receiver.url, ADA, kinds=["decision"]).channel
    load(partition)
    run(partition)
    alerts.watch_all()
    assert (receiver.got, receiver.refused) == ([], 1)
    assert Channel.objects.get().last_status == "answered 403"
    receiver.secret = webhooks.rotate_secret(channel, ADA, "the receiver lost it").secret
    channel.deliveries.update(next_try_at=channel.created_at)
    alerts.watch_all()
    assert [message["event"] for message in receiver.got] == ["decision"]


def test_an_altered_an_old_and_a_foreign_message_are_not_genuine():
    check, at, body = genuine(), int(time.time()), b'{"event":"switch"}'
    assert check("mine", webhooks.signature("mine", at, body), body)
    assert not check("mine", webhooks.signature("mine", at, body), body + b" ")
    assert not check("mine", webhooks.signature("other", at, body), body)
    assert not check("mine", webhooks.signature("mine", at - 301, body), body)
