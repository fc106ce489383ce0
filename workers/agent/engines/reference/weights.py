"""Weights as one float32 file that all nodes of a data folder map into memory and so share.

A model file is dequantised once: under a lock, into a temporary file, renamed when complete. Matrices lie as
`[outputs, inputs]` with query, key and value (and gate and up) side by side; rotary halves are apart, not interleaved.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.agent.engines.reference.gguf_file import (
    ModelFileError,
    default_model_path,
    read_metadata,
    read_tensor_names,
)
from workers.agent.engines.reference.safetensors_folder import SafetensorsFolder
from workers.agent.engines.reference.tokenizer import end_token_ids

Floats = npt.NDArray[np.float32]
_MAGIC = b"SWYWGT02"
_FORMER_MAGIC = b"SWYWGT01"
_ALIGN = 64
RANDOM_VOCABULARY = 49152


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-architecture model. `width` is the hidden size, `hidden` the feed-forward size; `tied`: the
    embedding is the output matrix too."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float
    end_token_ids: tuple[int, ...]
    tied: bool = True

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Floats
    qkv: Floats
    output: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """A mapped model. `fingerprint` (16 bytes) differs whenever the numbers do; pools of other fingerprints are foreign."""

    config: ModelConfig
    fingerprint: bytes
    embedding: Floats
    head: Floats
    norm: Floats
    rope_factors: Floats
    layers: list[LayerWeights]


Source = Callable[[], Iterator[tuple[str, Floats]]]


def load_weights(source: str | None, models_dir: Path, seed: int = 0) -> Weights:
    """Map the weights of `source` (None: default model; `random`: the small seeded one; else a GGUF file or a folder of
    safetensors), making the float32 file first where there is none. Blocks while another process makes it. Raises ModelFileError."""
    if source == "random":
        config = random_config()
        return _map(_shared_file(models_dir, f"random-{seed}", config, lambda: random_tensors(config, seed)))
    path = Path(source) if source is not None else default_model_path()
    if path.is_dir():
        folder = SafetensorsFolder(path)
        config, name = _folder_config(folder), f"{path.resolve().name}-{folder.digest[:16]}"
        tensors = partial(folder.tensors, config.layers, config.head_dim // 2, config.rope_base)
        return _map(_shared_file(models_dir, name, config, tensors))
    if not path.is_file():
        raise ModelFileError(f"weights: expected a GGUF file or a folder of safetensors at {path}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = _gguf_config(path)
    return _map(_shared_file(models_dir, f"{path.stem}-{digest[:16]}", config, lambda: _gguf_tensors(path, config)))


# --- the file -----------------------------------------------------------------------------------------------------


def _shared_file(models_dir: Path, name: str, config: ModelConfig, source: Source) -> Path:
    models_dir.mkdir(parents=True, exist_ok=True)
    path = models_dir / f"{name}.f32"
    with (models_dir / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists() or _is_former(path):
            _write(path, config, source)
    return path


def _is_former(path: Path) -> bool:
    """Whether the file is whole but of the version before, with its matrices the other way round."""
    with path.open("rb") as file:
        return file.read(len(_FORMER_MAGIC)) == _FORMER_MAGIC


def _write(path: Path, config: ModelConfig, source: Source) -> None:
    """Header (magic, its length, JSON padded with spaces), then the tensors, each aligned."""
    shapes = dict(_shapes(config))
    offset = 0
    tensors: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        tensors[name] = {"offset": offset, "shape": shape}
        offset += -(-int(np.prod(shape)) * 4 // _ALIGN) * _ALIGN
    temporary = path.with_suffix(f".{os.getpid()}.new")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            header = _header(config, tensors, "0" * 32)
            file.write(header)
            written = set()
            for name, tensor in source():
                if tuple(tensor.shape) != tuple(shapes[name]):
                    raise ModelFileError(f"{name}: expected shape {shapes[name]}, got {list(tensor.shape)}")
                data = np.ascontiguousarray(tensor, dtype=np.float32).data.cast("B")
                file.seek(len(header) + tensors[name]["offset"])
                file.write(data)
                digest.update(name.encode() + hashlib.sha256(data).digest())
                written.add(name)
            if written != set(shapes):
                raise ModelFileError(f"{path.stem}: tensors are missing: {sorted(set(shapes) - written)[:3]}")
            file.truncate(len(header) + offset)
            file.seek(0)
            file.write(_header(config, tensors, digest.hexdigest()[:32]))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _header(config: ModelConfig, tensors: dict[str, Any], fingerprint: str) -> bytes:
    document = json.dumps({"config": asdict(config), "fingerprint": fingerprint, "tensors": tensors}).encode()
    length = -(-(16 + len(document)) // 4096) * 4096
    return _MAGIC + length.to_bytes(8, "little") + document.ljust(length - 16)


def _map(path: Path) -> Weights:
    with path.open("rb") as file:
        start = file.read(16)
        length = int.from_bytes(start[8:], "little")
        if start[:8] != _MAGIC or length > 1 << 24:
            raise ModelFileError(f"{path}: not a weights file of this version; delete it")
        document = json.loads(file.read(length - 16))
    data = np.memmap(path, dtype=np.float32, mode="r", offset=length)
    config = ModelConfig(**{**document["config"], "end_token_ids": tuple(document["config"]["end_token_ids"])})

    def tensor(name: str) -> Floats:
        entry = document["tensors"][name]
        first = entry["offset"] // 4
        view: Floats = data[first : first + int(np.prod(entry["shape"]))].reshape(entry["shape"]).view(np.ndarray)
        return view

    layers = [
        LayerWeights(**{part: tensor(f"{index}.{part}") for part in _LAYER_PARTS}) for index in range(config.layers)
    ]
    embedding = tensor("embedding")
    head = tensor("head") if "head" in document["tensors"] else embedding
    return Weights(
        config, bytes.fromhex(document["fingerprint"]), embedding, head, tensor("norm"), tensor("rope_factors"), layers
    )


_LAYER_PARTS = ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down")


def _shapes(config: ModelConfig) -> Iterator[tuple[str, list[int]]]:
    yield "embedding", [config.vocabulary, config.width]
    if not config.tied:
        yield "head", [config.vocabulary, config.width]
    yield "norm", [config.width]
    yield "rope_factors", [config.head_dim // 2]
    for index in range(config.layers):
        yield f"{index}.attention_norm", [config.width]
        yield f"{index}.qkv", [config.qkv, config.width]
        yield f"{index}.output", [config.width, config.heads * config.head_dim]
        yield f"{index}.mlp_norm", [config.width]
        yield f"{index}.gate_up", [2 * config.hidden, config.width]
        yield f"{index}.down", [config.width, config.hidden]


# --- safetensors --------------------------------------------------------------------------------------------------


def _folder_config(folder: SafetensorsFolder) -> ModelConfig:
    heads, width = int(folder.number("num_attention_heads")), int(folder.number("hidden_size"))
    return ModelConfig(
        layers=int(folder.number("num_hidden_layers")),
        width=width,
        heads=heads,
        kv_heads=int(folder.number("num_key_value_heads", heads)),
        head_dim=int(folder.number("head_dim", width // heads)),
        hidden=int(folder.number("intermediate_size")),
        vocabulary=int(folder.number("vocab_size")),
        context_tokens=int(folder.number("max_position_embeddings")),
        rope_base=float(folder.number("rope_theta", 10000.0)),
        norm_epsilon=float(folder.number("rms_norm_eps", 1e-5)),
        end_token_ids=folder.end_token_ids(),
        tied=folder.tied,
    )


# --- GGUF ---------------------------------------------------------------------------------------------------------


def _gguf_config(path: Path) -> ModelConfig:
    metadata, tensor_names = read_metadata(path), read_tensor_names(path)
    if metadata.get("general.architecture") != "llama":
        raise ModelFileError(f"{path}: expected architecture llama, got {metadata.get('general.architecture')!r}")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelFileError(f"{path}: rope scaling {scaling!r} is not supported")
    if metadata.get("llama.expert_count"):
        raise ModelFileError(f"{path}: mixtures of experts are not supported")
    try:
        heads = int(metadata["llama.attention.head_count"])
        width = int(metadata["llama.embedding_length"])
        return ModelConfig(
            layers=int(metadata["llama.block_count"]),
            width=width,
            heads=heads,
            kv_heads=int(metadata.get("llama.attention.head_count_kv", heads)),
            head_dim=int(metadata.get("llama.attention.key_length", width // heads)),
            hidden=int(metadata["llama.feed_forward_length"]),
            vocabulary=len(metadata["tokenizer.ggml.tokens"]),
            context_tokens=int(metadata["llama.context_length"]),
            rope_base=float(metadata.get("llama.rope.freq_base", 10000.0)),
            norm_epsilon=float(metadata["llama.attention.layer_norm_rms_epsilon"]),
            end_token_ids=tuple(sorted(end_token_ids(metadata))),
            tied="output.weight" not in tensor_names,
        )
    except KeyError as error:
        raise ModelFileError(f"{path}: metadata {error} is missing") from None


def _gguf_tensors(path: Path, config: ModelConfig) -> Iterator[tuple[str, Floats]]:
    """Dequantised tensors in this file's names, layout and rotary order."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}

    def read(name: str) -> Floats:
        if name not in found:
            raise ModelFileError(f"{path}: tensor {name} is missing")
        tensor = found[name]
        values: Floats = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return values.reshape([int(size) for size in reversed(tensor.shape)])

    yield "embedding", read("token_embd.weight")
    if not config.tied:
        yield "head", read("output.weight")
    yield "norm", read("output_norm.weight")
    factors = read("rope_freqs.weight") if "rope_freqs.weight" in found else np.ones(config.head_dim // 2, np.float32)
    yield "rope_factors", factors
    for index in range(config.layers):
        block = f"blk.{index}"
        query = _halves_apart(read(f"{block}.attn_q.weight"), config.heads)
        key = _halves_apart(read(f"{block}.attn_k.weight"), config.kv_heads)
        value = read(f"{block}.attn_v.weight")
        yield f"{index}.attention_norm", read(f"{block}.attn_norm.weight")
        yield f"{index}.qkv", np.concatenate([query, key, value])
        yield f"{index}.output", read(f"{block}.attn_output.weight")
        yield f"{index}.mlp_norm", read(f"{block}.ffn_norm.weight")
        yield f"{index}.gate_up", np.concatenate([read(f"{block}.ffn_gate.weight"), read(f"{block}.ffn_up.weight")])
        yield f"{index}.down", read(f"{block}.ffn_down.weight")


def _halves_apart(matrix: Floats, heads: int) -> Floats:
    """GGUF interleaves the two rotary halves of each head (0, h, 1, h+1, ..); put them back one after the other."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


# --- the small random model ---------------------------------------------------------------------------------------


def random_config(vocabulary: int = RANDOM_VOCABULARY) -> ModelConfig:
    """4 layers, 256 wide, and the default model's vocabulary and end token, so that its tokenizer fits."""
    return ModelConfig(
        layers=4,
        width=256,
        heads=4,
        kv_heads=2,
        head_dim=64,
        hidden=512,
        vocabulary=vocabulary,
        context_tokens=8192,
        rope_base=10000.0,
        norm_epsilon=1e-5,
        end_token_ids=(2,),
    )


def random_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Floats]]:
    """Seeded random tensors: the same bytes on every machine."""
    generator = np.random.Generator(np.random.PCG64(seed))
    for name, shape in _shapes(config):
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
            continue
        scale = 1.0 if name == "embedding" else 2.0 / float(np.sqrt(shape[1]))
        yield name, generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)
