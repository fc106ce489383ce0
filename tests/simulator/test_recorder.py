"""Rows of finished requests stay in order and whole, however many there are."""

from __future__ import annotations

from workers.simulator.recorder import ROWS_AT_ONCE, Recorder


def finish(recorder: Recorder, number: int) -> None:
    recorder.finished(float(number), number / 10, number / 5, 0.0, 100 + number, 50, 7, ("CC", "agents"))


def test_rows_are_read_while_others_come_and_beyond_what_there_was_room_for() -> None:
    recorder = Recorder(capacity=16)
    total = 2 * ROWS_AT_ONCE + 5
    for number in range(total):
        finish(recorder, number)
        if number in (0, 10, ROWS_AT_ONCE, total - 1):
            assert list(recorder.column("finished_at")) == list(range(number + 1))
    assert list(recorder.column("prompt_tokens", 5.0, 8.0)) == [105, 106, 107]
    assert list(recorder.latest("ttft_s", total - 2)) == [(total - 2) / 10, (total - 1) / 10]
    assert len(recorder.of_kind("e2e_s", "CC", None, 0.0, 1e9)) == total
