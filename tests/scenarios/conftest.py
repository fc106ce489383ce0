"""Fixtures of the whole-system scenarios."""

from __future__ import annotations

import os

# As in the agent's process: one BLAS thread, set before numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import pytest

from workers.agent.engines.reference.weights import load_weights


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small random model's weights, made once."""
    folder = tmp_path_factory.mktemp("models")
    load_weights("random", folder)
    return folder
