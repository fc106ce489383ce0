"""Parts of the reference engine: sampler, device KV, scheduler, weights file."""

from __future__ import annotations

import multiprocessing
from array import array
from pathlib import Path

import numpy as np
import pytest

from workers.agent.engines.base import Sampling
from workers.agent.engines.reference.gguf_file import ModelFileError
from workers.agent.engines.reference.kv import DeviceKv
from workers.agent.engines.reference.model import LlamaModel, Part
from workers.agent.engines.reference.sampler import sample
from workers.agent.engines.reference.scheduler import MAX_OVERTAKES, Scheduler
from workers.agent.engines.reference.tasks import Task
from workers.agent.engines.reference.weights import load_weights, random_config

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def draw(sampling: Sampling, draws: int = 400) -> dict[int, float]:
    """Share of each token over many positions."""
    tokens = [sample(LOGITS, sampling, "r", [0] * position, position)[0] for position in range(draws)]
    return {token: tokens.count(token) / draws for token in sorted(set(tokens))}


def test_greedy_takes_the_most_likely_token() -> None:
    assert draw(Sampling(temperature=0.0), 5) == {0: 1.0}


def test_a_drawn_token_follows_its_probability() -> None:
    shares = draw(Sampling(temperature=1.0, seed=1), 2000)
    assert shares == pytest.approx({0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}, abs=0.04)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=1.0, seed=1, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, seed=1, top_p=0.5), {0}),
        (Sampling(temperature=1.0, seed=1, top_p=0.79), {0, 1}),
        (Sampling(temperature=1.0, seed=1, top_p=0.81), {0, 1, 2}),
        (Sampling(temperature=1.0, seed=1, min_p=0.25), {0, 1, 2}),
        (Sampling(temperature=0.01, seed=1), {0}),
    ],
)
def test_limits_leave_out_unlikely_tokens(sampling: Sampling, allowed: set[int]) -> None:
    assert set(draw(sampling)) == allowed


def test_draws_depend_on_seed_and_position_alone() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    assert [sample(LOGITS, sampling, "a", [0] * at, at) for at in range(20)] == [
        sample(LOGITS, sampling, "b", [0] * at, at) for at in range(20)
    ]
    without = Sampling(temperature=1.0)
    assert [sample(LOGITS, without, "a", [0] * at, at) for at in range(20)] != [
        sample(LOGITS, without, "b", [0] * at, at) for at in range(20)
    ]


def test_log_probabilities_come_with_the_token() -> None:
    token, logprob = sample(LOGITS, Sampling(logprobs=2), "r", [], 0)
    assert token == 0
    assert logprob is not None
    assert logprob.logprob == pytest.approx(np.log(0.5), abs=1e-5)
    assert [entry[0] for entry in logprob.top] == [0, 1]


@pytest.mark.parametrize(
    ("sampling", "ids", "prompt_tokens", "chosen"),
    [
        (Sampling(presence_penalty=0.6), [0, 0], 2, 0),
        (Sampling(presence_penalty=0.6), [9, 0], 1, 1),
        (Sampling(frequency_penalty=0.3), [9, 0], 1, 0),
        (Sampling(frequency_penalty=0.3), [9, 0, 0], 1, 1),
        (Sampling(presence_penalty=0.6, output_from=1), [9, 0], 2, 1),
        (Sampling(repetition_penalty=2.0), [0], 1, 1),
        (Sampling(repetition_penalty=2.0), [1], 1, 0),
        (Sampling(repetition_penalty=2.0), [0, 1], 1, 0),
    ],
)
def test_penalties_count_what_was_said(sampling: Sampling, ids: list[int], prompt_tokens: int, chosen: int) -> None:
    logits = np.concatenate([LOGITS, np.full(6, -9, np.float32)])
    token, _ = sample(logits, sampling, "r", ids, prompt_tokens)
    assert token == chosen


def test_log_probabilities_are_the_models_own_whatever_the_penalty() -> None:
    token, logprob = sample(LOGITS, Sampling(logprobs=1, presence_penalty=2.0), "r", [0], 0)
    assert token == 1
    assert logprob is not None
    assert logprob.logprob == pytest.approx(np.log(0.3), abs=1e-5)
    assert logprob.top[0][0] == 0


def device(blocks: int) -> DeviceKv:
    return DeviceKv(random_config(), 16, 16 * blocks)


def test_device_blocks_are_neighbours_where_possible_and_never_shared() -> None:
    kv = device(6)
    first, second = kv.allocate(32), kv.allocate(17)
    assert first is not None and second is not None
    assert first.contiguous and second.contiguous
    kv.release(first)
    scattered = kv.allocate(64)
    assert scattered is not None and not scattered.contiguous
    assert set(scattered.blocks) & set(second.blocks) == set()
    assert kv.allocate(1) is None
    kv.release(scattered)
    with pytest.raises(ValueError, match="twice"):
        kv.release(scattered)


def task(name: str, stage: str = "prefill", tokens: int = 40, ready: bool = True) -> Task:
    return Task(
        stage=stage,  # type: ignore[arg-type]
        request_id=name,
        ids=array("I", range(tokens)),
        wanted=tokens,
        chain=b"",
        sampling=Sampling(),
        reserve_tokens=tokens,
        emit=lambda _: None,
        enqueued_at=0.0,
        prompt_blocks=tokens // 16,
        prompt_tokens=tokens,
        ready=ready,
    )


def admitted(scheduler: Scheduler) -> list[str]:
    names = []
    while (found := scheduler.admit()) is not None:
        names.append(found.request_id)
    return names


def test_prompts_run_in_order_and_fill_the_chunk_together() -> None:
    scheduler = Scheduler(device(64), 8, 64)
    for name in ("a", "b", "c"):
        scheduler.add(task(name))
    assert admitted(scheduler) == ["a", "b"], "the third would not fit into the next chunk"
    chunks = scheduler.next_chunks()
    assert [(chunk.task.request_id, chunk.start, chunk.end) for chunk in chunks] == [("a", 0, 40), ("b", 0, 24)]


def test_a_fetching_prompt_is_overtaken_but_not_for_ever() -> None:
    scheduler = Scheduler(device(512), 8, 10_000)
    slow = task("slow", ready=False)
    scheduler.add(slow)
    for index in range(MAX_OVERTAKES + 3):
        scheduler.add(task(f"t{index}"))
    assert len(admitted(scheduler)) == MAX_OVERTAKES
    slow.ready = True
    assert admitted(scheduler)[0] == "slow"


def test_outputs_are_limited_by_batch_and_device_and_freed_at_once() -> None:
    scheduler = Scheduler(device(7), 3, 64)
    tasks = [task(name, "decode") for name in ("a", "b", "c")]
    for entry in tasks:
        scheduler.add(entry)
    assert admitted(scheduler) == ["a", "b"], "three blocks each"
    scheduler.check_integrity()
    scheduler.remove(tasks[0])
    assert admitted(scheduler) == ["c"]
    scheduler.check_integrity()
    for entry in tasks:
        scheduler.remove(entry)
    assert scheduler.tasks() == []
    scheduler.check_integrity()


def test_a_batch_computes_the_same_as_its_requests_one_by_one(models_dir: Path) -> None:
    weights = load_weights("random", models_dir)
    model, kv = LlamaModel(weights, 256), DeviceKv(weights.config, 16, 1024)
    prompts = [[5, 9, 11], [77], list(range(100, 140)), [3] * 17, [900, 901]]
    tables = [kv.allocate(48) for _ in prompts]
    together = model.forward(
        kv, [Part(t, 0, ids, True) for t, ids in zip(tables, prompts, strict=True) if t is not None]
    )
    alone = [
        model.forward(kv, [Part(t, 0, ids, True)])[0] for t, ids in zip(tables, prompts, strict=True) if t is not None
    ]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-4, atol=1e-3)


def test_attention_never_looks_ahead(models_dir: Path) -> None:
    weights = load_weights("random", models_dir)
    model, kv = LlamaModel(weights, 256), DeviceKv(weights.config, 16, 64)
    table = kv.allocate(32)
    assert table is not None
    short = model.forward(kv, [Part(table, 0, [5, 6, 7], True)])
    keys = kv.block(table, 0)[:, :, :, :3].copy()
    model.forward(kv, [Part(table, 0, [5, 6, 7, 8, 9], True)])
    np.testing.assert_allclose(kv.block(table, 0)[:, :, :, :3], keys, rtol=1e-4, atol=1e-4)
    assert short.shape == (1, weights.config.vocabulary)


def _fingerprint(folder: str) -> bytes:
    return load_weights("random", Path(folder), seed=3).fingerprint


def test_processes_that_start_together_make_one_weights_file(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        first, second = processes.map(_fingerprint, [str(tmp_path)] * 2)
    assert first == second
    assert [path.name for path in tmp_path.glob("*.f32")] == ["random-3.f32"]
    assert not list(tmp_path.glob("*.new"))


def test_other_numbers_have_another_fingerprint(models_dir: Path, tmp_path: Path) -> None:
    assert load_weights("random", models_dir).fingerprint != load_weights("random", tmp_path, seed=1).fingerprint


def test_a_broken_or_missing_weights_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "random-0.f32").write_bytes(b"x" * 100)
    with pytest.raises(ModelFileError, match="delete it"):
        load_weights("random", tmp_path)
    with pytest.raises(ModelFileError, match="GGUF file"):
        load_weights(str(tmp_path / "no.gguf"), tmp_path)
