"""The tables beside the charts: they tell of the time range that the charts show, not of the last minute."""

import time

import pytest

from apps.console.past import present_period
from apps.telemetry import periods, services
from apps.telemetry.periods import BandSums, Period, Sums

BASE = "/p/gb300/"


def request(number, age_s, **changes):
    return {
        "kind": "request", "id": f"r-{number}", "t": time.time() - age_s, "tenant": "acme", "band": "standard",
        "prompt_tokens": 1000, "cached_tokens": 800, "computed_tokens": 200, "output_tokens": 11, "queue_s": 0.1,
        "ttft_s": 0.5, "predicted_ttft_s": 0.4, "e2e_s": 2.5, "outcome": "completed", "lost": {"evicted": 100}, **changes,
    }  # fmt: skip


@pytest.fixture
def served(live, partition):
    """Three quick requests a minute ago; seven slow ones three hours ago, two of them dropped; one five days ago."""
    sent = [request(n, 60) for n in range(3)]
    sent += [request(10 + n, 3 * 3600, ttft_s=8.0, outcome="dropped" if n < 2 else "completed") for n in range(7)]
    sent.append(request(99, 5 * 86_400, band="old <band>"))
    services.store_entries(partition, sent, "1-1")


@pytest.mark.parametrize(
    ("asked", "requests", "p95"),
    [
        ("5m", 3, "500 ms"),
        ("1h", 3, "500 ms"),
        ("6h", 10, "8."),
        ("24h", 10, "8."),
        ("7d", 11, "8."),
        ("30d", 11, "8."),
    ],
)
def test_the_overviews_tables_tell_of_the_time_that_the_charts_show(as_role, served, asked, requests, p95):
    answer = as_role("viewer").get(BASE, {"range": asked})
    found = answer.context["period"]
    assert found["requests"] == requests
    ttft = found["latency"][0]
    assert ttft["n"] == str(requests)
    assert ttft["p95"][:2] == p95[:2]
    page = answer.content.decode()
    assert f"period/?range={asked}" in page
    assert f'data-range="{asked}"' in page
    assert ttft["p95"] in page.split("Latency in this time")[1].split("</table>")[0]


def test_the_tables_renew_themselves_with_the_same_range(as_role, served):
    answer = as_role("viewer").get(f"{BASE}period/", {"range": "6h"})
    page = answer.content.decode()
    assert page.startswith('<div id="period"') and "period/?range=6h" in page
    assert "8 completed · 2 dropped" in page
    assert "2 (20.0 %)" in page
    assert as_role("viewer").get(f"{BASE}period/", {"range": "7 years"}).context["range"] == "5m"


def test_the_reuse_page_tells_the_reuse_of_the_charts_time(as_role, served):
    page = as_role("viewer").get(f"{BASE}reuse/", {"range": "6h"}).content.decode()
    there = page.split("Reuse in this time")[1].split("</section>")[0]
    assert "80.0 %" in there and "90.0 %" in there and "evicted from the pool" in there
    part = as_role("viewer").get(f"{BASE}period/", {"range": "6h", "part": "reuse"}).content.decode()
    assert "Reuse in this time" in part and "Latency" not in part and "part=reuse" in part


def test_a_time_in_which_nothing_ended_is_said_to_be_empty(as_role, live):
    page = as_role("viewer").get(BASE).content.decode()
    assert "No request ended in this time" in page
    assert "No request ended in this time" in as_role("viewer").get(f"{BASE}reuse/").content.decode()


def test_what_a_client_sent_is_escaped_in_the_tables(as_role, served):
    page = as_role("viewer").get(BASE, {"range": "7d"}).content.decode()
    assert "old &lt;band&gt;" in page and "old <band>" not in page


def test_rates_are_those_of_the_time_that_was_really_summed(as_role, served):
    sums = Sums(
        {"completed": 50, "odd": 1}, {"output_tokens": 600}, {}, {"ttft": {"0": 1}}, {}, {"": BandSums({"odd": 1}, {})}
    )
    shown = present_period(Period(100.0, 400.0, sums), 1.0)
    assert [row["per_s"] for row in shown["rates"]] == ["0.2", "2.0", "0.0", "0.0"]
    assert shown["outcomes"] == "50 completed · 1 odd"
    assert shown["bands"][0] == {
        "name": "none", "requests": "1", "per_s": "0.0", "p50": "–", "p95": "–", "dropped": "none", "tone": "",
    }  # fmt: skip
    assert shown["latency"][1]["p95"] == "–"


def test_a_ttft_above_the_target_is_marked_in_the_past_as_it_is_now():
    sums = Sums(times={"ttft": {periods._bucket(3.0): 10}})
    assert present_period(Period(0.0, 60.0, sums), 1.0)["latency"][0]["p95_tone"] == "bad"
    assert present_period(Period(0.0, 60.0, sums), 9.0)["latency"][0]["p95_tone"] == ""
