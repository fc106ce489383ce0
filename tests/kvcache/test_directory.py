"""Who holds what, from what nodes report, in whatever order it comes."""

from dataclasses import replace

import pytest

from apps.kvcache.domain import events as ev
from apps.kvcache.domain.directory import Directory
from apps.kvcache.domain.hashing import root_hash
from apps.kvcache.domain.machine import KvConfig, KvMachine
from tests.kvcache.kit import ROOT, World, chain_of, each, prompt_of


def held(w: World, ids) -> dict[str, int]:
    return {match.node: match.blocks for match in w.machine.match(prompt_of(ids))}


def test_each_node_is_matched_with_its_longest_leading_run():
    w = World()
    w.store("a", [1, 2, 3, 4])
    w.store("b", [1, 2])
    w.store("b", [1, 2, 30, 40])
    w.store("c", [9])
    assert held(w, [1, 2, 3, 4, 5]) == {"a": 4, "b": 2}
    assert held(w, [1, 2, 30]) == {"a": 2, "b": 3}
    assert held(w, [1]) == {"a": 1, "b": 1}
    assert held(w, []) == {} and held(w, [77]) == {}


def test_another_sharing_domain_sees_nothing():
    w = World()
    w.store("a", [1, 2, 3])
    other = prompt_of([1, 2, 3], root=root_hash("model", "f32", "somebody-else"))
    assert w.machine.match(other) == []


def test_evicted_tails_shorten_the_match():
    w = World()
    w.store("a", [1, 2, 3, 4])
    w.store("b", [1, 2, 3, 4])
    w.drop("a", [1, 2, 3, 4], keep=1)
    assert held(w, [1, 2, 3, 4]) == {"a": 1, "b": 4}
    w.drop("a", [1, 2, 3, 4], keep=0)
    assert held(w, [1, 2, 3, 4]) == {"b": 4}
    assert w.machine.node_usage("a") == (0, 0)


def test_removed_blocks_may_be_listed_in_any_order_and_twice():
    w = World()
    w.store("a", [1, 2, 3, 4])
    w.store("a", [1, 2, 30])
    gone = {*each(chain_of([1, 2, 3, 4]))[1:], *each(chain_of([1, 2, 30]))[1:]}
    commands = w.send(ev.BlocksRemoved("a", w.next_seq("a"), b"".join(sorted(gone)) + min(gone)))
    assert commands == [] and held(w, [1, 2, 3, 4]) == {"a": 1}


def test_a_run_may_be_stored_after_a_block_in_the_middle_of_another():
    w = World()
    w.store("a", [1, 2, 3, 4])
    w.store("a", [1, 2, 9])
    w.store("b", [1, 2, 3])
    w.store("b", [1, 2, 3, 4])
    assert held(w, [1, 2, 9]) == {"a": 3, "b": 2} and held(w, [1, 2, 3, 4]) == {"a": 4, "b": 4}


def test_the_root_hash_of_a_known_domain_is_a_parent_like_none():
    w = World()
    w.see([1, 2], branch_id="b")
    w.send(ev.BlocksStored("a", 1, ROOT, chain_of([1, 2])))
    assert held(w, [1, 2]) == {"a": 2}


def test_a_device_copy_is_matched_but_never_counted():
    w = World()
    resolved = w.see([1, 2, 3], branch_id="b")
    w.send(ev.Homed("b", "prefill", "a"))
    w.store("a", [1])
    w.send(ev.BlocksStored("a", w.next_seq("a"), None, chain_of([1, 2, 3]), tier="device"))
    assert w.machine.match(prompt_of([1, 2, 3])) == [ev.NodeMatch("a", 3, "device")]
    assert w.machine.node_usage("a") == (1, 1)
    w.send(ev.BlocksRemoved("a", w.next_seq("a"), chain_of([1, 2, 3]), tier="device"))
    assert w.machine.match(prompt_of([1, 2, 3])) == [ev.NodeMatch("a", 1, "host")]
    w.send(ev.RequestAborted(resolved.request_id))


def test_a_cleared_node_holds_nothing():
    w = World()
    w.store("a", [1, 2])
    w.store("b", [1, 2])
    w.send(ev.NodeCleared("a", w.next_seq("a")))
    assert held(w, [1, 2]) == {"b": 2}
    w.send(ev.NodeCleared("b"))
    assert held(w, [1, 2]) == {}


# ---- duplicated, reordered and lost events ---------------------------------------------------------------------------


def stored(node: str, seq: int, ids: list[int], known: int = 0) -> ev.BlocksStored:
    chain = chain_of(ids)
    return ev.BlocksStored(node, seq, chain[16 * known - 16 : 16 * known] or None, chain[16 * known :])


def test_a_duplicated_event_is_ignored():
    w = World()
    w.store("a", [1, 2])
    w.drop("a", [1, 2], keep=0)
    assert w.send(stored("a", 1, [1, 2])) == []
    assert held(w, [1, 2]) == {}


def test_a_gap_asks_once_for_a_snapshot_and_again_when_none_comes():
    w = World()
    w.send(stored("a", 1, [1]))
    assert w.send(stored("a", 3, [1, 2, 3], known=2)) == [ev.SnapshotNeeded("a", "gap")]
    assert w.send(stored("a", 4, [1, 2, 3, 4], known=3)) == []
    assert w.machine.next_deadline() == w.now + 4.0
    assert w.send(ev.Tick(), after_s=4.0) == [ev.SnapshotNeeded("a", "gap")]
    assert held(w, [1, 2, 3, 4]) == {"a": 1}


def test_reordered_events_are_applied_in_order_once_the_missing_one_comes():
    w = World()
    w.send(stored("a", 1, [1]))
    w.send(stored("a", 3, [1, 2, 3], known=2))
    assert w.send(stored("a", 2, [1, 2], known=1)) == []
    assert held(w, [1, 2, 3]) == {"a": 3}
    assert w.machine.next_deadline() is None


def test_a_snapshot_replaces_what_was_known_and_later_events_go_on_from_it():
    w = World()
    w.store("a", [1, 2])
    w.send(stored("a", 5, [7, 8], known=1))  # after a gap: 7 was stored by event 3 or 4
    runs = [(chain_of([7]), chain_of([7, 6])[16:]), (None, chain_of([7]))]
    commands = w.send(ev.NodeSnapshot("a", 4, runs))
    assert commands[0] == ev.RefsReset("a", "snapshot")
    assert held(w, [1, 2]) == {} and held(w, [7, 6]) == {"a": 2} and held(w, [7, 8]) == {"a": 2}
    assert w.machine.next_deadline() is None


def test_a_snapshot_tells_the_node_its_counts_anew():
    w = World()
    w.turn([1, 2, 3], branch_id="b")
    w.turn([1, 2, 30], branch_id="c")
    before = w.counts("d1", [1, 2, 3]) + w.counts("d1", [1, 2, 30])
    assert before == [2, 2, 1, 2, 2, 1]
    w.refs["d1"] = {}
    w.send(
        ev.NodeSnapshot(
            "d1", w.seq["d1"], [(None, chain_of([1, 2, 3])), (chain_of([1, 2])[16:], chain_of([1, 2, 30])[32:])]
        )
    )
    assert w.counts("d1", [1, 2, 3]) + w.counts("d1", [1, 2, 30]) == before


def test_an_older_snapshot_is_ignored():
    w = World()
    w.store("a", [1])
    w.store("a", [1, 2])
    assert w.send(ev.NodeSnapshot("a", 1, [])) == []
    assert held(w, [1, 2]) == {"a": 2}


def test_a_stream_joined_in_the_middle_starts_with_a_snapshot():
    w = World()
    assert w.send(stored("a", 57, [1])) == [ev.SnapshotNeeded("a", "gap")]
    w.send(ev.NodeSnapshot("a", 56, []))
    assert held(w, [1]) == {"a": 1}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored("a", 2, [5, 6], known=1), "unknown-parent"),
        (ev.BlocksRemoved("a", 2, chain_of([5])), "unknown-blocks"),
        (ev.BlocksRemoved("a", 2, chain_of([1])), "unknown-blocks"),
    ],
)
def test_a_report_that_cannot_be_true_asks_for_a_snapshot_and_waits_for_it(event, reason):
    w = World()
    w.send(stored("a", 1, [1, 2]))
    assert w.send(event) == [ev.SnapshotNeeded("a", reason)]
    assert w.send(stored("a", 3, [8])) == []
    assert held(w, [8]) == {}
    w.send(ev.NodeSnapshot("a", 2, [(None, chain_of([1]))]))
    assert held(w, [8]) == {"a": 1} and held(w, [1, 2]) == {"a": 1}


def test_a_node_that_comes_back_as_a_new_process_counts_from_one_again():
    w = World()
    for _ in range(3):
        w.send(ev.NodeSequence("a", w.next_seq("a")))
    w.store("a", [1])
    w.send(ev.NodeLost("a"))
    assert held(w, [1]) == {}
    assert w.send(stored("a", 1, [2])) == [] and held(w, [2]) == {"a": 1}


def test_a_flood_after_a_gap_is_bounded_and_heals():
    w = World()
    w.store("a", [1])
    for seq in range(3, 5003):
        w.machine.handle(w.now, stored("a", seq, [seq]))
    w.send(ev.NodeSnapshot("a", 4000, []))
    commands = w.send(ev.NodeSequence("a", 5003))
    assert commands == [ev.SnapshotNeeded("a", "gap")]
    w.send(ev.NodeSnapshot("a", 5003, [(None, chain_of([1]))]))
    assert w.machine.next_deadline() is None and held(w, [1]) == {"a": 1}


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (ev.BlocksStored("a", 1, None, b"short"), "chain"),
        (ev.BlocksRemoved("a", 1, b"short"), "hashes"),
        (ev.NodeSnapshot("a", 1, [(None, b"short")]), "segments"),
        (ev.RequestSeen("r", ev.BranchSignal(), replace(prompt_of([1]), chain=b"short")), "prompt.chain"),
    ],
)
def test_malformed_hashes_are_refused_by_name(event, field):
    with pytest.raises(ValueError, match=f"{field}: expected a multiple of 16"):
        KvMachine().handle(0.0, event)


def test_a_counted_block_that_went_and_came_back_unseen_is_counted_anew_a_little_later():
    w = World()
    w.turn([1, 2, 3], decode="p1", branch_id="b")
    last = chain_of([1, 2, 3])[32:]
    late = [
        ev.BlocksRemoved("p1", w.next_seq("p1"), last),
        ev.BlocksStored("p1", w.next_seq("p1"), chain_of([1, 2])[16:], last),
    ]
    del w.refs["p1"][last]  # the node has it again, with no count
    resolved = w.see([1, 2, 3], branch_id="c")
    w.send(ev.Homed("c", "prefill", "p1"))
    w.send(ev.RequestAborted(resolved.request_id))
    assert w.counts("p1", [1, 2, 3]) == [2, 2, 1]
    for event in late:
        w.send(event)
    assert w.counts("p1", [1, 2, 3]) == [2, 2, 3], "the count of c was on its way while the block was gone"
    assert w.machine.next_deadline() == w.now - 1.0 + 10.0
    commands = w.send(ev.Tick(), after_s=9.0)
    assert commands[0] == ev.RefsReset("p1", "recount")
    assert w.counts("p1", [1, 2, 3]) == [2, 2, 2]
    assert w.send(ev.Tick(), after_s=60.0) == []


def test_a_snapshot_makes_a_recount_needless():
    w = World()
    w.turn([1, 2, 3], decode="p1", branch_id="b")
    w.drop("p1", [1, 2, 3], keep=2)
    assert w.machine.next_deadline() == w.now + 10.0
    w.send(ev.NodeSnapshot("p1", w.seq["p1"], [(None, chain_of([1, 2]))]))
    assert w.counts("p1", [1, 2]) == [1, 1] and w.send(ev.Tick(), after_s=30.0) == []


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_branch_of_many_turns_stays_few_segments():
    w = World()
    ids = [1]
    for turn in range(30):
        w.turn(ids, output=[1000 + turn], branch_id="b", version=0, sequence=turn)
        ids = [*ids, 1000 + turn, 2000 + turn]
    assert sum(1 for _ in w.machine._directory.tree.segments()) <= 3


def test_what_nobody_holds_is_remembered_within_a_bound_the_latest_longest():
    w = World(KvMachine(KvConfig(max_blocks=20)))
    for first in range(0, 100, 10):
        ids = list(range(first, first + 5))
        w.turn(ids, branch_id=f"b{first}")
        w.send(ev.BranchEnded(f"b{first}"))
        for node in ("p1", "d1"):
            w.drop(node, ids, keep=0)
    tree = w.machine._directory.tree
    assert tree.total_blocks <= 20
    assert [step[1] for step in tree.walk(chain_of(range(90, 95)))] == [5]
    assert list(tree.walk(chain_of(range(5)))) == []


def test_what_is_held_or_counted_stays_beyond_the_bound():
    w = World(KvMachine(KvConfig(max_blocks=2)))
    w.turn([1, 2, 3, 4], branch_id="b")
    w.store("x", [7, 8, 9])
    assert held(w, [1, 2, 3, 4]) == {"p1": 4, "d1": 4} and held(w, [7, 8, 9]) == {"x": 3}


def test_a_prompt_that_was_never_computed_leaves_no_trace():
    w = World()
    resolved = w.see([1, 2, 3], branch_id="b")
    w.send(ev.RequestAborted(resolved.request_id))
    w.send(ev.BranchEnded("b"))
    assert w.machine._directory.tree.total_blocks == 0


def test_a_wrong_count_is_found_by_the_integrity_check():
    w = World()
    w.turn([1, 2], branch_id="b")
    segment = next(w.machine._directory.tree.segments())
    segment.counts[0] += 1
    with pytest.raises(AssertionError, match="reference counts"):
        w.machine.check_integrity()


def test_the_tree_takes_no_negative_bound():
    with pytest.raises(ValueError, match="max_blocks"):
        Directory(-1)
