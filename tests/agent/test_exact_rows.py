"""Not only tokens: every bit of a row's logits and of its keys and values is the same in any chunk and any batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from workers.agent.blas import choose_kernels, kernel_name
from workers.agent.engines.reference.kv import BlockTable, DeviceKv
from workers.agent.engines.reference.model import LlamaModel, Part
from workers.agent.engines.reference.tiles import DENSE_TILE, project
from workers.agent.engines.reference.weights import load_weights

IDS = np.random.default_rng(5).integers(100, 49000, 300).tolist()


def compute(model: LlamaModel, kv: DeviceKv, table: BlockTable, cuts: list[int]) -> np.ndarray:
    """Logits of the last token when IDS is computed in the chunks that end at `cuts`."""
    start = 0
    for end in cuts:
        logits = model.forward(kv, [Part(table, start, IDS[start:end], end == len(IDS))])
        start = end
    return logits[0].copy()


def held(kv: DeviceKv, table: BlockTable) -> np.ndarray:
    return np.stack([kv.block(table, index) for index in range(len(IDS) // 16)])


def every_way(models_dir: Path) -> set[bytes]:
    """IDS computed in many ways; the distinct results, logits and KV together."""
    weights = load_weights("random", models_dir)
    model, kv = LlamaModel(weights, 512), DeviceKv(weights.config, 16, 2048)
    results = set()
    for step in (300, 128, 64, 37, 16, 1):
        table = kv.allocate(300)
        assert table is not None
        logits = compute(model, kv, table, [*range(step, 300, step), 300])
        results.add(logits.tobytes() + held(kv, table).tobytes())
        kv.release(table)
    scattered = BlockTable(np.arange(38, 0, -2), contiguous=False)
    logits = compute(model, kv, scattered, [100, 299, 300])
    results.add(logits.tobytes() + held(kv, scattered).tobytes())
    return results


def test_chunks_of_any_size_give_the_same_bits(models_dir: Path) -> None:
    assert len(every_way(models_dir)) == 1


def test_a_row_is_the_same_alone_and_anywhere_in_a_batch(models_dir: Path) -> None:
    weights = load_weights("random", models_dir)
    model, kv = LlamaModel(weights, 512), DeviceKv(weights.config, 16, 4096)
    tables = [table for table in (kv.allocate(160) for _ in range(11)) if table is not None]
    lengths = [1, 15, 16, 17, 40, 127, 128, 129, 3, 90, 64]
    for table, length in zip(tables, lengths, strict=True):
        model.forward(kv, [Part(table, 0, IDS[:length], False)])
    parts = [Part(table, length, [IDS[length]], True) for table, length in zip(tables, lengths, strict=True)]
    alone = [model.forward(kv, [part])[0].tobytes() for part in parts]
    for order in ([*range(11)], [*range(10, -1, -1)], [3, 7, 1]):
        together = model.forward(kv, [parts[index] for index in order])
        assert [row.tobytes() for row in together] == [alone[index] for index in order]
    prompt = Part(kv.allocate(60) or tables[0], 0, IDS[:60], True)
    mixed = model.forward(kv, [parts[0], prompt, parts[5]])
    assert (mixed[0].tobytes(), mixed[2].tobytes()) == (alone[0], alone[5])


def test_stale_keys_after_the_context_weigh_nothing(models_dir: Path) -> None:
    weights = load_weights("random", models_dir)
    model, kv = LlamaModel(weights, 512), DeviceKv(weights.config, 16, 320)
    table = kv.allocate(300)
    assert table is not None
    clean = compute(model, kv, table, [300])
    kv._data[...] = 1e4
    assert compute(model, kv, table, [200, 300]).tobytes() == clean.tobytes()


@pytest.mark.parametrize(("outputs", "inputs"), [(7, 64), (200, 96), (640, 128), (49, 1536)])
def test_pieces_of_a_product_make_the_whole(outputs: int, inputs: int) -> None:
    generator = np.random.default_rng(outputs)
    weight = generator.standard_normal((outputs, inputs), dtype=np.float32)
    tiles = generator.standard_normal((3, inputs, DENSE_TILE), dtype=np.float32)
    np.testing.assert_allclose(project(weight, tiles), np.matmul(weight, tiles), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernels", ["Haswell", "SkylakeX"])
def test_other_kernels_are_exact_too(models_dir: Path, kernels: str) -> None:
    """In a process of its own, for BLAS chooses its kernels once. A processor without AVX-512 skips the second."""
    environ = {**os.environ, "SWITCHYARD_BLAS_KERNELS": ""}
    environ.pop("OPENBLAS_CORETYPE", None)
    choose_kernels(environ)
    if kernels == "SkylakeX" and environ.get("OPENBLAS_CORETYPE") != kernels:
        pytest.skip("this processor has no AVX-512")
    environ["OPENBLAS_CORETYPE"] = kernels
    code = (
        "import sys, pathlib; from tests.agent.test_exact_rows import every_way, kernel_name;"
        "print(kernel_name(), len(every_way(pathlib.Path(sys.argv[1]))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(models_dir)],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    name, ways = run.stdout.split()
    assert ways == "1"
    assert name in (kernels, "unknown")


def test_the_kernels_are_known_by_name() -> None:
    assert kernel_name() == "unknown" or kernel_name()[0].isupper()


def test_avx512_processors_get_its_kernels_and_others_keep_theirs(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu avx2 avx512f avx512cd avx512bw avx512dq avx512vl\n")
    environ: dict[str, str] = {}
    choose_kernels(environ, info)
    assert (environ["OPENBLAS_CORETYPE"], environ["OPENBLAS_NUM_THREADS"]) == ("SkylakeX", "1")
    info.write_text("flags\t\t: fpu avx2 avx512f\n")
    environ = {}
    choose_kernels(environ, info)
    assert "OPENBLAS_CORETYPE" not in environ
    choose_kernels(environ, tmp_path / "none")
    environ["SWITCHYARD_BLAS_KERNELS"] = "Zen"
    choose_kernels(environ, info)
    assert environ["OPENBLAS_CORETYPE"] == "Zen"
