"""Generators against their targets, recorded sessions, traces; damaged files are refused by field."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest

from apps.kvcache.domain.hashing import HASH_BYTES
from tests.simulator.support import make_run
from workers.harness.replay.sessions import load_sessions
from workers.simulator.workloads import traces
from workers.simulator.workloads.generators import agent, parameters, skipped
from workers.simulator.workloads.mixes import ClosedLoop, OpenLoop, Population, generated, play_all
from workers.simulator.workloads.sessions import SessionScripts
from workers.simulator.workloads.statistics import describe


@pytest.mark.parametrize(
    ("workload", "agents", "block_tokens"), [("CC", 30, 256), ("Putnam", 40, 64), ("OSWorld", 40, 128)]
)
def test_a_generator_gives_what_it_was_fitted_to(workload: str, agents: int, block_tokens: int) -> None:
    figures = describe((agent(workload, 1, number, block_tokens) for number in range(agents)), block_tokens)
    target = parameters()[workload]["target"]
    hit = target["ideal_hit_pct"]
    low, high = hit if isinstance(hit, list) else (hit, hit)
    assert low - 0.6 < figures["ideal_hit_pct"] < high + 0.6
    assert figures["output_tokens"] == pytest.approx(target["output_tokens"], rel=0.1)


def test_an_agent_is_the_same_every_time_and_another_agent_is_not() -> None:
    one, same, other = (list(agent("CC", 1, number, 256)) for number in (5, 5, 6))
    assert [turn[:5] for turn in one] == [turn[:5] for turn in same]
    assert one[0].chain != other[0].chain
    system = parameters()["CC"]["shared_system_tools_tokens"] // 256 * HASH_BYTES
    assert one[0].chain[:system] == other[0].chain[:system]


def test_what_was_decoded_is_the_head_of_what_comes_next() -> None:
    script = list(agent("Putnam", 1, 3, 64))
    for turn, following in itertools.pairwise(script):
        assert following.chain.startswith(turn.chain + turn.output_chain)
    assert [turn.signal.end for turn in script] == [False] * (len(script) - 1) + [True]


def test_a_compaction_raises_the_version_and_shrinks_the_context() -> None:
    versions = [
        (turn.signal.version or 0, len(turn.chain)) for number in range(12) for turn in agent("CC", 1, number, 256)
    ]
    raised = [(before, after) for before, after in itertools.pairwise(versions) if after[0] > before[0]]
    assert any(after[1] < before[1] / 2 for before, after in raised)


def test_a_script_can_be_joined_in_its_middle() -> None:
    assert next(skipped(agent("Putnam", 1, 0, 64), 3)).chain == list(agent("Putnam", 1, 0, 64))[3].chain
    assert next(skipped(agent("Putnam", 1, 0, 64), 10_000), None) is None


def test_recorded_sessions_keep_their_blocks_pauses_and_sub_agents() -> None:
    sessions = load_sessions()
    maker = SessionScripts(sessions, seed=1)
    played = [list(maker(number)) for number in range(len(sessions))]
    assert sum(len(script) for script in played) == sum(
        sum(turn.request is not None for turn in session.turns) for session in sessions
    )
    assert sum(len(turn.helpers) for script in played for turn in script) > 0
    figures = describe((maker(number) for number in range(len(sessions))), 64)
    assert 94 < figures["ideal_hit_pct"] < 98
    again = list(maker(len(sessions)))
    assert again[0].chain != played[0][0].chain


def test_recorded_sessions_run_to_their_end() -> None:
    sessions = sorted(load_sessions(), key=lambda session: session.request_count)[8:12]
    run = make_run(check_every=0)
    ClosedLoop(run.partition, {"sessions": SessionScripts(sessions)}, [Population(0.0, {"sessions": 4}), Population(1.0, {"sessions": 0})],
               stagger_s=0.5, mature=False)  # fmt: skip
    run.partition.clock.run_until(20_000.0)
    assert run.partition.clients.living == 0
    assert run.partition.answered == sum(session.request_count for session in sessions)


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_a_mooncake_trace_keeps_its_times_scaled_in_rate(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2 + n]} for n in range(4)
    ]
    trace = traces.TraceScripts(traces.read_mooncake(write(tmp_path / "t.gz", rows)), 512, rate=2.0)
    found = [(at, next(script)) for at, script in trace.scripts()]
    assert [at for at, _ in found] == [0.0, 0.5, 1.0, 1.5]
    assert found[0][1].chain == found[1][1].chain[: 2 * HASH_BYTES]
    assert found[0][1].signal.branch_id is None


def test_an_agentic_trace_waits_for_what_it_waits_for(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"request_id": "root", "session_id": "s", "timestamp": 0, "input_length": 128, "output_length": 64, "hash_ids": [1, 2]},
        {"request_id": "helper", "session_id": "h", "wait_for": ["root"], "delay": 500, "input_length": 64, "output_length": 8, "hash_ids": [9]},
        {"request_id": "next", "session_id": "s", "wait_for": ["root"], "delay": 1000, "tool_wait_ms": 1000, "input_length": 256, "output_length": 8, "hash_ids": [1, 2, 3, 4]},
    ]  # fmt: skip
    run = make_run()
    trace = traces.TraceScripts(traces.read_mooncake(write(tmp_path / "a.gz", rows)), 64)
    play_all(run.partition, trace.scripts(), "trace")
    run.partition.clock.run_until(60.0)
    assert run.partition.answered == 3
    assert run.partition.recorder.column("cached_tokens")[2] == 128


def test_azure_lengths_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.9799600,3180,8\n"
    )
    rows = traces.read_azure(path)
    assert [row.at_s for row in rows] == [0.0, 1.0]
    assert describe((script for _, script in traces.TraceScripts(rows, 64).scripts()), 64)["ideal_hit_pct"] == 0.0


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}, "input_length"),
        ({"timestamp": 0, "input_length": 5, "output_length": "x", "hash_ids": []}, "output_length"),
        ({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": "no"}, "hash_ids"),
        ({"input_length": 5, "output_length": 1, "hash_ids": []}, "timestamp"),
        ({"timestamp": -1, "input_length": 5, "output_length": 1, "hash_ids": []}, "timestamp"),
    ],
)
def test_a_damaged_row_is_refused_by_its_field(tmp_path: Path, row: dict[str, object], field: str) -> None:
    with pytest.raises(traces.TraceError, match=f"line 1: {field}: expected"):
        traces.read_mooncake(write(tmp_path / "bad.gz", [row]))


def test_a_mix_that_changes_lets_agents_end_and_others_begin() -> None:
    run = make_run(check_every=0)
    makers = {"Putnam": generated("Putnam", 1, 64), "OSWorld": generated("OSWorld", 1, 64)}
    loop = ClosedLoop(
        run.partition,
        makers,
        [Population(0.0, {"Putnam": 4}), Population(300.0, {"Putnam": 1, "OSWorld": 1})],
        seed=1,
        stagger_s=5.0,
    )
    run.partition.clock.run_until(290.0)
    assert loop.active == {"Putnam": 4}
    run.partition.clock.run_until(2000.0)
    assert loop.active == {"Putnam": 1, "OSWorld": 1}


def test_open_arrivals_come_at_their_rate() -> None:
    run = make_run(check_every=0)
    arrivals = OpenLoop(run.partition, lambda number: iter(()), "CC", per_minute=30.0, seed=2)
    run.partition.clock.run_until(3600.0)
    assert 1650 < arrivals.started < 1950
    assert arrivals.ended == arrivals.started
