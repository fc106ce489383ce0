"""A partition of hundreds of nodes on the Nodes page: counted, ordered, narrowed, and every one of them on some page."""

import re
from datetime import timedelta

import pytest
from django.utils import timezone

from apps.console import fleet
from apps.console.views import nodes
from apps.planning.models import SwitchOrder, SwitchStep
from apps.topology.models import ConfigurationVersion, Node
from tests.console.kit import node, publish_snapshot, snapshot
from tests.factories import COEFFICIENTS

BASE = "/p/gb300/nodes/"


@pytest.fixture
def many(partition, redis_client):
    """Two hundred nodes: one is down, one drains; the higher the number the longer the wait and the fuller the pool."""
    Node.objects.bulk_create(
        Node(partition=partition, name=f"gb300-{i}", order=i, url=f"http://127.0.0.1:9/{i}", engine="simulated",
             hardware_class="gb300", coefficients=COEFFICIENTS, decode_limit=8, desired_phase="decode")
        for i in range(5, 201)
    )  # fmt: skip
    rows = [
        node(f"gb300-{i}", "prefill" if i % 2 else "decode", predicted_wait_s=i, pool_used_blocks=i, age_s=200 - i)
        for i in range(1, 201)
    ]
    rows[149] |= {"health": "down"}
    rows[150] |= {"state": "draining"}
    return publish_snapshot(redis_client, snapshot(nodes=rows))


def names(page):
    return re.findall(r'<li class="node panel" data-id="(gb300-\d+)"', page)


def test_the_pages_together_hold_every_node_once_those_that_need_a_look_first(as_role, many):
    client, address, found = as_role("viewer"), BASE, []
    while address:
        page = client.get(address).content.decode()
        found.append(names(page))
        link = re.search(r'href="([^"]+)#node-list">Next', page)
        address = link[1].replace("&amp;", "&") if link else None
    assert [len(part) for part in found] == [96, 96, 8]
    every = [name for part in found for name in part]
    assert every[:3] == ["gb300-150", "gb300-151", "gb300-1"]
    assert len(set(every)) == 200


def test_how_many_there_are_of_each_kind_is_said_and_leads_there(as_role, many):
    page = as_role("viewer").get(BASE).content.decode()
    head = page.split('class="kinds"')[1].split("</ul>")[0]
    text = re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", head))
    for said in ("200 nodes", "99 prefill", "99 decode", "1 draining", "1 down"):
        assert said in text
    assert "1 to 96 of 200" in page
    down = as_role("viewer").get(BASE, {"kind": "down"}).content.decode()
    assert names(down) == ["gb300-150"]
    assert "200 nodes" in down  # the way back


@pytest.mark.parametrize(
    ("order", "first"),
    [("node", "gb300-1"), ("wait", "gb300-200"), ("pool", "gb300-200"), ("report", "gb300-1"), ("prefill", "gb300-1"),
     ("decode", "gb300-2"), ("by luck", "gb300-150")],
)  # fmt: skip
def test_nodes_are_ordered_as_asked(as_role, many, order, first):
    assert names(as_role("viewer").get(BASE, {"sort": order}).content.decode())[0] == first
    assert order in ("by luck", *fleet.ORDERS)


def test_the_list_renews_itself_on_the_page_and_in_the_order_that_are_shown(as_role, many):
    page = as_role("viewer").get(BASE, {"sort": "wait", "page": "2"}).content.decode()
    address = re.search(r'id="node-list"[^>]*hx-get="([^"]+)"', page)[1].replace("&amp;", "&")
    again = as_role("viewer").get(address).content.decode()
    assert names(again) == names(page) == [f"gb300-{i}" for i in range(104, 8, -1)]


@pytest.mark.parametrize("number", ["0", "-1", "99", "x", "999999999", "²"])
def test_a_page_that_there_is_not_is_the_first_or_the_last(as_role, many, number):
    assert len(names(as_role("viewer").get(BASE, {"page": number}).content.decode())) in (96, 8)


def test_few_nodes_stay_on_the_live_feed_until_they_are_ordered(as_role, live):
    page = as_role("viewer").get(BASE).content.decode()
    assert 'data-each="nodes"' in page and 'class="kinds"' not in page
    page = as_role("viewer").get(BASE, {"sort": "pool"}).content.decode()
    assert 'data-each="nodes"' not in page and "4 nodes" in re.sub("<[^>]+>", "", page)


def test_the_split_page_shows_what_each_of_many_nodes_does_not_only_of_the_first(as_role, many, redis_client):
    many["nodes"][198] |= {"phase": "mixed"}
    publish_snapshot(redis_client, many)
    current = as_role("viewer").get("/p/gb300/split/").context["plan"]["marks"][0]
    assert {cell["kind"]: cell["grow"] for cell in current["cells"]} == {
        "prefill": 98, "decode": 99, "mixed": 1, "draining": 1, "down": 1,
    }  # fmt: skip


def test_the_timeline_of_many_switches_has_those_of_its_lanes_and_the_newest_in_its_table(
    as_role, many, partition, monkeypatch
):
    monkeypatch.setattr(nodes, "MOVES_SHOWN", 3)
    monkeypatch.setattr(nodes, "LANES_SHOWN", 2)
    now = timezone.now()
    ConfigurationVersion.objects.update(created_at=now - timedelta(days=1))
    orders = SwitchOrder.objects.bulk_create(
        SwitchOrder(partition=partition, cause="planner", ordered_by="p", reason="r", state="done", from_prefill=[],
                    from_decode=[], to_prefill=[], to_decode=[], drain_deadline_s=1, cooldown_s=1)
        for _ in range(2)
    )  # fmt: skip
    SwitchStep.objects.bulk_create(
        SwitchStep(order=orders[i // 4], position=i, node=f"gb300-{20 + i % 4}", from_phase="prefill", to_phase="decode",
                   state="switched", began_at=now - timedelta(minutes=9 - i), finished_at=now - timedelta(minutes=8 - i))
        for i in range(8)
    )  # fmt: skip
    found = as_role("viewer").get(f"{BASE}timeline/").context
    assert [move.node for move in found["moves"]] == ["gb300-23", "gb300-22", "gb300-21"]
    assert [lane["name"] for lane in found["lanes"]] == ["gb300-21", "gb300-22"]
    assert [part["kind"] for part in found["lanes"][0]["parts"]].count("switching") == 2
    rows = as_role("viewer").get(f"{BASE}timeline/", {"format": "json"}).json()
    assert sum(row["phase"] == "switching" for row in rows) == 8
