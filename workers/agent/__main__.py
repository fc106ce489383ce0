"""`python -m workers.agent --spec FILE`: run the nodes of one start file until SIGTERM or SIGINT."""

# ruff: noqa: E402
from __future__ import annotations

import os

from workers.agent.blas import choose_kernels

choose_kernels(os.environ)

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import structlog

from workers.agent.process import AgentProcess
from workers.agent.spec import AgentSpec, SpecError, load_spec
from workers.logs import configure_logging

logger = structlog.get_logger("switchyard.agent")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.agent", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="start file (JSON, docs/interfaces.md section 7)")
    arguments = parser.parse_args()
    configure_logging()
    try:
        spec = load_spec(arguments.spec)
        token = os.environ.get(spec.token_env, "")
        if not token:
            raise SpecError(spec.token_env, "expected the agent token in this environment variable")
        asyncio.run(_run(spec, token))
    except SpecError as error:
        print(f"switchyard agent: {error}", file=sys.stderr)
        return 2
    return 0


async def _run(spec: AgentSpec, token: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    process = AgentProcess(spec, token)
    try:
        await process.start()
        logger.info("agent ready", url=process.base_url, nodes=sorted(process.nodes))
        await stop.wait()
    finally:
        await process.close()


if __name__ == "__main__":
    sys.exit(main())
