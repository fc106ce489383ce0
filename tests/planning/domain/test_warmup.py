"""Warm-up: the ladder of batch sizes, dealt so that the partition keeps serving, and when it is over."""

from apps.planning.domain.warmup import WarmUpPlan, decode_limits, judge, ladder, ladder_ended, rung_at

PLAN = WarmUpPlan(1000.0, 15.0, 600.0, (("a", 16), ("b", 16), ("c", 4)))


def test_the_ladder_doubles_up_to_the_nodes_own_limit():
    assert ladder(1) == (1,)
    assert ladder(8) == (1, 2, 4, 8)
    assert ladder(128) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert ladder(20) == (1, 2, 4, 8, 16, 20)


def test_every_node_climbs_every_rung_and_they_stand_on_different_ones():
    seen = {"a": set(), "b": set(), "c": set()}
    for rung in range(len(PLAN.ladder)):
        limits = decode_limits(PLAN, rung)
        assert limits["a"] != limits["b"]
        for name, limit in limits.items():
            seen[name].add(limit)
    assert seen["a"] == seen["b"] == {1, 2, 4, 8, 16}
    assert seen["c"] == {1, 2, 4}, "never more than its own limit"


def test_time_climbs_the_rungs():
    assert [rung_at(PLAN, 1000.0 + t) for t in (0, 14, 15, 44, 75)] == [0, 0, 1, 2, 5]


def test_it_goes_on_until_a_ladder_is_climbed_even_if_everything_is_learned():
    assert judge(PLAN, 1060.0, {}).what == "go-on"
    assert not ladder_ended(PLAN, 1074.0)
    verdict = judge(PLAN, 1075.0, {})
    assert (verdict.what, verdict.rung) == ("done", 5)


def test_the_first_minute_that_teaches_nothing_is_waited_out():
    quick = WarmUpPlan(1000.0, 5.0, 600.0, (("a", 4),))
    assert judge(quick, 1030.0, {}).what == "go-on"
    assert judge(quick, 1065.0, {}).what == "done"


def test_what_is_not_learned_prolongs_it_and_at_its_limit_it_gives_up_saying_what_is_missing():
    missing = {"gb300": "decode: 3 usable windows, 15 are needed"}
    assert judge(PLAN, 1200.0, missing).what == "go-on"
    verdict = judge(PLAN, 1600.0, missing)
    assert verdict.what == "given-up"
    assert "15 are needed" in verdict.reason
