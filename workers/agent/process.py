"""One agent process: builds the engines and nodes of a start file, then serves them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from aiohttp import web

from workers.agent.engines import build_engine
from workers.agent.engines.base import EngineContext
from workers.agent.node import NodeAgent
from workers.agent.server import build_app, serve
from workers.agent.spec import AgentSpec, SpecError


class AgentProcess:
    """Nodes of one start file behind one port. `start` then `close`; both are for one event loop."""

    def __init__(self, spec: AgentSpec, token: str) -> None:
        self.spec = spec
        self.token = token
        self.port = spec.port or _free_port(spec.host)
        self.base_url = f"http://{spec.host}:{self.port}"
        data_dir = Path(spec.data_dir).absolute()
        data_dir.mkdir(parents=True, exist_ok=True)
        context = EngineContext(
            data_dir=data_dir,
            models_dir=Path(spec.models_dir).absolute() if spec.models_dir else data_dir / "models",
            base_url=self.base_url,
            token=token,
            speed=spec.speed,
            engines={},
        )
        self.nodes: dict[str, NodeAgent] = {}
        for node_spec in spec.nodes:
            engine = build_engine(node_spec, context)
            context.engines[node_spec.name] = engine
            self.nodes[node_spec.name] = NodeAgent(node_spec, engine, data_dir)
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Start every engine, then listen. Raises SpecError where the port is taken or a model cannot be loaded."""
        await asyncio.gather(*(node.start() for node in self.nodes.values()))
        try:
            self._runner, _ = await serve(build_app(self.nodes, self.token), self.spec.host, self.port)
        except OSError as error:
            raise SpecError("port", f"expected a free port, got {self.port} ({error.strerror})") from None

    async def close(self) -> None:
        """Abort all work, stop listening, release pools. Idempotent."""
        await asyncio.gather(*(node.close() for node in self.nodes.values()))
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
