"""Sends one recorded request through the gateway and reads its stream to the end, waiting and trying again when told to."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import monotonic, time
from typing import Any

import aiohttp

from workers.harness.replay.summary import Summary

FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 30.0
SHORTEST_WAIT_S = 0.1
RETRIED_STATUSES = frozenset({429, 503})
DONE = b"data: [DONE]"

logger = logging.getLogger(__name__)


class RequestFailed(Exception):
    """A request that got no complete answer. `reason` is short and countable; the message is for a person."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Unreachable(Exception):
    """The gateway took no request: it is starting, restarting or away."""


class _Refused(Exception):
    """The gateway asked to come back later."""

    def __init__(self, status: int, retry_after_s: float | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `give_up_s` bounds how long one request is sent again after refusals."""

    gateway_url: str
    model: str
    api_key: str
    give_up_s: float


class Sender:
    """Sends completions to one gateway over one session."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, summary: Summary, rng: random.Random) -> None:
        self._url = f"{target.gateway_url.rstrip('/')}/v1/completions"
        self._target = target
        self._session = session
        self._summary = summary
        self._rng = rng

    async def complete(self, ids: list[int], prompt_tokens: int, max_tokens: int, headers: Mapping[str, str]) -> None:
        """Returns when the answer has been streamed to its end.

        429 and 503 wait as long as `Retry-After` says, an unreachable gateway is tried again; both up to `give_up_s`.
        Raises `RequestFailed` for anything else; nothing is sent twice once an answer began.
        """
        body = json.dumps(
            {
                "model": self._target.model,
                "prompt": ids,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "switchyard": {"prompt_tokens": prompt_tokens},
            },
            separators=(",", ":"),
        ).encode()
        all_headers = {
            **headers,
            "Authorization": f"Bearer {self._target.api_key}",
            "Content-Type": "application/json",
        }
        give_up_at = monotonic() + self._target.give_up_s
        back_off_s = FIRST_BACK_OFF_S
        while True:
            try:
                output_tokens = await self._send(body, all_headers)
            except _Refused as refusal:
                self._summary.refused[refusal.status] += 1
                wait_s = refusal.retry_after_s if refusal.retry_after_s is not None else self._jitter(back_off_s)
                problem, reason = str(refusal), f"refused-{refusal.status}"
            except _Unreachable as away:
                self._summary.unreachable += 1
                wait_s, problem, reason = self._jitter(back_off_s), str(away), "unreachable"
            else:
                self._count_answer(prompt_tokens, max_tokens, output_tokens)
                return
            if monotonic() + wait_s > give_up_at:
                raise RequestFailed(reason, f"given up after {self._target.give_up_s:.0f} s: {problem}")
            await asyncio.sleep(max(SHORTEST_WAIT_S, wait_s))
            back_off_s = min(LONGEST_BACK_OFF_S, back_off_s * 2)

    def _jitter(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.5, 1.0)

    def _count_answer(self, prompt_tokens: int, max_tokens: int, output_tokens: int | None) -> None:
        self._summary.answered += 1
        self._summary.prompt_tokens += prompt_tokens
        self._summary.output_tokens += output_tokens or 0
        if output_tokens is not None and output_tokens != max_tokens:
            raise RequestFailed("short-answer", f"expected {max_tokens} output tokens, the answer has {output_tokens}")

    async def _send(self, body: bytes, headers: Mapping[str, str]) -> int | None:
        """One attempt; the output tokens that the answer's usage states, None when it states none."""
        started = monotonic()
        self._summary.in_flight += 1
        try:
            answer = await self._session.post(self._url, data=body, headers=headers)
        except (aiohttp.ClientConnectionError, TimeoutError) as problem:
            raise _Unreachable(str(problem) or type(problem).__name__) from None
        finally:
            self._summary.in_flight -= 1
        self._summary.in_flight += 1
        try:
            async with answer:
                if answer.status != 200:
                    await self._refuse(answer)
                return await self._read_stream(answer, started)
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise RequestFailed("broken-stream", f"the stream broke: {problem or type(problem).__name__}") from None
        finally:
            self._summary.in_flight -= 1

    async def _refuse(self, answer: aiohttp.ClientResponse) -> None:
        message = _error_message(await answer.read())
        if answer.status in RETRIED_STATUSES:
            raise _Refused(answer.status, retry_after_s(answer.headers.get("Retry-After"), time()), message)
        raise RequestFailed(f"status-{answer.status}", f"the gateway answered {answer.status}: {message}")

    async def _read_stream(self, answer: aiohttp.ClientResponse, started: float) -> int | None:
        """Reads events without decoding the ones that only carry text."""
        output_tokens: int | None = None
        begun = done = False
        async for line in answer.content:
            if not line.startswith(b"data:"):
                continue
            if not begun:
                begun = True
                self._summary.first_token_after(monotonic() - started)
            if line.startswith(DONE):
                done = True
            elif b'"error"' in line:
                error = _decode(line).get("error")
                if error:
                    code = error.get("code") if isinstance(error, dict) else None
                    raise RequestFailed(f"error-{code or 'unnamed'}", f"the stream ended with an error: {error}")
            elif b'"completion_tokens"' in line:
                usage = _decode(line).get("usage")
                if isinstance(usage, dict):
                    output_tokens = usage.get("completion_tokens")
        if not done:
            raise RequestFailed("broken-stream", "the stream ended without [DONE]")
        return output_tokens


def retry_after_s(header: str | None, now: float) -> float | None:
    """Seconds to wait as a `Retry-After` header says (a number or an HTTP date; `now` is unix seconds); None if it does not."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except ValueError:
            return None
    return max(0.0, seconds) if seconds == seconds else None


def _decode(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line[5:])
    except ValueError:
        raise RequestFailed("broken-stream", f"an event is not JSON: {line[:200]!r}") from None
    return document if isinstance(document, dict) else {}


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
