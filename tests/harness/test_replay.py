"""The replay against a gateway that records what arrives."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
from itertools import islice
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from workers.harness.replay.__main__ import choose_sessions, replay
from workers.harness.replay.agents import Pace, plays
from workers.harness.replay.options import OptionError, parse_options, read_key, spread_objectives
from workers.harness.replay.sessions import parse_session
from workers.harness.replay.summary import Summary
from workers.harness.replay.traffic import RequestFailed, Sender, Target, retry_after_s


def call(first_tokens: int, blocks: list, out: int = 4, t: float = 0.0, think: float = 0.0) -> dict:
    return {"t": t, "in": first_tokens, "out": out, "h": blocks, "api_time": 0.0, "think_time": think}


def session(requests: list, name: str = "s1"):
    return parse_session(json.dumps({"id": name, "block_size": 64, "requests": requests}), "line 1")


def options(url: str, *more: str):
    common = [
        "--model",
        "m",
        "--key-file",
        "unused",
        "--stagger-s",
        "0",
        "--objectives",
        "",
        "--first-session-number",
        "7",
    ]
    return parse_options(["--gateway", url, *common, "--agents", "1", "--sessions", "1", *more])


async def test_a_request_carries_ids_tokens_output_length_and_signals(gateway) -> None:
    recorded = session([call(650, [[1, 10]], out=33), call(700, [[1, 10]])])
    summary = await replay(options(gateway.url, "--objectives", "premium=1"), "secret", [recorded])
    first, second = gateway.arrivals
    assert first.body == {
        "model": "m",
        "prompt": [(7 << 20) + i for i in range(1, 11)],
        "max_tokens": 33,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "switchyard": {"prompt_tokens": 650},
    }
    assert first.headers["x-switchyard-branch-version"] == "0"
    assert first.headers["x-switchyard-program"] == first.branch == second.branch
    assert first.headers["x-llm-d-inference-objective"] == "premium"
    assert "x-switchyard-branch-end" not in first.headers
    assert second.headers["x-switchyard-branch-end"] == "true"
    assert gateway.authorizations == {"Bearer secret"}
    assert gateway.ended == []
    assert (summary.answered, summary.failures, summary.output_tokens, summary.in_flight) == (2, 0, 37, 0)


async def test_the_next_request_waits_for_the_answer_and_the_scaled_pause(gateway) -> None:
    gateway.answer_s = 0.1
    recorded = session([call(64, [[1, 1]]), call(128, [[1, 2]], t=60.0, think=2.0), call(192, [[1, 3]], think=500.0)])
    await replay(options(gateway.url, "--pause-scale", "0.05", "--max-pause-s", "0.2"), "k", [recorded])
    first, second, third = gateway.arrivals
    assert second.at_s - first.answered_at_s == pytest.approx(0.1, abs=0.05)
    assert third.at_s - second.answered_at_s == pytest.approx(0.2, abs=0.05)


async def test_a_rewritten_context_raises_the_version(gateway) -> None:
    recorded = session([call(6400, [[1, 100]]), call(6464, [[1, 101]]), call(3200, [[1, 20], [500, 30]])])
    summary = await replay(options(gateway.url), "k", [recorded])
    assert [a.headers["x-switchyard-branch-version"] for a in gateway.arrivals] == ["0", "0", "1"]
    assert summary.versions == 1


async def test_subagents_run_at_the_same_time_as_branches_of_their_own_while_the_parent_waits(gateway) -> None:
    gateway.answer_s = 0.1
    helpers = [
        {"subagent": f"helper-{n}", "t": 30.0, "dur_ms": 29_000, "requests": [call(64, [[n, 1]]), call(128, [[n, 2]])]}
        for n in (300, 400)
    ]
    recorded = session([call(64, [[1, 1]]), *helpers, call(128, [[1, 2]], t=30.0)])
    summary = await replay(options(gateway.url, "--pause-scale", "0"), "k", [recorded])
    main, *children = gateway.branches
    assert children == [f"{main}-helper-300", f"{main}-helper-400"]
    for child in children:
        first, last = gateway.of(child)
        assert (first.headers["x-switchyard-parent"], first.headers["x-switchyard-relation"]) == (main, "subagent")
        assert first.headers["x-switchyard-program"] == main
        assert last.headers["x-switchyard-branch-end"] == "true"
        assert gateway.of(main)[0].answered_at_s <= first.at_s
        assert last.answered_at_s <= gateway.of(main)[1].at_s
    starts = [gateway.of(child)[0].at_s for child in children]
    assert abs(starts[0] - starts[1]) < 0.08
    assert summary.subagents == 2


async def test_a_session_that_ends_with_a_subagent_ends_its_branch_without_a_request(gateway) -> None:
    helper = {"subagent": "helper", "t": 1.0, "dur_ms": 0, "requests": [call(64, [[9, 1]])]}
    await replay(options(gateway.url), "k", [session([call(64, [[1, 1]]), helper])])
    assert gateway.ended == [gateway.branches[0]]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refused_request_is_sent_again_after_retry_after(gateway, status: int) -> None:
    gateway.answer = lambda arrival: (
        web.json_response({"error": {"message": "full"}}, status=status, headers={"Retry-After": "0.3"})
        if len(gateway.arrivals) == 1
        else None
    )
    summary = await replay(options(gateway.url), "k", [session([call(64, [[1, 1]])])])
    first, second = gateway.arrivals
    assert second.at_s - first.at_s >= 0.3
    assert second.body == first.body and second.headers["x-switchyard-branch-end"] == "true"
    assert (summary.refused, summary.failures, summary.answered) == ({status: 1}, 0, 1)


async def test_a_request_refused_for_too_long_counts_as_failed(gateway) -> None:
    gateway.answer = lambda arrival: web.json_response({}, status=429, headers={"Retry-After": "2"})
    summary = await replay(options(gateway.url, "--give-up-s", "1"), "k", [session([call(64, [[1, 1]])])])
    assert summary.failed == {"refused-429": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"without_done": True}, "broken-stream"),
        ({"error_event": {"code": "node-lost", "message": "m"}}, "error-node-lost"),
        ({"fewer_tokens": 1}, "short-answer"),
        ({"answer": lambda arrival: web.json_response({"error": {"message": "no"}}, status=400)}, "status-400"),
    ],
)
async def test_a_failed_request_is_counted_and_the_session_goes_on(gateway, change: dict, reason: str) -> None:
    for name, value in change.items():
        setattr(gateway, name, value)
    summary = await replay(options(gateway.url), "k", [session([call(64, [[1, 1]]), call(128, [[1, 2]])])])
    assert summary.failed == {reason: 2}
    assert summary.sessions_finished == 1
    assert gateway.ended == gateway.branches, "the end that went with a failed request is said again"


async def test_the_replay_waits_for_a_gateway_that_restarts(gateway) -> None:
    await gateway.stop()
    running = asyncio.create_task(replay(options(gateway.url), "k", [session([call(64, [[1, 1]])])]))
    await asyncio.sleep(0.4)
    await gateway.start(gateway.port)
    summary = await asyncio.wait_for(running, 10)
    assert summary.unreachable >= 1
    assert (summary.answered, summary.failures) == (1, 0)


async def test_a_stopped_replay_ends_its_live_branches(gateway) -> None:
    gateway.answer_s = 30.0
    running = asyncio.create_task(
        replay(options(gateway.url), "k", [session([call(64, [[1, 1]]), call(128, [[1, 2]])])])
    )
    await gateway.arrived(1)
    running.cancel()
    await running
    assert gateway.ended == gateway.branches


async def test_agents_share_the_sessions_and_start_staggered(gateway) -> None:
    recorded = [session([call(64, [[1, 1]])], f"s{n}") for n in range(4)]
    more = ("--agents", "4", "--sessions", "4", "--stagger-s", "0.4")
    await replay(options(gateway.url, *more), "k", recorded)
    assert sorted(branch.rsplit("-", 1)[1] for branch in gateway.branches) == ["s0", "s1", "s2", "s3"]
    assert gateway.arrivals[-1].at_s - gateway.arrivals[0].at_s < 0.5


def test_sessions_repeat_for_ever_with_new_numbers_and_the_seed_fixes_their_order() -> None:
    recorded = [session([call(64, [[1, 1]])], f"s{n}") for n in range(5)]
    first = list(islice(plays(recorded, random.Random(1), 10, None), 15))
    again = list(islice(plays(recorded, random.Random(1), 10, None), 15))
    assert first == again
    assert [play.number for play in first] == list(range(10, 25))
    for start in (0, 5, 10):
        assert {play.session.id for play in first[start : start + 5]} == {"s0", "s1", "s2", "s3", "s4"}
    assert len(list(plays(recorded, random.Random(1), 10, 7))) == 7


def test_pauses_are_scaled_before_they_are_capped() -> None:
    assert Pace(0.5, 10.0).wait_s(8.0) == 4.0
    assert Pace(0.5, 10.0).wait_s(8000.0) == 10.0


async def test_a_broken_gateway_answer_names_its_reason(gateway) -> None:
    gateway.answer = lambda arrival: web.json_response({"error": {"message": "prompt: expected ids"}}, status=400)
    async with aiohttp.ClientSession() as http:
        sender = Sender(Target(gateway.url, "m", "k", 1.0), http, Summary(), random.Random(0))
        with pytest.raises(RequestFailed, match="answered 400: prompt: expected ids"):
            await sender.complete([1], 64, 1, {"x-switchyard-branch": "b"})


def test_retry_after_reads_seconds_and_dates() -> None:
    assert retry_after_s("2.5", 0.0) == 2.5
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 20.0) == pytest.approx(40.0)
    assert retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", 90.0) == 0.0
    assert retry_after_s("soon", 0.0) is None
    assert retry_after_s(None, 0.0) is None


def test_objectives_follow_their_shares_for_any_number_of_agents() -> None:
    chosen = spread_objectives({"premium": 0.2, "standard": 0.6, "best-effort": 0.2}, 60)
    assert (chosen.count("premium"), chosen.count("standard"), chosen.count("best-effort")) == (12, 36, 12)
    assert set(chosen[:5]) == {"premium", "standard", "best-effort"}
    assert spread_objectives({}, 2) == [None, None]


def test_a_key_file_is_names_and_keys_or_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for text in ('{"replay": "sk-1", "demo": "sk-2"}', '{"keys": {"replay": "sk-1"}}', "sk-1\n"):
        path.write_text(text)
        assert read_key(path, "replay") == "sk-1"
    for text in ('{"demo": "sk-2"}', '{"replay": 3}', "{sk-2", "sk-2 sk-2", ""):
        path.write_text(text)
        with pytest.raises(OptionError, match="expected") as problem:
            read_key(path, "replay")
        assert "sk-2" not in str(problem.value)
    with pytest.raises(OptionError, match="--key-file: expected a readable file"):
        read_key(tmp_path / "absent", "replay")


@pytest.mark.parametrize(
    "wrong",
    [("--agents", "0"), ("--pause-scale", "-1"), ("--pause-scale", "nan"), ("--objectives", "a"), ("--sessions", "x")],
)
def test_a_wrong_option_is_named(wrong: tuple[str, str], capsys) -> None:
    with pytest.raises(SystemExit):
        options("http://x", *wrong)
    assert re.search(rf"argument {wrong[0]}: expected .*got", capsys.readouterr().err)


def test_a_limit_on_session_length_leaves_only_short_ones() -> None:
    chosen = choose_sessions(options("http://x", "--max-session-requests", "12"))
    assert len(chosen) == 19 and max(s.request_count for s in chosen) <= 12
    with pytest.raises(OptionError, match="--max-session-requests"):
        choose_sessions(options("http://x", "--max-session-requests", "1"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strict", "status", "expected"), [((), 400, 0), (("--strict",), 400, 1), (("--strict",), 0, 0)]
)
async def test_the_command_says_what_happened_by_its_exit_status(
    gateway, tmp_path: Path, strict: tuple[str, ...], status: int, expected: int
) -> None:
    gateway.answer = lambda arrival: web.json_response({}, status=status) if status else None
    (tmp_path / "key").write_text("secret")
    recorded = {"id": "s1", "block_size": 64, "requests": [call(64, [[1, 1]])]}
    (tmp_path / "sessions.jsonl").write_text(json.dumps(recorded))
    command = ["--gateway", gateway.url, "--model", "m", "--key-file", str(tmp_path / "key"), "--agents", "2"]
    more = ["--sessions", "2", "--file", str(tmp_path / "sessions.jsonl"), "--stagger-s", "0", *strict]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workers.harness.replay", *command, *more, stdout=-1, stderr=-1
    )
    out, _ = await process.communicate()
    assert process.returncode == expected
    assert b"sessions 2 of 2 finished" in out and b"secret" not in out


@pytest.mark.processes
async def test_the_command_stops_on_a_signal(gateway, tmp_path: Path) -> None:
    gateway.answer_s = 30.0
    (tmp_path / "key").write_text("secret")
    command = ["--gateway", gateway.url, "--model", "m", "--key-file", str(tmp_path / "key"), "--agents", "3"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workers.harness.replay", *command, "--stagger-s", "0", stdout=-1
    )
    await gateway.arrived(3)
    process.send_signal(signal.SIGTERM)
    out, _ = await asyncio.wait_for(process.communicate(), 5)
    assert process.returncode == 0
    assert sorted(gateway.ended) == sorted(gateway.branches)
    assert b"live branches were told to end" in out
