"""The KV directory's benchmark in a small form: that it runs, finds everything, and says when the peer is not there."""

import json

from bench import index, index_limits
from bench.index_workload import Ours, Run


def test_the_workload_finds_every_context_it_stored():
    run = Run(Ours(), branches=40, workers=3, finds=60)
    run.store_contexts()
    run.store_turns()
    run.find_all()
    run.compact()
    run.find_all()
    run.lose_workers()
    assert run.wrong == 0
    assert set(run.times_ns) == {
        "store_context",
        "store_turn",
        "find_whole_context",
        "find_head_only",
        "find_nothing",
        "compaction_remove_tail",
        "compaction_store_summary",
        "remove_worker",
    }


def test_a_match_that_falls_short_is_counted_as_wrong():
    run = Run(Ours(), branches=10, workers=2, finds=30)
    run.store_contexts()
    for worker in range(2):
        run.index.lose(worker)
    run.find_all()
    assert run.wrong == 30


def test_without_the_peer_its_numbers_are_null_and_nothing_is_judged(capsys, monkeypatch):
    monkeypatch.delenv(index.PEER_VARIABLE, raising=False)
    index.compare(index.find_peer(None), branches=20, rounds=1)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 9
    assert all(line["baseline"] is None and line["met"] is None and line["value"] is not None for line in lines)


def test_the_limits_can_be_measured():
    assert index_limits.memory(blocks=5000)["blocks"] >= 5000
    found = index_limits.decision(nodes=4, branches=20, decisions=10)
    assert 0 < found["match"]["p50"] <= found["decision"]["p50"]
    assert index_limits.hashing(contexts=3)["64"]["p50"] > 0
