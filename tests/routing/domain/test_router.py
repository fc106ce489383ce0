from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from apps.routing.domain.loads import LoadBook
from apps.routing.domain.router import Router
from apps.routing.domain.views import POLICIES, FetchPlan, QueuedWork
from tests.routing.domain.building import NETWORK, decode_query, facts, policy, prefill_query, view


def loaded(requests: int) -> dict:
    return {"queued": (QueuedWork(1000),) * (requests - 1), "running_prefill": 1, "running_remaining_s": 0.1}


def decoding(running: int, announced: int = 0, kv_used_tokens: int = 0) -> dict:
    return {"running_decode": running, "announced_decode": announced, "kv_used_tokens": kv_used_tokens}


# --- prefill ---


def test_the_least_predicted_ttft_wins_and_every_row_is_kept():
    views = [view("n0", load=loaded(2)), view("n1"), view("n2", "decode"), view("n3", state="draining")]
    choice = Router(policy()).choose_prefill(0.0, prefill_query(1600, waited_s=2.0), views)
    assert choice.node == "n1"
    assert choice.predicted_ttft_s == pytest.approx(2.0 + 0.17)
    assert [(r.node, r.why_not) for r in choice.terms] == [
        ("n0", None), ("n1", None), ("n2", "phase-decode"), ("n3", "draining"),
    ]  # fmt: skip
    assert choice.chosen.total_s == pytest.approx(0.17)
    assert choice.reason_code == "least-ttft"
    assert choice.reason == "n1: least predicted TTFT 0.170 s (service 0.170); next n0 0.380 s"


def test_a_cached_prefix_is_worth_a_short_wait_but_not_a_long_one():
    matches = {"n0": 90}
    for requests, expected in ((1, "n0"), (4, "n1")):
        views = [view("n0", load=loaded(requests)), view("n1")]
        choice = Router(policy(fetch=False)).choose_prefill(0.0, prefill_query(1600, matches), views)
        assert choice.node == expected


def test_the_choice_says_what_to_fetch():
    views = [view("n0"), view("n1", "decode")]
    choice = Router(policy()).choose_prefill(0.0, prefill_query(1600, {"n1": 90}), views)
    assert (choice.node, choice.fetch) == ("n0", FetchPlan("n1", 0, 90))
    assert "fetch 0.002 of which 0.002 not hidden" in choice.reason


def test_no_node_at_all_says_why():
    views = [view("n0", "decode"), view("n1", healthy=False)]
    choice = Router(policy()).choose_prefill(0.0, prefill_query(), views)
    assert (choice.node, choice.predicted_ttft_s, choice.reason_code) == (None, None, "no-node")
    assert choice.reason == "no node can prefill: n0 phase-decode, n1 unhealthy"


def test_a_mixed_node_serves_both_stages():
    router = Router(policy())
    assert router.choose_prefill(0.0, prefill_query(), [view("n0", "mixed")]).node == "n0"
    assert router.choose_decode(0.0, decode_query(), [view("n0", "mixed")]).node == "n0"


@pytest.mark.parametrize("name", POLICIES)
def test_new_conversations_one_at_a_time_spread_over_equal_nodes(name):
    router, views = Router(policy(name)), [view(f"n{i}") for i in range(4)]
    chosen = [router.choose_prefill(0.0, prefill_query(), views).node for _ in range(12)]
    assert Counter(chosen) == {"n0": 3, "n1": 3, "n2": 3, "n3": 3}
    assert chosen[:4] == ["n0", "n1", "n2", "n3"], "node order first, then in turn"


def test_requests_of_one_instant_spread_because_load_counts_from_the_decision():
    router, book = Router(policy()), LoadBook(NETWORK)
    nodes = [facts(f"n{i}") for i in range(3)]
    for index in range(9):
        views = [book.view(5.0, node) for node in nodes]
        choice = router.choose_prefill(5.0, prefill_query(), views)
        book.placed_prefill(5.0, f"r{index}", choice.node, QueuedWork(1600))
    assert [book.view(5.0, node).prefill_requests for node in nodes] == [3, 3, 3]


def test_equal_predictions_go_to_the_node_with_fewest_placed():
    views = [
        view("n0", load={"queued": (QueuedWork(1), QueuedWork(1)), "running_remaining_s": 0.0}),
        view("n1", load={"running_prefill": 1, "running_remaining_s": 0.0202}),
    ]
    choice = Router(policy()).choose_prefill(0.0, prefill_query(16000), views)
    assert (choice.node, choice.reason_code) == ("n1", "least-ttft-tied")


# --- decode ---


def test_decode_goes_where_an_iteration_stays_shortest_after_joining():
    views = [view("n0", "decode", decoding(3)), view("n1", "decode", decoding(1, 1)), view("n2")]
    choice = Router(policy()).choose_decode(0.0, decode_query(), views)
    assert (choice.node, choice.reason_code) == ("n1", "least-iteration")
    assert [(t.node, t.batch, t.why_not) for t in choice.terms] == [
        ("n0", 4, None), ("n1", 3, None), ("n2", 0, "phase-prefill"),
    ]  # fmt: skip
    assert choice.terms[1].iteration_s == pytest.approx(0.013)


def test_a_faster_node_takes_more_of_the_decoding():
    slow = view("n0", "decode", decoding(1))
    fast = view("n1", "decode", decoding(3))
    fast = replace(fast, facts=replace(fast.facts, decode=replace(fast.facts.decode, d0=0.002)))
    assert Router(policy()).choose_decode(0.0, decode_query(), [slow, fast]).node == "n1"


@pytest.mark.parametrize(("running_at_home", "expected"), [(2, "n0"), (5, "n1")])
def test_the_home_node_is_kept_within_a_margin(running_at_home, expected):
    views = [view("n0", "decode", decoding(running_at_home)), view("n1", "decode", decoding(1))]
    choice = Router(policy()).choose_decode(0.0, decode_query(home="n0"), views)
    assert choice.node == expected
    assert choice.reason_code == ("home" if expected == "n0" else "least-iteration")


def test_a_node_without_room_for_the_kv_or_the_batch_gets_nothing():
    views = [
        view("n0", "decode", decoding(0, kv_used_tokens=900), kv_capacity_tokens=1000),
        view("n1", "decode", decoding(0), kv_capacity_tokens=105),
        view("n2", "decode", decoding(7, 1)),
    ]
    choice = Router(policy()).choose_decode(0.0, decode_query(100, 10, home="n0"), views)
    assert (choice.node, choice.reason_code) == (None, "no-room")
    assert [t.why_not for t in choice.terms] == ["kv-full", "kv-too-small", "batch-full"]
    assert choice.reason == "no node can decode: n0 kv-full, n1 kv-too-small, n2 batch-full"


def test_a_router_that_holds_nothing_back_sends_on_to_nodes_without_room_but_not_where_it_never_fits():
    views = [
        view("n0", "decode", load=decoding(1, kv_used_tokens=99_000), kv_capacity_tokens=100_000),
        view("n1", "decode", kv_capacity_tokens=1000),
    ]
    query = decode_query(2000, 500)
    for name in ("ttft", "least-loaded", "round-robin", "dynamo-kv"):
        assert Router(policy(name=name)).choose_decode(0.0, query, views).node is None
        choice = Router(policy(name=name, holds_back=False)).choose_decode(0.0, query, views)
        assert choice.node == "n0"
        assert [row.why_not for row in choice.terms] == ["kv-full", "kv-too-small"]


def test_asking_what_the_choice_would_be_takes_nobodys_turn():
    nodes, loads = [facts("n0"), facts("n1")], LoadBook(NETWORK)
    router = Router(policy(name="round-robin"))
    asked = [router.decide_prefill(0.0, prefill_query(), nodes, loads, takes_turn=False).node for _ in range(3)]
    assert asked == ["n0", "n0", "n0"]
    assert [router.decide_prefill(0.0, prefill_query(), nodes, loads).node for _ in range(3)] == ["n0", "n1", "n0"]


@pytest.mark.parametrize("name", POLICIES)
def test_idle_decode_nodes_take_turns(name):
    router, views = Router(policy(name)), [view(f"n{i}", "decode") for i in range(3)]
    chosen = [router.choose_decode(0.0, decode_query(), views).node for _ in range(6)]
    assert chosen == ["n0", "n1", "n2"] * 2


# --- the policies behind the same interface ---


def test_an_unknown_policy_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"routing.policy: expected one of ttft, round-robin.*got 'luck'"):
        policy("luck")


def test_a_policy_can_be_changed_between_two_requests():
    router, views = Router(policy()), [view("n0"), view("n1", load=loaded(3))]
    assert router.choose_prefill(0.0, prefill_query(), views).node == "n0"
    router.configure(policy("round-robin"))
    choice = router.choose_prefill(0.0, prefill_query(), views)
    assert (choice.node, choice.reason_code) == ("n1", "round-robin")


def test_baselines_do_not_fetch_unless_they_are_told_to():
    views = [view("n0"), view("n1", "decode")]
    query = prefill_query(1600, {"n1": 90})
    assert Router(policy("least-loaded")).choose_prefill(0.0, query, views).fetch is None
    assert Router(policy("least-loaded", fetch=True)).choose_prefill(0.0, query, views).fetch is not None


def test_least_loaded_counts_requests_only():
    views = [view("n0", load=loaded(2)), view("n1", load={"running_prefill": 1, "running_remaining_s": 99.0})]
    choice = Router(policy("least-loaded")).choose_prefill(0.0, prefill_query(), views)
    assert (choice.node, choice.predicted_ttft_s) == ("n1", pytest.approx(99.17)), "the prediction is made all the same"


@pytest.mark.parametrize(
    ("blocks", "load", "expected", "code"),
    [(80, 5, "n0", "cache-hit"), (30, 5, "n1", "cache-miss"), (80, 40, "n1", "load-balance")],
)
def test_cache_aware_follows_the_prefix_unless_short_or_too_uneven(blocks, load, expected, code):
    views = [view("n0", load=loaded(load)), view("n1")]
    choice = Router(policy("cache-aware")).choose_prefill(0.0, prefill_query(1600, {"n0": blocks}), views)
    assert (choice.node, choice.reason_code) == (expected, code)


def test_sticky_keeps_a_session_at_home_whatever_the_load():
    router = Router(policy("sticky"))
    views = [view("n0", load=loaded(30)), view("n1")]
    assert router.choose_prefill(0.0, prefill_query(home="n0"), views).node == "n0"
    assert router.choose_prefill(0.0, prefill_query(), views).node == "n1"
    gone = [view("n0", state="draining"), view("n1")]
    assert router.choose_prefill(0.0, prefill_query(home="n0"), gone).node == "n1"
    full = [view("n0", "decode", decoding(8)), view("n1", "decode", decoding(7))]
    assert router.choose_decode(0.0, decode_query(home="n0"), full).node == "n1"


def test_dynamo_weighs_new_blocks_against_active_ones():
    views = [view("n0", load={"kv_used_tokens": 800}, kv_capacity_tokens=9999), view("n1")]
    for blocks, expected in ((40, "n1"), (60, "n0")):
        choice = Router(policy("dynamo-kv")).choose_prefill(0.0, prefill_query(1600, {"n0": blocks}), views)
        assert (choice.node, choice.reason_code) == (expected, "least-cost")


def test_a_choice_says_what_it_was_made_without():
    query = prefill_query(prompt_tokens=10, unseen={"n1": "no-events", "n2": "events-silent"})
    choice = Router(policy()).choose_prefill(0.0, query, [view("n0"), view("n1"), view("n2")])
    codes = [lack.code for lack in choice.blind]
    assert codes == ["prompt-shorter-than-block", "events-silent", "no-events"]
    assert "blind: what n1 holds is not known (no-events)" in choice.reason
    assert "shorter than a block of 16 tokens" in choice.reason


def test_a_choice_with_a_full_view_says_nothing_of_it():
    choice = Router(policy()).choose_prefill(0.0, prefill_query(), [view("n0"), view("n1")])
    assert choice.blind == () and "blind" not in choice.reason


def test_what_copies_cost_others_counts_for_the_choice_but_is_not_predicted_as_waiting():
    full = view("n1", pool_spare_tokens=0, pool_referenced_tokens=10_000)
    choice = Router(policy()).choose_prefill(
        0.0, prefill_query(matches={"n0": 90}), [view("n0", state="draining"), full]
    )
    row = choice.chosen
    assert row.mode == "recompute" and row.duplicate_s == 0.0, "here it is cheaper to compute again"
    cheap_to_hold = view("n1", pool_spare_tokens=1000, pool_referenced_tokens=10_000)
    choice = Router(policy()).choose_prefill(
        0.0, prefill_query(matches={"n0": 90}), [view("n0", state="draining"), cheap_to_hold]
    )
    row = choice.chosen
    assert row.mode == "fetch" and row.duplicate_s == pytest.approx(440 * 1e-4)
    assert choice.predicted_ttft_s == pytest.approx(row.total_s - row.duplicate_s)
    assert "s of later work lost to copies" in choice.reason
