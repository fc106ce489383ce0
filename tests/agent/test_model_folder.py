"""A model published as a folder of safetensors gives the same tokens and the same text as the same model elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agent.reference_support import greedy, prompt
from workers.agent.engines.reference.gguf_file import ModelFileError
from workers.agent.engines.reference.safetensors_folder import SafetensorsFolder
from workers.agent.engines.reference.tokenizer import load_tokenizer
from workers.agent.engines.reference.weights import Weights, load_weights

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def save(path: Path, tensors: dict[str, np.ndarray], kind: str = "F32") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces = []
    at = 0
    for name, tensor in tensors.items():
        if kind == "BF16":
            data = (np.ascontiguousarray(tensor).view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            data = np.ascontiguousarray(tensor).astype("<f4" if kind == "F32" else "<f2").tobytes()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        pieces.append(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))


def published(weights: Weights) -> dict[str, np.ndarray]:
    """The tensors under the names that `transformers` gives them."""
    config = weights.config
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    query, key = config.heads * config.head_dim, (config.heads + config.kv_heads) * config.head_dim
    for index, layer in enumerate(weights.layers):
        block = f"model.layers.{index}"
        parts = np.split(layer.qkv, [query, key])
        tensors |= {f"{block}.self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        tensors |= {
            f"{block}.self_attn.o_proj.weight": layer.output,
            f"{block}.mlp.gate_proj.weight": layer.gate_up[: config.hidden],
            f"{block}.mlp.up_proj.weight": layer.gate_up[config.hidden :],
            f"{block}.mlp.down_proj.weight": layer.down,
            f"{block}.input_layernorm.weight": layer.attention_norm,
            f"{block}.post_attention_layernorm.weight": layer.mlp_norm,
        }
    return tensors


@pytest.fixture(scope="module")
def folder(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model, split over two files, with the default model's tokenizer."""
    path = tmp_path_factory.mktemp("published")
    (path / "config.json").write_text(json.dumps(CONFIG))
    tensors = list(published(load_weights("random", models_dir)).items())
    save(path / "model-00001-of-00002.safetensors", dict(tensors[:5]))
    save(path / "model-00002-of-00002.safetensors", dict(tensors[5:]))
    default = load_tokenizer()
    default._bpe.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def test_the_same_numbers_give_the_same_tokens(folder: Path, models_dir: Path, tmp_path: Path) -> None:
    weights = load_weights(str(folder), tmp_path)
    assert weights.config == load_weights("random", models_dir).config
    ids = prompt(40, 3)
    assert greedy(tmp_path, ids, 6, source=str(folder)) == greedy(models_dir, ids, 6)


@pytest.mark.parametrize(("kind", "tolerance"), [("F16", 1e-3), ("BF16", 8e-3)])
def test_half_precision_is_widened(folder: Path, tmp_path: Path, kind: str, tolerance: float) -> None:
    tensor = np.random.default_rng(0).standard_normal((7, 5), dtype=np.float32)
    save(tmp_path / "model.safetensors", {"x": tensor}, kind)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    read = SafetensorsFolder(tmp_path).read("x")
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, tensor, rtol=tolerance, atol=tolerance)


def test_its_tokenizer_and_chat_template_are_read(folder: Path) -> None:
    default, found = load_tokenizer(), load_tokenizer(folder)
    text = "Hello 12345 Wörld — 🚂👩‍👩‍👧 <|im_start|> def f(x):\n\treturn x"
    assert found.encode(text) == default.encode(text)
    assert [found.token_bytes(index) for index in range(3000)] == [default.token_bytes(index) for index in range(3000)]
    assert found.render_chat([{"role": "user", "content": "Hi"}]) == "<|im_start|>user\nHi<|im_end|>\n"
    assert found.eos_ids == {default.encode("<|im_end|>")[0]}


def test_llama_3_stretches_its_slow_frequencies_only(folder: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    save(tmp_path / "model.safetensors", {"x": np.zeros((1, 1), np.float32)})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": scaling}))
    factors = SafetensorsFolder(tmp_path).rope_factors(64, 500000.0)
    assert (factors[0], factors[-1]) == (1.0, 8.0)
    assert (np.diff(factors) >= 0).all()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gpt_neox"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 5}, "model.layers.4"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn"),
    ],
)
def test_what_the_engine_does_not_run_is_refused_by_name(
    folder: Path, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    for file in folder.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ModelFileError, match=told):
        load_weights(str(tmp_path), tmp_path / "models")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelFileError, match="no safetensors"):
        load_weights(str(tmp_path), tmp_path / "models")
