"""Capacity of a split against independently computed values."""

import json
from pathlib import Path

import pytest

from apps.planning.domain.capacity import (
    BatchRange,
    NodeCapacity,
    Workload,
    closed_loop_rate,
    decode_rate,
    erlang_wait_ratio,
    prefill_rate,
    prefill_service_s,
    prefill_wait_s,
    split_capacity,
)
from apps.planning.domain.cost_model import DecodeCoefficients, PrefillCoefficients

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "formula_vectors.json").read_text())
EXPECTED = VECTORS["capacity_u8192_rho1_Bcap128"]
PREFILL = PrefillCoefficients(*VECTORS["C_prefill"])
DECODE = DecodeCoefficients(*VECTORS["D_decode"], experts=256, experts_per_token=8, t_fwd=3)
NODE = NodeCapacity(PREFILL, DECODE, batch_limit=128)


def workload(in_flight: float = 70) -> Workload:
    w = EXPECTED["w"]
    # rho = 1: every cached token is restored from host memory.
    return Workload(w["t_uc"], w["A"], w["t_c"], w["t_out"], w["t_acc"], 8192, in_flight)


def test_prefill_service_time_and_rate_match_the_vectors():
    assert prefill_service_s(PREFILL, workload()) == pytest.approx(EXPECTED["svc_prefill_s"], rel=1e-12)
    assert prefill_rate(PREFILL, workload()) == pytest.approx(EXPECTED["mu_P"], rel=1e-12)


@pytest.mark.parametrize("batch", [8, 64])
def test_decode_rate_matches_the_vectors(batch):
    assert decode_rate(NODE, workload(), batch) == pytest.approx(EXPECTED[f"mu_D(B={batch})"], rel=1e-12)


@pytest.mark.parametrize(("prefill", "decode"), [(4, 5), (5, 4)])
def test_theta_matches_the_vectors(prefill, decode):
    theta = split_capacity([NODE] * prefill, [NODE] * decode, workload(70)).theta
    assert theta == pytest.approx(EXPECTED[f"theta({prefill},{decode},q=70)"], rel=1e-12)


def test_a_split_with_an_empty_phase_carries_nothing():
    assert split_capacity([], [NODE] * 9, workload()).theta == EXPECTED["theta(0,9)"] == 0
    assert split_capacity([NODE] * 9, [], workload()).theta == 0


def test_outside_the_fitted_batches_the_estimate_is_clamped_on_the_safe_side_and_flagged():
    fitted = NodeCapacity(PREFILL, DECODE, 128, BatchRange(8, 16))
    assert decode_rate(fitted, workload(), 64) == decode_rate(NODE, workload(), 16)
    assert decode_rate(fitted, workload(), 2) < decode_rate(NODE, workload(), 2)
    assert split_capacity([fitted], [fitted], workload(64)).outside_fit
    assert not split_capacity([fitted], [fitted], workload(12)).outside_fit


def test_erlang_c_of_one_server_is_its_utilisation_and_more_servers_wait_less():
    assert erlang_wait_ratio(1, 0.6) == pytest.approx(0.6)
    assert erlang_wait_ratio(4, 4 * 0.6) < 0.6
    assert erlang_wait_ratio(2, 1.0) == pytest.approx(1 / 3)


def test_predicted_wait_grows_with_load_and_never_exceeds_what_all_requests_in_flight_need():
    waits = [prefill_wait_s(4, rate, 6.0, in_flight=60) for rate in (0, 2, 4, 5.5, 5.99, 7)]
    assert waits == sorted(waits)
    assert waits[0] == 0
    assert waits[-1] == 60 / 6.0


def test_the_closed_loop_stays_under_both_capacities_and_saturates_with_many_agents():
    few = closed_loop_rate([NODE] * 4, [NODE] * 5, workload(), agents=10, think_s=14.1)
    many = closed_loop_rate([NODE] * 4, [NODE] * 5, workload(), agents=4000, think_s=14.1)
    assert few < 10 / 14.1
    assert many == pytest.approx(4 * prefill_rate(PREFILL, workload()), rel=0.02)


@pytest.mark.parametrize(("c", "d"), [(0.0, 0.0), (0.0, 1e308), (1e308, 0.0), (1e308, 1e308)])
def test_coefficients_of_nothing_or_of_everything_break_no_estimate(c, d):
    node = NodeCapacity(PrefillCoefficients(c, c, c, c), DecodeCoefficients(d, 0.0, d), 128)
    assert split_capacity([node], [node], workload()).theta >= 0
    assert closed_loop_rate([node], [node], workload(), agents=10, think_s=1.0) >= 0
