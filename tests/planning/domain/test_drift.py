"""Drift of the learned model: a lasting change is reported soon, scatter and small or short changes are not."""

import numpy as np
import pytest

from apps.planning.domain.drift import Drift, level, watch


def rows(count, slowness=1.0, noise=0.03, start=0.0, seed=1):
    rng = np.random.default_rng(seed)
    return [(start + 5.0 * i, slowness * float(np.exp(noise * rng.standard_normal()))) for i in range(count)]


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.15])
def test_a_model_that_stays_right_raises_no_alarm_in_a_day_of_windows(noise):
    drift, alarm = watch(Drift(), rows(17_000, noise=noise), noise)
    assert alarm is None
    assert (drift.rows, drift.seen_until) == (17_000, 5.0 * 16_999)


@pytest.mark.parametrize("slowness", [1.25, 0.8])
def test_a_lasting_change_of_a_quarter_is_reported_within_twenty_windows_and_tells_since_when(slowness):
    drift, alarm = watch(Drift(), rows(200), 0.03)
    assert alarm is None
    drift, alarm = watch(drift, rows(40, slowness, start=1000.0, seed=2), 0.03)
    assert alarm is not None
    assert drift.seen_until < 1000.0 + 20 * 5
    assert 990 <= alarm.since <= 1010
    assert alarm.ratio == pytest.approx(slowness, rel=0.05)
    assert ("slower" if slowness > 1 else "faster") in alarm.reason


def test_a_change_too_small_to_move_a_split_is_left_alone():
    assert watch(Drift(), rows(5000, 1.04), 0.03)[1] is None


def test_one_paused_machine_is_no_drift():
    drift, alarm = watch(Drift(), [*rows(50), (250.0, 30.0), *rows(50, start=255.0)], 0.03)
    assert alarm is None
    assert drift.slow == 0 and drift.slow_since is None


def test_counting_goes_on_where_it_stopped():
    together = watch(Drift(), rows(60, 1.1), 0.03)
    first, _ = watch(Drift(), rows(60, 1.1)[:7], 0.03)
    assert watch(first, rows(60, 1.1)[7:], 0.03) == together


def test_the_level_is_the_median_and_says_what_scatter_remains():
    found = level([1.5, 1.5, 1.5, 1.5, 30.0])
    assert (found.ratio, found.rows) == (1.5, 5)
    assert found.error_ratio == pytest.approx(0.95 / 5)
    assert level([slowness for _, slowness in rows(400, 1.3)]).error_ratio == pytest.approx(0.024, abs=0.004)
