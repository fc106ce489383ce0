"""Who is next: fairness that counts tokens or service, and orderings that look at deadlines or at agents under way."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from apps.flowcontrol.domain.config import BandConfig
from apps.flowcontrol.domain.events import Enqueue, StageReleased
from apps.flowcontrol.domain.metered_fairness import MAX_HANDICAP_S
from apps.flowcontrol.domain.ordering import CONTINUE_LEAD_S, UNSTATED_SLO_S
from tests.flowcontrol.domain.driving import Cluster, flow_config, names, request


def one_band(fairness: str = "global-strict", ordering: str = "fcfs", **fields) -> Cluster:
    """A cluster that serves one request at a time, a second each, with one band of these policies."""
    bands = [BandConfig("standard", 0, fairness=fairness, ordering=ordering)]
    return Cluster(flow_config(limit=1, bands=bands, **fields), answer_s=1.0)


def flows_of(cluster: Cluster, first: int) -> Counter:
    """How many of the first dispatches went to each flow, the one that found the cluster idle left out."""
    return Counter(command.flow_id for _, command in cluster.dispatches[1 : first + 1])


# --- token-fair ---


def test_a_flow_of_large_requests_gets_the_same_tokens_not_the_same_requests():
    cluster = one_band("token-fair")
    cluster.enqueue("running", flow="x")
    cluster.enqueue(*names("big", 20), flow="big", uncached_tokens=900, output_tokens=100)
    cluster.enqueue(*names("small", 100), flow="small", uncached_tokens=90, output_tokens=10)
    cluster.run()
    served = flows_of(cluster, 55)
    assert 4 <= served["big"] <= 6 and 49 <= served["small"] <= 51


def test_weights_divide_the_tokens():
    cluster = one_band("token-fair")
    cluster.enqueue("running", flow="x")
    cluster.enqueue(*names("a", 60), flow="a", uncached_tokens=100, weight=3.0)
    cluster.enqueue(*names("b", 60), flow="b", uncached_tokens=100, weight=1.0)
    cluster.run()
    served = flows_of(cluster, 40)
    assert served == {"a": 30, "b": 10}


def test_flows_that_all_wait_are_never_further_apart_than_a_request_each():
    rng = random.Random(5)
    weights = {"f0": 0.5, "f1": 1.0, "f2": 1.0, "f3": 3.0}
    cluster = Cluster(flow_config(limit=1, bands=[BandConfig("standard", 0, fairness="token-fair")]), answer_s=None)
    cluster.enqueue("running", flow="x")
    sizes: dict[str, int] = {}
    for flow, weight in weights.items():
        for name in names(f"{flow}-", 800):
            sizes[name] = rng.choice((10, 50, 3000)) if flow != "f1" else 3000
            cluster.controller.handle(
                0.0, Enqueue(request(name, flow=flow, uncached_tokens=sizes[name], weight=weight))
            )
    accounts = dict.fromkeys(weights, 0.0)
    (command,) = cluster.controller.handle(0.0, StageReleased("running", "decode"))
    for _ in range(700):
        accounts[command.flow_id] += sizes[command.request_id] / weights[command.flow_id]
        for one in weights:
            for other in weights:
                bound = 3000 / weights[one] + 3000 / weights[other]
                assert abs(accounts[one] - accounts[other]) <= bound
        (command,) = cluster.controller.handle(0.0, StageReleased(command.request_id, "decode"))
    assert min(accounts.values()) > 10 * 3000


def test_a_flow_that_had_nothing_to_do_gathers_no_claim():
    cluster = one_band("token-fair")
    cluster.enqueue(*names("a", 40), flow="a", uncached_tokens=100)
    cluster.run(until=20.0)
    cluster.enqueue(*names("b", 10), flow="b", uncached_tokens=100)
    before = len(cluster.dispatches)
    cluster.run(until=30.0)
    after = Counter(command.flow_id for _, command in cluster.dispatches[before:])
    assert abs(after["a"] - after["b"]) <= 1, "they share from now on"


def test_a_flow_cannot_shed_its_debt_by_pausing():
    cluster = one_band("token-fair")
    cluster.enqueue("running", flow="x")
    cluster.enqueue("a0", flow="a", uncached_tokens=1000)
    cluster.enqueue(*names("b", 30), flow="b", uncached_tokens=100)
    cluster.run(until=2.0)
    cluster.enqueue("a1", flow="a", uncached_tokens=1000)
    cluster.run()
    order = cluster.order[1:]
    assert 9 <= order.index("a1") - order.index("a0") <= 11, "ten small ones weigh as much as the large one before"


def test_what_a_request_really_cost_corrects_the_account():
    cluster = Cluster(flow_config(limit=1, bands=[BandConfig("standard", 0, fairness="token-fair")]), answer_s=None)
    cluster.enqueue("running", flow="x")
    cluster.enqueue(*names("a", 9), flow="a", uncached_tokens=100)
    cluster.enqueue(*names("b", 9), flow="b", uncached_tokens=100)
    cluster.release("running")
    assert cluster.order[-1] == "a0"
    cluster.running.discard("a0")
    cluster.send(StageReleased("a0", "prefill", tokens=500))
    cluster.send(StageReleased("a0", "decode", tokens=0))
    for _ in range(6):
        cluster.release(cluster.order[-1])
    assert [name[0] for name in cluster.order[1:8]] == ["a", "b", "b", "b", "b", "b", "a"]


def test_output_is_expected_from_what_the_flow_produced_before():
    cluster = Cluster(flow_config(limit=1), answer_s=None)
    cluster.enqueue("first", flow="a", prompt_tokens=10, output_tokens=5000)
    assert cluster.controller.snapshot(0.0).stages["decode"].tokens == 10 + 1024, "nothing is known yet"
    cluster.send(StageReleased("first", "decode", tokens=40))
    cluster.enqueue("second", flow="a", prompt_tokens=10, output_tokens=5000)
    assert cluster.controller.snapshot(0.0).stages["decode"].tokens == 10 + 40
    cluster.release("second")
    cluster.enqueue("third", flow="a", prompt_tokens=10, output_tokens=7)
    assert cluster.controller.snapshot(0.0).stages["decode"].tokens == 10 + 7, "never more than it may"


# --- least-attained-service ---


def test_all_branches_of_an_agent_stand_in_one_line():
    cluster = one_band("least-attained-service")
    cluster.enqueue("running", flow="x", uncached_tokens=1)
    cluster.enqueue(*names("a", 4), flow="branch", program="agent-a", uncached_tokens=100)
    cluster.enqueue("c", flow="other", program="agent-a", uncached_tokens=100)
    cluster.enqueue("b", flow="b", program="agent-b", uncached_tokens=100)
    cluster.run()
    assert cluster.order[1:3] == ["a0", "b"], "one turn of agent a, then the agent with less service"


def test_programs_of_two_tenants_are_two_agents():
    cluster = one_band("least-attained-service")
    cluster.enqueue("running", flow="x", uncached_tokens=1)
    cluster.enqueue("a0", "a1", program="1", tenant="a", uncached_tokens=100)
    cluster.enqueue("b0", program="1", tenant="b", uncached_tokens=100)
    cluster.run()
    assert cluster.order[1:] == ["a0", "b0", "a1"]


def test_a_new_agent_passes_one_that_was_served_much():
    cluster = one_band("least-attained-service")
    cluster.enqueue(*names("old", 10), program="old", uncached_tokens=1000)
    cluster.run(until=5.5)
    cluster.enqueue("new", program="new", uncached_tokens=10)
    cluster.run()
    assert cluster.order.index("new") == 6


def test_nobody_is_passed_by_who_came_more_than_a_minute_later():
    cluster = one_band("least-attained-service")
    cluster.enqueue(*names("old", 10), program="old", uncached_tokens=1000)
    cluster.run(until=5.5)
    waits_since = 0.0
    for index in range(300):
        when = 5.0 + 0.5 * index
        cluster.at(when, Enqueue(request(f"new{index}", program=f"p{index}", uncached_tokens=10)))
    cluster.run()
    passed_by = cluster.order[: cluster.order.index("old6")]
    last = max(int(name[3:]) for name in passed_by if name.startswith("new"))
    assert 5.0 + 0.5 * last <= waits_since + MAX_HANDICAP_S
    assert last > 50, "new agents did pass"


def test_old_service_is_forgotten():
    cluster = one_band("least-attained-service")
    cluster.enqueue("a0", program="a", uncached_tokens=1000)
    cluster.run()
    cluster.now = 3000.0
    cluster.enqueue("running", program="x", uncached_tokens=500)
    cluster.enqueue("a1", program="a", uncached_tokens=10)
    cluster.now = 3000.5
    cluster.enqueue("b", program="b", uncached_tokens=10)
    cluster.run()
    assert cluster.order[-2:] == ["a1", "b"], "fifty minutes later both agents are as good as new, so arrival decides"


# --- orderings ---


def test_the_earliest_wished_first_token_goes_first():
    cluster = one_band(ordering="slo-deadline")
    cluster.enqueue("running")
    cluster.enqueue("none", received_at=0.0)
    cluster.enqueue("slow", received_at=0.0, slo_ttft_s=9.0)
    cluster.enqueue("late", received_at=3.0, slo_ttft_s=1.0)
    cluster.enqueue("fast", received_at=0.0, slo_ttft_s=2.0)
    cluster.run()
    assert cluster.order == ["running", "fast", "late", "slow", "none"]


def test_a_request_without_a_wish_is_not_passed_for_ever():
    cluster = one_band(ordering="slo-deadline")
    cluster.enqueue("running", "none")
    for index in range(120):
        cluster.at(0.9 * index, Enqueue(request(f"r{index}", received_at=0.9 * index, slo_ttft_s=2.0)))
    cluster.run()
    when = next(when for when, command in cluster.dispatches if command.request_id == "none")
    assert UNSTATED_SLO_S - 3 <= when <= UNSTATED_SLO_S * 1.2


def test_agents_under_way_go_before_new_branches():
    cluster = one_band(ordering="continue-first")
    cluster.enqueue("running")
    cluster.enqueue("new0", "new1", starts_branch=True)
    cluster.enqueue("turn0", "turn1", starts_branch=False)
    cluster.run()
    assert cluster.order == ["running", "turn0", "turn1", "new0", "new1"]


def test_new_branches_are_not_passed_for_ever():
    cluster = one_band(ordering="continue-first")
    cluster.enqueue("running")
    cluster.enqueue("new", starts_branch=True)
    for index in range(150):
        cluster.at(0.9 * index, Enqueue(request(f"r{index}")))
    cluster.run()
    when = next(when for when, command in cluster.dispatches if command.request_id == "new")
    assert CONTINUE_LEAD_S <= when <= CONTINUE_LEAD_S * 1.2


@pytest.mark.parametrize("ordering", ["fcfs", "edf", "slo-deadline", "continue-first"])
@pytest.mark.parametrize("fairness", ["round-robin", "global-strict", "token-fair", "least-attained-service"])
def test_a_withdrawn_request_is_the_first_of_its_line_again(fairness, ordering):
    bands = [BandConfig("standard", 0, fairness=fairness, ordering=ordering)]
    cluster = Cluster(flow_config(limit=1, bands=bands), answer_s=None)
    cluster.enqueue("running", flow="x")
    cluster.enqueue("a", "b", "c", flow="a", uncached_tokens=10, slo_ttft_s=5.0)
    cluster.release("running")
    first = cluster.order[-1]
    cluster.withdraw(first)
    cluster.tick(0.05)
    assert cluster.order == ["running", first, first]
    assert cluster.controller.totals.dispatched == 2


@pytest.mark.parametrize("fairness", ["token-fair", "least-attained-service"])
def test_accounts_of_flows_long_gone_are_not_kept(fairness):
    cluster = Cluster(flow_config(limit=1, bands=[BandConfig("standard", 0, fairness=fairness)]), answer_s=None)
    band = cluster.controller._bands["standard"]
    for index in range(6000):
        cluster.now = 5.0 * index
        cluster.controller.handle(cluster.now, Enqueue(request(f"r{index}", flow=f"f{index}", uncached_tokens=10)))
        cluster.controller.handle(cluster.now, StageReleased(f"r{index}", "decode"))
    kept = band._fairness._accounts if fairness == "token-fair" else band._fairness._attained
    assert len(kept) < 3000
