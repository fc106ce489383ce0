"""A switch order, event by event: order of steps, fencing, failure, roll-back, and coming back after a crash."""

from copy import deepcopy

import pytest

from apps.planning.domain.phase_machine import (
    GRACE_S,
    AgentUnreachable,
    InvalidTransition,
    MovePlan,
    NodeFacts,
    OrderPlan,
    PhaseMachine,
    PollStatus,
    Publish,
    PushAnswered,
    PushPhase,
    ReleaseNode,
    RollBackAsked,
    StatusReported,
    TakeNode,
    Tick,
)


def machine(*moves, nodes=None, drain=60.0, cooldown=30.0):
    facts = nodes or {f"n{i}": NodeFacts("prefill" if i <= 4 else "decode", 7) for i in range(1, 10)}
    plans = [MovePlan(node, a, b) for node, a, b in moves or [("n5", "decode", "prefill")]]
    return PhaseMachine(OrderPlan("ordered", plans, drain, cooldown, ordered_at=0.0), facts)


def kinds(commands):
    return [type(command) for command in commands]


def ready(node="n5", phase="prefill", generation=8):
    return StatusReported(node, phase, phase, "ready", generation)


def reload(m):
    """What a new process builds from the stored plan and nodes."""
    return PhaseMachine(deepcopy(m.plan), deepcopy(m.nodes))


def test_the_node_is_taken_and_published_before_its_agent_hears_of_it():
    m = machine()
    commands = m.handle(1.0, Tick())
    assert commands[0] == TakeNode("n5", "prefill", 8)
    assert kinds(commands) == [TakeNode, Publish, PushPhase]
    assert commands[-1] == PushPhase("n5", "prefill", 8, 60.0)
    assert m.plan.state == "draining"


def test_an_order_goes_through_draining_switching_cooling_to_done():
    m = machine()
    m.handle(1.0, Tick())
    m.handle(1.1, PushAnswered("n5", 8))
    assert m.handle(1.2, Tick()) == [PollStatus("n5")]
    m.handle(1.3, StatusReported("n5", "decode", "prefill", "draining", 8))
    assert m.plan.state == "draining"
    m.handle(2.0, StatusReported("n5", "decode", "prefill", "switching", 8))
    assert m.plan.state == "switching"
    commands = m.handle(2.5, ready())
    assert kinds(commands) == [ReleaseNode, Publish]
    assert (m.plan.state, m.plan.cooling_until) == ("cooling", 32.5)
    assert m.next_deadline() == 32.5
    assert m.handle(32.4, Tick()) == []
    m.handle(32.5, Tick())
    assert (m.plan.state, m.next_deadline()) == ("done", None)
    m.check_integrity()


def test_old_news_of_another_generation_changes_nothing():
    m = machine()
    m.handle(1.0, Tick())
    before = deepcopy(m.plan)
    m.handle(1.1, ready(generation=7))
    m.handle(1.1, PushAnswered("n5", 7, "bad-request", "old"))
    assert m.plan == before


def test_the_same_news_twice_is_the_same_as_once():
    m = machine()
    m.handle(1.0, Tick())
    m.handle(2.0, ready())
    before = deepcopy(m.plan)
    assert m.handle(2.1, ready()) == []
    assert m.plan == before


def test_a_push_is_repeated_until_the_agent_accepts_it():
    m = machine()
    m.handle(1.0, Tick())
    m.handle(1.1, AgentUnreachable("n5", "connection refused"))
    assert PushPhase not in kinds(m.handle(1.5, Tick()))
    assert PushPhase in kinds(m.handle(2.0, Tick()))
    m.handle(2.1, PushAnswered("n5", 8))
    assert kinds(m.handle(5.0, Tick())) == [PollStatus]


def test_an_agent_that_forgot_the_order_after_a_restart_is_told_again():
    m = machine()
    m.handle(1.0, Tick())
    m.handle(1.1, PushAnswered("n5", 8))
    assert PushPhase in kinds(m.handle(3.0, ready(phase="decode", generation=7)))


def test_an_agent_that_obeys_a_newer_order_is_fenced_above_it():
    m = machine()
    m.handle(1.0, Tick())
    assert PollStatus in kinds(m.handle(1.1, PushAnswered("n5", 8, "stale-generation")))
    commands = m.handle(1.2, ready(phase="decode", generation=41))
    assert TakeNode("n5", "prefill", 42) in commands
    assert PushPhase("n5", "prefill", 42, 60.0) in commands


def test_an_agent_under_our_generation_but_another_phase_is_fenced_too():
    m = machine()
    m.handle(1.0, Tick())
    commands = m.handle(1.2, ready(phase="decode", generation=8))
    assert TakeNode("n5", "prefill", 9) in commands


def test_a_node_that_serves_both_phases_after_the_drain_deadline_may_be_routed_to_again():
    m = machine()
    m.handle(1.0, Tick())
    commands = m.handle(62.0, StatusReported("n5", "mixed", "prefill", "draining", 8))
    assert kinds(commands)[:2] == [ReleaseNode, Publish]
    assert m.plan.state == "switching"
    m.handle(1.0 + 60 + GRACE_S, Tick())
    assert m.plan.state == "switching", "a mixed node does no harm and is waited for"
    m.handle(400.0, ready())
    assert m.plan.state == "cooling"


def test_a_node_that_never_switches_gets_its_old_phase_back_and_the_order_fails():
    m = machine()
    m.handle(1.0, Tick())
    m.handle(1.1, AgentUnreachable("n5", "connection refused"))
    commands = m.handle(1.0 + 60 + GRACE_S, Tick())
    assert commands[0] == TakeNode("n5", "decode", 9)
    assert kinds(commands) == [TakeNode, ReleaseNode, Publish, PushPhase]
    assert m.plan.state == "failed"
    assert "connection refused" in m.plan.reason


def test_a_refused_push_fails_the_order_and_later_moves_never_start():
    nodes = {"n1": NodeFacts("prefill", 1), **{f"n{i}": NodeFacts("decode", 1) for i in (2, 3, 4)}}
    m = machine(("n2", "decode", "prefill"), ("n3", "decode", "prefill"), ("n4", "decode", "prefill"), nodes=nodes)
    m.handle(1.0, Tick())
    assert [move.state for move in m.plan.moves] == ["draining", "draining", "waiting"]
    m.handle(1.1, PushAnswered("n2", 2, "bad-field", "phase: unknown"))
    m.handle(1.2, ready("n3", generation=2))
    assert [move.state for move in m.plan.moves] == ["failed", "switched", "cancelled"]
    assert m.plan.state == "failed"


def test_a_phase_is_never_left_without_a_serving_node():
    nodes = {"n1": NodeFacts("prefill", 1), "n2": NodeFacts("prefill", 1), "n3": NodeFacts("decode", 1)}
    m = machine(("n1", "prefill", "decode"), ("n2", "prefill", "decode"), ("n3", "decode", "prefill"), nodes=nodes)
    m.handle(1.0, Tick())
    assert [move.state for move in m.plan.moves] == ["draining", "waiting", "waiting"]
    m.handle(2.0, ready("n1", "decode", 2))
    # n1 decodes now, so n3 may leave decode; n2 is the last in prefill and waits for it.
    assert [move.state for move in m.plan.moves] == ["switched", "waiting", "draining"]
    m.handle(3.0, ready("n3", "prefill", 2))
    assert [move.state for move in m.plan.moves] == ["switched", "draining", "switched"]


def test_a_node_that_is_down_does_not_count_as_serving():
    nodes = {"n1": NodeFacts("prefill", 1), "n2": NodeFacts("prefill", 1, serving=False), "n3": NodeFacts("decode", 1)}
    m = machine(("n1", "prefill", "decode"), nodes=nodes)
    m.handle(1.0, Tick())
    assert m.plan.moves[0].state == "waiting"
    m.handle(60.0, Tick())
    assert m.plan.state == "failed"
    assert "no other node" in m.plan.reason


def test_an_empty_phase_may_be_filled():
    nodes = {"n1": NodeFacts("prefill", 1, serving=False), "n2": NodeFacts("decode", 1), "n3": NodeFacts("decode", 1)}
    m = machine(("n2", "decode", "prefill"), nodes=nodes)
    m.handle(1.0, Tick())
    assert m.plan.moves[0].state == "draining"


def test_rolling_back_turns_a_draining_node_round_under_a_newer_generation():
    m = machine()
    m.handle(1.0, Tick())
    m.handle(1.1, PushAnswered("n5", 8))
    commands = m.handle(1.5, RollBackAsked("wrong node"))
    assert TakeNode("n5", "decode", 9) in commands
    assert PushPhase("n5", "decode", 9, 60.0) in commands
    m.handle(1.6, ready(phase="decode", generation=9))
    assert (m.plan.state, m.plan.reason) == ("rolled-back", "wrong node")


def test_rolling_back_an_order_of_several_nodes_also_returns_those_that_have_switched():
    m = machine(("n5", "decode", "prefill"), ("n6", "decode", "prefill"))
    m.handle(1.0, Tick())
    m.handle(2.0, ready("n5"))
    m.handle(2.1, RollBackAsked("no"))
    m.handle(3.0, ready("n5", "decode", 9))
    m.handle(3.0, ready("n6", "decode", 9))
    assert m.plan.state == "rolled-back"
    assert {name: facts.phase for name, facts in m.nodes.items()}["n5"] == "decode"


def test_an_order_that_is_over_cannot_be_rolled_back_in_place():
    m = machine()
    m.handle(1.0, Tick())
    m.handle(2.0, ready())
    with pytest.raises(InvalidTransition, match="reverse"):
        m.handle(3.0, RollBackAsked("late"))
    m.handle(100.0, Tick())
    with pytest.raises(InvalidTransition, match="done"):
        m.handle(101.0, RollBackAsked("later"))


# The planner may die after any event was stored, with its commands sent or not; a new process must finish the order.
EVENTS = [
    (1.0, Tick()),
    (1.1, PushAnswered("n5", 8)),
    (1.2, StatusReported("n5", "decode", "prefill", "draining", 8)),
    (2.0, StatusReported("n5", "decode", "prefill", "switching", 8)),
    (2.5, ready()),
]


@pytest.mark.parametrize("crash_after", range(len(EVENTS) + 1))
def test_an_order_is_finished_after_a_crash_at_any_point_even_if_the_last_commands_were_lost(crash_after):
    m = machine()
    for now, event in EVENTS[:crash_after]:
        m.handle(now, event)
    m = reload(m)
    agent = {"phase": "decode", "generation": 7}
    if crash_after > 1:
        agent = {"phase": "prefill", "generation": 8}
    now = 10.0
    while m.plan.state not in ("cooling", "done"):
        commands = m.handle(now, Tick())
        for command in commands:
            if isinstance(command, PushPhase) and command.generation >= agent["generation"]:
                agent = {"phase": command.phase, "generation": command.generation}
                m.handle(now, PushAnswered(command.node, command.generation))
            if isinstance(command, PollStatus):
                m.handle(now, ready(command.node, agent["phase"], agent["generation"]))
        now += 1.0
        assert now < 30, f"stuck in {m.plan}"
        m = reload(m)
    assert agent["phase"] == "prefill"
    assert m.nodes["n5"] == NodeFacts("prefill", agent["generation"])
    m.check_integrity()


# ---- engines whose switch is routing alone ---------------------------------------------------------------------------


def pair():
    facts = {"v1": NodeFacts("prefill", 3, by_routing=True), "v2": NodeFacts("decode", 3, by_routing=True)}
    return machine(("v1", "prefill", "decode"), ("v2", "decode", "prefill"), nodes=facts)


def test_two_nodes_that_switch_by_routing_alone_swap_in_one_step():
    m = pair()
    commands = m.handle(1.0, Tick())
    assert [command for command in commands if isinstance(command, TakeNode)] == [
        TakeNode("v1", "decode", 4),
        TakeNode("v2", "prefill", 4),
    ]
    m.handle(1.1, ready("v1", "decode", 4))
    assert m.plan.state != "cooling"
    m.handle(1.2, ready("v2", "prefill", 4))
    assert m.plan.state == "cooling"
    m.check_integrity()


def test_a_swap_by_routing_is_rolled_back_in_one_step_too():
    m = pair()
    m.handle(1.0, Tick())
    m.handle(1.1, ready("v1", "decode", 4))
    commands = reload(m).handle(1.2, RollBackAsked("no"))
    assert {(c.node, c.phase) for c in commands if isinstance(c, TakeNode)} == {("v1", "prefill"), ("v2", "decode")}


def test_two_nodes_with_agents_never_swap_at_once():
    m = machine(
        ("v1", "prefill", "decode"),
        ("v2", "decode", "prefill"),
        nodes={"v1": NodeFacts("prefill", 3), "v2": NodeFacts("decode", 3)},
    )
    assert m.handle(1.0, Tick()) == []
    m.handle(100.0, Tick())
    assert m.plan.state == "failed"
    assert "no other node would serve it" in m.plan.reason


# ---- two nodes that come to serve both phases, and back --------------------------------------------------------------


def couple(*phases):
    return {f"n{i}": NodeFacts(phase, 1) for i, phase in enumerate(phases, start=1)}


def test_two_nodes_come_to_serve_both_phases_one_after_the_other():
    m = machine(("n1", "prefill", "mixed"), ("n2", "decode", "mixed"), nodes=couple("prefill", "decode"))
    m.handle(1.0, Tick())
    assert [move.state for move in m.plan.moves] == ["draining", "waiting"]
    m.handle(2.0, ready("n1", "mixed", 2))
    assert [move.state for move in m.plan.moves] == ["switched", "draining"]
    m.handle(3.0, ready("n2", "mixed", 2))
    assert m.plan.state == "cooling"


def test_two_mixed_nodes_get_a_phase_each_one_after_the_other():
    m = machine(("n1", "mixed", "prefill"), ("n2", "mixed", "decode"), nodes=couple("mixed", "mixed"))
    m.handle(1.0, Tick())
    assert [move.state for move in m.plan.moves] == ["draining", "waiting"], "n2 decodes for both meanwhile"
    m.handle(2.0, ready("n1", "prefill", 2))
    assert [move.state for move in m.plan.moves] == ["switched", "draining"]
    m.handle(3.0, ready("n2", "decode", 2))
    assert m.plan.state == "cooling"


# ---- a clock that is set back ----------------------------------------------------------------------------------------


def test_a_push_is_repeated_though_the_clock_was_set_back_by_an_hour():
    m = machine()
    m.handle(5000.0, Tick())
    assert PushPhase in kinds(m.handle(1400.0, Tick()))


def test_a_silent_node_is_given_up_in_time_though_the_clock_was_set_back():
    m = machine()
    m.handle(5000.0, Tick())
    m.handle(1400.0, Tick())
    m.handle(1400.0 + 60 + GRACE_S, Tick())
    assert m.plan.state == "failed"


def test_an_order_does_not_cool_down_for_longer_than_it_should_after_the_clock_was_set_back():
    m = machine()
    m.handle(5000.0, Tick())
    m.handle(5001.0, ready())
    m.handle(1400.0, Tick())
    m.handle(1430.0, Tick())
    assert m.plan.state == "done"


def test_an_order_that_cannot_start_says_so_in_time_though_the_clock_was_set_back():
    m = machine(("n1", "prefill", "decode"), nodes=couple("prefill", "decode"))
    m.plan.ordered_at = 5000.0
    m.handle(1400.0, Tick())
    m.handle(1460.0, Tick())
    assert m.plan.state == "failed"
