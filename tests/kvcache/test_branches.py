"""The life of a branch, as its nodes' reference counts see it."""

import pytest

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.machine import KvConfig, KvMachine, LeasePolicy
from tests.kvcache.kit import World, chain_of, prompt_of

LEASE = LeasePolicy(multiple=4.0, floor_s=60.0, ceiling_s=3600.0)


def world() -> World:
    return World(KvMachine(KvConfig(lease=LEASE)))


def of_type(commands, kind):
    return [command for command in commands if isinstance(command, kind)]


def test_an_example_life():
    w = world()
    system, task = [1, 2, 3], [10, 11]
    first = [*system, *task]

    # A new branch counts on every block of its context, once on each node that it has a home on.
    resolved, _ = w.turn(first, output=[12], branch_id="main", version=0, sequence=1)
    assert resolved.kind == "new"
    assert w.counts("p1", [*first, 12]) == [1, 1, 1, 1, 1, 0]  # p1 has no copy of the output
    assert w.counts("d1", [*first, 12]) == [1] * 6

    # It goes on: what is added is counted, nothing else changes.
    second = [*first, 12, 20]
    resolved, _ = w.turn(second, output=[21, 22], branch_id="main", version=0, sequence=2)
    assert resolved.kind == "continuation"
    assert w.counts("d1", [*second, 21, 22]) == [1] * 9

    # A sub-agent starts its own context: it shares the system prompt and counts on nothing else of its parent.
    sub = [*system, 50, 51]
    resolved, _ = w.turn(sub, branch_id="sub", parent="main", relation="subagent", sequence=1)
    assert resolved.kind == "subagent"
    assert w.counts("d1", sub) == [2, 2, 2, 1, 1]
    assert w.counts("d1", second)[3:] == [1] * 4

    # A fork reuses its parent's context and counts on all of it.
    fork = [*second, 60]
    resolved, _ = w.turn(fork, branch_id="fork", parent="main", relation="fork", sequence=1)
    assert resolved.kind == "fork"
    assert w.counts("d1", fork) == [3, 3, 3, 2, 2, 2, 2, 1]
    assert w.counts("d1", [*second, 21, 22])[-2:] == [1, 1]

    # Compaction raises the version: the branch leaves its old context and counts on the new one.
    compacted = [*system, 90]
    resolved, _ = w.turn(compacted, branch_id="main", version=1, sequence=3)
    assert (resolved.kind, resolved.version) == ("version", 1)
    assert w.counts("d1", [*second, 21, 22]) == [3, 3, 3, 1, 1, 1, 1, 0, 0]
    assert w.counts("d1", compacted) == [3, 3, 3, 1]

    # The sub-agent ends while its parent waits.
    closed = of_type(w.send(ev.BranchEnded("sub")), ev.BranchClosed)
    assert closed == [ev.BranchClosed("sub", "ended")]
    assert w.counts("d1", sub) == [2, 2, 2, 0, 0]

    # A long wait: the lease runs out, then the branch resumes where it was and counts again.
    closed = of_type(w.send(ev.Tick(), after_s=1000.0), ev.BranchClosed)
    assert {command.branch_id: command.cause for command in closed} == {"main": "lease", "fork": "lease"}
    assert w.counts("d1", compacted) == [0, 0, 0, 0]
    resolved, reuse = w.turn([*compacted, 91], branch_id="main", version=1, sequence=4)
    assert (resolved.kind, resolved.reason) == ("continuation", "signal-resumed")
    assert w.counts("d1", [*compacted, 91]) == [1] * 5
    assert reuse.actual_tokens == 40

    # The last request says so: the branch is gone when its output is complete, not before.
    resolved = w.see([*compacted, 91, 92], branch_id="main", version=1, sequence=5, end=True)
    assert w.machine.branch("main") is not None
    commands = w.send(ev.OutputStored(resolved.request_id, b""))
    assert of_type(commands, ev.BranchClosed) == [ev.BranchClosed("main", "ended")]
    assert w.machine.node_usage("d1")[1] == 0 and w.machine.branches_live == 0


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_signals_that_are_not_newer_change_nothing():
    w = world()
    w.turn([1, 2, 3, 4], branch_id="b", version=1, sequence=5)
    for stale in ({"version": 0, "sequence": 9}, {"version": 1, "sequence": 5}, {"version": 1, "sequence": 4}):
        resolved = w.see([7, 8], branch_id="b", **stale)
        assert (resolved.reason, resolved.version) == ("signal-stale", 1)
        w.send(ev.OutputStored(resolved.request_id, b""))
        assert w.counts("d1", [1, 2, 3, 4]) == [1] * 4
    assert w.machine.branch("b").context_blocks == 4


def test_a_late_duplicate_does_not_revive_an_ended_branch():
    w = world()
    w.turn([1, 2], branch_id="b", version=0, sequence=3)
    w.send(ev.BranchEnded("b", "closed by the operator"))
    resolved = w.see([1, 2], branch_id="b", version=0, sequence=3)
    assert resolved.reason == "signal-stale" and w.machine.branches_live == 0


def test_a_newer_version_counts_even_with_a_lower_sequence():
    w = world()
    w.turn([1, 2], branch_id="b", version=0, sequence=9)
    resolved = w.see([1, 3], branch_id="b", version=1, sequence=1)
    assert (resolved.kind, w.machine.branch("b").sequence) == ("version", 1)


def test_the_same_request_again_is_resolved_again_and_nothing_else():
    w = world()
    w.turn([1, 2], branch_id="b", version=0, sequence=1)
    w.see([1, 2, 3], branch_id="b", version=0, sequence=2, request_id="x")
    again = w.see([1, 2, 3], branch_id="b", version=0, sequence=2, request_id="x")
    assert (again.branch_id, again.reason) == ("b", "duplicate-request")
    assert w.machine.branch("b").open_requests == 1


def test_a_branch_without_versions_is_raised_when_its_context_is_rewritten():
    w = world()
    w.turn([1, 2, 3, 4], branch_id="b")
    assert w.see([1, 2, 3, 4, 5], branch_id="b").kind == "continuation"
    resolved = w.see([1, 2, 9], branch_id="b")
    assert (resolved.kind, resolved.version, resolved.reason) == ("version", 1, "signal-diverged")


def test_output_that_comes_back_in_other_tokens_is_still_a_continuation():
    w = world()
    w.turn([1, 2, 3], output=[4, 5], branch_id="b")
    assert w.see([1, 2, 3, 4, 77, 78], branch_id="b").kind == "continuation"
    assert w.counts("d1", [1, 2, 3, 4, 5]) == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(("ids", "kind"), [([1, 2, 3, 4, 9], "fork"), ([1, 7, 8], "subagent")])
def test_a_parent_without_a_relation_is_told_by_what_is_shared(ids, kind):
    w = world()
    w.turn([1, 2, 3, 4], branch_id="parent")
    assert w.see(ids, branch_id="child", parent="parent").kind == kind


def test_an_older_request_that_finishes_late_does_not_move_the_context_back():
    w = world()
    old = w.see([1, 2], branch_id="b", version=0, sequence=1)
    w.see([1, 2, 3, 4], branch_id="b", version=0, sequence=2)
    w.send(ev.OutputStored(old.request_id, chain_of([1, 2, 9])[32:]))
    assert w.machine.branch("b").context_blocks == 4


def test_stored_output_may_be_given_with_its_prompt():
    w = world()
    resolved = w.see([1, 2], branch_id="b")
    w.send(ev.OutputStored(resolved.request_id, chain_of([1, 2, 3])))
    assert w.machine.branch("b").context_blocks == 3


def test_a_prompt_shorter_than_a_block_is_a_branch_too():
    w = world()
    w.turn([], branch_id="b")
    assert w.machine.branch("b").context_blocks == 0
    w.turn([1], branch_id="b")
    assert w.counts("d1", [1]) == [1]
    w.send(ev.BranchEnded("b"))
    assert w.counts("d1", [1]) == [0]


def test_events_about_strangers_are_without_effect():
    w = world()
    for event in (
        ev.BranchEnded("x"),
        ev.Homed("x", "prefill", "p1"),
        ev.RequestServed("x", "p1", 0, 10, 0),
        ev.OutputStored("x", b""),
        ev.RequestAborted("x"),
        ev.NodeLost("x"),
    ):
        assert w.send(event) == []


# ---- homes and phases ------------------------------------------------------------------------------------------------


def test_a_move_within_a_phase_moves_the_count():
    w = world()
    ids = [1, 2, 3]
    w.turn(ids, branch_id="b")
    w.store("p2", ids)
    w.send(ev.Homed("b", "prefill", "p2"))
    assert w.counts("p1", ids) == [0, 0, 0] and w.counts("p2", ids) == [1, 1, 1]
    assert w.counts("d1", ids) == [1, 1, 1]
    assert (w.machine.home("b", "prefill"), w.machine.home("b", "decode")) == ("p2", "d1")


def test_one_node_that_serves_both_phases_is_counted_once():
    w = world()
    w.turn([1, 2], prefill="m", decode="m", branch_id="b")
    assert w.counts("m", [1, 2]) == [1, 1]
    w.send(ev.Homed("b", "prefill", "p1"))
    assert w.counts("m", [1, 2]) == [1, 1]


def test_a_node_is_told_only_of_what_it_holds_and_of_the_rest_when_it_stores_it():
    w = world()
    resolved = w.see([1, 2, 3], branch_id="b")
    assert w.send(ev.Homed("b", "prefill", "p1")) == []
    assert w.store("p1", [1, 2]) == [ev.RefsChanged("p1", chain_of([1, 2])[16:], 2, 1)]
    assert w.store("p1", [1, 2, 3]) == [ev.RefsChanged("p1", chain_of([1, 2, 3])[32:], 1, 1)]
    w.send(ev.RequestAborted(resolved.request_id))
    assert w.machine.node_usage("p1") == (3, 3)


def test_a_node_switched_from_decode_to_prefill_has_no_counts_left():
    w = world()
    w.send(ev.NodePhaseChanged("d1", "decode", w.next_seq("d1")))
    w.turn([1, 2], branch_id="b")
    commands = w.send(ev.NodePhaseChanged("d1", "prefill", w.next_seq("d1")))
    assert commands == [ev.RefsReset("d1", "switched-to-prefill")]
    assert w.machine.node_usage("d1") == (2, 0)
    assert w.machine.home("b", "decode") is None and w.counts("p1", [1, 2]) == [1, 1]


def test_a_drain_through_mixed_still_counts_as_the_switch_it_is():
    w = world()
    for phase in ("decode", "mixed"):
        w.send(ev.NodePhaseChanged("d1", phase, w.next_seq("d1")))
    w.turn([1, 2], branch_id="b")
    assert w.send(ev.NodePhaseChanged("d1", "prefill", w.next_seq("d1"))) == [ev.RefsReset("d1", "switched-to-prefill")]


def test_a_node_switched_from_prefill_to_decode_keeps_its_counts():
    w = world()
    w.send(ev.NodePhaseChanged("p1", "prefill", w.next_seq("p1")))
    w.turn([1, 2], branch_id="b")
    assert w.send(ev.NodePhaseChanged("p1", "decode", w.next_seq("p1"))) == []
    assert w.counts("p1", [1, 2]) == [1, 1]


def test_a_switch_that_the_stream_lost_is_known_from_a_status():
    w = World()
    w.turn([1, 2], branch_id="b")
    assert w.send(ev.NodePhaseChanged("d1", "decode", None, 3)) == []
    assert w.send(ev.NodePhaseChanged("d1", "decode", None, 4)) == []  # draining
    assert w.send(ev.NodePhaseChanged("d1", "mixed", None, 4)) == []
    assert w.send(ev.NodePhaseChanged("d1", "prefill", None, 4)) == [ev.RefsReset("d1", "switched-to-prefill")]
    assert w.counts("d1", [1, 2]) == [0, 0]
    assert w.send(ev.NodePhaseChanged("d1", "prefill", w.next_seq("d1"), 4)) == []


def test_a_late_status_does_not_undo_a_switch():
    w = World()
    w.send(ev.NodePhaseChanged("d1", "decode", w.next_seq("d1"), 1))
    assert w.send(ev.NodePhaseChanged("d1", "prefill", w.next_seq("d1"), 2)) != []
    for generation in (1, 2):
        w.send(ev.NodePhaseChanged("d1", "decode", None, generation))
    w.turn([1, 2], prefill="d1", branch_id="b")
    assert w.send(ev.NodePhaseChanged("d1", "prefill", None, 2)) == [] and w.counts("d1", [1, 2]) == [1, 1]
    w.send(ev.NodePhaseChanged("d1", "decode", None, 3))
    assert w.send(ev.NodePhaseChanged("d1", "prefill", None, 4)) == [ev.RefsReset("d1", "switched-to-prefill")]


def test_a_lost_node_is_nobodys_home():
    w = world()
    w.turn([1, 2], branch_id="b")
    w.send(ev.NodeLost("d1"))
    assert w.machine.home("b", "decode") is None
    assert w.machine.node_usage("d1") == (0, 0)
    assert [match.node for match in w.machine.match(prompt_of([1, 2]))] == ["p1"]


@pytest.mark.parametrize(
    "event", [ev.Homed("b", "mixed", "p1"), ev.NodePhaseChanged("p1", "idle", 1), ev.NodePhaseChanged("p1", "", None)]
)
def test_an_unknown_phase_is_refused_by_name(event):
    w = world()
    w.see([1], branch_id="b")
    with pytest.raises(ValueError, match="phase: expected prefill"):
        w.machine.handle(9.0, event)


# ---- leases ----------------------------------------------------------------------------------------------------------


def lease_end_s(w: World, branch_id: str) -> float:
    return w.machine.branch(branch_id).lease_until_s - w.now


def test_a_lease_is_a_multiple_of_the_branchs_own_pauses_within_bounds():
    w = world()
    w.turn([1], branch_id="b")
    assert lease_end_s(w, "b") == 240.0  # before any pause: the multiple of the floor
    w.turn([1, 2], branch_id="b", after_s=100.0)
    assert lease_end_s(w, "b") == 400.0
    w.turn([1, 2, 3], branch_id="b", after_s=20.0)
    assert lease_end_s(w, "b") == 240.0  # halfway from the longest
    for ids in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]):
        w.turn(ids, branch_id="b", after_s=1.0)
    assert lease_end_s(w, "b") == 60.0
    w.send(ev.BranchEnded("b"))


def test_the_deadline_is_when_a_lease_runs_out_and_not_before():
    w = world()
    w.turn([1, 2], branch_id="b")
    until_s = w.machine.branch("b").lease_until_s
    assert w.machine.next_deadline() <= until_s
    assert not of_type(w.machine.handle(until_s - 0.001, ev.Tick()), ev.BranchClosed)
    assert w.machine.next_deadline() == until_s
    commands = w.machine.handle(until_s, ev.Tick())
    assert of_type(commands, ev.BranchClosed) == [ev.BranchClosed("b", "lease")]
    assert w.machine.next_deadline() is None
    w.machine.check_integrity()


def test_an_open_request_keeps_its_branch_until_the_ceiling():
    w = world()
    w.see([1, 2], branch_id="b")
    w.send(ev.Tick(), after_s=3599.0)
    assert w.machine.branches_live == 1
    assert of_type(w.send(ev.Tick(), after_s=1.0), ev.BranchClosed) == [ev.BranchClosed("b", "lease")]


def test_a_parent_waits_for_its_sub_agent():
    w = world()
    w.turn([1, 2], branch_id="main")
    w.see([1, 3], branch_id="sub", parent="main", relation="subagent", request_id="long")
    w.send(ev.Tick(), after_s=1000.0)
    assert w.machine.branch("main") is not None
    w.send(ev.OutputStored("long", b""))
    w.send(ev.BranchEnded("sub"))
    w.send(ev.Tick(), after_s=200.0)
    assert w.machine.branch("main") is not None
    w.send(ev.Tick(), after_s=50.0)
    assert w.machine.branches_live == 0


def test_branches_that_name_each_other_as_parents_still_end():
    w = world()
    w.turn([1, 2], branch_id="a", parent="b", relation="subagent")
    w.turn([1, 3], branch_id="b", parent="a", relation="subagent")
    for _ in range(20):
        w.send(ev.Tick(), after_s=100.0)
    assert w.machine.branches_live == 0


def test_a_changed_lease_holds_from_the_next_request_on():
    w = world()
    w.turn([1], branch_id="b")
    w.machine.reconfigure(KvConfig(lease=LeasePolicy(multiple=2.0, floor_s=10.0, ceiling_s=100.0)))
    w.turn([1, 2], branch_id="b", after_s=8.0)
    assert lease_end_s(w, "b") == 16.0
    assert of_type(w.send(ev.Tick(), after_s=16.0), ev.BranchClosed) == [ev.BranchClosed("b", "lease")]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"multiple": 0.0}, "lease.multiple"),
        ({"floor_s": 0.0}, "lease.floor_s"),
        ({"floor_s": 99999.0}, "lease.floor_s"),
    ],
)
def test_a_bad_lease_is_named(values, field):
    with pytest.raises(ValueError, match=field):
        LeasePolicy(**values)


# ---- no signals ------------------------------------------------------------------------------------------------------


def test_without_signals_a_prompt_that_goes_on_is_a_continuation():
    w = world()
    first, _ = w.turn([1, 2, 3], output=[4], tenant="t")
    second, _ = w.turn([1, 2, 3, 4, 5], tenant="t")
    assert (first.kind, second.kind) == ("new", "continuation")
    assert second.branch_id == first.branch_id
    assert w.counts("d1", [1, 2, 3, 4, 5]) == [1] * 5


def test_without_signals_a_rewritten_tail_is_a_new_version_while_the_old_one_is_silent():
    w = world()
    first, _ = w.turn([1, 2, 3, 4, 5, 6])
    second, _ = w.turn([1, 2, 3, 4, 70])
    assert (second.kind, second.version) == ("version", 1) and second.branch_id == first.branch_id
    assert w.counts("d1", [1, 2, 3, 4, 5, 6]) == [1, 1, 1, 1, 0, 0]


def test_without_signals_it_is_a_fork_when_the_old_tail_goes_on():
    w = world()
    first, _ = w.turn([1, 2, 3, 4, 5, 6])
    w.turn([1, 2, 3, 4, 70])
    third, _ = w.turn([1, 2, 3, 4, 5, 6, 7])
    assert third.kind == "fork" and third.branch_id != first.branch_id
    assert w.counts("d1", [1, 2, 3, 4, 5, 6, 7]) == [2, 2, 2, 2, 1, 1, 1]
    assert w.see([1, 2, 3, 4, 70, 71]).branch_id == first.branch_id
    assert w.see([1, 2, 3, 4, 5, 6, 7, 8]).branch_id == third.branch_id


def test_without_signals_it_is_a_fork_when_the_other_is_running():
    w = world()
    w.turn([1, 2, 3])
    first = w.see([1, 2, 3, 4, 5])
    second = w.see([1, 2, 3, 4, 70])
    same = w.see([1, 2, 3, 4, 70])
    assert (second.kind, second.reason) == ("fork", "inferred-diverged-while-running")
    assert (same.kind, same.reason) == ("fork", "inferred-context-in-use")
    assert len({first.branch_id, second.branch_id, same.branch_id}) == 3
    assert w.machine.branch(second.branch_id).parent == first.branch_id


def test_without_signals_a_head_where_living_branches_part_says_nothing():
    w = world()
    w.see([1, 2, 3, 4, 5, 6], request_id="running")
    assert w.see([1, 2, 30, 40, 50, 60]).kind == "new"
    w.send(ev.OutputStored("running", b""))
    assert w.see([1, 2, 31, 41]).kind == "new"


def test_without_signals_a_silent_context_whose_head_nobody_else_has_was_compacted():
    w = world()
    first, _ = w.turn([1, 2, 3, 4, 5, 6, 7, 8])
    second, _ = w.turn([1, 2, 90])
    assert (second.kind, second.branch_id) == ("version", first.branch_id)
    assert w.counts("d1", [1, 2, 3, 4]) == [1, 1, 0, 0]


def test_a_wrong_guess_about_a_head_is_made_once():
    w = world()
    w.turn([1, 2, 3, 4])
    wrong, _ = w.turn([1, 2, 30, 40])
    assert wrong.kind == "version"
    back, _ = w.turn([1, 2, 3, 4, 5])
    assert (back.kind, back.reason) == ("fork", "inferred-old-tail-goes-on")
    assert w.see([1, 2, 31, 41]).kind == "new"


def test_the_last_tokens_of_a_long_prompt_may_come_back_different():
    w = world()
    ids = list(range(1, 101))
    first, _ = w.turn(ids)
    moved, _ = w.turn([*ids[:90], 500, 501])  # 100 tokens of 1000
    assert (moved.kind, moved.branch_id) == ("continuation", first.branch_id)
    edited, _ = w.turn([*ids[:70], 600])
    assert (edited.kind, edited.branch_id) == ("version", first.branch_id)


def test_a_branch_let_go_too_early_is_taken_up_again_by_the_same_name():
    w = world()
    first, _ = w.turn([1, 2, 3, 4], output=[5])
    w.send(ev.Tick(), after_s=5000.0)
    assert w.machine.branches_live == 0
    again, _ = w.turn([1, 2, 3, 4, 5, 6])
    assert (again.kind, again.reason, again.branch_id) == ("continuation", "inferred-resumed", first.branch_id)
    assert w.counts("d1", [1, 2, 3, 4, 5, 6]) == [1] * 6


# ---- a session's id, which its sub-agents share ----------------------------------------------------------------------


def test_another_context_in_a_session_is_its_sub_agent():
    w = world()
    main, _ = w.turn([1, 2, 3, 4], session="s")
    sub, _ = w.turn([50, 51], session="s")
    assert (main.branch_id, main.kind) == ("s", "new")
    assert (sub.kind, w.machine.branch(sub.branch_id).parent) == ("subagent", "s")
    assert w.turn([50, 51, 52], session="s")[0].branch_id == sub.branch_id
    assert w.turn([1, 2, 3, 4, 5], session="s")[0].branch_id == "s"
    assert w.turn([1, 2, 3, 4, 6], session="other")[0].branch_id == "other"


def test_the_end_of_a_session_ends_all_its_branches():
    w = world()
    w.turn([1, 2, 3], session="s")
    w.turn([50, 51], session="s")
    closed = of_type(w.send(ev.BranchEnded("s")), ev.BranchClosed)
    assert len(closed) == 2 and w.machine.branches_live == 0 and w.machine.node_usage("d1")[1] == 0


def test_an_announced_rewrite_makes_the_next_other_context_a_version():
    w = world()
    w.turn([1, 2, 3, 4], session="s")
    w.send(ev.BranchAnnounced("s", rewritten=True))
    w.turn([1, 2, 3, 4, 5], session="s")  # the harness still asks for the summary
    rewritten, _ = w.turn([90, 91], session="s")
    assert (rewritten.kind, rewritten.branch_id, rewritten.reason) == ("version", "s", "signal-rewritten")
    assert w.turn([70, 71], session="s")[0].kind == "subagent"


def test_what_was_announced_of_a_branch_counts_for_its_first_request():
    w = world()
    w.turn([1, 2, 3, 4], branch_id="main")
    w.send(ev.BranchAnnounced("child", parent="main", relation="subagent", program="p"))
    assert w.see([1, 2, 3, 4, 5], branch_id="child").kind == "subagent"
    assert (w.machine.branch("child").parent, w.machine.branch("child").program) == ("main", "p")


def test_without_signals_other_tenants_and_signalled_branches_are_left_alone():
    w = world()
    w.turn([1, 2, 3], branch_id="b", tenant="t")
    assert w.see([1, 2, 3, 4], tenant="t").kind == "new"
    w.turn([7, 8, 9], tenant="t")
    assert w.see([7, 8, 9, 10], tenant="other").kind == "new"


def test_an_end_that_comes_twice_leaves_the_sub_agents_alone():
    w = World()
    w.turn([1, 2], branch_id="main")
    w.turn([7, 8], branch_id="helper", parent="main", relation="subagent")
    ended = [command.branch_id for command in w.send(ev.BranchEnded("main")) if isinstance(command, ev.BranchClosed)]
    assert ended == ["main"] and not w.machine.names_live_branch("main")
    assert w.send(ev.BranchEnded("main")) == []
    assert w.machine.branch("helper") is not None and w.counts("d1", [7, 8]) == [1, 1]


def test_an_inferred_branch_can_be_ended_by_its_name():
    w = World()
    resolved, _ = w.turn([1, 2])
    assert w.machine.names_live_branch(resolved.branch_id)
    assert any(isinstance(command, ev.BranchClosed) for command in w.send(ev.BranchEnded(resolved.branch_id)))
    assert w.machine.branches_live == 0 and w.counts("d1", [1, 2]) == [0, 0]


def test_without_signals_both_tenants_of_one_domain_take_their_silent_branches_up_again():
    w = World(KvMachine(KvConfig(lease=LeasePolicy(multiple=1.0, floor_s=10.0, ceiling_s=10.0))))
    first = {tenant: w.turn([1, 2, 3], tenant=tenant)[0] for tenant in ("t", "other")}
    w.send(ev.Tick(), 60.0)
    assert w.machine.branches_live == 0
    for tenant, resolved in first.items():
        again, _ = w.turn([1, 2, 3, 4], tenant=tenant)
        assert (again.branch_id, again.reason) == (resolved.branch_id, "inferred-resumed")


@pytest.mark.parametrize("others", [{"tenant": "other"}, {"tenant": "t", "branch_id": "b"}])
def test_without_signals_a_rewrite_is_seen_whoever_else_has_the_same_tail(others):
    w = world()
    w.turn([1, 2, 3, 4], tenant="t")
    w.turn([1, 2, 3, 8, 9], **others)
    assert w.see([1, 2, 3, 8, 9], tenant="t").kind == "version"


def test_without_signals_what_is_common_among_one_tenants_branches_tells_nothing_of_anothers():
    def kind_of_a_rewrite(*others: str) -> str:
        w = world()
        for tenant in others:
            for ids in ([1, 2, 50], [1, 2, 60], [1, 2, 50, 51]):  # two branches that both go on
                w.turn(ids, tenant=tenant)
        w.turn([1, 2, 70, 71], tenant="t")
        return w.see([1, 2, 80], tenant="t").kind

    assert (kind_of_a_rewrite(), kind_of_a_rewrite("other"), kind_of_a_rewrite("t")) == ("version", "version", "new")
