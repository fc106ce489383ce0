"""Ideal and actual reuse, and one cause for each lost token. Blocks are 10 tokens; prompts have a tail of 5 more."""

import pytest

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.directory import PrefixFacts
from apps.kvcache.domain.hashing import HashedPrompt
from apps.kvcache.domain.reuse import judge
from tests.kvcache.kit import ROOT, World, chain_of, prompt_of


def run(w: World, ids, node="p1", branch_id="b", **served) -> ev.ReuseCounted:
    """Place a request of a (new) branch on `node` and compute its prompt."""
    resolved = w.see(ids, branch_id=branch_id)
    w.send(ev.Homed(branch_id, "prefill", node))
    counted = w.serve(resolved.request_id, ids, node, **served)
    w.send(ev.OutputStored(resolved.request_id, b""))
    assert sum(counted.lost.values()) == counted.ideal_tokens - counted.actual_tokens
    return counted


def test_a_first_prompt_has_nothing_to_reuse():
    counted = run(World(), [1, 2, 3])
    assert (counted.prompt_tokens, counted.ideal_tokens, counted.actual_tokens, counted.lost) == (35, 0, 0, {})


def test_a_continuation_on_the_same_node_loses_nothing():
    w = World()
    run(w, [1, 2, 3])
    counted = run(w, [1, 2, 3, 4])
    assert (counted.ideal_tokens, counted.actual_tokens, counted.lost) == (30, 30, {})


def test_output_counts_as_produced_too():
    w = World()
    w.turn([1, 2], output=[3], branch_id="b")
    counted = run(w, [1, 2, 3, 4], node="d1")
    assert (counted.ideal_tokens, counted.actual_tokens, counted.lost) == (30, 30, {})


def test_blocks_of_another_node_are_lost_to_routing_unless_fetched():
    w = World()
    run(w, [1, 2, 3])
    assert run(w, [1, 2, 3, 4], node="p2", branch_id="c", fetched=2).lost == {"routed": 10}


def test_what_a_fetch_did_not_bring_is_lost_to_the_fetch():
    w = World()
    run(w, [1, 2, 3, 4])
    assert run(w, [1, 2, 3, 4], node="p2", branch_id="c", fetched=1, failed=2).lost == {
        "fetch-failed": 20,
        "routed": 10,
    }


def test_blocks_that_no_node_holds_any_more_are_lost_to_eviction():
    w = World()
    run(w, [1, 2, 3])
    w.drop("p1", [1, 2, 3], keep=1)
    counted = run(w, [1, 2, 3, 4])
    assert (counted.actual_tokens, counted.lost) == (10, {"evicted": 20})


def test_blocks_whose_last_copy_went_in_a_switch_are_lost_to_it():
    w = World()
    run(w, [1, 2, 3])
    w.send(ev.NodeCleared("p1", w.next_seq("p1")))
    w.blocks["p1"].clear()
    assert run(w, [1, 2, 3, 4]).lost == {"switched": 30}


def test_each_part_of_a_context_keeps_the_cause_it_went_by():
    w = World()
    run(w, [1, 2, 3, 4])
    w.drop("p1", [1, 2, 3, 4], keep=3)
    w.send(ev.NodeCleared("p1", w.next_seq("p1")))
    w.blocks["p1"].clear()
    assert run(w, [1, 2, 3, 4, 5]).lost == {"switched": 30, "evicted": 10}
    w.drop("p1", [1, 2, 3, 4, 5], keep=0)
    assert run(w, [1, 2, 3, 4, 5]).lost == {"evicted": 50}


def test_blocks_of_a_lost_node_count_as_evicted():
    w = World()
    run(w, [1, 2, 3])
    w.send(ev.NodeLost("p1"))
    assert run(w, [1, 2, 3, 4], node="p2").lost == {"evicted": 30}


def test_blocks_that_no_node_ever_kept_were_never_stored():
    w = World()
    w.see([1, 2, 3], branch_id="b", request_id="first")
    w.store("p1", [1])
    w.send(ev.RequestServed("first", "p1", 0, 35, 0))
    w.send(ev.OutputStored("first", b""))
    assert run(w, [1, 2, 3, 4], branch_id="c").lost == {"never-stored": 20}


def test_one_prompt_can_lose_tokens_to_several_causes():
    w = World()
    run(w, [1, 2, 3, 4])
    w.drop("p1", [1, 2, 3, 4], keep=2)
    run(w, [1, 2, 3, 4, 5], node="p2", branch_id="c")
    w.drop("p2", [1, 2, 3, 4, 5], keep=3)
    counted = run(w, [1, 2, 3, 4, 5, 6], node="p1", branch_id="d")
    assert counted.lost == {"routed": 10, "evicted": 20} and counted.actual_tokens == 20


def test_the_last_token_must_always_be_computed():
    w = World()
    run(w, [1, 2, 3])
    w.see([1, 2, 3], branch_id="c", request_id="exact")
    exact = HashedPrompt(30, 10, ROOT, chain_of([1, 2, 3]))
    w.send(ev.RequestSeen("same-length", ev.BranchSignal("d"), exact))
    (counted,) = w.send(ev.RequestServed("same-length", "p1", 20, 10, 0))
    assert (counted.ideal_tokens, counted.lost) == (20, {})


def test_reuse_is_judged_as_of_placement_not_of_what_the_request_stored_itself():
    w = World()
    run(w, [1, 2])
    w.drop("p1", [1, 2], keep=0)
    w.see([1, 2, 3], branch_id="c", request_id="r")
    w.send(ev.Homed("c", "prefill", "p1"))
    w.store("p1", [1, 2, 3])
    (counted,) = w.send(ev.RequestServed("r", "p1", 0, 35, 0))
    assert counted.lost == {"evicted": 20}


def test_what_came_while_the_request_waited_counts():
    w = World()
    w.see([1, 2, 3], branch_id="waits", request_id="r")
    run(w, [1, 2], branch_id="other")
    w.send(ev.Homed("waits", "prefill", "p2"))
    (counted,) = w.send(ev.RequestServed("r", "p2", 0, 35, 0))
    assert (counted.ideal_tokens, counted.lost) == (20, {"routed": 20})


def test_reuse_of_what_this_process_never_saw_raises_the_ideal():
    w = World()
    w.see([1, 2, 3], branch_id="b", request_id="r")
    (counted,) = w.send(ev.RequestServed("r", "p1", 30, 5, 0))
    assert (counted.ideal_tokens, counted.actual_tokens, counted.lost) == (30, 30, {})


def test_a_request_is_counted_once():
    w = World()
    w.see([1, 2, 3], branch_id="b", request_id="r")
    assert len(w.send(ev.RequestServed("r", "p1", 0, 35, 0))) == 1
    assert w.send(ev.RequestServed("r", "p1", 0, 35, 0)) == []
    assert w.machine.reuse().prompt_tokens == 35


def test_totals_are_kept_by_node_tenant_and_workload():
    w = World()
    run(w, [1, 2, 3], tenant="t1", workload="chat")
    run(w, [1, 2, 3, 4], node="p2", branch_id="c", tenant="t2", workload="chat")
    totals = w.machine.reuse()
    assert (totals.prompt_tokens, totals.ideal_tokens, totals.actual_tokens) == (80, 30, 0)
    assert totals.lost == {"evicted": 0, "routed": 30, "switched": 0, "fetch-failed": 0, "never-stored": 0}
    assert {name: part.prompt_tokens for name, part in w.machine.reuse_by("tenant").items()} == {"t1": 35, "t2": 45}
    assert {name: part.prompt_tokens for name, part in w.machine.reuse_by("workload").items()} == {"chat": 80}
    assert w.machine.reuse_by("node")["p2"].lost["routed"] == 30


@pytest.mark.parametrize("cached", range(0, 60, 5))
@pytest.mark.parametrize("failed", [0, 7, 100])
def test_causes_always_add_up(cached, failed):
    facts = PrefixFacts({"p1": 2, "p2": 3}, 5, ((4, "evicted"), (5, "never-stored")))
    judgement = judge(prompt_of(range(6)), facts, ev.RequestServed("r", "p1", cached, 0, 3, failed))
    assert sum(judgement.lost.values()) == judgement.ideal_tokens - judgement.actual_tokens
    assert all(tokens > 0 for tokens in judgement.lost.values())
