from __future__ import annotations

import json
from pathlib import Path

import pytest

from apps.planning.domain.cost_model import (
    DecodeCoefficients,
    NetworkProfile,
    PrefillCoefficients,
    decode_iteration_s,
    fetch_s,
    pairs,
    phi,
    prefill_iteration_s,
    prefill_work_s,
)

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "formula_vectors.json").read_text())
PREFILL = PrefillCoefficients(*VECTORS["C_prefill"])
NETWORK = NetworkProfile(51200, 40e9, 200e9, 0.002)


@pytest.mark.parametrize(("t_uc", "t_c", "expected"), VECTORS["pairs_[t_uc,t_c,A]"])
def test_pairs_match_the_vectors(t_uc, t_c, expected):
    assert pairs(t_uc, t_c) == expected


def test_chunks_have_the_same_pairs_as_the_whole():
    assert pairs(300, 700) + pairs(77, 1000) + pairs(623, 1077) == pairs(1000, 700)


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("one(5268,150000,0)", [(5268, 150000, 0)]),
        ("one(5268,150000,150000)", [(5268, 150000, 150000)]),
        ("two[(100,0,0),(50,1000,1000)]", [(100, 0, 0), (50, 1000, 1000)]),
        ("empty", []),
    ],
)
def test_a_prefill_iteration_takes_the_seconds_of_the_vectors(name, requests):
    assert prefill_iteration_s(PREFILL, requests) == pytest.approx(VECTORS["prefill_iteration_s"][name], rel=1e-12)


def test_several_iterations_pay_the_fixed_cost_each():
    once, thrice = (prefill_work_s(PREFILL, 100, 5050, 0, iterations) for iterations in (1, 3))
    assert thrice - once == pytest.approx(2 * PREFILL.c0)


@pytest.mark.parametrize("t_fwd", [1, 3])
def test_the_share_of_experts_matches_the_vectors(t_fwd):
    for batch, expected in VECTORS["phi_k8_E256"][f"t_fwd={t_fwd}"].items():
        assert phi(int(batch), 256, 8, t_fwd) == pytest.approx(expected, abs=1e-8)


def test_a_dense_model_touches_no_experts():
    assert phi(64, 0, 0) == 0.0


def test_a_decode_iteration_takes_the_seconds_of_the_vectors():
    coefficients = DecodeCoefficients(*VECTORS["D_decode"], experts=256, experts_per_token=8, t_fwd=3)
    for batch, expected in VECTORS["decode_iteration_s_k8_E256_tfwd3"].items():
        assert decode_iteration_s(coefficients, int(batch)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tokens", [(16384, 16384, 0), (150000, 150000, 300000), (0, 0, 9)])
def test_a_fetch_takes_the_seconds_of_the_vectors(tokens):
    expected = VECTORS["ttft_s"]["fetch_time({},{},{})".format(*tokens)]
    assert fetch_s(*tokens, NETWORK) == pytest.approx(expected, rel=1e-12)
