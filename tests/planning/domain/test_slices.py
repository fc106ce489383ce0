"""From load windows to a slice, and what is watched after a switch."""

from dataclasses import replace

import pytest

from apps.planning.domain.capacity import Workload
from apps.planning.domain.slices import LoadPiece, close_slice
from apps.planning.domain.watch import breach, workload_moved

PIECE = LoadPiece(
    t0=0,
    t1=2,
    prefilled=4,
    t_uc=4000,
    pairs=4_000_000,
    t_rst=400,
    prefill_iterations=2,
    finished=2,
    t_out=600,
    decode_iterations_of_finished=300,
    in_flight_s=20,
    prefill_utilisation=0.5,
    decode_utilisation=0.9,
    prefill_waits_s=(0.1, 0.2),
    stale_ratio=0.1,
)


def test_a_slice_averages_per_request_and_over_time():
    later = replace(
        PIECE, t0=2, t1=6, prefilled=0, t_uc=0, pairs=0, t_rst=0, prefill_iterations=0, prefill_utilisation=0.2
    )
    view = close_slice(0, 6, [PIECE, later])
    assert view.workload == Workload(
        t_uc=1000, pairs=1_000_000, t_rst=100, t_out=300, t_acc=2, u_tokens=2000, in_flight=40 / 6
    )
    assert view.rate == pytest.approx(4 / 6)
    assert view.prefill_utilisation == pytest.approx((0.5 * 2 + 0.2 * 4) / 6)
    assert view.prefill_wait_p95_s == 0.2


@pytest.mark.parametrize("missing", ["prefilled", "finished", "t_out"])
def test_a_slice_without_prefills_or_without_finished_requests_is_empty(missing):
    assert close_slice(0, 2, [replace(PIECE, **{missing: 0})]).workload is None
    assert close_slice(0, 2, []).workload is None


def pieces(before=0.5, after=30.0, until=160):
    return [LoadPiece(t0=t, t1=t + 2, prefill_waits_s=(before if t < 100 else after,)) for t in range(60, until, 2)]


def test_waits_over_twice_the_target_for_thirty_seconds_after_a_switch_ask_for_its_undoing():
    assert "over 10.0 s" in breach(140, switched_at=100, slo_ttft_s=5, pieces=pieces())


@pytest.mark.parametrize(
    ("now", "slo_ttft_s", "samples"),
    [
        (125, 5, pieces()),  # not yet thirty seconds
        (221, 5, pieces(until=230)),  # two minutes are over
        (140, None, pieces()),  # no target
        (140, 20, pieces()),  # within twice the target
        (140, 5, pieces(before=30)),  # it was so before the switch
        (140, 5, pieces(until=128)),  # nothing measured in the last ten seconds
    ],
)
def test_nothing_else_does(now, slo_ttft_s, samples):
    assert breach(now, 100, slo_ttft_s, samples) is None


def test_a_workload_that_doubles_has_moved():
    then = close_slice(0, 2, [PIECE]).workload
    assert workload_moved(then, then) is None
    assert "t_out went from 300 to 700" in workload_moved(then, replace(then, t_out=700))
