"""What happened to requests, and what the gateway reports right now, as Redis has it."""

import json

import pytest

from apps.telemetry.models import RequestRecord
from tests.api.conftest import is_problem

pytestmark = pytest.mark.django_db
GATEWAY = "/partitions/gb300"


def test_requests_are_narrowed_by_what_is_asked_for(rest, partition):
    RequestRecord.objects.all().delete()
    rows = [
        {"request_id": "a", "tenant": "acme", "band": "premium", "prefill_node": "gb300-1", "outcome": "completed"},
        {"request_id": "b", "tenant": "rival", "band": "premium", "decode_node": "gb300-1", "outcome": "failed"},
        {"request_id": "c", "tenant": "acme", "band": "standard", "branch": "x", "outcome": "completed"},
    ]
    for minute, row in enumerate(rows):
        RequestRecord.objects.create(partition=partition, at=f"2026-01-01T00:0{minute}:00Z", **row)

    def found(query):
        return "".join(row["request_id"] for row in rest("get", f"{GATEWAY}/requests?{query}")[1]["items"])

    assert found("") == "cba"
    assert found("tenant=acme") == "ca"
    assert found("band=premium&outcome=failed") == "b"
    assert found("node=gb300-1") == "ba"
    assert found("branch=x") == "c"
    assert found("since=2026-01-01T00:01:00Z") == "cb"
    assert found("until=2026-01-01T00:01:00Z") == "a"


def test_the_live_snapshot_is_what_the_gateway_wrote(rest, live):
    assert rest("get", f"{GATEWAY}/live", role="viewer") == (200, live)


def test_the_queues_are_part_of_it(rest, live):
    status, body = rest("get", f"{GATEWAY}/queues", role="viewer")
    assert status == 200
    assert body == {name: live[name] for name in ("partition", "t", "config_version", "bands", "stages")}


@pytest.mark.parametrize("what", ["live", "queues"])
def test_no_snapshot_is_said_and_not_made_up(rest, redis_client, what):
    answer = rest.answer("get", f"{GATEWAY}/{what}")
    assert (answer.status_code, json.loads(answer.content)["code"]) == (503, "no-live-snapshot")
    assert is_problem(answer)


@pytest.mark.parametrize("what", ["live", "queues"])
@pytest.mark.parametrize("text", ["{", "[]", "3", '"x"', '{"partition": "gb300"}', '{"t": "noon", "bands": 3}', "\x00"])
def test_a_snapshot_that_cannot_be_read_is_no_fault_of_the_caller_or_the_api(rest, redis_client, what, text):
    redis_client.set("switchyard:gb300:live", text)
    assert rest("get", f"{GATEWAY}/{what}")[0] in (200, 503)
    assert rest("get", f"{GATEWAY}/queues")[1]["code"] == "no-live-snapshot"


@pytest.mark.parametrize("what", ["live", "queues"])
def test_redis_being_away_is_said(rest, settings, what):
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    answer = rest.answer("get", f"{GATEWAY}/{what}")
    assert (answer.status_code, json.loads(answer.content)["code"]) == (503, "redis-away")
    assert is_problem(answer)


def test_an_edit_is_kept_while_redis_is_away(rest, settings, django_capture_on_commit_callbacks):
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    with django_capture_on_commit_callbacks(execute=True):
        assert rest("patch", f"{GATEWAY}/bands/standard", {"priority": 9})[0] == 200
    assert rest("get", f"{GATEWAY}/bands/standard")[1]["priority"] == 9


REUSE = {
    "total": {"prompt_tokens": 100, "ideal_tokens": 80, "actual_tokens": 60, "lost": {"evicted": 15, "routed": 5}},
    "by": {"node": {}, "tenant": {}, "workload": {}},
    "pools": {},
}


def test_reuse_is_what_the_gateway_counts(rest, monkeypatch):
    asked = []
    monkeypatch.setattr("apps.telemetry.gateways._call", lambda *call: asked.append(call[1:]) or REUSE)
    assert rest("get", f"{GATEWAY}/reuse", role="viewer") == (200, REUSE)
    assert asked == [("GET", "reuse")]


def test_branches_are_listed_shown_and_ended_by_their_whole_name(rest, monkeypatch):
    asked = []
    monkeypatch.setattr("apps.telemetry.gateways._call", lambda *call: asked.append(call[1:]) or {"rows": []})
    assert rest("get", f"{GATEWAY}/branches?tenant=acme&limit=5", role="viewer")[0] == 200
    assert rest("get", f"{GATEWAY}/branches/acme/s1", role="viewer")[0] == 200
    body = {"id": "acme/s1", "reason": "stuck"}
    assert rest.answer("post", f"{GATEWAY}/branches/end", body, role="operator").status_code == 204
    assert asked == [
        ("GET", "branches", {"tenant": "acme", "limit": 5}),
        ("GET", "branch", {"id": "acme/s1"}),
        ("POST", "branch/end", {"id": "acme/s1"}),
    ]
