"""Starts the replay; see `--help`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import signal
import sys
from collections.abc import Sequence
from time import monotonic, time

import aiohttp

from workers.harness.client import AsyncHarnessClient
from workers.harness.replay.agents import Agent, Pace, plays
from workers.harness.replay.blocks import SESSION_NUMBERS
from workers.harness.replay.options import OptionError, parse_options, read_key, spread_objectives
from workers.harness.replay.sessions import Session, SessionFileError, load_sessions
from workers.harness.replay.summary import Summary
from workers.harness.replay.traffic import Sender, Target


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 done or stopped, 1 a request failed under `--strict`, 2 the options or the file cannot be used."""
    options = parse_options(arguments)
    # A branch that cannot be ended is left to its lease; a line for each would bury the summary.
    logging.getLogger("workers.harness.client").setLevel(logging.ERROR)
    try:
        api_key = read_key(options.key_file, options.key_name)
        sessions = choose_sessions(options)
    except (OptionError, SessionFileError, OSError) as problem:
        print(f"replay: {problem}", file=sys.stderr)
        return 2
    summary = asyncio.run(replay(options, api_key, sessions))
    print(summary.line(monotonic()), flush=True)
    return 1 if options.strict and summary.failures else 0


def choose_sessions(options: argparse.Namespace) -> list[Session]:
    """The sessions of the chosen file that are short enough. Raises `SessionFileError`, `OptionError`, `OSError`."""
    limit = options.max_session_requests
    sessions = [session for session in load_sessions(options.file) if limit is None or session.request_count <= limit]
    if not sessions:
        raise OptionError(f"--max-session-requests: expected a limit that leaves a session; {limit} leaves none")
    return sessions


async def replay(options: argparse.Namespace, api_key: str, sessions: Sequence[Session]) -> Summary:
    """Runs all agents until their sessions are played, or SIGINT or SIGTERM asks them to stop; then ends live branches."""
    summary = Summary()
    rng = random.Random(options.seed)
    first_number = options.first_session_number
    if first_number is None:
        first_number = int(time()) % SESSION_NUMBERS
    queue = plays(sessions, rng, first_number, options.sessions)
    pace = Pace(options.pause_scale, options.max_pause_s, options.stagger_s)
    target = Target(options.gateway, options.model, api_key, options.give_up_s)
    run_name = f"replay-{int(time()):x}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        client = AsyncHarnessClient(options.gateway, api_key, session)
        sender = Sender(target, session, summary, rng)
        everything = asyncio.current_task()
        _cancel_on_signals(everything)
        reporter = asyncio.create_task(_report(summary, options.summary_s))
        try:
            async with asyncio.TaskGroup() as agents:
                for position, objective in enumerate(spread_objectives(options.objectives, options.agents)):
                    agent = Agent(run_name, objective, client, sender, pace, summary)
                    agents.create_task(agent.run(queue, pace.stagger_s * position / options.agents))
        except asyncio.CancelledError:
            print("replay: stopped; live branches were told to end", flush=True)
        finally:
            reporter.cancel()
    return summary


def _cancel_on_signals(task: asyncio.Task[object] | None) -> None:
    """The first signal cancels the agents; each ends its branches as its `async with` blocks are left."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, task.cancel if task is not None else loop.stop)


async def _report(summary: Summary, every_s: float) -> None:
    summary.line(monotonic())
    while every_s > 0:
        await asyncio.sleep(every_s)
        print(summary.line(monotonic()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
