from __future__ import annotations

from dataclasses import replace

import pytest

from apps.flowcontrol.domain.config import BandConfig
from apps.flowcontrol.domain.events import (
    Drain,
    Enqueue,
    PoolChanged,
    PredictedTtft,
    StageReleased,
    Tick,
)
from tests.flowcontrol.domain.driving import flow_config, names, request


def dropped(cluster) -> list[tuple[str, str]]:
    return [(drop.request_id, drop.reason_code) for _, drop in cluster.drops]


# --- the gate ---


def test_a_dispatch_takes_a_prefill_place_and_announces_a_decode_place(make_cluster):
    cluster = make_cluster(answer_s=None, limit=2, decode_limit=3)
    cluster.enqueue(*names("r", 4))
    assert cluster.order == ["r0", "r1"]
    cluster.send(StageReleased("r0", "prefill"))
    assert cluster.order == ["r0", "r1", "r2"], "the freed prefill place is used"
    cluster.send(StageReleased("r1", "prefill"))
    assert len(cluster.order) == 3, "one announced and two running decodes fill the decode stage"
    stages = cluster.controller.snapshot(0.0).stages
    assert (stages["decode"].in_flight, stages["decode"].announced, stages["decode"].limit) == (2, 1, 3)
    assert cluster.controller.snapshot(0.0).gating_stage == "decode"
    cluster.send(StageReleased("r0", "decode"))
    assert cluster.order == names("r", 4)


def test_the_end_of_a_request_frees_a_prefill_place_it_never_gave_back(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1)
    cluster.enqueue("a", "b")
    cluster.release("a")
    assert cluster.order == ["a", "b"]
    cluster.send(StageReleased("a", "decode"))
    cluster.send(StageReleased("a", "prefill"))
    assert cluster.controller.saturation(0.0, "prefill") == 1.0, "a repeated report frees nothing"


def test_limits_grow_with_the_healthy_nodes_of_the_stage_in_one_pass(make_cluster):
    cluster = make_cluster(answer_s=None, limit=4)
    cluster.enqueue(*names("r", 20))
    commands = cluster.send(PoolChanged("prefill", 3))
    assert len(commands) == 8
    cluster.send(PoolChanged("prefill", 1))
    assert cluster.controller.saturation(0.0, "prefill") == 3.0, "more than full, nothing recalled"


def test_an_automatic_limit_follows_what_engines_report(make_cluster):
    config = flow_config()
    cluster = make_cluster(answer_s=None, limit=4)
    cluster.reconfigure(replace(config, prefill=replace(config.prefill, limit_per_node=None)))
    cluster.enqueue(*names("r", 9))
    assert len(cluster.order) == 1, "one a node until the engines have said what they take"
    cluster.send(PoolChanged("prefill", 1, reported_limit=6))
    assert len(cluster.order) == 6


def test_a_ceiling_keeps_room_free_for_other_bands(make_cluster):
    bands = [BandConfig("premium", 100), BandConfig("batch", -10, ceiling=0.5)]
    cluster = make_cluster(answer_s=None, limit=4, bands=bands)
    cluster.enqueue(*names("low", 4), band="batch")
    assert len(cluster.order) == 2
    cluster.enqueue(*names("high", 4), band="premium")
    assert cluster.order == ["low0", "low1", "high0", "high1"]


def test_a_guaranteed_share_cannot_be_starved(make_cluster):
    bands = [BandConfig("premium", 100), BandConfig("batch", -10, min_share=0.25)]
    cluster = make_cluster(limit=1, bands=bands)
    cluster.enqueue(*names("high", 30), band="premium")
    cluster.enqueue(*names("low", 10), band="batch")
    cluster.run()
    first = cluster.dispatches[:24]
    assert [c.request_id[:3] for _, c in first].count("low") == 6 - 1, "a quarter, once its first share was earned"
    assert {c.reason_code for _, c in first if c.band == "batch"} == {"min-share"}


def test_without_a_share_the_order_is_strict(make_cluster):
    cluster = make_cluster(limit=1)
    cluster.enqueue(*names("high", 10), band="premium")
    cluster.enqueue("low", band="best-effort")
    cluster.run()
    assert cluster.order[-1] == "low"


# --- configuration, live ---


def test_a_changed_priority_orders_the_very_next_dispatch_and_loses_nothing(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1)
    cluster.enqueue("running", band="standard")
    cluster.enqueue("s0", "s1", band="standard")
    cluster.enqueue("b0", "b1", band="best-effort")
    bands = [BandConfig("premium", 100), BandConfig("standard", 0), BandConfig("best-effort", 50)]
    cluster.reconfigure(flow_config(limit=1, bands=bands))
    for done in ("running", "b0", "b1", "s0"):
        cluster.release(done)
    assert cluster.order == ["running", "b0", "b1", "s0", "s1"]
    assert not cluster.drops


def test_two_bands_may_swap_their_priorities(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1)
    cluster.enqueue("first", "p", band="premium")
    cluster.enqueue("s", band="standard")
    cluster.reconfigure(flow_config(limit=1, bands=[BandConfig("premium", 0), BandConfig("standard", 100)]))
    cluster.release("first")
    assert cluster.order == ["first", "s"]


def test_changed_policies_line_the_waiting_requests_up_again(make_cluster):
    bands = [BandConfig("standard", 0)]
    cluster = make_cluster(answer_s=None, limit=1, bands=bands)
    cluster.enqueue("a0", "a1", "a2", flow="a")
    cluster.enqueue("b0", flow="b")
    cluster.reconfigure(flow_config(limit=1, bands=[BandConfig("standard", 0, fairness="global-strict")]))
    cluster.release("a0")
    cluster.release("a1")
    assert cluster.order == ["a0", "a1", "a2"], "one line: arrival order"
    cluster.enqueue("a3", flow="a")
    cluster.reconfigure(flow_config(limit=1, bands=bands))
    cluster.release("a2")
    assert cluster.order[-1] == "b0"


def test_a_removed_band_keeps_its_requests_until_they_are_served(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1)
    cluster.enqueue("x", "y", band="best-effort")
    cluster.reconfigure(flow_config(limit=1, bands=[BandConfig("standard", 0)]))
    cluster.release("x")
    assert cluster.order == ["x", "y"]
    cluster.release("y")
    cluster.reconfigure(flow_config(limit=1, bands=[BandConfig("standard", 0)]))
    assert [band.name for band in cluster.controller.snapshot(0.0).bands] == ["standard"]


def test_a_lower_limit_counts_at_once_and_recalls_nobody(make_cluster):
    cluster = make_cluster(answer_s=None, limit=4)
    cluster.enqueue(*names("r", 6))
    cluster.reconfigure(flow_config(limit=2))
    cluster.release("r0", "r1")
    assert len(cluster.order) == 4
    cluster.release("r2")
    assert len(cluster.order) == 5


def test_an_unknown_band_gets_one_of_its_own_from_the_template(make_cluster):
    template = BandConfig("default", 0, max_requests=1)
    cluster = make_cluster(answer_s=None, limit=1, default_band=template)
    cluster.enqueue("running")
    cluster.enqueue("u0", "u1", band="tuesday", priority=7)
    assert dropped(cluster) == [("u1", "rejected-saturated")]
    band = next(b for b in cluster.controller.snapshot(0.0).bands if b.name == "tuesday")
    assert (band.priority, band.waiting) == (7, 1)


def test_bands_nobody_configured_do_not_pile_up(make_cluster):
    cluster = make_cluster(answer_s=None, limit=4)
    for index in range(300):
        cluster.enqueue(f"r{index}", band=f"band-{index}")
        cluster.release(f"r{index}")
    assert len(cluster.controller.snapshot(0.0).bands) <= 3 + 64


# --- capacity and displacement ---


def test_limits_are_checked_global_first_then_the_band(make_cluster):
    bands = [BandConfig("standard", 0, max_requests=2, max_bytes=25)]
    cluster = make_cluster(answer_s=None, limit=1, bands=bands, max_requests=2, max_bytes=20)
    cluster.enqueue("running", "w0")
    cluster.enqueue("big", bytes=11)
    assert "the queue may hold 20 bytes" in cluster.drops[-1][1].message
    cluster.enqueue("w1")
    cluster.enqueue("w2", bytes=0)
    assert "the queue may hold 2 requests" in cluster.drops[-1][1].message
    cluster.reconfigure(flow_config(limit=1, bands=bands))
    cluster.enqueue("w3", bytes=6)
    assert "band standard may hold 25 bytes" in cluster.drops[-1][1].message
    cluster.enqueue("w4", bytes=1)
    assert "band standard may hold 2 requests" in cluster.drops[-1][1].message


def test_a_higher_request_displaces_the_newest_of_the_lowest_sheddable_band(make_cluster):
    bands = [BandConfig("premium", 100), BandConfig("standard", 0), BandConfig("low", -10), BandConfig("lowest", -20)]
    cluster = make_cluster(answer_s=None, limit=1, bands=bands, max_requests=4)
    cluster.enqueue("running")
    cluster.enqueue("l0", band="low")
    cluster.enqueue("ll0", "ll1", band="lowest")
    cluster.enqueue("s0", band="standard")
    cluster.enqueue("p0", "p1", "p2", "p3", band="premium")
    assert dropped(cluster) == [
        ("ll1", "evicted-priority"),
        ("ll0", "evicted-priority"),
        ("l0", "evicted-priority"),
        ("p3", "rejected-saturated"),
    ], "standard is not sheddable"
    assert cluster.controller.totals.displaced == 3


def test_shedding_prefers_requests_that_start_a_branch(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, max_requests=3)
    cluster.enqueue("running")
    cluster.enqueue("starts", band="best-effort", starts_branch=True)
    cluster.enqueue("mid-task-0", "mid-task-1", band="best-effort")
    cluster.enqueue("p0", "p1", band="premium")
    assert [name for name, _ in dropped(cluster)] == ["starts", "mid-task-1"]


def test_nobody_is_displaced_for_a_request_that_does_not_fit_anyway(make_cluster):
    bands = [BandConfig("premium", 100, max_requests=1), BandConfig("best-effort", -10)]
    cluster = make_cluster(answer_s=None, limit=1, bands=bands, max_requests=2, max_bytes=30)
    cluster.enqueue("running", "p0", band="premium")
    cluster.enqueue("b0", band="best-effort")
    cluster.enqueue("too-big", band="premium", bytes=31)
    cluster.enqueue("band-full", band="premium")
    assert [name for name, _ in dropped(cluster)] == ["too-big", "band-full"]


def test_displacement_can_be_switched_off(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, max_requests=1, displacement=False)
    cluster.enqueue("running", "b0", band="best-effort")
    cluster.enqueue("p0", band="premium")
    assert dropped(cluster) == [("p0", "rejected-saturated")]


def test_equal_or_lower_requests_displace_nobody(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, max_requests=1)
    cluster.enqueue("running", "b0", "b1", band="best-effort")
    assert dropped(cluster) == [("b1", "rejected-saturated")]


# --- expiry ---


def test_waiting_ends_exactly_and_a_request_can_only_shorten_it(make_cluster):
    bands = [BandConfig("standard", 0, ttl_s=5.0), BandConfig("best-effort", -10)]
    cluster = make_cluster(answer_s=None, limit=1, bands=bands, default_ttl_s=7.0)
    cluster.enqueue("running")
    cluster.enqueue("own", ttl_s=1.25)
    cluster.enqueue("longer", ttl_s=60.0)
    cluster.enqueue("default", band="best-effort")
    assert cluster.controller.next_deadline() == 1.25
    cluster.run()
    assert [(when, drop.request_id) for when, drop in cluster.drops] == [
        (1.25, "own"),
        (5.0, "longer"),
        (7.0, "default"),
    ]
    assert cluster.controller.next_deadline() is None


def test_room_at_the_moment_of_the_deadline_still_serves(make_cluster):
    cluster = make_cluster(answer_s=3.0, limit=1, default_ttl_s=3.0)
    cluster.enqueue("first", "second")
    cluster.run()
    assert cluster.order == ["first", "second"]


def test_a_late_call_does_not_serve_what_ran_out_before(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, default_ttl_s=3.0)
    cluster.enqueue("first", "second")
    cluster.now = 3.5
    cluster.release("first")
    assert dropped(cluster) == [("second", "rejected-ttl-expired")]


def test_dispatched_requests_leave_no_deadline_behind(make_cluster):
    cluster = make_cluster(answer_s=None, limit=4, default_ttl_s=3.0)
    cluster.enqueue("a")
    assert cluster.controller.next_deadline() is None


# --- the empty pool ---


def test_an_empty_pool_has_its_own_ttl_and_answers_503(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, default_ttl_s=60.0, empty_pool_ttl_s=4.0)
    cluster.enqueue("running", "before")
    cluster.now = 10.0
    cluster.send(PoolChanged("decode", 0))
    cluster.now = 11.0
    cluster.enqueue("during")
    cluster.run()
    drops = [(when, d.request_id, d.outcome, d.http_status, d.reason_code) for when, d in cluster.drops]
    assert drops == [
        (14.0, "before", "EvictedNoEndpoints", 503, "rejected-no-endpoints"),
        (15.0, "during", "EvictedNoEndpoints", 503, "rejected-no-endpoints"),
    ]


def test_a_pool_that_comes_back_serves_who_still_waits(make_cluster):
    cluster = make_cluster(answer_s=None, limit=4, nodes=0, empty_pool_ttl_s=4.0)
    cluster.enqueue("a", "b")
    assert cluster.controller.next_deadline() == 4.0
    cluster.now = 2.0
    cluster.send(PoolChanged("prefill", 1))
    cluster.send(PoolChanged("decode", 1))
    assert cluster.order == ["a", "b"]
    assert cluster.controller.next_deadline() is None


def test_an_empty_pool_may_be_waited_for_longer_than_a_full_one(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, nodes=0, default_ttl_s=10.0, empty_pool_ttl_s=300.0)
    cluster.enqueue("a", "b", "c")
    cluster.enqueue("own", ttl_s=20.0)
    cluster.run(until=100.0)
    assert [(when, drop.request_id, drop.outcome) for when, drop in cluster.drops] == [
        (20.0, "own", "EvictedNoEndpoints")
    ]
    cluster.now = 100.0
    for stage in ("prefill", "decode"):
        cluster.send(PoolChanged(stage, 1))
    assert cluster.order == ["a"]
    cluster.run()
    assert [(when, drop.request_id, drop.outcome) for when, drop in cluster.drops[1:]] == [
        (110.0, "b", "EvictedTTL"),
        (110.0, "c", "EvictedTTL"),
    ]


def test_a_pool_that_comes_and_goes_is_not_waited_for_longer_than_either_time(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, nodes=0, default_ttl_s=60.0, empty_pool_ttl_s=30.0)
    cluster.enqueue("a", "b")
    for when in range(20, 200, 20):
        cluster.run(until=float(when))
        cluster.now = float(when)
        for stage in ("prefill", "decode"):
            cluster.send(PoolChanged(stage, when // 20 % 2))
    assert [(when, drop.request_id) for when, drop in cluster.drops] == [(60.0, "b")]


def test_what_waits_in_a_removed_band_keeps_its_place_but_no_guaranteed_share(make_cluster):
    cluster = make_cluster(
        answer_s=None, limit=1, bands=(BandConfig("old", -10, min_share=0.9), BandConfig("new", 100))
    )
    cluster.enqueue("running", band="new")
    cluster.enqueue(*names("old", 3), band="old")
    cluster.reconfigure(flow_config(limit=1, bands=(BandConfig("new", 100),)))
    cluster.enqueue(*names("new", 3), band="new")
    for _ in range(6):
        cluster.release(cluster.order[-1])
    assert cluster.order == ["running", *names("new", 3), *names("old", 3)]


def test_with_an_empty_pool_ttl_of_zero_arrivals_are_refused_at_once(make_cluster):
    cluster = make_cluster(nodes=0, empty_pool_ttl_s=0.0)
    cluster.enqueue("a")
    assert [(d.outcome, d.retry_after_s) for _, d in cluster.drops] == [("RejectedNoEndpoints", 10)]


# --- cancel, withdraw, shutdown ---


def test_a_cancelled_waiting_request_is_gone_and_a_running_one_frees_its_places(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1)
    cluster.enqueue("a", "b", "c")
    cluster.cancel("b")
    assert [(d.http_status, d.retry_after_s) for _, d in cluster.drops] == [(499, None)]
    cluster.cancel("a")
    assert cluster.order == ["a", "c"]
    assert (cluster.controller.totals.cancelled, cluster.controller.totals.dispatched) == (1, 2)
    cluster.cancel("unknown")


@pytest.mark.parametrize("ordering", ["fcfs", "edf"])
@pytest.mark.parametrize("fairness", ["round-robin", "global-strict"])
def test_a_withdrawn_request_waits_again_at_the_head(make_cluster, fairness, ordering):
    bands = [BandConfig("standard", 0, fairness=fairness, ordering=ordering)]
    cluster = make_cluster(answer_s=None, limit=2, bands=bands)
    cluster.enqueue("a0", "a1", "a2", flow="a", ttl_s=50.0)
    cluster.enqueue("b0", flow="b", ttl_s=5.0)
    cluster.withdraw("a1")
    assert cluster.order == ["a0", "a1"], "not tried again in the same call"
    assert cluster.controller.next_deadline() == 0.05
    cluster.tick(0.05)
    assert cluster.order == ["a0", "a1", "a1"]
    assert cluster.controller.totals.dispatched == 2
    assert cluster.controller.totals.arrived == 4


def test_a_withdrawn_request_keeps_its_deadline(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, default_ttl_s=3.0)
    cluster.enqueue("a")
    cluster.now = 3.5
    cluster.withdraw("a")
    cluster.run()
    assert dropped(cluster) == [("a", "rejected-ttl-expired")]


def test_shutdown_drops_who_waits_and_who_comes_but_lets_running_ones_go_on(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1)
    cluster.enqueue("running", "waiting")
    cluster.send(Drain())
    cluster.enqueue("late")
    assert dropped(cluster) == [("waiting", "rejected-shutting-down"), ("late", "rejected-shutting-down")]
    assert {d.http_status for _, d in cluster.drops} == {503}
    cluster.withdraw("running")
    assert len(cluster.drops) == 3
    assert cluster.controller.totals.rejected == 3


def test_an_id_that_is_known_already_is_an_error(make_cluster):
    cluster = make_cluster()
    cluster.enqueue("a")
    with pytest.raises(ValueError, match="request_id: expected one that is not known, got 'a'"):
        cluster.enqueue("a")


# --- reasons and estimates ---


def test_a_dispatch_says_why(make_cluster):
    cluster = make_cluster(answer_s=None, limit=4)
    cluster.enqueue("a", band="premium")
    command = cluster.dispatches[0][1]
    assert command.reason_code == "highest-priority"
    expected = "band premium (100) is the highest band waiting, its flow's turn; prefill 1/4, decode 1/1000 taken"
    assert command.reason == expected


def test_retry_after_grows_with_the_queue_and_stays_between_1_and_30_seconds(make_cluster):
    cluster = make_cluster(answer_s=1.0, limit=1, max_requests=8)
    for second in range(40):
        cluster.at(float(second), Enqueue(request(f"r{second}")))
    cluster.run(until=38.0)
    cluster.enqueue(*names("x", 20))
    soon = cluster.drops[-1][1].retry_after_s
    assert 7 <= soon <= 10, "eight wait and about one a second is served"
    cluster.send(PredictedTtft(5.0))
    cluster.enqueue("y")
    assert cluster.drops[-1][1].retry_after_s == soon + 5
    cluster.tick(200.0)
    cluster.controller.handle(200.0, Tick())
    cluster.enqueue("z")
    assert cluster.drops[-1][1].retry_after_s == 30


def test_the_snapshot_shows_who_waits_and_why(make_cluster):
    cluster = make_cluster(answer_s=None, limit=2, max_requests=3)
    cluster.enqueue("a0", "a1", "a2", flow="a")
    cluster.now = 1.0
    cluster.enqueue("b0", flow="b")
    cluster.enqueue("p0", band="premium")
    cluster.enqueue("b1", flow="b")
    snapshot = cluster.controller.snapshot(3.0)
    assert [band.name for band in snapshot.bands] == ["premium", "standard", "best-effort"]
    standard = snapshot.bands[1]
    assert (standard.waiting, standard.waiting_bytes, standard.oldest_s, standard.dispatched_total) == (2, 20, 3.0, 2)
    assert [(f.id, f.waiting, f.oldest_s, f.dispatched_total) for f in standard.flows] == [
        ("a", 1, 3.0, 2),
        ("b", 1, 2.0, 0),
    ]
    assert standard.dropped == {"rejected-saturated": 1}
    assert standard.expected_wait_s > snapshot.bands[0].expected_wait_s > 0
    assert snapshot.gating_stage == "prefill"
    assert snapshot.stages["prefill"].saturation == 1.0
