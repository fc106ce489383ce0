"""Learning the cost model: known coefficients are found again from noisy windows, and doubts are said aloud."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apps.planning.domain.capacity import NodeCapacity, Workload, decode_rate, split_capacity
from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients, decode_iteration_s, prefill_work_s
from apps.planning.domain.fitting import Fit, FitWindow, NotEnough, fit_decode, fit_prefill

PREFILL = PrefillCoefficients(0.015, 5e-5, 4e-10, 2e-7)
DECODE = DecodeCoefficients(0.005, 0.01713, 0.000358, experts=256, experts_per_token=8, t_fwd=3)
DENSE = DecodeCoefficients(0.03, 0.0, 0.012)


def prefill_windows(count, noise=0.0, seed=1, chunk=None, restores=True):
    rng = np.random.default_rng(seed)
    windows = []
    for _ in range(count):
        iterations = int(rng.integers(2, 30))
        t_uc = iterations * chunk if chunk else int(rng.integers(500, 60_000))
        pairs = int(t_uc * rng.integers(1000, 150_000))
        t_rst = int(rng.integers(0, 1_500_000)) if restores else 0
        busy = prefill_work_s(PREFILL, t_uc, pairs, t_rst, iterations) * (1 + noise * rng.standard_normal())
        windows.append(FitWindow(iterations, t_uc, pairs, t_rst, busy))
    return windows


def decode_windows(count, low, high, noise=0.0, seed=2, model=DECODE):
    rng = np.random.default_rng(seed)
    windows = []
    for _ in range(count):
        counts = {}
        middle = int(rng.integers(low, high + 1))
        for _ in range(60):
            batch = int(np.clip(middle + rng.integers(-2, 3), low, high))
            counts[batch] = counts.get(batch, 0) + 1
        busy = sum(n * decode_iteration_s(model, b) for b, n in counts.items()) * (1 + noise * rng.standard_normal())
        windows.append(FitWindow(decode_iterations=60, batch_counts=tuple(counts.items()), busy_decode_s=busy))
    return windows


def worst_decode_error(fit, batches, model=DECODE):
    learned = DecodeCoefficients(
        **fit.coefficients, experts=model.experts, experts_per_token=model.experts_per_token, t_fwd=model.t_fwd
    )
    return max(abs(decode_iteration_s(learned, b) / decode_iteration_s(model, b) - 1) for b in batches)


def test_noiseless_windows_give_the_coefficients_back():
    prefill, decode = fit_prefill(prefill_windows(40)), fit_decode(decode_windows(40, 1, 64), DECODE)
    assert prefill.coefficients == pytest.approx({"c0": 0.015, "c1": 5e-5, "c2": 4e-10, "c3": 2e-7}, rel=1e-6)
    assert decode.coefficients == pytest.approx({"d0": 0.005, "d1": 0.01713, "d2": 0.000358}, rel=1e-6)
    assert prefill.error_ratio < 1e-9 and not prefill.warnings


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_three_percent_noise_gives_predictions_within_three_percent(seed):
    prefill = fit_prefill(prefill_windows(60, 0.03, seed))
    learned = PrefillCoefficients(**prefill.coefficients)
    errors = [
        abs(prefill_work_s(learned, w.t_uc, w.pairs, w.t_rst, w.prefill_iterations) / w.busy_prefill_s - 1)
        for w in prefill_windows(50, 0.0, seed=99)
    ]
    assert np.mean(errors) < 0.03
    decode = fit_decode(decode_windows(60, 1, 64, 0.03, seed), DECODE)
    assert worst_decode_error(decode, range(4, 65, 4)) < 0.03
    assert decode.usable and (decode.batch_range.low, decode.batch_range.high) == (1, 64)


def test_a_narrow_range_of_batches_merges_what_cannot_be_told_apart_and_keeps_the_range():
    fit = fit_decode(decode_windows(60, 28, 32, 0.03), DECODE)
    assert fit.condition > 1e3
    assert fit.merged
    assert any("moved together" in warning for warning in fit.warnings)
    assert (fit.batch_range.low, fit.batch_range.high) == (28, 32)
    assert worst_decode_error(fit, range(28, 33)) < 0.03


def test_a_constant_batch_is_fitted_as_one_number_in_the_believed_proportion():
    slower = DecodeCoefficients(0.01, 0.03426, 0.000716, 256, 8, 3)
    fit = fit_decode(decode_windows(40, 16, 16), slower)
    assert fit.merged == (("d0", "d1", "d2"),)
    assert fit.coefficients == pytest.approx({"d0": 0.005, "d1": 0.01713, "d2": 0.000358}, rel=1e-6)


def test_a_fixed_chunk_merges_iterations_with_tokens():
    fit = fit_prefill(prefill_windows(60, chunk=4096), PREFILL)
    assert fit.merged == (("c0", "c1"),)


def test_a_dense_model_has_no_expert_term_and_no_complaint_about_it():
    fit = fit_decode(decode_windows(40, 1, 8, model=DENSE), DENSE)
    assert fit.coefficients == pytest.approx({"d0": 0.03, "d1": 0.0, "d2": 0.012}, rel=1e-6, abs=1e-12)
    assert not fit.warnings


def test_work_that_never_happened_keeps_its_believed_coefficient_and_is_named():
    fit = fit_prefill(prefill_windows(40, restores=False), PREFILL)
    assert fit.coefficients["c3"] == PREFILL.c3
    assert fit.unidentified == ("c3",)


def test_too_few_windows_are_refused_with_the_number_needed():
    result = fit_prefill(prefill_windows(19))
    assert result == NotEnough(19, 20)
    assert "20 are needed" in result.reason
    assert isinstance(fit_prefill(prefill_windows(20)), Fit)
    assert fit_prefill([]) == NotEnough(0, 5)


def test_a_fit_that_misses_by_more_than_fifteen_percent_is_not_usable():
    fit = fit_prefill(prefill_windows(60, 0.03))
    assert fit.usable
    rng = np.random.default_rng(0)
    wild = [
        FitWindow(w.prefill_iterations, w.t_uc, w.pairs, w.t_rst, w.busy_prefill_s * rng.uniform(0.3, 3))
        for w in prefill_windows(60)
    ]
    bad = fit_prefill(wild)
    assert not bad.usable
    assert any("not used for planning" in warning for warning in bad.warnings)


# -- what goes with a fit --------------------------------------------------------------------------------------------


def on_nodes(windows, names, slower=None):
    """The windows dealt to nodes in turn; `slower` makes the rows of one node that much slower."""
    name, factor = slower or ("", 1.0)
    dealt = []
    for index, window in enumerate(windows):
        node = names[index % len(names)]
        busy = factor if node == name else 1.0
        dealt.append(
            replace(
                window,
                node=node,
                t0=5.0 * index,
                busy_prefill_s=window.busy_prefill_s * busy,
                busy_decode_s=window.busy_decode_s * busy,
            )
        )
    return dealt


def test_a_quarter_is_held_out_of_every_node_in_its_turn():
    fit = fit_prefill(on_nodes(prefill_windows(80, 0.03), ("a", "b", "c", "d")))
    held = [residual.node for residual in fit.residuals if residual.held_out]
    assert len(held) == 20
    assert all(4 <= held.count(name) <= 6 for name in "abcd")


def test_the_residuals_say_what_was_measured_and_what_the_fit_makes_of_it():
    windows = on_nodes(prefill_windows(60, 0.03), ("a",))
    fit = fit_prefill(windows)
    assert [residual.measured_s for residual in fit.residuals] == [window.busy_prefill_s for window in windows]
    held = [abs(r.predicted_s / r.measured_s - 1) for r in fit.residuals if r.held_out]
    assert fit.error_ratio == pytest.approx(np.mean(held))
    assert fit.deviation == pytest.approx(0.03, rel=0.3)


def test_the_range_of_each_column_is_kept():
    windows = prefill_windows(60)
    fit = fit_prefill(windows)
    per_iteration = [window.t_uc / window.prefill_iterations for window in windows]
    assert fit.columns["c1"].low == pytest.approx(min(per_iteration))
    assert fit.columns["c1"].high == pytest.approx(max(per_iteration))


def test_nodes_that_share_a_fit_share_its_coefficients_and_an_odd_one_is_named_with_its_own_speed():
    pooled = fit_decode(on_nodes(decode_windows(80, 1, 64, 0.03), ("a", "b", "c", "d")), DECODE)
    assert pooled.odd_nodes == {}
    odd = fit_decode(on_nodes(decode_windows(80, 1, 64, 0.02), ("a", "b", "c", "d"), ("c", 1.4)), DECODE)
    assert list(odd.odd_nodes) == ["c"]
    assert odd.odd_nodes["c"] == pytest.approx(1.4, rel=0.12)
    assert any("c is" in warning and "slower than its class" in warning for warning in odd.warnings)


# The independent computation's figures (formula_vectors.json), for windows drawn as there: B in the range, 3 % noise.
EXPECTED = json.loads((Path(__file__).parents[2] / "data" / "formula_vectors.json").read_text())["nnls_expectations"]


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("good: B 1..64, 60 windows, 3% noise", decode_windows(60, 1, 64, 0.03)),
        ("few: 12 windows", decode_windows(16, 1, 64, 0.03)),
        ("narrow: B 28..32", decode_windows(60, 28, 32, 0.03)),
        ("const: B = 16", decode_windows(60, 16, 16, 0.03)),
        ("10% noise, 60", decode_windows(60, 1, 64, 0.10)),
        ("noiseless", decode_windows(60, 1, 64)),
    ],
)
def test_predictions_in_the_fitted_range_are_as_near_as_an_independent_fit_gets(name, windows):
    fit = fit_decode(windows, DECODE)
    batches = range(int(fit.batch_range.low), int(fit.batch_range.high) + 1)
    learned = DecodeCoefficients(**fit.coefficients, experts=256, experts_per_token=8, t_fwd=3)
    errors = [abs(decode_iteration_s(learned, b) / decode_iteration_s(DECODE, b) - 1) for b in batches]
    assert np.mean(errors) <= 2.5 * EXPECTED[name]["mape_in_range"] + 0.005
    assert bool(fit.merged) == (EXPECTED[name]["cond_scaled"] > 1e3)


def test_a_fit_on_narrow_batches_is_clamped_and_flagged_by_the_capacity_beyond_them():
    fit = fit_decode(decode_windows(60, 28, 32, 0.03), DECODE)
    learned = DecodeCoefficients(**fit.coefficients, experts=256, experts_per_token=8, t_fwd=3)
    node = NodeCapacity(PREFILL, learned, 128, fit.batch_range)
    load = Workload(5268, 804078546, 0, 848, 2.15, 8192, in_flight=90)
    inside = split_capacity([node], [node] * 3, load)
    beyond = split_capacity([node], [node], load)
    assert not inside.outside_fit
    assert beyond.outside_fit
    assert beyond.decode == pytest.approx(decode_rate(node, load, 32)), "no more than was seen is believed"
