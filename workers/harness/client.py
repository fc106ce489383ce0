"""Branch signals: a harness tells the gateway which context a request belongs to, when it was rewritten and when it ended.

A *branch* is one context with its own order of requests. Knowing it, the gateway keeps the KV that is still needed and
drops what is not. The signals are plain headers, so they go with whatever client sends the requests:

    client = HarnessClient("http://127.0.0.1:8100", api_key)
    with client.branch(program="fix-the-build") as branch:
        openai.chat.completions.create(..., extra_headers=branch.headers())
        branch.version()                                    # the context was compacted or edited
        openai.chat.completions.create(..., extra_headers=branch.headers())
        with branch.subagent() as helper:                   # a new context, spawned by this one
            openai.chat.completions.create(..., extra_headers=helper.headers(end=True))

`AsyncHarnessClient` is the same under `async with`. A branch that is never ended is let go of when its lease runs out.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.parse
import urllib.request
import uuid
from types import TracebackType
from typing import Literal, Self

import aiohttp

BRANCH = "x-switchyard-branch"
BRANCH_VERSION = "x-switchyard-branch-version"
BRANCH_SEQUENCE = "x-switchyard-branch-sequence"
BRANCH_END = "x-switchyard-branch-end"
PARENT = "x-switchyard-parent"
RELATION = "x-switchyard-relation"
PROGRAM = "x-switchyard-program"
OBJECTIVE = "x-llm-d-inference-objective"

MAX_NAME_LENGTH = 200

Relation = Literal["fork", "subagent"]

logger = logging.getLogger(__name__)


class BranchError(Exception):
    """A branch was used wrongly, or the gateway refused its end; the message says which branch and why."""


def check_name(field: str, name: str) -> str:
    """`name` if it can travel as a header; raises `BranchError` naming the field if not."""
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isascii() or not name.isprintable() or name != name.strip():
        raise BranchError(f"{field}: expected 1 to {MAX_NAME_LENGTH} printable ASCII characters, got {name!r}")
    return name


class BranchSignals:
    """The signals of one branch, with no I/O: `headers()` for the next request, and the branches that come out of it."""

    def __init__(
        self,
        branch_id: str | None = None,
        *,
        parent: str | None = None,
        relation: Relation | None = None,
        program: str | None = None,
        objective: str | None = None,
    ) -> None:
        self.branch_id = check_name("branch_id", branch_id or uuid.uuid4().hex)
        self.parent = parent and check_name("parent", parent)
        self.relation: Relation | None = relation
        self.program = program and check_name("program", program)
        self.objective = objective and check_name("objective", objective)
        self.version_number = 0
        self.sequence_number = 0
        self.ended = False

    def version(self) -> int:
        """Say that the context was rewritten (compaction, edit): later requests carry the next version. Returns it."""
        self._refuse_if_ended("rewritten")
        self.version_number += 1
        return self.version_number

    def headers(self, *, end: bool = False) -> dict[str, str]:
        """Headers of the next request, once for each: they are numbered, so a repeat with the same ones changes nothing.
        `end` marks it as the branch's last one: nothing else has to be sent."""
        self._refuse_if_ended("continued")
        self.sequence_number += 1
        signals = {
            BRANCH: self.branch_id,
            BRANCH_VERSION: str(self.version_number),
            BRANCH_SEQUENCE: str(self.sequence_number),
        }
        if self.parent and self.relation:
            signals[PARENT] = self.parent
            signals[RELATION] = self.relation
        if self.program:
            signals[PROGRAM] = self.program
        if self.objective:
            signals[OBJECTIVE] = self.objective
        if end:
            signals[BRANCH_END] = "true"
            self.ended = True
        return signals

    def _refuse_if_ended(self, verb: str) -> None:
        if self.ended:
            raise BranchError(f"branch {self.branch_id} has ended and cannot be {verb}")


def branch_url(gateway_url: str, branch_id: str) -> str:
    """Where a branch is spoken of without a request."""
    return f"{gateway_url.rstrip('/')}/v1/branches/{urllib.parse.quote(branch_id, safe='')}"


def announcement(
    parent: str | None, relation: Relation | None, program: str | None, rewritten: bool
) -> dict[str, str | bool]:
    """The body of `PUT /v1/branches/{id}`."""
    said: dict[str, str | None] = {"parent": parent, "relation": relation, "program": program}
    body: dict[str, str | bool] = {name: value for name, value in said.items() if value is not None}
    return body | ({"rewritten": True} if rewritten else {})


class Branch(BranchSignals):
    """A branch of a `HarnessClient`; ends itself when its `with` block is left."""

    def __init__(self, client: HarnessClient, branch_id: str | None = None, **signals: str | None) -> None:
        super().__init__(branch_id, **signals)  # type: ignore[arg-type]
        self._client = client

    def fork(self, branch_id: str | None = None) -> Branch:
        """A branch that goes on from this one's context."""
        return Branch(self._client, branch_id, **_child_signals(self, "fork"))

    def subagent(self, branch_id: str | None = None) -> Branch:
        """A branch that this one spawned, with a new context."""
        return Branch(self._client, branch_id, **_child_signals(self, "subagent"))

    def end(self) -> None:
        """Tell the gateway that no request follows. Once is enough; again does nothing. Raises `BranchError`."""
        if not self.ended:
            self._client.end_branch(self.branch_id)
            self.ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.end()
        except BranchError as problem:
            logger.warning("%s; its lease will end it", problem)


class HarnessClient:
    """Makes branches and ends them, blocking. Safe to share between threads: it holds no connection."""

    def __init__(self, gateway_url: str, api_key: str, *, timeout_s: float = 5.0) -> None:
        self.gateway_url = gateway_url.rstrip("/")
        self._api_key = api_key
        self._timeout_s = timeout_s

    def branch(
        self, branch_id: str | None = None, *, program: str | None = None, objective: str | None = None
    ) -> Branch:
        """A new branch; its id is made up unless given."""
        return Branch(self, branch_id, program=program, objective=objective)

    def end_branch(self, branch_id: str) -> None:
        """`POST /v1/branches/{id}/end`. A branch the gateway does not know (404) counts as ended. Raises `BranchError`."""
        self._call("POST", branch_url(self.gateway_url, branch_id) + "/end", {}, f"branch {branch_id} was not ended")

    def announce(
        self,
        branch_id: str,
        *,
        parent: str | None = None,
        relation: Relation | None = None,
        program: str | None = None,
        rewritten: bool = False,
    ) -> None:
        """`PUT /v1/branches/{id}`: what is to be known of a branch before its first request, or (`rewritten`) before the
        first request after a compaction. Saying it again changes nothing. Raises `BranchError`."""
        body = announcement(parent, relation, program, rewritten)
        self._call("PUT", branch_url(self.gateway_url, branch_id), body, f"branch {branch_id} was not announced")

    def _call(self, method: str, url: str, body: dict[str, str | bool], failed: str) -> None:
        request = urllib.request.Request(  # noqa: S310 (the gateway's own URL)
            url,
            data=json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self._api_key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):  # noqa: S310
                return
        except urllib.error.HTTPError as refusal:
            with refusal:
                _check_answer(failed, refusal.code, refusal.read())
        except OSError as problem:
            raise BranchError(f"{failed}: {problem}") from problem


class AsyncBranch(BranchSignals):
    """A branch of an `AsyncHarnessClient`; ends itself when its `async with` block is left."""

    def __init__(self, client: AsyncHarnessClient, branch_id: str | None = None, **signals: str | None) -> None:
        super().__init__(branch_id, **signals)  # type: ignore[arg-type]
        self._client = client

    def fork(self, branch_id: str | None = None) -> AsyncBranch:
        """A branch that goes on from this one's context."""
        return AsyncBranch(self._client, branch_id, **_child_signals(self, "fork"))

    def subagent(self, branch_id: str | None = None) -> AsyncBranch:
        """A branch that this one spawned, with a new context."""
        return AsyncBranch(self._client, branch_id, **_child_signals(self, "subagent"))

    async def end(self) -> None:
        """Tell the gateway that no request follows. Once is enough; again does nothing. Raises `BranchError`."""
        if not self.ended:
            await self._client.end_branch(self.branch_id)
            self.ended = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self.end()
        except BranchError as problem:
            logger.warning("%s; its lease will end it", problem)


class AsyncHarnessClient:
    """Makes branches and ends them on an aiohttp session that the caller owns and closes."""

    def __init__(
        self, gateway_url: str, api_key: str, session: aiohttp.ClientSession, *, timeout_s: float = 5.0
    ) -> None:
        self.gateway_url = gateway_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    def branch(
        self, branch_id: str | None = None, *, program: str | None = None, objective: str | None = None
    ) -> AsyncBranch:
        """A new branch; its id is made up unless given."""
        return AsyncBranch(self, branch_id, program=program, objective=objective)

    async def end_branch(self, branch_id: str) -> None:
        """`POST /v1/branches/{id}/end`. A branch the gateway does not know (404) counts as ended. Raises `BranchError`."""
        await self._call(
            "POST", branch_url(self.gateway_url, branch_id) + "/end", {}, f"branch {branch_id} was not ended"
        )

    async def announce(
        self,
        branch_id: str,
        *,
        parent: str | None = None,
        relation: Relation | None = None,
        program: str | None = None,
        rewritten: bool = False,
    ) -> None:
        """As `HarnessClient.announce`."""
        body = announcement(parent, relation, program, rewritten)
        await self._call("PUT", branch_url(self.gateway_url, branch_id), body, f"branch {branch_id} was not announced")

    async def _call(self, method: str, url: str, body: dict[str, str | bool], failed: str) -> None:
        try:
            async with self._session.request(
                method, url, json=body, headers=self._headers, timeout=self._timeout
            ) as answer:
                if answer.status >= 300:
                    _check_answer(failed, answer.status, await answer.read())
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise BranchError(f"{failed}: {problem or type(problem).__name__}") from problem


def _child_signals(parent: BranchSignals, relation: Relation) -> dict[str, str | None]:
    return {
        "parent": parent.branch_id,
        "relation": relation,
        "program": parent.program,
        "objective": parent.objective,
    }


def _check_answer(failed: str, status: int, body: bytes) -> None:
    if status == 404:
        return
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", "replace")
    raise BranchError(f"{failed}: the gateway answered {status}: {message}")
