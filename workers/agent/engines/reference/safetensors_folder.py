"""A model as a folder of `config.json` and `*.safetensors` files, as published for `transformers`: Llama and its kin.

The format is read directly: eight bytes with the length of a JSON header, the header, then the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.agent.engines.reference.gguf_file import ModelFileError

Floats = npt.NDArray[np.float32]
_MODEL_TYPES = ("llama", "mistral", "smollm")
_MAX_HEADER_BYTES = 100_000_000


class SafetensorsFolder:
    """The tensors and the configuration of one folder. Raises ModelFileError for what the engine does not run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json")
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelFileError(f"{path}: expected *.safetensors files")
        self._tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for file in files:
            start, header = _read_header(file)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._tensors[name] = (file, start, entry)
        self._files = files
        self._check()

    def _check(self) -> None:
        config = self.config
        if config.get("model_type") not in _MODEL_TYPES:
            known = ", ".join(_MODEL_TYPES)
            raise ModelFileError(f"{self.path}: expected model_type {known}, got {config.get('model_type')!r}")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelFileError(f"{self.path}: expected hidden_act silu, got {config['hidden_act']!r}")
        if config.get("sliding_window"):
            raise ModelFileError(f"{self.path}: sliding_window is not supported")
        if any(name.endswith(".bias") for name in self._tensors):
            raise ModelFileError(f"{self.path}: biases are not supported")

    @property
    def digest(self) -> str:
        """sha256 of the configuration and of all weights."""
        digest = hashlib.sha256()
        for file in [self.path / "config.json", *self._files]:
            with file.open("rb") as opened:
                digest.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
        return digest.hexdigest()

    @property
    def tied(self) -> bool:
        return "lm_head.weight" not in self._tensors

    def number(self, name: str, default: Any = None) -> Any:
        """A number of the configuration. Raises ModelFileError where it is missing."""
        value = self.config.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFileError(f"{self.path / 'config.json'}: {name}: expected a number, got {value!r}")
        return value

    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, by the configuration and by the generation defaults beside it."""
        generation = self.path / "generation_config.json"
        documents = [self.config, _read_json(generation) if generation.is_file() else {}]
        ends: set[int] = set()
        for document in documents:
            value = document.get("eos_token_id")
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(sorted(ends))

    def rope_factors(self, half: int, base: float) -> Floats:
        """What each rotary frequency is divided by: 1, or the stretch of Llama 3.1 and its kin."""
        scaling: dict[str, Any] = self.config.get("rope_scaling") or {}
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in (None, "default"):
            return np.ones(half, np.float32)
        if kind == "linear":
            return np.full(half, scaling["factor"], np.float32)
        if kind != "llama3":
            raise ModelFileError(f"{self.path}: rope_scaling {kind!r} is not supported")
        factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        original = float(scaling["original_max_position_embeddings"])
        wavelengths = 2 * math.pi * base ** (np.arange(half) / half)
        smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        factors: Floats = (1.0 / ((1 - smooth) / factor + smooth)).astype(np.float32)
        return factors

    def read(self, name: str) -> Floats:
        """One tensor as float32."""
        if name not in self._tensors:
            raise ModelFileError(f"{self.path}: tensor {name} is missing")
        file, start, entry = self._tensors[name]
        begin, end = entry["data_offsets"]
        with file.open("rb") as opened:
            opened.seek(start + begin)
            data = opened.read(end - begin)
        kind = entry["dtype"]
        if kind == "BF16":
            wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
            values: Floats = wide.view(np.float32)
        elif kind in ("F32", "F16"):
            values = np.frombuffer(data, "<f4" if kind == "F32" else "<f2").astype(np.float32)
        else:
            raise ModelFileError(f"{file}: {name}: expected F32, F16 or BF16, got {kind!r}")
        if values.size != math.prod(entry["shape"]):
            raise ModelFileError(f"{file}: {name}: the file ends early")
        return values.reshape(entry["shape"])

    def tensors(self, layers: int, half: int, base: float) -> Iterator[tuple[str, Floats]]:
        """All tensors under the names and in the layout of the weights file."""
        yield "embedding", self.read("model.embed_tokens.weight")
        if not self.tied:
            yield "head", self.read("lm_head.weight")
        yield "norm", self.read("model.norm.weight")
        yield "rope_factors", self.rope_factors(half, base)
        for index in range(layers):
            attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
            yield f"{index}.attention_norm", self.read(f"model.layers.{index}.input_layernorm.weight")
            yield f"{index}.qkv", np.concatenate([self.read(f"{attention}.{part}_proj.weight") for part in "qkv"])
            yield f"{index}.output", self.read(f"{attention}.o_proj.weight")
            yield f"{index}.mlp_norm", self.read(f"model.layers.{index}.post_attention_layernorm.weight")
            parts = [self.read(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")]
            yield f"{index}.gate_up", np.concatenate(parts)
            yield f"{index}.down", self.read(f"{mlp}.down_proj.weight")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise ModelFileError(f"{path}: expected a readable file ({error.strerror})") from None
    except ValueError as error:
        raise ModelFileError(f"{path}: expected JSON ({error})") from None
    if not isinstance(document, dict):
        raise ModelFileError(f"{path}: expected a JSON object")
    return document


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors of a file begin, and its header."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ModelFileError(f"{path}: no safetensors file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelFileError(f"{path}: expected a readable file ({error.strerror})") from None
    except ValueError:
        raise ModelFileError(f"{path}: no safetensors file") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path}: no safetensors file")
    return 8 + length, header
