"""The proof of inference, on the packaged excerpt of recorded sessions."""

from __future__ import annotations

import gzip
import json

import pytest

from bench.inference import main, measure
from bench.inference_truth import TrueSession, read_sessions
from workers.harness.replay.sessions import PACKAGED_SESSIONS


@pytest.fixture(scope="module")
def sessions() -> list[TrueSession]:
    return list(read_sessions(PACKAGED_SESSIONS))


def recording(tmp_path, requests: list[dict]):
    line = {"id": "s", "block_size": 64, "requests": requests}
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(line) + "\n").encode()))
    return path


def request(at_s: float, *runs: list[int]) -> dict:
    return {"t": at_s, "in": 64 * sum(count for _, count in runs) + 1, "out": 1, "h": list(runs), "api_time": 1.0}


def test_the_truth_tells_versions_forks_and_sub_agents_by_what_follows(tmp_path) -> None:
    path = recording(
        tmp_path,
        [
            request(0, [1, 100]),
            request(10, [1, 120]),
            request(20, [1, 119], [500, 9]),  # its last block came back different
            request(30, [1, 20], [600, 30]),  # left for good
            request(40, [1, 10], [700, 30]),  # left, and gone on with later
            request(50, [1, 20], [600, 40]),
            {"t": 60, "subagent": "helper", "dur_ms": 5000, "requests": [request(0, [900, 10]), request(2, [900, 12])]},
        ],
    )
    (session,) = read_sessions(path)
    kinds = [(each.start_s, each.kind, each.subagent) for each in session.requests]
    assert kinds == [
        (0, "new", False),
        (10, "continuation", False),
        (20, "continuation", False),
        (30, "version", False),
        (40, "fork", False),
        (50, "continuation", False),
        (55, "new", True),
        (57, "continuation", False),
    ]
    assert len(session.final_epochs) == 3


def test_inference_finds_most_of_what_no_harness_said(sessions) -> None:
    result = measure(sessions, "as-recorded")
    versions, ends = result.scores["version"], result.scores["end"]
    right = sum(count for (true, said), count in result.confusion.items() if true == said == "continuation")
    continuations = sum(count for (true, _), count in result.confusion.items() if true == "continuation")
    assert right / continuations > 0.99
    assert versions.precision > 0.9 and versions.recall > 0.6
    assert ends.recall > 0.95


def test_a_session_id_finds_nearly_every_version(sessions) -> None:
    versions = measure(sessions, "session-ids").scores["version"]
    assert versions.precision > 0.7 and versions.recall > 0.95


def test_without_a_recording_the_proof_says_what_it_needs(tmp_path, capsys) -> None:
    assert main([str(tmp_path / "none.gz")]) == 2
    assert "make proof-inference DATA=FILE" in capsys.readouterr().err


def test_a_broken_recording_is_named_by_line_and_field(tmp_path, capsys) -> None:
    path = recording(tmp_path, [{"t": 0, "in": "many", "out": 1, "h": [[1, 1]]}])
    assert main([str(path)]) == 2
    assert "sessions.jsonl.gz line 1: requests[0]: in" in capsys.readouterr().err
