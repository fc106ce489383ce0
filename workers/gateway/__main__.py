"""`python -m workers.gateway --partition P --port N --config-file FILE`: one partition's front door.

Reads REDIS_URL and SWITCHYARD_AGENT_TOKEN from the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import uvloop

from workers.collecting import collect_seldom
from workers.gateway.gateway import Gateway
from workers.gateway.http_api import build_front
from workers.logs import configure_logging


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.gateway", description=__doc__)
    parser.add_argument("--partition", required=True, help="name of the partition to serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--config-file", type=Path, required=True, help="where the last good configuration is kept")
    return parser.parse_args()


async def _run(arguments: argparse.Namespace, token: str, redis_url: str) -> None:
    gateway = Gateway(arguments.partition, arguments.config_file, redis_url, token)
    await gateway.start()
    front = build_front(gateway)
    await front.listen(arguments.host, arguments.port)
    collect_seldom()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    front.stop_listening()
    await gateway.close()
    await front.close()


def main() -> int:
    configure_logging()
    arguments = _arguments()
    token = os.environ.get("SWITCHYARD_AGENT_TOKEN", "")
    if not token:
        print("SWITCHYARD_AGENT_TOKEN: expected the token that node agents know", file=sys.stderr)
        return 2
    redis_url = os.environ.get("REDIS_URL") or "redis://127.0.0.1:6379/0"
    uvloop.run(_run(arguments, token, redis_url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
