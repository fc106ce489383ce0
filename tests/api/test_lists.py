"""Lists: paged by a cursor that holds while rows come and go."""

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from apps.flowcontrol import services as flowcontrol
from apps.planning.models import Proposal
from apps.telemetry.models import RequestRecord
from apps.tenancy import services as tenancy
from apps.tenancy.models import Tenant
from apps.topology import services as topology
from apps.topology.models import Node, Partition
from controlplane.actors import SYSTEM
from tests.factories import make_node, make_tenant

GATEWAY = "/partitions/gb300"
LISTS = {
    "/tenants": lambda row: row["name"],
    "/tenants/acme/keys": lambda row: -row["id"],
    "/clusters": lambda row: row["name"],
    "/partitions": lambda row: row["name"],
    f"{GATEWAY}/nodes": lambda row: row["order"],
    f"{GATEWAY}/configurations": lambda row: -row["version"],
    f"{GATEWAY}/bands": lambda row: -row["priority"],
    f"{GATEWAY}/objectives": lambda row: row["name"],
    f"{GATEWAY}/requests": lambda row: -datetime.fromisoformat(row["at"]).timestamp(),
    "/split/gb300/proposals": lambda row: -row["id"],
}


def pages(rest, path, limit):
    """The items of each page, to the last one."""
    found, cursor = [], ""
    while cursor is not None:
        status, page = rest("get", f"{path}?limit={limit}" + (f"&cursor={cursor}" if cursor else ""))
        assert status == 200, page
        found.append(page["items"])
        cursor = page["next_cursor"]
        assert len(found) < 50, "the list does not end"
    return found


@pytest.fixture
def many(partition):
    moment = timezone.now()
    acme, premium = Tenant.objects.get(name="acme"), partition.bands.get(name="premium")
    for number in range(5):
        make_tenant(f"tenant-{number}")
        tenancy.issue_key(acme, f"key-{number}", SYSTEM)
        flowcontrol.create_objective(partition, f"o-{number}", premium, SYSTEM)
        at = moment - timedelta(seconds=number // 2)  # some at the very same moment
        RequestRecord.objects.create(partition=partition, request_id=f"q-{9 - number}", at=at, tenant="acme")
        split = {side: [] for side in ("prefill", "decode", "from_prefill", "from_decode")}
        Proposal.objects.create(partition=partition, expires_at=at, created_at=moment, state="expired", **split)
    for number in range(5):
        cluster = topology.create_cluster(f"cluster-{number}", SYSTEM)
        Partition.objects.create(cluster=cluster, name=f"part-{number}", model={}, network={}, gateway_url="http://g")


def test_pages_give_every_row_once_and_in_order(rest, many):
    for path, order in LISTS.items():
        whole = rest("get", f"{path}?limit=500")[1]
        assert whole["next_cursor"] is None
        assert len(whole["items"]) >= 3, path
        keys = [order(row) for row in whole["items"]]
        assert keys == sorted(keys), path
        for limit in (1, 2):
            found = pages(rest, path, limit)
            assert [row for page in found for row in page] == whole["items"], path
            assert all(len(page) == limit for page in found[:-1]), path


def test_a_full_last_page_has_no_cursor(rest):
    assert [len(page) for page in pages(rest, f"{GATEWAY}/nodes", 2)] == [2, 2]


def test_rows_that_come_and_go_shift_no_page(rest, partition):
    first = rest("get", f"{GATEWAY}/nodes?limit=2")[1]
    make_node(partition, "gb300-0", 9, "decode")
    Node.objects.filter(name="gb300-1").delete()
    second = rest("get", f"{GATEWAY}/nodes?limit=500&cursor={first['next_cursor']}")[1]
    assert [row["name"] for row in second["items"]] == ["gb300-3", "gb300-4", "gb300-0"]


def test_a_request_that_arrives_meanwhile_shifts_nothing(rest, partition):
    now = timezone.now()
    for index, age in enumerate((30, 20, 20, 10)):
        at = now - timedelta(seconds=age)
        RequestRecord.objects.create(partition=partition, request_id=f"old-{index}", at=at, tenant="beta")
    path = f"{GATEWAY}/requests?tenant=beta&limit=2"
    first = rest("get", path)[1]
    assert [row["request_id"] for row in first["items"]] == ["old-3", "old-2"]
    RequestRecord.objects.create(partition=partition, request_id="new", at=now, tenant="beta")
    second = rest("get", f"{path}&cursor={first['next_cursor']}")[1]
    assert [row["request_id"] for row in second["items"]] == ["old-1", "old-0"]
    assert second["next_cursor"] is None


def test_a_cursor_of_another_list_is_refused(rest):
    cursor = rest("get", f"{GATEWAY}/nodes?limit=1")[1]["next_cursor"]
    status, problem = rest("get", f"{GATEWAY}/requests?cursor={cursor}")
    assert (status, problem["errors"][0]["field"]) == (422, "cursor")
