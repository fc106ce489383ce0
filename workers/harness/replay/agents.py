"""Agents that play recorded sessions closed-loop: the next request follows the answer and the recorded pause."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.harness.client import AsyncBranch, AsyncHarnessClient, BranchError
from workers.harness.replay.blocks import Runs, is_rewrite, prompt_ids
from workers.harness.replay.sessions import RecordedRequest, RecordedSubAgent, Session
from workers.harness.replay.summary import Summary
from workers.harness.replay.traffic import RequestFailed, Sender

FAILURES_LOGGED = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """How recorded pauses become waiting: scaled, then capped. Starts are spread evenly over `stagger_s`."""

    pause_scale: float = 1.0
    max_pause_s: float = 300.0
    stagger_s: float = 30.0

    def wait_s(self, recorded_s: float) -> float:
        return min(recorded_s * self.pause_scale, self.max_pause_s)


@dataclass(frozen=True, slots=True)
class Play:
    """One session to play: `number` makes its block ids and branch ids unique in this run."""

    number: int
    session: Session


def plays(sessions: Sequence[Session], rng: random.Random, first_number: int, limit: int | None) -> Iterator[Play]:
    """Every session once in shuffled order, then again in another order, for ever or `limit` in all."""
    number = first_number
    while True:
        order = list(sessions)
        rng.shuffle(order)
        for session in order:
            if limit is not None and number - first_number >= limit:
                return
            yield Play(number, session)
            number += 1


class Agent:
    """One harness: takes a session, plays it to its end, takes the next."""

    def __init__(
        self,
        run_name: str,
        objective: str | None,
        client: AsyncHarnessClient,
        sender: Sender,
        pace: Pace,
        summary: Summary,
    ) -> None:
        self._run_name = run_name
        self._objective = objective
        self._client = client
        self._sender = sender
        self._pace = pace
        self._summary = summary

    async def run(self, queue: Iterator[Play], start_after_s: float) -> None:
        """Plays sessions from the shared `queue` until it is empty. Cancelling it ends its branches."""
        await asyncio.sleep(start_after_s)
        for play in queue:
            self._summary.sessions_started += 1
            await self._play(play)
            self._summary.sessions_finished += 1

    async def _play(self, play: Play) -> None:
        name = f"{self._run_name}-{play.number}-{play.session.id}"
        branch = self._client.branch(name, program=name, objective=self._objective)
        context = _Context(branch)
        last_turn = len(play.session.turns) - 1
        async with branch:
            for position, turn in enumerate(play.session.turns):
                if turn.subagents:
                    async with asyncio.TaskGroup() as helpers:
                        for subagent in turn.subagents:
                            helpers.create_task(self._play_subagent(play, branch, subagent))
                if turn.request is not None:
                    await self._ask(play, context, turn.request, last=position == last_turn)

    async def _play_subagent(self, play: Play, parent: AsyncBranch, recorded: RecordedSubAgent) -> None:
        await asyncio.sleep(self._pace.wait_s(recorded.delay_s))
        self._summary.subagents += 1
        branch = parent.subagent(f"{parent.branch_id}-{recorded.name}")
        context = _Context(branch)
        async with branch:
            for position, request in enumerate(recorded.requests, start=1):
                await self._ask(play, context, request, last=position == len(recorded.requests))

    async def _ask(self, play: Play, context: _Context, request: RecordedRequest, last: bool) -> None:
        await asyncio.sleep(self._pace.wait_s(request.pause_s))
        if context.rewritten_by(request.blocks):
            context.branch.version()
            self._summary.versions += 1
        ids = prompt_ids(request.blocks, play.number)
        headers = context.branch.headers(end=last)
        try:
            await self._sender.complete(ids, request.prompt_tokens, request.output_tokens, headers)
        except RequestFailed as failure:
            self._count_failure(context.branch, failure)
            if last:
                await self._end_anyway(context.branch)

    def _count_failure(self, branch: AsyncBranch, failure: RequestFailed) -> None:
        self._summary.failed[failure.reason] += 1
        if self._summary.failures <= FAILURES_LOGGED:
            logger.warning("replay: a request of branch %s failed: %s", branch.branch_id, failure)

    async def _end_anyway(self, branch: AsyncBranch) -> None:
        """The request that said "end" may not have arrived."""
        try:
            await self._client.end_branch(branch.branch_id)
        except BranchError as problem:
            logger.warning("%s; its lease will end it", problem)


class _Context:
    """What a branch sent last, to see when its context was rewritten."""

    def __init__(self, branch: AsyncBranch) -> None:
        self.branch = branch
        self._blocks: Runs = ()

    def rewritten_by(self, blocks: Runs) -> bool:
        rewritten = is_rewrite(self._blocks, blocks)
        self._blocks = blocks
        return rewritten
