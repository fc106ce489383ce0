"""`PUT /api/v1/nodes/{node}/phase`, as the console's session and as a program's key send it."""

import json
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from apps.planning.models import ForcedSplit, SwitchOrder
from tests.factories import make_user

BODY = {"phase": "decode", "reason": "long answers", "expires_in_s": 600}
PATH = "/api/v1/nodes/gb300-2/phase"


def put(client, **headers):
    return client.put(PATH, json.dumps(BODY), content_type="application/json", headers=headers)


@pytest.fixture
def session(partition):
    """A browser that has logged in; it must send the CSRF token."""
    client = Client(enforce_csrf_checks=True)
    make_user("ada", "administrator")
    client.get("/login/")
    assert client.login(username="ada", password="a long enough password")
    return client


def is_forced(answer):
    assert answer.status_code == 200, answer.content
    assert answer.json()["forced"]["phases"] == {"gb300-2": "decode"}
    force, order = ForcedSplit.objects.get(), SwitchOrder.objects.get()
    assert force.reason == order.reason == "long answers"
    assert abs(force.expires_at - timezone.now() - timedelta(seconds=600)) < timedelta(seconds=30)
    assert [(step.node, step.to_phase) for step in order.steps.all()] == [("gb300-2", "decode")]
    return True


def test_an_administrators_session_forces_a_node_with_the_csrf_token(session):
    assert put(session).status_code == 403
    assert not ForcedSplit.objects.exists()
    assert is_forced(put(session, **{"X-CSRFToken": session.cookies["csrftoken"].value}))


def test_an_administrators_key_forces_a_node_without_one(partition, key_of):
    client = Client(enforce_csrf_checks=True)
    assert is_forced(put(client, Authorization=f"Bearer {key_of('administrator')}"))


def test_an_operators_key_may_not(partition, key_of):
    answer = put(Client(), Authorization=f"Bearer {key_of('operator')}")
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert not ForcedSplit.objects.exists()
