"""Fixtures of the agent's tests."""

# ruff: noqa: E402
from __future__ import annotations

import os

from workers.agent.blas import choose_kernels

# As in the agent's process, before numpy is imported.
choose_kernels(os.environ)

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

import workers.agent.transport as transport
from tests.agent.reference_support import TOKEN, tiny_spec
from tests.agent.two_agents import Agents
from workers.agent.engines.reference.weights import load_weights
from workers.agent.process import AgentProcess
from workers.agent.spec import AgentSpec


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small random model's weights, made once."""
    folder = tmp_path_factory.mktemp("models")
    load_weights("random", folder)
    return folder


@pytest.fixture
async def agents(tmp_path: Path, models_dir: Path) -> AsyncIterator[Agents]:
    processes = {}
    for node, phase in (("p", "prefill"), ("d", "decode")):
        spec = AgentSpec(data_dir=str(tmp_path), nodes=[tiny_spec(node, phase=phase)], models_dir=str(models_dir))
        processes[node] = AgentProcess(msgspec.convert(msgspec.to_builtins(spec), AgentSpec), TOKEN)
        await processes[node].start()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        yield Agents(processes, session)
    for process in processes.values():
        await process.close()


@pytest.fixture
def other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers' pools cannot be mapped, as on another host."""
    monkeypatch.setattr(transport, "_on_this_host", lambda _pool: False)
