"""What an engine's stream of events brings, however it is written and cut."""

import json

import pytest

from workers.gateway.dialects.chat_stream import Counted, counted
from workers.gateway.event_stream import EventStream


def event(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]} | more).encode() + b"\n\n"


USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
TALE = [event("a"), b": still here\n\n", event("data: [DONE]\n\n in a text, data: twice"), event("c")]
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


def fed(pieces: list[bytes], keep_usage: bool = False) -> tuple[EventStream, bytes]:
    stream = EventStream(keep_usage)
    passed = b"".join([stream.push(piece) for piece in pieces])
    return stream, passed


@pytest.mark.parametrize("crlf", [(), (0,), (1,), (2, 4), (0, 1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_a_stream_means_the_same_however_it_is_cut_and_its_lines_end(size: int, crlf: tuple[int, ...]) -> None:
    parts = [part.replace(b"\n", b"\r\n") if place in crlf else part for place, part in enumerate([*TALE, LAST, DONE])]
    whole = b"".join(parts)
    stream, passed = fed([whole[at : at + size] for at in range(0, len(whole), size)])
    assert passed == b"".join([*parts[:4], parts[5]])
    assert (stream.events, stream.done) == (3, True)
    assert stream.usage == Counted(40, 16, 3)


def test_a_text_that_speaks_of_the_closing_event_is_none() -> None:
    stream, passed = fed([TALE[2]])
    assert (stream.done, stream.events, passed) == (False, 1, TALE[2])


def test_nothing_from_behind_the_closing_event_is_passed_on() -> None:
    stream, passed = fed([event("a") + DONE + event("b")])
    assert (passed, stream.done, stream.events) == (event("a") + DONE, True, 1)


def test_a_closing_event_without_its_empty_line_counts_once_the_stream_has_ended() -> None:
    stream, passed = fed([event("a"), b"data: [DONE]\n"])
    assert (passed, stream.done) == (event("a"), False)
    assert (stream.close(), stream.done, stream.events) == (DONE, True, 1)
    cut, _ = fed([event("a"), b'data: {"choices'])
    assert (cut.close(), cut.done) == (b"", False)


@pytest.mark.parametrize(
    "said", [{"error": {"message": "m", "code": 400}}, {"object": "error", "message": "m", "code": 400}]
)
def test_an_error_event_is_kept_apart_with_what_follows_it(said: dict[str, object]) -> None:
    stream, passed = fed([event("a") + b"data: " + json.dumps(said).encode() + b"\n\n" + DONE])
    assert (passed, stream.done, stream.events) == (event("a"), False, 1)
    assert stream.error["message"] == "m"


def test_an_error_that_is_none_and_a_text_about_errors_are_no_error() -> None:
    stream, passed = fed([event("a", error=None), event('{"error": "x"}'), event("b", finish_reason="error")])
    assert (stream.error, stream.events) == (None, 3)
    assert passed.count(b"data:") == 3


@pytest.mark.parametrize("wrong", ["12", -1, 1.5, None, True, [], 10**30, float("inf")])
def test_a_count_that_is_none_counts_nothing(wrong: object) -> None:
    usage = {"prompt_tokens": wrong, "completion_tokens": wrong, "prompt_tokens_details": {"cached_tokens": wrong}}
    assert counted(usage) == Counted(0, 0, 0)
    assert counted(wrong) == Counted(0, 0, 0)
    assert counted(USAGE | {"prompt_tokens_details": wrong, "completion_tokens": 3.0}) == Counted(40, 0, 3)
