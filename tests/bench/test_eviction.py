"""The proof of the eviction order on a few recorded sessions: exact accounting, and how much less is lost than with LRU."""

import json

import pytest

from bench import eviction
from workers.harness.replay.sessions import load_sessions


@pytest.fixture(scope="module")
def calls():
    return eviction.timeline(load_sessions()[9:27], at_once=8)


def test_a_pool_that_holds_everything_loses_nothing(calls):
    node = eviction.play(calls, eviction.all_blocks(calls), "referenced")
    reuse = node.machine.reuse()
    assert reuse.ideal_tokens == reuse.actual_tokens > 0
    node.index.check_integrity()
    node.machine.check_integrity()
    assert node.index.referenced_blocks == 0, "every branch has ended"


def test_calls_follow_one_another_in_a_branch_and_parents_wait_for_subagents(calls):
    ended: dict[str, float] = {}
    for call in calls:
        assert call.start_s >= ended.get(call.branch_id, 0.0)
        ended[call.branch_id] = call.end_s
    for call in calls:
        if call.parent in ended and call.last:
            assert call.end_s <= ended[call.parent]


@pytest.mark.parametrize("policy", ["referenced", "lru"])
def test_what_is_lost_in_a_small_pool_is_lost_to_eviction_alone_and_adds_up(calls, policy):
    node = eviction.play(calls, int(0.6 * eviction.need_blocks(calls)), policy)
    reuse = node.machine.reuse()
    assert reuse.ideal_tokens - reuse.actual_tokens == sum(reuse.lost.values())
    assert reuse.lost["evicted"] > 0 and reuse.lost["routed"] == reuse.lost["switched"] == 0
    node.index.check_integrity()
    node.machine.check_integrity()


def test_counting_branches_loses_less_than_a_quarter_of_what_lru_loses(calls, capsys):
    assert eviction.prove(calls, [eviction.JUDGED_SHARE])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    judged = next(line for line in lines if line["name"].endswith(".referenced"))
    assert judged["met"] and judged["baseline"] > 0
