"""The parts of `make vllm-proof` that need no vLLM: the model's folder, the file of engines, the counters."""

import json
import struct

import numpy as np
import pytest
import yaml

from controlplane import clusters
from tools import vllm_model, vllm_proof
from workers.agent.engines.reference.tokenizer import load_tokenizer
from workers.agent.engines.reference.weights import load_weights


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [(0x3F800000, 0x3F80), (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0xBF80FFFF, 0xBF81)],
)
def test_weights_are_rounded_to_the_nearest_bfloat16_and_ties_to_even(bits, rounded):
    value = np.array([struct.unpack("<f", struct.pack("<I", bits))[0]], dtype=np.float32)
    assert int(vllm_model.to_bfloat16(value)[0]) == rounded


def test_the_written_folder_is_the_same_model(tmp_path):
    weights = load_weights("random", tmp_path / "models")
    folder = tmp_path / "folder"
    folder.mkdir()
    vllm_model.write_safetensors(folder / "model.safetensors", dict(vllm_model.named(weights)))
    (folder / "config.json").write_text(json.dumps(vllm_model.described(weights.config)))
    again = load_weights(str(folder), tmp_path / "models")
    assert (again.config.layers, again.config.qkv, again.config.tied) == (4, weights.config.qkv, True)
    for ours, theirs in ((weights.embedding, again.embedding), (weights.layers[3].qkv, again.layers[3].qkv)):
        assert np.allclose(ours, theirs, rtol=2**-8, atol=1e-30)
        assert not np.array_equal(ours, theirs)


def server(name):
    return vllm_proof.Server(name, 8001, f"ipc:///x/{name}.events", f"ipc:///x/{name}.replay", None, None)


def test_the_pairs_file_is_one_that_switchyard_takes(tmp_path):
    file = tmp_path / "clusters.yaml"
    file.write_text(yaml.safe_dump(vllm_proof.description({name: server(name) for name in vllm_proof.NODES})))
    (cluster,) = clusters.load(file).clusters
    assert cluster.phases() == {"v1": "prefill", "v2": "decode"}
    assert cluster.model.ids_per_block == vllm_proof.BLOCK_TOKENS
    assert clusters.missing_tokens(clusters.load(file), {"VLLM_API_KEY": "x"}) == []


def test_no_two_questions_share_a_block():
    tokenizer = load_tokenizer()
    asked = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]))
        for question in vllm_proof.questions(48)
    ]
    assert min(map(len, asked)) > 2 * vllm_proof.BLOCK_TOKENS
    starts = {tuple(ids[: 2 * vllm_proof.BLOCK_TOKENS]) for ids in asked}
    assert len(starts) == 48


def test_counters_are_read_from_the_servers_metrics(monkeypatch):
    text = (
        'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 829.0\n'
        'vllm:prompt_tokens_by_source_created{engine="0",source="external_kv_transfer"} 1.7e9\n'
        'vllm:nixl_num_failed_transfers_total{engine="0"} 2.0\nprocess_start_time_seconds 1.5e9\n'
    )
    monkeypatch.setattr(vllm_proof.httpx, "get", lambda *_, **__: type("Answer", (), {"text": text}))
    assert server("v1").counters() == {
        "prompt_external_kv_transfer": 829.0,
        "vllm:nixl_num_failed_transfers_total": 2.0,
        "process_start_time_seconds": 1.5e9,
    }
