"""Fixtures of the agent's tests."""

# ruff: noqa: E402
from __future__ import annotations

import os

from workers.agent.blas import choose_kernels

# As in the agent's process, before numpy is imported.
choose_kernels(os.environ)

from pathlib import Path

import pytest

from workers.agent.engines.reference.weights import load_weights


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small random model's weights, made once."""
    folder = tmp_path_factory.mktemp("models")
    load_weights("random", folder)
    return folder
