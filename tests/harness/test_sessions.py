"""Recorded sessions: what is read, what is refused, and what their block ids say."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from workers.harness.replay.blocks import common_prefix_blocks, is_rewrite, prompt_ids
from workers.harness.replay.sessions import SessionFileError, load_sessions, parse_session


def session_line(**changes) -> str:
    call = {"t": 0.0, "in": 200, "out": 5, "h": [[1, 3]], "api_time": 2.0, "think_time": 0.0}
    return json.dumps({"id": "s1", "block_size": 64, "requests": [call], **changes})


def test_the_packaged_excerpt_is_sixty_varied_sessions() -> None:
    sessions = load_sessions()
    assert len(sessions) == len({session.id for session in sessions}) == 60
    assert sum(session.request_count for session in sessions) == 2799
    with_subagents = [s for s in sessions if any(turn.subagents for turn in s.turns)]
    rewritten = [s for s in sessions if _rewrites(s)]
    short = [s for s in sessions if s.request_count <= 12]
    assert (len(with_subagents), len(rewritten), len(short)) == (9, 19, 19)


def _rewrites(session) -> int:
    prompts = [turn.request.blocks for turn in session.turns if turn.request]
    return sum(is_rewrite(before, after) for before, after in pairwise(prompts))


def test_a_subagent_starts_where_it_was_launched_and_its_time_is_not_paused_again() -> None:
    def call(t: float, think: float) -> dict:
        return {"t": t, "in": 64, "out": 1, "h": [[1, 1]], "api_time": 2.0, "think_time": think}

    helper = {"subagent": "a", "t": 33.0, "dur_ms": 30_000, "requests": [call(0.0, 0.0)]}
    session = parse_session(session_line(requests=[call(0.0, 0.0), helper, call(40.0, 38.0)]), "line 1")
    turn = session.turns[1]
    assert turn.subagents[0].delay_s == pytest.approx(1.0)
    assert turn.request is not None and turn.request.pause_s == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"in": 0}, r"requests\[0\]: in: expected a whole number of at least 1, got '0'"),
        ({"in": True}, "in: expected a whole number"),
        ({"out": -1}, "out: expected"),
        ({"h": []}, r"h: expected a list of at least one \[first id, count\]"),
        ({"h": [[1, 4]]}, "h: expected at most 3 blocks of 64 tokens, got '4'"),
        ({"h": [[1 << 20, 1]]}, "h: expected .first id, count. with ids under 1048576"),
        ({"h": [[1]]}, "h: expected"),
        ({"t": "soon"}, "t: expected seconds"),
        ({"think_time": -3}, "think_time: expected seconds"),
    ],
)
def test_a_bad_request_is_refused_by_file_line_and_field(tmp_path: Path, call: dict, message: str) -> None:
    good = {"t": 0.0, "in": 200, "out": 5, "h": [[1, 3]]}
    path = tmp_path / "sessions.jsonl"
    path.write_text(session_line() + "\n" + session_line(requests=[{**good, **call}]) + "\n")
    with pytest.raises(SessionFileError, match=f"sessions.jsonl line 2: .*{message}"):
        load_sessions(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object, got list"),
        (session_line(id=""), "id: expected a text"),
        (session_line(block_size=None), "block_size: expected a whole number"),
        (session_line(requests=[]), "requests: expected a list of at least one request"),
    ],
)
def test_a_line_that_is_no_session_is_refused(line: str, message: str) -> None:
    with pytest.raises(SessionFileError, match=f"line 1: {message}"):
        parse_session(line, "line 1")


def test_a_plain_file_and_a_compressed_one_read_the_same(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.jsonl", tmp_path / "packed"
    plain.write_text(session_line() + "\n\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_sessions(plain) == load_sessions(packed)


def test_a_truncated_or_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(session_line().encode() * 50)[:-20])
    with pytest.raises(SessionFileError, match="expected UTF-8 JSON lines"):
        load_sessions(path)
    path.write_bytes(b"")
    with pytest.raises(SessionFileError, match="expected at least one session"):
        load_sessions(path)


def test_ids_of_two_session_numbers_never_meet() -> None:
    runs = ((1, 2), ((1 << 20) - 1, 1))
    assert prompt_ids(runs, 3) == [(3 << 20) + 1, (3 << 20) + 2, (4 << 20) - 1]
    assert not set(prompt_ids(runs, 3)) & set(prompt_ids(runs, 4))
    assert max(prompt_ids(runs, 4095)) < 1 << 32
    assert prompt_ids(runs, 4096) == prompt_ids(runs, 0)


def test_a_shared_head_is_counted_however_the_runs_are_cut() -> None:
    assert common_prefix_blocks(((1, 10),), ((1, 4), (5, 6), (90, 3))) == 10
    assert common_prefix_blocks(((1, 4), (50, 3)), ((1, 4), (50, 1), (70, 9))) == 5
    assert common_prefix_blocks(((1, 10),), ((2, 10),)) == 0


def test_growing_or_changing_the_last_blocks_is_a_continuation_and_losing_more_is_a_rewrite() -> None:
    assert not is_rewrite((), ((1, 5),))
    assert not is_rewrite(((1, 100),), ((1, 140),))
    assert not is_rewrite(((1, 100),), ((1, 97), (500, 20)))
    assert is_rewrite(((1, 100),), ((1, 96), (500, 20)))
    assert is_rewrite(((1, 100),), ((1, 30),))
