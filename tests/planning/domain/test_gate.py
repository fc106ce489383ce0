"""The gate against independently computed verdicts."""

import json
from pathlib import Path

import pytest

from apps.planning.domain.gate import judge, widened_standard_error

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "formula_vectors.json").read_text())
CASES = VECTORS["gate_base4.0"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_gate_gives_the_verdict_and_the_reason_of_the_vectors(name):
    passed, gain, standard_error, slices, code = CASES[name]["result"]
    result = judge(CASES[name]["gains"], base=4.0)
    assert (result.passed, result.slices, result.code) == (passed, slices, code)
    assert result.gain == (None if gain is None else pytest.approx(gain, rel=1e-9))
    assert result.standard_error == (None if standard_error is None else pytest.approx(standard_error, rel=1e-9))
    assert str(slices) in result.reason or "gain" in result.reason


def test_neighbouring_slices_that_resemble_each_other_widen_the_standard_error():
    expected = VECTORS["se_autocorr"]
    assert widened_standard_error([0] * 5 + [1] * 5) == pytest.approx(tuple(expected["[0,0,0,0,0,1,1,1,1,1]"]))
    assert widened_standard_error([0, 1] * 5) == pytest.approx(tuple(expected["alternating"]))


def test_twice_the_strictness_stops_a_gain_that_only_just_passes():
    gains = CASES["noisy_pass"]["gains"]
    assert judge(gains, 4.0).passed
    assert judge(gains, 4.0, strictness=2.0).passed
    assert not judge(gains, 4.0, strictness=2.2).passed


@pytest.mark.parametrize("wild", [float("nan"), float("inf")])
def test_a_gain_that_is_no_number_is_no_evidence(wild):
    assert judge([1.0] * 4 + [wild] * 6, base=4.0).code == "too_few_slices"
    assert judge([1.0] * 5 + [wild] * 5, base=4.0) == judge([1.0] * 5, base=4.0)
