"""Many nodes at once give the same table and choice as one after the other."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients
from apps.routing.domain.loads import LoadBook
from apps.routing.domain.router import COLUMNS_FROM_NODES, Router
from apps.routing.domain.views import DecodeQuery, NodeFacts, PrefillQuery, QueuedWork
from tests.routing.domain.building import NETWORK, facts, policy


def cluster(rng: random.Random, nodes: int) -> list[NodeFacts]:
    found = []
    for number in range(nodes):
        found.append(
            facts(
                f"n{number}",
                phase=rng.choice(["prefill", "prefill", "mixed", "decode"]),
                prefill=PrefillCoefficients(rng.random() * 0.05, rng.random() * 1e-4, 1e-9, 1e-7),
                state=rng.choice(["ready", "ready", "ready", "draining", "down"]),
                healthy=rng.random() < 0.95,
                prefill_chunk_tokens=rng.choice([0, 512, 8192]),
                pool_spare_tokens=rng.choice([None, 0, 10_000]),
                pool_referenced_tokens=rng.choice([0, 50_000]),
            )
        )
    return found


@pytest.mark.parametrize("seed", range(8))
def test_many_nodes_at_once_give_the_table_and_the_choice_of_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    nodes = cluster(rng, 60)
    loads = LoadBook(NETWORK)
    rows, columns = Router(policy()), Router(policy())
    now, placed = 0.0, []
    for number in range(120):
        now += rng.random() * 0.2
        held = {node.name: rng.randint(1, 200) for node in nodes if rng.random() < 0.2}
        query = PrefillQuery(f"r{number}", rng.randint(1, 4000), held, 16, waited_s=rng.random())
        one_by_one = rows.choose_prefill(now, query, [loads.view(now, node) for node in nodes])
        at_once = columns.decide_prefill(now, query, nodes, loads)
        assert (at_once.node, at_once.reason_code, at_once.reason) == (
            one_by_one.node, one_by_one.reason_code, one_by_one.reason,
        )  # fmt: skip
        assert tuple(at_once.terms) == tuple(one_by_one.terms)
        assert at_once.chosen == one_by_one.chosen and at_once.fetch == one_by_one.fetch
        if at_once.node is not None:
            loads.placed_prefill(
                now, query.request_id, at_once.node, QueuedWork(query.prompt_tokens), rng.randint(0, 500)
            )
            placed.append(query.request_id)
        for request_id in rng.sample(placed, k=min(len(placed), rng.randint(0, 2))):
            (loads.finished_prefill if rng.random() < 0.7 else loads.started_prefill)(now, request_id)
        if rng.random() < 0.1:
            at = rng.randrange(len(nodes))
            nodes[at] = replace(nodes[at], state=rng.choice(["ready", "draining"]))
        if rng.random() < 0.05:
            loads.node_lost(now, rng.choice(nodes).name)
        if rng.random() < 0.03:
            nodes = nodes[:-1] if len(nodes) > COLUMNS_FROM_NODES + 5 else nodes
    loads.check_integrity()


@pytest.mark.parametrize("seed", range(6))
def test_many_decode_nodes_at_once_give_the_choice_of_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    nodes = []
    for number in range(40):
        moe = {"experts": 256, "experts_per_token": 8, "t_fwd": rng.choice([1, 4])} if rng.random() < 0.5 else {}
        nodes.append(
            facts(
                f"n{number}",
                phase=rng.choice(["decode", "decode", "mixed", "prefill"]),
                decode=DecodeCoefficients(d0=rng.choice([0.01, 0.02]), d1=0.018, d2=0.001, **moe),
                state=rng.choice(["ready", "ready", "draining"]),
                decode_limit=rng.choice([1, 4, 8]),
                kv_capacity_tokens=rng.choice([None, 500, 20_000]),
            )
        )
    loads = LoadBook(NETWORK)
    rows, columns = Router(policy()), Router(policy())
    for number in range(150):
        home = rng.choice([None, *(node.name for node in nodes)])
        query = DecodeQuery(f"r{number}", rng.randint(1, 3000), rng.randint(1, 500), home)
        one_by_one = rows.choose_decode(0.0, query, [loads.view(0.0, node) for node in nodes])
        at_once = columns.decide_decode(0.0, query, nodes, loads)
        assert (at_once.node, at_once.reason_code, at_once.reason) == (
            one_by_one.node, one_by_one.reason_code, one_by_one.reason,
        )  # fmt: skip
        for left, right in zip(at_once.terms, one_by_one.terms, strict=True):
            assert replace(left, iteration_s=0.0) == replace(right, iteration_s=0.0)
            assert left.iteration_s == pytest.approx(right.iteration_s)
        if at_once.node is not None:
            loads.announced_decode(query.request_id, at_once.node, query.context_tokens + query.output_tokens)
        if rng.random() < 0.4:
            request_id = f"r{rng.randrange(number + 1)}"
            (loads.started_decode(request_id) if rng.random() < 0.5 else loads.finished(0.0, request_id))
    loads.check_integrity()


def test_a_table_is_read_like_a_list_of_rows() -> None:
    nodes = [facts(f"n{number}") for number in range(30)]
    choice = Router(policy()).decide_prefill(0.0, PrefillQuery("r", 100, {"n3": 2}, 16), nodes, LoadBook(NETWORK))
    assert len(choice.terms) == 30
    assert [row.node for row in choice.terms][:3] == ["n0", "n1", "n2"]
    assert choice.terms[3].cached_tokens == 32 and choice.terms[-1].node == "n29"
    assert [row.node for row in choice.terms[28:]] == ["n28", "n29"]


def test_when_no_node_of_many_may_prefill_each_says_why() -> None:
    nodes = [facts(f"n{number}", phase="decode") for number in range(30)]
    choice = Router(policy()).decide_prefill(0.0, PrefillQuery("r", 100, {}, 16), nodes, LoadBook(NETWORK))
    assert (choice.node, choice.reason_code) == (None, "no-node")
    assert "n29 phase-decode" in choice.reason
