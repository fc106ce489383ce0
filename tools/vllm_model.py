"""The default model as a folder that vLLM and `transformers` read: bfloat16 weights, `config.json`, tokenizer.

    python -m tools.vllm_model FOLDER

SmolLM2 comes as a quantised GGUF file; its weights are dequantised, rounded to bfloat16 and written under their usual names.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.agent.engines.reference.gguf_file import default_model_path, read_metadata
from workers.agent.engines.reference.tokenizer import load_tokenizer
from workers.agent.engines.reference.weights import ModelConfig, Weights, load_weights

MODEL = "smollm2-135m-instruct"
Floats = npt.NDArray[np.float32]


def convert(folder: Path) -> None:
    """Writes the folder. Effects: about 270 MB there, and twice as much for a moment in the folder for temporary files."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = read_metadata(default_model_path())
    with tempfile.TemporaryDirectory() as scratch:
        weights = load_weights(None, Path(scratch))
        write_safetensors(folder / "model.safetensors", dict(named(weights)))
        (folder / "config.json").write_text(json.dumps(described(weights.config), indent=1))
    ends = sorted(weights.config.end_token_ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "do_sample": False}, indent=1))
    load_tokenizer()._bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_settings(metadata), indent=1))


def named(weights: Weights) -> Iterator[tuple[str, Floats]]:
    """The tensors under the names that `transformers` gives them."""
    config = weights.config
    query, key = config.heads * config.head_dim, (config.heads + config.kv_heads) * config.head_dim
    yield "model.embed_tokens.weight", weights.embedding
    yield "model.norm.weight", weights.norm
    if not config.tied:
        yield "lm_head.weight", weights.head
    for index, layer in enumerate(weights.layers):
        block = f"model.layers.{index}"
        for letter, part in zip("qkv", np.split(layer.qkv, [query, key]), strict=True):
            yield f"{block}.self_attn.{letter}_proj.weight", part
        yield f"{block}.self_attn.o_proj.weight", layer.output
        yield f"{block}.mlp.gate_proj.weight", layer.gate_up[: config.hidden]
        yield f"{block}.mlp.up_proj.weight", layer.gate_up[config.hidden :]
        yield f"{block}.mlp.down_proj.weight", layer.down
        yield f"{block}.input_layernorm.weight", layer.attention_norm
        yield f"{block}.post_attention_layernorm.weight", layer.mlp_norm


def described(config: ModelConfig) -> dict[str, Any]:
    """`config.json` of a Llama model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context_tokens,
        "rope_theta": config.rope_base,
        "rms_norm_eps": config.norm_epsilon,
        "bos_token_id": 1,
        "eos_token_id": min(set(config.end_token_ids) - {0}, default=2),
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, ties to even, as bit patterns."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def write_safetensors(path: Path, tensors: dict[str, Floats]) -> None:
    """Eight bytes with the length of a JSON header, the header, then the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + 2 * tensor.size]}
        at += 2 * tensor.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(to_bfloat16(tensor).tobytes())


def _tokenizer_settings(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_model", description=__doc__)
    parser.add_argument("folder", type=Path)
    convert(parser.parse_args().folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
