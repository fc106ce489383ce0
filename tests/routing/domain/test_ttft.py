from __future__ import annotations

import json
from pathlib import Path

import pytest

from apps.planning.domain.cost_model import NetworkProfile, PrefillCoefficients
from apps.routing.domain.ttft import best_sources, duplicate_s, predict, prefill_s
from apps.routing.domain.views import FetchPlan, QueuedWork
from tests.routing.domain.building import NETWORK, facts, prefill_query, view

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "formula_vectors.json").read_text())


def row(query, node, others=(), network=NETWORK, may_fetch=True):
    return predict(query, node, best_sources(query.matches, [node, *others]), network, may_fetch)


def test_an_idle_node_takes_the_service_time_of_the_vectors():
    node = view("n0", prefill=PrefillCoefficients(*VECTORS["C_prefill"]))
    terms = row(prefill_query(5268 + 150000, {"n0": 9375}), node)
    assert terms.cached_tokens == 150000
    assert terms.total_s == pytest.approx(VECTORS["prefill_iteration_s"]["one(5268,150000,150000)"], rel=1e-12)


def test_a_busy_node_adds_its_remaining_batch_and_its_queue():
    queued = (QueuedWork(1000), QueuedWork(500, 100, 100))
    terms = row(prefill_query(1000), view("n0", load={"queued": queued, "running_remaining_s": 0.25}))
    assert (terms.remaining_s, terms.queue_s, terms.service_s) == pytest.approx((0.25, 0.11 + 0.06, 0.11))
    assert terms.total_s == pytest.approx(0.25 + 0.17 + 0.11)


def test_chunks_pay_the_fixed_cost_each():
    assert prefill_s(facts("n0", prefill_chunk_tokens=256), QueuedWork(1000)) == pytest.approx(4 * 0.01 + 0.1)
    assert prefill_s(facts("n0"), QueuedWork(1000)) == pytest.approx(0.01 + 0.1)


def test_one_token_is_always_computed():
    terms = row(prefill_query(1600, {"n0": 100}), view("n0"))
    assert terms.cached_tokens == 1599


def test_a_node_fetches_what_a_peer_holds_and_waiting_does_not_hide():
    query = prefill_query(16000, {"n0": 100, "n1": 900})
    terms = row(query, view("n0"), [view("n1", "decode")])
    fetch_s = 0.001 + 800 * 16 * 1000 / 1e9 + 800 * 16 * 1000 / 1e12
    assert (terms.mode, terms.fetch, terms.fetch_tokens) == ("fetch", FetchPlan("n1", 100, 900), 12800)
    assert terms.fetch_s == terms.fetch_overflow_s == pytest.approx(fetch_s)
    assert terms.total_s == pytest.approx(0.01 + 1600 * 1e-4 + fetch_s)


def test_a_fetch_that_fits_in_the_wait_costs_nothing():
    node = view("n0", load={"running_remaining_s": 1.0})
    terms = row(prefill_query(16000, {"n1": 900}), node, [view("n1", "decode")])
    assert terms.fetch_s > 0
    assert terms.fetch_overflow_s == 0.0
    assert terms.total_s == pytest.approx(1.0 + 0.01 + 1600 * 1e-4)


def test_a_fetch_waits_behind_the_fetches_already_queued():
    query, peer = prefill_query(16000, {"n1": 900}), [view("n1", "decode")]
    alone, behind = (row(query, view("n0", load={"fetch_queue_bytes": b}), peer) for b in (0.0, 5e8))
    assert behind.fetch_s - alone.fetch_s == pytest.approx(0.5)


def test_computing_again_wins_where_the_network_is_slow():
    slow = NetworkProfile(1000, 1e6, 1e12, 0.001)
    terms = row(prefill_query(16000, {"n0": 100, "n1": 900}), view("n0"), [view("n1", "decode")], slow)
    assert (terms.mode, terms.fetch, terms.cached_tokens) == ("recompute", None, 1600)
    assert terms.total_s == pytest.approx(0.01 + 14400 * 1e-4)


def test_a_peer_that_holds_no_more_than_the_node_is_not_asked():
    terms = row(prefill_query(16000, {"n0": 900, "n1": 900}), view("n0"), [view("n1")])
    assert (terms.mode, terms.fetch) == ("local", None)


def test_lost_peers_are_no_source_but_draining_ones_are():
    query = prefill_query(16000, {"n1": 900, "n2": 800, "n3": 500})
    peers = [view("n1", healthy=False), view("n2", state="down"), view("n3", state="draining")]
    assert row(query, view("n0"), peers).fetch == FetchPlan("n3", 0, 500)


def test_copies_that_push_out_needed_blocks_are_charged():
    assert duplicate_s(1000, 2000, 9999, 5.6e-5) == VECTORS["ttft_s"]["dup(1000,2000,..)"]
    assert duplicate_s(1000, 200, 500, 5.6e-5) == pytest.approx(VECTORS["ttft_s"]["dup(1000,200,500)"])
    assert duplicate_s(1000, None, 500, 5.6e-5) == 0.0
    node = view("n0", pool_spare_tokens=2800, pool_referenced_tokens=90000)
    terms = row(prefill_query(16000, {"n1": 900}), node, [view("n1")])
    assert terms.duplicate_s == pytest.approx((14400 - 2800) * 1e-4)
    assert terms.mode == "fetch"
    assert terms.total_s == pytest.approx(terms.service_s + terms.fetch_overflow_s + terms.duplicate_s)


def test_a_prompt_without_tokens_is_an_error():
    with pytest.raises(ValueError, match="prompt_tokens"):
        prefill_query(0)
