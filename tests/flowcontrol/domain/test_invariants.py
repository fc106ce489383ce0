"""Thousands of random events against a plain model, for every pair of policies; `make proof-flow` runs millions."""

from __future__ import annotations

import pytest

from tests.flowcontrol.domain.random_events import FATES, SETTINGS, Run, Setting


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_random_events_keep_every_promise(setting: Setting) -> None:
    counts = Run(7, setting).go(1000, check_every=20)
    assert min(counts[fate] for fate in (*FATES, "dispatched")) > 0, counts
