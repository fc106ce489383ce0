"""The published measurements of a flow-control queue in front of one engine, in virtual time with exact counts."""

from __future__ import annotations

import pytest

from apps.flowcontrol.domain.config import BandConfig
from apps.flowcontrol.domain.events import Enqueue
from tests.flowcontrol.domain.driving import names, request


@pytest.mark.parametrize(("limit", "waves"), [(4, [4, 4, 4, 4]), (10, [10, 6]), (None, [16])])
def test_sixteen_equal_requests_run_in_waves_of_the_limit(make_cluster, limit, waves):
    cluster = make_cluster(limit=limit)
    cluster.at(0.0, *(Enqueue(request(name)) for name in names("r", 16)))
    cluster.run()
    assert cluster.waves() == waves
    assert cluster.most_running == (limit or 16)


def test_twelve_flows_in_one_instant_never_exceed_the_limit(make_cluster):
    cluster = make_cluster(limit=4)
    cluster.at(0.0, *(Enqueue(request(name, flow=name)) for name in names("r", 12)))
    cluster.run(until=0.0)
    assert cluster.most_running == len(cluster.running) == 4


def test_a_late_tenant_takes_half_of_the_next_wave(make_cluster):
    cluster = make_cluster(limit=4)
    cluster.at(0.0, *(Enqueue(request(name, flow="a")) for name in names("a", 12)))
    cluster.at(0.4, *(Enqueue(request(name, flow="b")) for name in names("b", 2)))
    cluster.run()
    waves = [[command.flow_id for when, command in cluster.dispatches if when == t] for t in (0.0, 2.0, 4.0, 6.0)]
    assert [sorted(wave) for wave in waves] == [["a"] * 4, ["a", "a", "b", "b"], ["a"] * 4, ["a"] * 2]


def test_every_higher_band_goes_before_every_waiting_lower_one_and_running_ones_stay(make_cluster):
    cluster = make_cluster(limit=4)
    cluster.at(0.0, *(Enqueue(request(name, "best-effort")) for name in names("low", 12)))
    cluster.at(0.1, *(Enqueue(request(name, "premium")) for name in names("high", 4)))
    cluster.at(0.1, *(Enqueue(request(name, "standard")) for name in names("mid", 4)))
    cluster.run()
    assert cluster.order == names("low", 4) + names("high", 4) + names("mid", 4) + names("low", 12)[4:]
    assert cluster.waves() == [4, 4, 4, 4, 4]


def test_a_small_band_with_a_ttl_dispatches_rejects_and_expires_exactly(make_cluster):
    cluster = make_cluster(limit=4, bands=[BandConfig("best-effort", -10, max_requests=5, ttl_s=3.0)])
    cluster.at(0.0, *(Enqueue(request(name, "best-effort")) for name in names("r", 24)))
    cluster.run()
    expected = {"Dispatched": 8, "RejectedCapacity": 15, "EvictedTTL": 1}
    assert cluster.outcomes() == expected
    assert {str(outcome): count for outcome, count in cluster.controller.outcomes.items()} == expected
    assert {(drop.http_status, drop.reason_code) for _, drop in cluster.drops} == {
        (429, "rejected-saturated"),
        (429, "rejected-ttl-expired"),
    }
    assert [when for when, drop in cluster.drops if drop.outcome == "EvictedTTL"] == [3.0]
    assert all(1 <= drop.retry_after_s <= 30 for _, drop in cluster.drops)
