"""The replay's command line and the file its API key comes from."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from workers.harness.replay.blocks import SESSION_NUMBERS

DEFAULT_OBJECTIVES = "premium=0.2,standard=0.6,best-effort=0.2"


class OptionError(ValueError):
    """An option that cannot be used; the message names it and says what was expected."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line; a wrong one ends the program with status 2 and a message, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.harness.replay",
        description="Replay recorded agent sessions closed-loop through a Switchyard gateway.",
    )
    add = parser.add_argument
    add("--gateway", required=True, metavar="URL", help="the gateway, such as http://127.0.0.1:8101")
    add("--model", required=True, help="a served model whose tokenizer is symbolic (block ids stand for tokens)")
    add("--key-file", required=True, type=Path, metavar="FILE", help="a JSON object of names and keys, or one bare key")
    add("--key-name", default="replay", help="which key of the file (default: replay)")
    add("--agents", type=_whole(1, 10_000), default=60, help="agents that run at the same time (default: 60)")
    add("--sessions", type=_whole(1), default=None, help="stop after this many sessions (default: never)")
    add("--file", type=Path, default=None, help="sessions as JSON lines, plain or gzip (default: the packaged excerpt)")
    add("--max-session-requests", type=_whole(1), default=None, help="leave out sessions with more requests than this")
    add("--pause-scale", type=_seconds, default=1.0, help="recorded pauses are multiplied by this (default: 1)")
    add("--max-pause-s", type=_seconds, default=300.0, help="longest pause after scaling (default: 300)")
    add("--stagger-s", type=_seconds, default=30.0, help="starts of the agents are spread over this (default: 30)")
    add("--give-up-s", type=_seconds, default=600.0, help="longest a refused request is sent again (default: 600)")
    add("--summary-s", type=_seconds, default=30.0, help="seconds between summary lines (default: 30)")
    add("--objectives", type=_shares, default=_shares(DEFAULT_OBJECTIVES), metavar="NAME=SHARE,..",
        help=f"how agents divide over objectives, empty for none (default: {DEFAULT_OBJECTIVES})")  # fmt: skip
    add("--seed", type=int, default=0, help="order of the sessions and jitter (default: 0)")
    add("--first-session-number", type=_whole(0, SESSION_NUMBERS - 1), default=None,
        help="makes block ids unique; runs with one number share KV (default: from the clock)")  # fmt: skip
    add("--strict", action="store_true", help="exit with status 1 if any request failed")
    return parser.parse_args(arguments)


def read_key(path: Path, name: str) -> str:
    """The API key called `name` in a key file.

    The file is a JSON object with the key under its name, at the top or inside `keys`, or it holds one bare key and
    nothing else. Raises `OptionError` that never repeats what the file holds.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionError(f"--key-file: expected a readable file: {problem}") from None
    if not text.startswith("{"):
        if not text or len(text.split()) != 1:
            raise OptionError("--key-file: expected a JSON object of names and keys, or one bare key")
        return text
    try:
        document = json.loads(text)
    except ValueError:
        raise OptionError("--key-file: expected a JSON object of names and keys; it is not JSON") from None
    inner = document.get("keys")
    for names in (document, inner if isinstance(inner, dict) else {}):
        if isinstance(names.get(name), str) and names[name]:
            return str(names[name])
    raise OptionError(f"--key-name: expected a key called {name!r} in {path.name}; there is none")


def spread_objectives(shares: dict[str, float], agents: int) -> list[str | None]:
    """An objective for each agent, so that every prefix of the list is as close to the shares as whole agents can be."""
    if not shares:
        return [None] * agents
    given = dict.fromkeys(shares, 0)
    chosen: list[str | None] = []
    for position in range(1, agents + 1):
        name = max(shares, key=lambda candidate: shares[candidate] * position - given[candidate])
        given[name] += 1
        chosen.append(name)
    return chosen


def _fail(expected: str, text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")


def _whole(minimum: int, maximum: int | None = None):  # type: ignore[no-untyped-def]
    expected = f"a whole number of at least {minimum}" + (f" and at most {maximum}" if maximum is not None else "")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            _fail(expected, text)
        if value < minimum or (maximum is not None and value > maximum):
            _fail(expected, text)
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        _fail("a number of at least 0", text)
    if not math.isfinite(value) or value < 0:
        _fail("a number of at least 0", text)
    return value


def _shares(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, separator, share = part.partition("=")
        if not name or not separator or name in shares:
            _fail("NAME=SHARE,NAME=SHARE with each name once", text)
        shares[name] = _seconds(share)
    total = sum(shares.values())
    if shares and total <= 0:
        _fail("shares that are not all 0", text)
    return {name: share / total for name, share in shares.items() if share > 0}
