"""Nodes: cards, phase lanes, and forcing one node."""

import json
import time
from datetime import timedelta

import pytest
from django.utils import timezone

from apps.console.views import nodes
from apps.planning import services
from apps.planning.models import ForcedSplit, SwitchOrder
from apps.topology.models import ConfigurationVersion
from tests.factories import actor_with
from tests.planning.test_services import finish

BASE = "/p/gb300/nodes/"
ADA = actor_with("administrator", "ada")


def forced(**changes):
    values = {"phase": "prefill", "minutes": "15", "reason": "more prompts", "confirm": "gb300-3"} | changes
    return {f"force-gb300-3-{name}": value for name, value in values.items()}


def test_each_node_shows_phase_health_age_load_and_pool(as_role, live):
    page = as_role("viewer").get(BASE).content.decode()
    assert page.count('<li class="node panel" data-id="gb300-') == 4
    assert "reported" in page
    assert "1 running · 2 queued" in page
    assert "32 of 128 · 3 announced" in page
    assert "60 %" in page
    assert "Force a phase" not in page


def test_without_a_gateway_the_nodes_are_shown_as_configured(as_role, partition):
    page = as_role("viewer").get(BASE).content.decode()
    assert "Nodes as configured" in page
    assert "gb300-4" in page
    assert "never" in page


def test_a_past_switch_is_in_its_nodes_lane_and_in_the_table(as_role, live, partition):
    services.force_node(partition.nodes.get(name="gb300-3"), "prefill", ADA, "peak")
    finish(SwitchOrder.objects.get())
    page = as_role("viewer").get(BASE + "timeline/").content.decode()
    lane = page.split('aria-label="gb300-3, oldest first"')[1].split("</ol>")[0]
    assert "decode for" in lane
    assert "decode → prefill" in page


def test_a_window_before_a_switch_shows_the_phase_of_then_and_not_the_switch(as_role, live, partition):
    services.force_node(partition.nodes.get(name="gb300-3"), "prefill", ADA, "peak")
    finish(SwitchOrder.objects.get())
    ConfigurationVersion.objects.update(created_at=timezone.now() - timedelta(hours=9))
    now = time.time()
    page = as_role("viewer").get(BASE + "timeline/", {"from": now - 7200, "to": now - 3600}).content.decode()
    lane = page.split('aria-label="gb300-3, oldest first"')[1].split("</ol>")[0]
    assert "decode for" in lane and "prefill for" not in lane
    assert "No node changed its phase in this time" in page


def test_of_many_nodes_those_that_switched_come_first(as_role, live, partition, monkeypatch):
    monkeypatch.setattr(nodes, "LANES_SHOWN", 2)
    services.force_node(partition.nodes.get(name="gb300-3"), "prefill", ADA, "peak")
    finish(SwitchOrder.objects.get())
    found = as_role("viewer").get(BASE + "timeline/").context
    assert [lane["name"] for lane in found["lanes"]] == ["gb300-3", "gb300-1"]
    assert found["lanes_left_out"] == 2
    rows = as_role("viewer").get(BASE + "timeline/", {"format": "json"}).json()
    assert {row["node"] for row in rows} == {f"gb300-{i}" for i in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("asked", "shown"),
    [("1h", 3600), ("600", 600), ("", 900), ("x", 900), ("-5", 900), ("1e30", 900), ("9999999", 30 * 86400)],
)
def test_the_time_shown_is_in_the_url_and_within_bounds(as_role, live, asked, shown):
    answer = as_role("viewer").get(BASE, {"span": asked})
    assert answer.context["window"].span_s == pytest.approx(shown, abs=1)
    assert answer.context["window"].follows


def test_a_past_window_stays_where_it_is_and_its_buttons_lead_on(as_role, live):
    now = time.time()
    answer = as_role("viewer").get(BASE, {"from": now - 7200, "to": now - 3600})
    window = answer.context["window"]
    assert not window.follows and window.span_s == pytest.approx(3600, abs=2)
    steps = {step["label"]: step["query"] for step in window.steps()}
    assert steps["Zoom in"].startswith("from=") and steps["Now"] == f"span={window.span_s:.0f}"
    assert "data-timeline-key" in answer.content.decode()


@pytest.mark.parametrize("kind", ["trace", "csv", "json"])
def test_phases_are_exported(as_role, live, kind):
    answer = as_role("viewer").get(BASE + "timeline/", {"format": kind})
    assert "attachment" in answer["Content-Disposition"]
    if kind == "trace":
        events = json.loads(answer.content)["traceEvents"]
        assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {f"gb300-{i}" for i in (1, 2, 3, 4)}
    else:
        assert b"gb300-1" in answer.content and b"prefill" in answer.content


def test_a_node_is_drained_brought_back_removed_and_added(as_role, live, partition):
    client = as_role("operator")
    node = partition.nodes.get(name="gb300-1")
    said = client.post(BASE + "gb300-1/drain/", {"drain-gb300-1-reason": "fan"}).content
    assert b"takes no new work" in said
    node.refresh_from_db()
    assert node.draining and b"Bring back" in client.get(BASE).content
    client.post(BASE + "gb300-1/undrain/", {})
    wrong = client.post(
        BASE + "gb300-1/remove/", {"remove-gb300-1-reason": "gone", "remove-gb300-1-confirm": "gb300-2"}
    )
    assert wrong.status_code == 422
    client.post(BASE + "gb300-1/remove/", {"remove-gb300-1-reason": "gone", "remove-gb300-1-confirm": "gb300-1"})
    node.refresh_from_db()
    assert not node.enabled and b"Out of service" in client.get(BASE).content
    client.post(BASE + "gb300-1/add/", {})
    node.refresh_from_db()
    assert node.enabled and not node.draining


def test_filtered_nodes_are_the_ones_asked_for(as_role, live):
    page = as_role("viewer").get(BASE, {"q": "300-3"}).content.decode()
    listed = page.split('id="node-list"')[1]
    assert "gb300-3" in listed and "gb300-1" not in listed
    assert "data-live" not in listed, "what is not kept up to date by the feed must not be written by it"


def test_forcing_a_node_orders_its_switch_and_marks_its_card(as_role, live, partition):
    client = as_role("administrator")
    assert b"Force gb300-3" in client.get(BASE + "gb300-3/force/").content
    answer = client.post(BASE + "gb300-3/force/", forced())
    assert answer.status_code == 200
    assert b"gb300-3 is forced to prefill" in answer.content
    assert ForcedSplit.objects.get().node == "gb300-3"
    assert "forced to prefill" in client.get(BASE).content.decode()
    ended = client.post(BASE + "gb300-3/force/clear/", {"clear-gb300-3-reason": "over"})
    assert b"no longer forced" in ended.content


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"confirm": "gb300-4"}, "confirm"), ({"reason": ""}, "reason"), ({"phase": "idle"}, "phase")],
)
def test_a_force_of_a_node_is_refused_at_its_field(as_role, partition, changes, field):
    answer = as_role("administrator").post(BASE + "gb300-3/force/", forced(**changes))
    assert answer.status_code == 422
    assert f'id="id_force-gb300-3-{field}_error"' in answer.content.decode()
    assert not ForcedSplit.objects.exists()


def test_the_last_node_of_a_phase_cannot_be_taken_away(as_role, partition):
    services.force_node(partition.nodes.get(name="gb300-4"), "prefill", ADA, "peak")
    finish(SwitchOrder.objects.get())
    answer = as_role("administrator").post(BASE + "gb300-3/force/", forced())
    assert answer.status_code == 422
    assert b"No enabled node would decode" in answer.content


def test_a_node_of_another_partition_is_not_found(as_role, partition):
    assert as_role("administrator").get(BASE + "other-1/force/").status_code == 404


def test_a_node_is_disabled_first_and_then_forgotten(as_role, live, partition):
    client, said = as_role("administrator"), {"forget-gb300-4-reason": "sold", "forget-gb300-4-confirm": "gb300-4"}
    assert "Disable<span" in client.get(BASE).content.decode()
    early = client.post(BASE + "gb300-4/forget/", said)
    assert early.status_code == 422 and b"is in service" in early.content
    off = {"remove-gb300-4-reason": "old", "remove-gb300-4-confirm": "gb300-4"}
    assert b"gb300-4 is out of service" in client.post(BASE + "gb300-4/remove/", off).content
    page = client.get(BASE).content.decode()
    assert BASE + "gb300-4/add/" in page and BASE + "gb300-4/forget/" in page
    unsure = client.post(BASE + "gb300-4/forget/", said | {"forget-gb300-4-confirm": "gb300-3"})
    assert unsure.status_code == 422 and partition.nodes.filter(name="gb300-4").exists()
    assert b"gb300-4 is forgotten" in client.post(BASE + "gb300-4/forget/", said).content
    assert not partition.nodes.filter(name="gb300-4").exists()
    assert BASE + "gb300-4/forget/" not in client.get(BASE).content.decode()


def test_who_does_not_administer_may_disable_a_node_and_not_forget_it(as_role, live, partition):
    client = as_role("operator")
    client.post(BASE + "gb300-4/remove/", {"remove-gb300-4-reason": "old", "remove-gb300-4-confirm": "gb300-4"})
    page = client.get(BASE).content.decode()
    assert BASE + "gb300-4/add/" in page and BASE + "gb300-4/forget/" not in page
