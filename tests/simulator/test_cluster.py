"""Partitions as processes: demand is exchanged at epochs, and the number of processes changes nothing."""

from __future__ import annotations

from dataclasses import replace

from workers.simulator.cluster import ClusterRun, Demand, Plan, Swing, exchange


def test_agents_start_where_requests_are_answered_fastest() -> None:
    demands = [Demand(0, 100, 10, 4.0), Demand(1, 100, 10, 9.0), Demand(2, 100, 10, 5.0)]
    assert exchange(demands, 300) == [105, 95, 100]
    even = [Demand(0, 100, 10, 4.0), Demand(1, 100, 10, 4.5)]
    assert exchange(even, 200) == [100, 100]


def test_no_agent_is_lost_in_an_exchange() -> None:
    demands = [Demand(0, 90, 10, 0.0), Demand(1, 100, 10, 9.0), Demand(2, 100, 10, 1.0)]
    assert sum(exchange(demands, 300)) == 300


def test_a_swing_keeps_its_total_and_is_out_of_step_between_partitions() -> None:
    swing = Swing(agents=(100, 100), depth=0.8, period_s=1200.0)
    one, other = swing.populations(0, 2, 1200.0), swing.populations(1, 2, 1200.0)
    assert all(abs(sum(population.agents.values()) - 100) <= 1 for population in (*one, *other))
    assert [p.agents["Putnam"] for p in one] != [p.agents["Putnam"] for p in other]
    assert min(p.agents["Putnam"] for p in one) == 10 and max(p.agents["Putnam"] for p in one) == 90


def test_one_process_or_two_give_the_same_run() -> None:
    plan = Plan(
        partitions=3, nodes=2, prefill_nodes=1, seconds=120.0, agents=4, workload="Putnam", block_tokens=64, seed=3
    )
    one, two = ClusterRun(plan, 1).run(), ClusterRun(plan, 2).run()
    assert one.requests == two.requests > 20
    assert one.demands == two.demands
    assert one.epochs == 2
    assert ClusterRun(replace(plan, seed=4), 1).run().demands != one.demands
