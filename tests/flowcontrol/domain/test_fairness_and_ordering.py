from __future__ import annotations

from apps.flowcontrol.domain.config import BandConfig
from tests.flowcontrol.domain.driving import names


def one_band(**fields) -> list[BandConfig]:
    return [BandConfig("standard", 0, **fields)]


def test_round_robin_takes_one_request_of_each_flow_in_turn(make_cluster):
    cluster = make_cluster(limit=1)
    cluster.enqueue(*names("a", 4), flow="a")
    cluster.enqueue(*names("b", 2), flow="b")
    cluster.enqueue(*names("c", 1), flow="c")
    cluster.run()
    assert cluster.order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


def test_a_flow_that_left_joins_the_end_of_the_round(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1)
    cluster.enqueue("a0", flow="a")
    cluster.enqueue("b0", "b1", flow="b")
    cluster.enqueue("a1", flow="a")
    for done in ("a0", "b0", "a1"):
        cluster.release(done)
    assert cluster.order == ["a0", "b0", "a1", "b1"]


def test_global_strict_is_one_line_by_arrival(make_cluster):
    cluster = make_cluster(limit=1, bands=one_band(fairness="global-strict"))
    cluster.enqueue(*names("a", 3), flow="a")
    cluster.enqueue(*names("b", 2), flow="b")
    cluster.run()
    assert cluster.order == ["a0", "a1", "a2", "b0", "b1"]


def test_earliest_deadline_first_orders_a_flow_by_enqueue_time_plus_ttl(make_cluster):
    cluster = make_cluster(limit=1, bands=one_band(ordering="edf"), default_ttl_s=100.0)
    cluster.enqueue("running", "none")
    cluster.enqueue("late", ttl_s=50.0)
    cluster.enqueue("soon", ttl_s=20.0)
    cluster.enqueue("soon-too", ttl_s=20.0)
    cluster.run()
    assert cluster.order == ["running", "soon", "soon-too", "late", "none"]


def test_earliest_deadline_first_across_flows_needs_the_one_line(make_cluster):
    cluster = make_cluster(limit=1, bands=one_band(ordering="edf", fairness="global-strict"))
    cluster.enqueue("running", flow="a")
    cluster.enqueue("late", flow="a", ttl_s=50.0)
    cluster.enqueue("soon", flow="b", ttl_s=20.0)
    cluster.run()
    assert cluster.order == ["running", "soon", "late"]


def test_cancelled_requests_leave_the_line_without_a_trace(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1, bands=one_band(ordering="edf"))
    cluster.enqueue("running")
    many = names("r", 500)
    cluster.enqueue(*many, ttl_s=50.0)
    for name in many[:-1]:
        cluster.cancel(name)
    cluster.release("running")
    assert cluster.order == ["running", many[-1]]


def test_idle_flows_are_not_kept(make_cluster):
    cluster = make_cluster(answer_s=None, limit=1)
    for index in range(2000):
        cluster.enqueue(f"r{index}", flow=f"flow-{index}")
        cluster.release(f"r{index}")
    band = next(b for b in cluster.controller.snapshot(0.0).bands if b.name == "standard")
    assert len(band.flows) <= 100
    assert band.dispatched_total == 2000
