"""Ingest: every entry once, bad ones passed over, old ones removed."""

from datetime import UTC, datetime

import pytest

from apps.telemetry import selectors, services
from apps.telemetry.models import CostWindow, LoadWindow, RequestRecord
from tests.factories import make_partition

pytestmark = pytest.mark.django_db
REQUEST = {
    "kind": "request",
    "id": "r-1",
    "t": 1_750_000_000.25,
    "tenant": "acme",
    "band": "standard",
    "branch": None,
    "prefill_node": "gb300-1",
    "decode_node": "gb300-2",
    "prompt_tokens": 4096,
    "cached_tokens": 2048,
    "computed_tokens": 2048,
    "output_tokens": 12,
    "ttft_s": 0.5,
    "predicted_ttft_s": float("nan"),
    "e2e_s": 2.0,
    "outcome": "completed",
    "reason": "shortest \x00predicted TTFT",
    "router_terms": [{"node": "gb300-1", "total_s": 0.5, "why_not": None}],
    "lost": {"evicted": 64},
}
COST = {
    "kind": "cost-window",
    "node": "gb300-1",
    "t0": 100.0,
    "t1": 105.0,
    "boot_id": "b",
    "prefill_iterations": 3,
    "t_uc": 3000,
    "pairs": 4_500_000_000_000,
    "batch_counts": {"4": 10},
    "switching": False,
}
LOAD = {
    "kind": "load",
    "t0": 100.0,
    "t1": 102.0,
    "arrived": 5,
    "in_flight_s": 8.5,
    "prefill_waits_s": [0.1, 0.2],
    "split": {"prefill": 1},
}


@pytest.fixture
def partition():
    return make_partition()


def test_each_kind_lands_in_its_table_with_the_cursor(partition):
    stored = services.store_entries(partition, [REQUEST, COST, LOAD], "7-1")
    assert (stored.requests, stored.cost_windows, stored.load_windows, stored.refused) == (1, 1, 1, ())
    assert services.cursor_of(partition) == "7-1"
    record = RequestRecord.objects.get()
    assert (record.request_id, record.branch, record.at.timestamp()) == ("r-1", "", 1_750_000_000.25)
    assert (record.predicted_ttft_s, record.reason) == (None, "shortest predicted TTFT")
    assert record.detail["router_terms"][0]["total_s"] == 0.5
    assert CostWindow.objects.get().pairs == 4_500_000_000_000
    assert LoadWindow.objects.get().prefill_waits_s == [0.1, 0.2]


def test_a_batch_read_again_after_a_crash_changes_nothing(partition):
    services.store_entries(partition, [LOAD], "7-1")
    again = services.store_entries(partition, [LOAD, {**LOAD, "t0": 200.0}], "7-1")
    assert again.repeated
    assert LoadWindow.objects.count() == 1


def test_stream_ids_are_compared_as_numbers(partition):
    services.store_entries(partition, [LOAD], "9-9")
    assert not services.store_entries(partition, [{**LOAD, "t0": 102.0}], "10-0").repeated
    assert services.cursor_of(partition) == "10-0"


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "weather"},
        {},
        {**REQUEST, "t": "yesterday"},
        {**REQUEST, "id": None},
        {**COST, "t_uc": -1},
        {**LOAD, "arrived": "many"},
        {**REQUEST, "t": 1e300},
        {**COST, "t_uc": 10**30},
        ["not", "an", "object"],
    ],
)
def test_an_unreadable_entry_is_passed_over_and_reported(partition, bad):
    stored = services.store_entries(partition, [bad, LOAD], "7-1")
    assert len(stored.refused) == 1
    assert stored.load_windows == 1
    assert services.cursor_of(partition) == "7-1"


def test_overlong_texts_are_cut_to_what_the_column_holds(partition):
    services.store_entries(partition, [{**REQUEST, "reason": "x" * 1000}], "1-1")
    assert len(RequestRecord.objects.get().reason) == 300


def test_rows_past_their_age_are_removed(partition):
    services.store_entries(partition, [REQUEST, COST, LOAD], "7-1")
    assert services.prune(partition, now=datetime.fromtimestamp(200.0, UTC)) == 0
    assert (
        services.prune(partition, now=datetime.fromtimestamp(REQUEST["t"] + 8 * 86400, UTC)) == 5
    )  # two short sums too


def test_requests_are_narrowed_by_tenant_node_and_time(partition):
    later = {**REQUEST, "id": "r-2", "t": REQUEST["t"] + 60, "tenant": "beta", "decode_node": "gb300-3"}
    services.store_entries(partition, [REQUEST, later], "7-1")

    def found(**narrow):
        return [row.request_id for row in selectors.requests_of(partition, selectors.RequestFilter(**narrow))]

    assert found() == ["r-2", "r-1"]
    assert found(tenant="acme") == ["r-1"]
    assert found(node="gb300-3") == ["r-2"]
    assert found(tenants=frozenset({"beta"})) == ["r-2"]
    assert found(since=datetime.fromtimestamp(REQUEST["t"] + 1, UTC)) == ["r-2"]
    assert found(until=datetime.fromtimestamp(REQUEST["t"] + 1, UTC)) == ["r-1"]
