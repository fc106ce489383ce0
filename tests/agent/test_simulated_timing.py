"""Simulated work takes what the coefficients say."""

from __future__ import annotations

import asyncio
import math

import pytest

from apps.planning.domain.cost_model import DecodeCoefficients, decode_iteration_s, pairs
from tests.agent.simulated_support import GB300, Nodes, elsewhere, in_virtual_time, output, prompt, read
from workers.agent.engines.simulated_timing import timing_of
from workers.agent.spec import SpecError

INSTANT = {"latency_s": 0.0, "kv_bytes_per_token": 1e-6}
"""A network that lets requests start together."""


def iteration_s(batch: int) -> float:
    names = ("d0", "d1", "d2", "experts", "experts_per_token", "t_fwd")
    return decode_iteration_s(DecodeCoefficients(*(GB300[name] for name in names)), batch)  # type: ignore[arg-type]


def iterations_of(output_tokens: int) -> int:
    """Of an output whose first token came from prefill."""
    return math.ceil((output_tokens - 1) / GB300["t_acc"])


def prefill_s(t_uc: int, t_c: int = 0, chunk: int = 8192) -> float:
    work_s = GB300["c1"] * t_uc + GB300["c2"] * pairs(t_uc, t_c) + GB300["c3"] * t_c
    return GB300["c0"] * math.ceil(t_uc / chunk) + work_s


@pytest.mark.parametrize("tokens", [1, 64, 8192, 8193, 100_000])
def test_a_prompt_takes_its_iterations_tokens_and_pairs(tokens: int) -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            loop = asyncio.get_running_loop()
            started = loop.time()
            result = await nodes.one.prefill(prompt("r", tokens))
            assert loop.time() - started == pytest.approx(prefill_s(tokens), rel=1e-6)
            assert result.timings.prefill_s == pytest.approx(prefill_s(tokens), rel=1e-6)
            samples = nodes.sink.of("prefill")
            assert len(samples) == math.ceil(tokens / 8192)
            assert sum(sample.t_uc for sample in samples) == tokens
            assert sum(sample.pairs for sample in samples) == pairs(tokens, 0)
            assert [sample.requests for sample in samples] == [0] * (len(samples) - 1) + [1]

    in_virtual_time(work)


def test_a_cached_prefix_costs_its_restore_and_the_pairs_of_the_new_tokens() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            await nodes.one.prefill(prompt("first", 64_000))
            result = await nodes.one.prefill(prompt("second", 66_000))
            cached = 64_000
            assert (result.cached_tokens, result.computed_tokens) == (cached, 2_000)
            assert result.timings.prefill_s == pytest.approx(prefill_s(2_000, cached), rel=1e-6)
            assert nodes.sink.samples[-1].t_rst == cached

    in_virtual_time(work)


@pytest.mark.parametrize("late_s", [0.0, 0.004])
@pytest.mark.parametrize("batch", [1, 7, 60, 128])
def test_a_batch_decodes_at_the_pace_of_its_size_even_when_timers_are_late(batch: int, late_s: float) -> None:
    async def work() -> None:
        async with Nodes(network=INSTANT) as nodes:
            jobs = [output(f"r{n}", 1_000, 500, elsewhere(1_000)) for n in range(batch)]
            streams = await asyncio.gather(*(read(nodes.one, job) for job in jobs))
            expected_s = iterations_of(500) * iteration_s(batch)
            last = max(streams, key=lambda stream: stream.finished_at)
            assert {stream.tokens for stream in streams} == {499}
            samples = nodes.sink.of("decode")
            whole = [sample for sample in samples if sample.batch == batch]
            assert sum(sample.busy_s for sample in samples) == pytest.approx(expected_s, rel=0.01)
            assert whole[0].busy_s == pytest.approx(iteration_s(batch), rel=1e-9)
            if batch == 1:
                assert last.finished.timings.decode_s == pytest.approx(expected_s, rel=1e-6)

    in_virtual_time(work, late_s)


def test_requests_that_start_together_finish_within_one_per_cent_of_the_model() -> None:
    async def work() -> None:
        async with Nodes(network=INSTANT) as nodes:
            started = asyncio.get_running_loop().time()
            jobs = [output(f"r{n}", 1_000, 2_000, elsewhere(1_000)) for n in range(40)]
            streams = await asyncio.gather(*(read(nodes.one, job) for job in jobs))
            expected_s = iterations_of(2_000) * iteration_s(40)
            for stream in streams:
                assert stream.finished_at - started == pytest.approx(expected_s, rel=0.01)

    in_virtual_time(work)


def test_a_request_that_joins_slows_the_others_from_the_next_iteration_on() -> None:
    async def work() -> None:
        async with Nodes(coefficients={"t_acc": 1.0}) as nodes:
            first = asyncio.create_task(read(nodes.one, output("a", 640, 101, elsewhere(640))))
            await asyncio.sleep(0.1)
            second = asyncio.create_task(read(nodes.one, output("b", 640, 31, elsewhere(640))))
            long, short = await first, await second
            together = sum(sample.batch == 2 for sample in nodes.sink.of("decode"))
            assert together == 30
            expected_s = 70 * iteration_s(1) + 30 * iteration_s(2)
            assert long.finished.timings.decode_s == pytest.approx(expected_s, rel=1e-6)
            waited_for_boundary_s = short.finished.timings.decode_s - 30 * iteration_s(2)
            assert 0 <= waited_for_boundary_s <= iteration_s(1)

    in_virtual_time(work)


def test_every_iteration_is_reported_with_its_batch_and_ends() -> None:
    async def work() -> None:
        async with Nodes() as nodes:
            await asyncio.gather(*(read(nodes.one, output(f"r{n}", 640, 45, elsewhere(640))) for n in range(3)))
            samples = nodes.sink.of("decode")
            assert sum(sample.batch for sample in samples) == 3 * iterations_of(45)
            assert sum(sample.requests for sample in samples) == 3
            assert all(sample.t_uc == sample.batch * 4 and sample.t_rst == 0 for sample in samples)
            assert samples[0].pairs >= 640

    in_virtual_time(work)


def test_prefill_and_decode_take_turns_on_a_mixed_node() -> None:
    async def work() -> None:
        async with Nodes(limits={"prefill_chunk_tokens": 1000}) as nodes:
            decoding = asyncio.create_task(read(nodes.one, output("d", 640, 400, elsewhere(640))))
            await asyncio.sleep(0.5)
            await nodes.one.prefill(prompt("p", 5_000, first_id=5_000))
            phases = [sample.phase for sample in nodes.sink.samples]
            first = phases.index("prefill")
            during = phases[first : len(phases) - 1 - phases[::-1].index("prefill") + 1]
            assert during.count("prefill") == 5
            assert "prefill prefill" not in " ".join(during)
            stream = await decoding
            chunk_s = sum(sample.busy_s for sample in nodes.sink.of("prefill"))
            expected_s = iterations_of(400) * iteration_s(1) + chunk_s
            assert stream.finished.timings.decode_s == pytest.approx(expected_s, rel=1e-6)

    in_virtual_time(work)


def test_at_speed_four_everything_takes_a_quarter() -> None:
    async def work() -> None:
        async with Nodes(("n1", "n2"), speed=4.0) as nodes:
            result = await nodes["n1"].prefill(prompt("r", 10_000, max_tokens=200))
            assert result.timings.prefill_s == pytest.approx(prefill_s(10_000) / 4, rel=1e-6)
            assert sum(sample.busy_s for sample in nodes.sink.samples) == pytest.approx(prefill_s(10_000) / 4, rel=1e-6)
            stream = await read(nodes["n2"], output("r", 10_000, 200, result.handoff))
            assert stream.finished.timings.fetch_s == pytest.approx((0.002 + 10_000 * 50_000 / 40e9) / 4, rel=1e-6)
            assert stream.finished.timings.decode_s == pytest.approx(iterations_of(200) * iteration_s(1) / 4, rel=1e-6)

    in_virtual_time(work)


async def test_on_the_real_clock_a_batch_is_within_one_per_cent_of_the_model() -> None:
    """A busy machine may delay one try; it may not delay all of them."""
    errors = []
    for _ in range(4):
        async with Nodes(network=INSTANT) as nodes:
            jobs = [output(f"r{n}", 1_000, 120, elsewhere(1_000)) for n in range(8)]
            started = asyncio.get_running_loop().time()
            streams = await asyncio.gather(*(read(nodes.one, job) for job in jobs))
            took_s = max(stream.finished_at for stream in streams) - started
            errors.append(abs(took_s / (iterations_of(120) * iteration_s(8)) - 1))
        if errors[-1] < 0.01:
            return
    raise AssertionError(f"errors of all tries: {errors}")


@pytest.mark.parametrize(
    ("section", "change", "field"),
    [
        ("coefficients", {"c1": -1}, "coefficients.c1"),
        ("coefficients", {"d0": float("nan")}, "coefficients.d0"),
        ("coefficients", {"t_acc": 0}, "coefficients.t_acc"),
        ("coefficients", {"c0": 0, "c1": 0}, "coefficients.c1"),
        ("coefficients", {"d0": 0, "d1": 0, "d2": 0}, "coefficients.d0"),
        ("network", {"peer_bandwidth_bytes_s": 0}, "network.peer_bandwidth_bytes_s"),
    ],
)
def test_impossible_figures_are_refused_by_name(section: str, change: dict[str, float], field: str) -> None:
    spec = Nodes(**{section: change}).spec("n1")
    with pytest.raises(SpecError, match=f"nodes.n1.{field}: expected"):
        timing_of(spec, 1.0)


def test_a_missing_coefficient_is_refused_by_name() -> None:
    spec = Nodes().spec("n1")
    spec.coefficients.pop("d2")
    with pytest.raises(SpecError, match=r"nodes\.n1\.coefficients\.d2: expected a number"):
        timing_of(spec, 1.0)
