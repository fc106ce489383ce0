"""Alert rules, members and the charts' points over REST: as the console edits them."""

import pytest

from apps.telemetry.models import AlertSetting, LiveSample
from tests.factories import make_user

pytestmark = pytest.mark.django_db
RULES = "/partitions/gb300/alert-rules"


def test_a_rule_gets_a_threshold_is_silenced_and_goes_back_to_its_own(rest):
    edited = rest("patch", f"{RULES}/queue-old", {"threshold": 45, "reason": "nights are slow"}, role="operator")[1]
    assert (edited["threshold"], edited["own_threshold"], edited["enabled"]) == (45, True, True)
    silenced = rest("patch", f"{RULES}/queue-old", {"silenced_until": "2099-01-01T00:00:00Z"})[1]
    assert silenced["silenced_until"].startswith("2099") and silenced["threshold"] == 45
    again = rest("patch", f"{RULES}/queue-old", {"threshold": None, "silenced_until": None})[1]
    assert (again["threshold"], again["own_threshold"], again["silenced_until"]) == (30, False, None)
    listed = {rule["name"]: rule for rule in rest("get", RULES, role="viewer")[1]}
    assert listed["queue-old"] == again and listed["node-down"]["do"]
    trail = rest("get", "/partitions/gb300/audit?table=alertsetting")[1]
    assert [row["reason"] for row in trail][-1] == "nights are slow"


@pytest.mark.parametrize(
    ("name", "wrong", "field"),
    [("queue-old", {"threshold": 0}, "threshold"), ("node-down", {"threshold": 3}, "threshold"),
     ("queue-old", {"enabled": None}, "enabled"), ("queue-old", {"silenced_until": "tomorrow"}, "silenced_until"),
     ("queue-old", {"threshold": True}, "threshold"), ("queue-old", {"threshold": 1e18}, "threshold"),
     ("queue-old", {"silenced_until": "0001-01-01T00:00:00+14:00"}, "silenced_until"),
     ("queue-old", {"silenced_until": "9999-12-31T23:59:59-12:00"}, "silenced_until"),
     ("queue-old", {"silenced_until": "2020-01-01T00:00:00Z"}, "silenced_until")],
)  # fmt: skip
def test_what_is_wrong_with_a_rule_is_named(rest, name, wrong, field):
    status, problem = rest("patch", f"{RULES}/{name}", wrong)
    assert (status, problem["errors"][0]["field"]) == (422, field)
    assert not AlertSetting.objects.exists()


def test_a_stale_edit_of_a_rule_is_refused(rest):
    tag = rest.answer("get", f"{RULES}/queue-old")["ETag"]
    assert rest("patch", f"{RULES}/queue-old", {"enabled": False}, If_Match=tag)[0] == 200
    assert rest("patch", f"{RULES}/queue-old", {"enabled": True}, If_Match=tag)[0] == 412


def test_a_member_sees_the_tenant_until_it_is_removed(rest, client):
    make_user("robin")
    assert rest("post", "/tenants/acme/members", {"username": "robin"})[0] == 201
    assert rest("post", "/tenants/acme/members", {"username": "nobody"})[0] == 422
    assert [row["username"] for row in rest("get", "/tenants/acme/members", role="viewer")[1]["items"]] == ["robin"]
    assert rest("delete", "/tenants/acme/members/robin?reason=left")[0] == 204
    assert rest("delete", "/tenants/acme/members/robin")[0] == 404
    assert rest("get", "/tenants/acme/members")[1]["items"] == []


def test_the_charts_points_are_of_the_asked_time_alone(rest, partition):
    import time

    for age_s in (30, 4000):
        LiveSample.objects.create(partition=partition, t=time.time() - age_s, data={"t": age_s})
    assert rest("get", "/partitions/gb300/history?seconds=60", role="viewer") == (200, [{"t": 30}])
    assert len(rest("get", "/partitions/gb300/history?seconds=6000")[1]) == 2
    assert rest("get", "/partitions/gb300/history?seconds=0")[0] == 422
