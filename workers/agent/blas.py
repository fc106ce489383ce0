"""Which BLAS kernels a node's process uses; imported before numpy, and itself free of it."""

from __future__ import annotations

import ctypes
from collections.abc import MutableMapping
from functools import cache
from pathlib import Path

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
SMALL_PRODUCT_KERNELS = frozenset(("SkylakeX", "Cooperlake", "SapphireRapids"))
_AVX512 = frozenset(("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"))


def choose_kernels(environ: MutableMapping[str, str], cpu_info: Path = Path("/proc/cpuinfo")) -> None:
    """Set the BLAS variables of a node's process; numpy must not have been imported yet.

    One thread a node: with more, decode collapses when nodes share cores. OpenBLAS takes AVX2 kernels on processors newer
    than itself; where all of AVX-512 is there, its AVX-512 kernels are twice as fast and have a way for small products that
    the engine builds on (`engines/reference/tiles.py`). `SWITCHYARD_BLAS_KERNELS` names others (an OpenBLAS core type)."""
    for variable in _THREAD_VARIABLES:
        environ[variable] = "1"
    chosen = environ.get("SWITCHYARD_BLAS_KERNELS", "")
    if not chosen and _cpu_flags(cpu_info) >= _AVX512:
        chosen = "SkylakeX"
    if chosen:
        environ["OPENBLAS_CORETYPE"] = chosen


def _cpu_flags(cpu_info: Path) -> frozenset[str]:
    try:
        with cpu_info.open() as lines:
            for line in lines:
                if line.startswith("flags"):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


@cache
def kernel_name() -> str:
    """Name of the OpenBLAS kernels that numpy runs on (`SkylakeX`, `Haswell`, ..), or "unknown". numpy must be imported."""
    try:
        with Path("/proc/self/maps").open() as lines:
            paths = {line.split()[-1] for line in lines if "openblas" in line and "numpy" in line}
        library = ctypes.CDLL(min(paths))
        ask = library.scipy_openblas_get_corename64_
    except (OSError, ValueError, AttributeError):
        return "unknown"
    ask.restype = ctypes.c_char_p
    name: bytes = ask()
    return name.decode("ascii", "replace")
