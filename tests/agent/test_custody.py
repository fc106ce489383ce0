"""Who asked for what: silent gateways lose their work, hand-overs end, and orphans are counted only when they stay."""

from __future__ import annotations

from workers.agent.custody import Custody, GivenUp, OrphanGauge


def test_a_gateway_that_falls_silent_loses_its_work_and_its_hand_overs() -> None:
    custody = Custody(lease_s=10)
    for owner in ("g1", "g2"):
        custody.heard(100.0, owner)
    custody.begin("prefill", "a", "g1")
    custody.begin("decode", "b", "g1")
    custody.begin("decode", "c", "g2")
    custody.keep_handoff("d", "g1", 1000.0)
    custody.heard(109.0, "g2")
    assert custody.give_up(110.0) == GivenUp([], [])
    assert custody.give_up(110.1) == GivenUp(["a", "b"], ["d"])
    assert custody.leases_ended == 1


def test_a_process_that_was_stopped_itself_takes_nobody_for_silent() -> None:
    custody = Custody(lease_s=10)
    custody.heard(100.0, "g")
    custody.begin("decode", "a", "g")
    custody.overslept(30.0)
    assert custody.give_up(139.0) == GivenUp([], [])
    assert custody.give_up(141.0) == GivenUp(["a"], [])


def test_work_without_an_owner_has_no_lease() -> None:
    custody = Custody(lease_s=10)
    custody.heard(0.0, "")
    custody.begin("decode", "a", "")
    assert custody.give_up(1e6) == GivenUp([], [])


def test_a_hand_over_is_given_up_at_its_time_or_dropped_once() -> None:
    custody = Custody()
    custody.keep_handoff("a", "g", 30.0)
    custody.keep_handoff("b", "g", 40.0)
    assert custody.give_up(30.0) == GivenUp([], ["a"])
    assert custody.drop_handoff("b") and not custody.drop_handoff("b")
    assert custody.handoffs == 0


def test_the_listing_names_requests_by_stage_and_owner() -> None:
    custody = Custody()
    custody.begin("prefill", "a", "g1")
    custody.begin("prefill", "b", "")
    custody.keep_handoff("c", "g1", 9.0)
    assert custody.listing() == {"prefill": {"g1": ["a"], "": ["b"]}, "decode": {}, "handoff": {"g1": ["c"]}}


def test_only_a_surplus_that_stays_counts_as_orphans() -> None:
    gauge = OrphanGauge()
    assert gauge.observe(0.0, 3) == 0
    assert gauge.observe(0.9, 2) == 0
    assert gauge.observe(1.1, 4) == 2, "the least that was always there"
    assert gauge.observe(1.2, 0) == 0
    assert gauge.observe(1.3, 1) == 0
