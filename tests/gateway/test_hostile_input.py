"""What a hostile client sends: it is told what is wrong, and neither the gateway nor what reads its telemetry is harmed."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from tests.gateway.world import KEY, UNTRUSTED_KEY, World, prompt, world
from workers.agent.messages import SamplingBody
from workers.gateway.body import parse
from workers.gateway.errors import ApiError

NOT_TEXT = {"not-utf-8": b"ab\xff\xfe", "control": b"a\x01b"}
NAME_HEADERS = [
    "x-switchyard-branch", "x-dynamo-session-id", "x-claude-code-session-id", "x-session-id", "x-switchyard-parent",
    "x-switchyard-program", "x-switchyard-relation", "x-switchyard-branch-end", "x-switchyard-branch-version",
    "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id", "x-llm-d-inference-objective",
    "x-llm-d-inference-ttl", "x-llm-d-slo-ttft-ms",
]  # fmt: skip


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as running:
        yield running


async def exchange(yard: World, data: bytes) -> tuple[int, bytes]:
    """Sends raw bytes; returns the status and the whole answer."""
    port = int(yard.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        )
        body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), body


def request(body: bytes | None = None, secret: bytes = KEY.encode(), **headers: bytes) -> bytes:
    body = json.dumps(prompt()).encode() if body is None else body
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: yard", b"Authorization: Bearer " + secret]
    lines += [name.encode() + b": " + value for name, value in headers.items()]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""]) + body


@pytest.mark.parametrize("value", NOT_TEXT.values(), ids=NOT_TEXT)
@pytest.mark.parametrize("header", NAME_HEADERS)
async def test_a_header_that_is_not_text_is_refused_and_harms_no_one(yard: World, header: str, value: bytes) -> None:
    status, body = await exchange(yard, request(**{header: value}))
    assert status == 400, body
    msgspec.json.encode(yard.gateway.snapshot())
    assert not yard.serving.yard.requests


async def test_a_key_that_is_not_text_is_a_wrong_key(yard: World) -> None:
    status, body = await exchange(yard, request(secret=b"\xff\xfe"))
    assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("name", NAME_HEADERS[-5:])
async def test_what_an_untrusted_key_says_of_its_flow_is_not_even_read(yard: World, name: str) -> None:
    status, _ = await exchange(yard, request(secret=UNTRUSTED_KEY.encode(), **{name: b"\xff"}))
    assert status == 200


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"prompt":[['])
async def test_a_body_nested_without_end_is_refused(yard: World, opening: bytes) -> None:
    status, body = await exchange(yard, request(opening * 100_000))
    assert status == 400 and json.loads(body)["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("body", [b"no gzip", gzip.compress(b"{}" * 500)[:-20]])
async def test_a_body_that_is_not_of_its_encoding_is_refused(yard: World, body: bytes) -> None:
    status, answer = await exchange(yard, request(body, **{"Content-Encoding": b"gzip"}))
    assert status == 400 and json.loads(answer)["error"]["code"] in ("unreadable_body", "invalid_json")


async def test_a_small_body_that_unpacks_to_a_huge_one_is_413(yard: World) -> None:
    status, _ = await exchange(yard, request(gzip.compress(b" " * 80_000_000), **{"Content-Encoding": b"gzip"}))
    assert status == 413


@pytest.mark.parametrize("bad", [{"user": "a\x00b"}, {"user": "a" * 201}, {"metadata": {"session_id": "a\x1b[0m"}}])
async def test_a_branch_named_in_the_body_is_printable_text(yard: World, bad: dict[str, Any]) -> None:
    response = await yard.complete(prompt() | bad)
    error = (await response.json())["error"]
    assert (response.status, error["param"].split(".")[0]) == (400, next(iter(bad)))


async def test_bytes_that_are_no_http_are_one_line_in_the_log_without_what_they_held(yard: World) -> None:
    with structlog.testing.capture_logs() as lines:
        status, _ = await exchange(yard, request(secret=KEY.encode() + b"\x00"))
    assert status == 400
    (line,) = [line for line in lines if line["log_level"] in ("info", "warning", "error")]
    assert (line["peer"], line["code"]) == ("127.0.0.1", "bad_request")
    assert KEY not in str(line)


def test_a_traceback_in_the_log_does_not_show_local_variables() -> None:
    script = (
        "import logging, structlog\n"
        "from workers.logs import configure_logging\n"
        "configure_logging()\n"
        "def fail(key):\n"
        "    try: raise ValueError('broken')\n"
        "    except ValueError:\n"
        "        structlog.get_logger().exception('failed'); logging.getLogger('x').exception('failed')\n"
        "fail('sk-' + 'secret')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stderr.count("ValueError: broken") == 2 and "sk-secret" not in ran.stderr + ran.stdout


VALUES: list[Any] = [
    0, 1, -1, 2, 7.5, 0.0, -0.0, 1e-300, 1e300, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30,
    True, False, None, "x", [], [0], [-1], [2**32 - 1], [2**32], [0.5], {},
]  # fmt: skip


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos"])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_that_the_gateway_lets_pass_is_one_that_a_node_takes(name: str, value: Any) -> None:
    try:
        sampling = parse(prompt() | {name: value}, chat=False).sampling
    except ApiError as error:
        assert error.status == 400 and (error.param or "").startswith(name)
        return
    msgspec.convert(dict(sampling) | {"max_tokens": 1}, SamplingBody)
