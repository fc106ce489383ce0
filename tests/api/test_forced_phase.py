"""`PUT /api/v1/nodes/{node}/phase`, as the console's session and as a program's key send it."""

import json
from datetime import datetime, timedelta

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


def test_proposals_and_freezes_end_after_seconds_too(rest):
    """As forces do; a proposal that says nothing is open for an hour."""
    split = "/split/gb300"
    for said, seconds in (({"expires_in_s": 600}, 600), ({}, 3600)):
        made = rest(
            "post", f"{split}/proposals", {"prefill_nodes": 1, "reason": "long answers", **said}, role="operator"
        )
        assert made[0] == 201, made
        ends = datetime.fromisoformat(made[1]["expires_at"])
        assert abs(ends - timezone.now() - timedelta(seconds=seconds)) < timedelta(seconds=30)
        rest("post", f"{split}/proposals/{made[1]['id']}/reject", {"reason": "a test"}, role="administrator")
    status, policy = rest("put", f"{split}/freeze", {"reason": "maintenance", "expires_in_s": 900})
    assert status == 200
    ends = datetime.fromisoformat(policy["frozen_until"])
    assert abs(ends - timezone.now() - timedelta(seconds=900)) < timedelta(seconds=30)


@pytest.mark.parametrize(
    ("what", "body", "at"),
    [
        ("proposals", {"prefill_nodes": 1}, "expires_at"),
        ("freeze", {}, "until"),
        ("force", {"prefill_nodes": 1}, "expires_at"),
    ],
)
def test_an_end_is_given_one_way(rest, what, body, at):
    ends = {at: "2099-01-01T00:00:00Z", "expires_in_s": 60}
    status, problem = rest(
        "post" if what == "proposals" else "put", f"/split/gb300/{what}", {**body, **ends, "reason": "x"}
    )
    assert (status, problem["errors"][0]["field"]) == (422, "expires_in_s")
