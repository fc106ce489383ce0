"""Alerts fire after their time, once; resolve; are silenced, set and acknowledged; a silent gateway is one alert, not ten."""

from datetime import timedelta

import pytest
from django.utils import timezone

from apps.telemetry import alerting, samples
from apps.telemetry.models import Alert, Delivery, LiveSample
from apps.telemetry.rules import RULES, Facts
from apps.telemetry.webhooks import create_channel
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Forbidden
from tests.console.kit import band, node, snapshot
from tests.factories import actor_with, make_partition

NOW = 1_800_000_000.0


@pytest.fixture
def partition(db, redis_client):
    return make_partition("gb300")


def look(partition, now, **changes):
    return alerting.evaluate(partition, Facts(now=now, snapshot=snapshot(**changes), slo_ttft_s=10.0))


def firing(partition):
    return sorted((a.rule, a.subject) for a in Alert.objects.filter(partition=partition, state="firing"))


OLD = {"bands": [band("standard", 0, 4, oldest_s=99.0)], "stages": {}}


def test_a_rule_fires_once_it_has_held_long_enough_and_resolves(partition):
    assert look(partition, NOW, **OLD) == []
    assert look(partition, NOW + 5, **OLD) == []
    assert [a.state for a in look(partition, NOW + 16, **OLD)] == ["firing"]
    assert look(partition, NOW + 20, **OLD) == [], "fires once"
    assert firing(partition) == [("queue-old", "standard")]
    assert [a.state for a in look(partition, NOW + 30, stages={})] == ["resolved"]
    assert firing(partition) == []


def test_what_never_fired_leaves_no_trace(partition):
    look(partition, NOW, **OLD)
    look(partition, NOW + 5, stages={})
    assert not Alert.objects.exists()


def test_each_node_has_its_own_alert(partition):
    nodes = [node("gb300-1", health="down"), node("gb300-2", "decode", health="down"), node("gb300-3", "decode")]
    for at in (0, 20):
        look(partition, NOW + at, nodes=nodes, stages={})
    assert firing(partition) == [("node-down", "gb300-1"), ("node-down", "gb300-2")]


def test_a_silent_gateway_is_one_alert(partition):
    for at in (0, 20):
        alerting.evaluate(partition, Facts(now=NOW + at, snapshot=None, telemetry_age_s=999))
    assert firing(partition) == [("gateway-silent", "")]


def test_thresholds_and_rules_can_be_set(partition):
    operator = actor_with("operator")
    alerting.set_rule(partition, "queue-old", operator, threshold=120.0)
    look(partition, NOW, **OLD)
    assert not Alert.objects.exists()
    alerting.set_rule(partition, "queue-old", operator, threshold=None, enabled=False)
    look(partition, NOW, **OLD)
    assert not Alert.objects.exists()
    with pytest.raises(InvalidField):
        alerting.set_rule(partition, "node-down", operator, threshold=3.0)
    with pytest.raises(Forbidden):
        alerting.set_rule(partition, "queue-old", actor_with("viewer"), enabled=True)


def test_channels_hear_of_it_unless_it_is_silenced(partition):
    create_channel("pager", "http://127.0.0.1:9/hook", actor_with("administrator"))
    for at in (0, 16):
        look(partition, NOW + at, **OLD)
    assert Delivery.objects.get().body["data"]["rule"] == "queue-old"
    until = timezone.now() + timedelta(days=36500)
    alerting.set_rule(partition, "node-down", actor_with("operator"), silenced_until=until)
    for at in (20, 40):
        look(partition, NOW + at, nodes=[node("gb300-1", health="down")], **OLD)
    assert Delivery.objects.count() == 1


def test_an_alert_is_acknowledged_while_it_is_open(partition):
    for at in (0, 16):
        look(partition, NOW + at, **OLD)
    alert = alerting.acknowledge(Alert.objects.get(), actor_with("operator"), "on it")
    assert (alert.acknowledged_by, alert.note) == ("robin", "on it")
    look(partition, NOW + 20, stages={})
    with pytest.raises(Conflict):
        alerting.acknowledge(alert, actor_with("operator"))


def test_every_rule_has_a_runbook_and_a_page(partition):
    for rule in RULES:
        assert min(len(rule.means), len(rule.look), len(rule.do)) > 20, rule.name
        assert rule.page, rule.name


def test_refusals_a_minute_and_lost_reuse_come_from_the_past(partition):
    old = snapshot(requests={"dropped": 10}) | {"t": NOW - 700}
    recent = snapshot(requests={"dropped": 40}) | {"t": NOW - 125}
    for data in (old, recent):
        samples.keep(partition, data)
    present = snapshot(requests={"dropped": 140}) | {"t": NOW}
    present["reuse"] = {"prompt_tokens": 3000, "ideal_tokens": 2900, "actual_tokens": 1300, "lost": {}}
    facts = alerting.facts_of(partition, present, NOW)
    assert facts.dropped_per_min == pytest.approx(100 / 125 * 60)
    assert facts.lost_ratio == pytest.approx(1 - 500 / 2000)


def test_samples_are_kept_every_15_s_and_thinned_out_for_long_ranges(partition):
    assert samples.keep(partition, snapshot() | {"t": NOW})
    assert not samples.keep(partition, snapshot() | {"t": NOW + 10})
    LiveSample.objects.bulk_create(
        LiveSample(partition=partition, t=NOW + 15 * i, data={"t": NOW + 15 * i}) for i in range(1, 2000)
    )
    whole = samples.between(partition, NOW, NOW + 15 * 2000)
    assert 300 < len(whole) <= samples.MAX_POINTS
    assert [p["t"] for p in whole] == sorted(p["t"] for p in whole)
    assert len(samples.between(partition, NOW, NOW + 600)) == 41


def test_rules_that_nobody_looks_at_are_told_after_half_a_minute(partition):
    assert alerting.unwatched_since(partition, 1000.0) is None, "not known yet"
    alerting.watch(partition, 1000.0)
    assert alerting.unwatched_since(partition, 1029.0) is None
    assert alerting.unwatched_since(partition, 1031.0) == 1000.0
    alerting.watch(partition, 1032.0)
    assert alerting.unwatched_since(partition, 1033.0) is None
